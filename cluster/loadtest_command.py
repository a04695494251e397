"""`baton loadtest`: measures any OpenAI-compatible server and says whether it keeps what was promised.

Owns the command line, where the report goes, and the exit status: 0 passed, 1 failed, 2 faulty settings, 3 no
result, since the server could not be measured. The test itself is `cluster.loadtest`. Main thread.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster.loadtest.report import LoadReport
from cluster.loadtest.settings import Api, ArrivalKind, LoadTestSettings, StreamEnd, WorkloadKind
from core.config import from_mapping
from core.errors import InvalidConfig

KEY_VARIABLE = "BATON_API_KEY"
EXIT_FAILED = 1
EXIT_NO_RESULT = 3
EXIT_INTERRUPTED = 130

_TARGET, _LOAD, _WORK, _JUDGE, _OUT = "Target", "Arrivals", "Workload", "Verdict", "Output"


def loadtest(
    url: Annotated[
        str, typer.Option(help="The server, without /v1.", rich_help_panel=_TARGET)
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Default: the first that it lists.", rich_help_panel=_TARGET)
    ] = None,
    api: Annotated[
        Api, typer.Option(help="Which interface is asked.", rich_help_panel=_TARGET)
    ] = Api.COMPLETIONS,
    extra_body: Annotated[
        str,
        typer.Option(help="JSON merged into each request; null takes a field away.", rich_help_panel=_TARGET),
    ] = "{}",
    stream_end: Annotated[
        StreamEnd,
        typer.Option(help="`finish` for servers that never send [DONE].", rich_help_panel=_TARGET),
    ] = StreamEnd.DONE,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", rich_help_panel=_TARGET)] = 300.0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, if the server counts no tokens.", rich_help_panel=_TARGET),
    ] = None,
    arrivals: Annotated[
        ArrivalKind | None,
        typer.Option(help="Default: trace for a trace, else poisson.", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.", rich_help_panel=_LOAD)] = None,
    cv: Annotated[
        float, typer.Option(help="Burstiness of gamma arrivals; 1 is Poisson.", rich_help_panel=_LOAD)
    ] = 2.0,
    concurrency: Annotated[int, typer.Option(help="Clients of a closed loop.", rich_help_panel=_LOAD)] = 1,
    speed: Annotated[
        float, typer.Option(help="How many times as fast a trace is replayed.", rich_help_panel=_LOAD)
    ] = 1.0,
    duration: Annotated[
        float, typer.Option(help="Seconds during which requests are due.", rich_help_panel=_LOAD)
    ] = 60.0,
    requests: Annotated[
        int | None, typer.Option(help="This many instead of a duration.", rich_help_panel=_LOAD)
    ] = None,
    warm_up: Annotated[
        float, typer.Option(help="Seconds at the beginning that do not count.", rich_help_panel=_LOAD)
    ] = 0.0,
    drain: Annotated[
        float, typer.Option(help="Seconds for answers after the last request.", rich_help_panel=_LOAD)
    ] = 60.0,
    workload: Annotated[
        WorkloadKind | None,
        typer.Option(help="Default: random, or trace if one is given.", rich_help_panel=_WORK),
    ] = None,
    isl: Annotated[
        str, typer.Option(help="Prompt tokens: 128, or a range 64:512.", rich_help_panel=_WORK)
    ] = "128",
    osl: Annotated[str, typer.Option(help="Output tokens, likewise.", rich_help_panel=_WORK)] = "32",
    prefix: Annotated[
        int, typer.Option(help="Shared tokens before each prompt.", rich_help_panel=_WORK)
    ] = 512,
    prefixes: Annotated[
        int, typer.Option(help="How many different shared prefixes.", rich_help_panel=_WORK)
    ] = 1,
    turns: Annotated[str, typer.Option(help="Of a conversation: 4, or 2:8.", rich_help_panel=_WORK)] = "4",
    think_time: Annotated[
        float, typer.Option(help="Seconds between an answer and the next turn.", rich_help_panel=_WORK)
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Mooncake .jsonl or Azure .csv, perhaps .gz.", rich_help_panel=_WORK),
    ] = None,
    length_scale: Annotated[
        float, typer.Option(help="Shortens a trace's prompts and answers.", rich_help_panel=_WORK)
    ] = 1.0,
    max_context: Annotated[
        int | None,
        typer.Option(help="Leave out longer requests of a trace.", rich_help_panel=_WORK),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="One seed gives one workload; take another for each repeat.", rich_help_panel=_WORK
        ),
    ] = 0,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token.", rich_help_panel=_JUDGE)
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(help="Seconds per further token, mean of a request.", rich_help_panel=_JUDGE),
    ] = None,
    slo_pause: Annotated[
        float | None, typer.Option(help="Seconds of the longest pause.", rich_help_panel=_JUDGE)
    ] = None,
    attainment: Annotated[
        float, typer.Option(help="Share of requests for which it must hold.", rich_help_panel=_JUDGE)
    ] = 0.9,
    max_error_share: Annotated[
        float, typer.Option(help="More errors fail the test.", rich_help_panel=_JUDGE)
    ] = 0.01,
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate within the SLO.", rich_help_panel=_JUDGE)
    ] = False,
    search_precision: Annotated[
        float, typer.Option(help="How close passing and failing rate must be.", rich_help_panel=_JUDGE)
    ] = 0.1,
    search_steps: Annotated[int, typer.Option(help="At most.", rich_help_panel=_JUDGE)] = 16,
    search_seconds: Annotated[
        float, typer.Option(help="No step begins later.", rich_help_panel=_JUDGE)
    ] = 1800.0,
    search_requests: Annotated[
        int, typer.Option(help="At least so many a step.", rich_help_panel=_JUDGE)
    ] = 30,
    out: Annotated[
        Path, typer.Option(help="Folder for report.json and report.html.", rich_help_panel=_OUT)
    ] = Path("loadtest"),
    submit: Annotated[
        str | None,
        typer.Option(
            help="Run it as a Ray job; the address of Ray's dashboard: http://127.0.0.1:8265",
            rich_help_panel=_OUT,
        ),
    ] = None,
    submit_python: Annotated[
        str | None, typer.Option(help="The job's Python, where Baton is installed.", rich_help_panel=_OUT)
    ] = None,
) -> None:
    """Measure a server: TTFT, ITL and goodput under an SLO, at one rate or at the highest that keeps it.

    With an API key in $BATON_API_KEY. Exit status: 0 passed, 1 failed, 2 faulty settings, 3 no result.
    """
    has_trace = trace is not None
    kind = workload or (WorkloadKind.TRACE if has_trace else WorkloadKind.RANDOM)
    own_times = kind is WorkloadKind.TRACE and rate is None
    tree: dict[str, Any] = {
        "target": {
            "url": url,
            "model": model,
            "api": api,
            "extra_body": extra_body,
            "stream_end": stream_end,
            "timeout_s": timeout,
            "tokenizer": tokenizer,
        },
        "arrivals": {
            "kind": arrivals or (ArrivalKind.TRACE if kind is WorkloadKind.TRACE else ArrivalKind.POISSON),
            "rate": None if own_times else rate,
            "cv": cv,
            "concurrency": concurrency,
            "speed": speed,
        },
        "workload": {
            "kind": kind,
            "prompt": _range(isl, "isl"),
            "output": _range(osl, "osl"),
            "prefix_tokens": prefix,
            "num_prefixes": prefixes,
            "turns": _range(turns, "turns"),
            "think_s": think_time,
            "trace": trace,
            "length_scale": length_scale,
            "max_context": max_context,
        },
        "window": {
            "duration_s": duration,
            "num_requests": requests,
            "warm_up_s": warm_up,
            "drain_s": drain,
        },
        "slo": {
            "ttft_s": slo_ttft,
            "itl_s": slo_itl,
            "longest_pause_s": slo_pause,
            "attainment": attainment,
        },
        "max_error_share": max_error_share,
        "seed": seed,
    }
    if search:
        tree["search"] = {
            "start": rate,
            "precision": search_precision,
            "max_steps": search_steps,
            "max_seconds": search_seconds,
            "min_requests": search_requests,
        }
    settings = from_mapping(LoadTestSettings, tree)
    job = None if submit is None else Job(submit, submit_python)
    raise typer.Exit(run(settings, out, job, Console(highlight=False)))


@dataclass(frozen=True, slots=True)
class Job:
    """Where to submit: the cluster's address, and the interpreter there if it is not to be guessed."""

    address: str
    python: str | None = None


def run(settings: LoadTestSettings, out: Path, job: Job | None, console: Console) -> int:
    """Run the test here or as a job, keep the report in `out`, and return the exit status."""
    from cluster.loadtest.client import NoAnswer
    from cluster.loadtest.html_report import render_html
    from cluster.loadtest.report import write_report

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--out: {error}", key="out") from error
    try:
        report = _run_here(settings, console) if job is None else _run_as_job(settings, job, console)
    except NoAnswer as error:
        console.print(f"[red]no result:[/] {escape(str(error))}", soft_wrap=True)
        return EXIT_NO_RESULT
    except KeyboardInterrupt:
        console.print("stopped before there was a result")
        return EXIT_INTERRUPTED
    write_report(report, out / "report.json")
    (out / "report.html").write_text(render_html(report), encoding="utf-8")
    colour = "green" if report.verdict.has_passed else "red"
    console.print(f"[{colour}]{escape(report.verdict.headline)}[/]", soft_wrap=True)
    for warning in report.verdict.warnings:
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)
    console.print(f"[dim]{escape(str(out / 'report.html'))}, report.json[/]", soft_wrap=True)
    return 0 if report.verdict.has_passed else EXIT_FAILED


def _run_here(settings: LoadTestSettings, console: Console) -> LoadReport:
    from cluster.loadtest.load_test import run_load_test
    from cluster.loadtest.progress import ConsoleWatcher

    with ConsoleWatcher(console) as watcher:
        return asyncio.run(run_load_test(settings, os.environ.get(KEY_VARIABLE), watcher))


def _run_as_job(settings: LoadTestSettings, job: Job, console: Console) -> LoadReport:
    from cluster.loadtest_submit import submit_load_test

    key = os.environ.get(KEY_VARIABLE)
    variables = {} if key is None else {KEY_VARIABLE: key}

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    return submit_load_test(settings, job.address, variables, job.python, tell)


def _range(text: str, name: str) -> dict[str, int]:
    """`128` or `64:512`."""
    low, colon, high = text.partition(":")
    try:
        return {"low": int(low), "high": int(high if colon else low)}
    except ValueError as error:
        raise InvalidConfig(
            f"--{name} must be a number or a range like 64:512, not {text!r}", key=name
        ) from error
