"""`baton simulate` and `baton calibrate`: what a deployment would do with a trace, at measured prices.

Owns the command lines and where reports and profiles go. Exit status of a simulation: 0 if it kept the SLO, 1
if not. Main thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.autoscaler.decision_log import DecisionEvent

_NO_PULL = {"router": {"pull_timeout_s": 0.0}}


def simulate(
    context: typer.Context,
    profile: Annotated[Path, typer.Option(help="What a worker is: the file of `baton calibrate`.")],
    trace: Annotated[Path, typer.Option(help="Mooncake .jsonl or Azure .csv, perhaps .gz.")],
    num_prefill: Annotated[
        int, typer.Option("--prefill-replicas", help="0: every worker reads and decodes.")
    ] = 1,
    num_decode: Annotated[int, typer.Option("--decode-replicas", help="Decode workers.")] = 1,
    speed: Annotated[float, typer.Option(help="How many times as fast the trace is replayed.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Only so many requests of the trace.")] = None,
    spread: Annotated[
        float, typer.Option(help="Seconds that the trace's times are rounded to; spreads them over it.")
    ] = 0.0,
    warm_up: Annotated[float, typer.Option(help="Seconds at the beginning that do not count.")] = 0.0,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    slo_itl: Annotated[float | None, typer.Option(help="Seconds per further token, mean.")] = None,
    attainment: Annotated[float, typer.Option(help="Share of requests for which it must hold.")] = 0.9,
    known_lengths: Annotated[
        bool,
        typer.Option("--known-lengths", help="max_tokens is each answer's length, as in a load test."),
    ] = False,
    own_hosts: Annotated[
        bool,
        typer.Option("--own-hosts", help="No two workers share cores, though the profile's did."),
    ] = False,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="The autoscaler decides, by section autoscaling, from those on."),
    ] = False,
    seed: Annotated[int, typer.Option(help="One seed plays one way.")] = 0,
    file: Annotated[Path | None, typer.Option("--config", help="As of `baton serve`.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")] = Path("simulation"),
) -> None:
    """Play a trace against simulated workers: the real schedulers, cache and placement at measured prices.

    Settings of router, prefill and decode: as of `baton serve`, also --section.key=value. Requests that do
    not fit the model's context are left out.
    """
    from cluster.config import load_config
    from cluster.loadtest.goodput import Slo
    from cluster.loadtest.html_report import render_html
    from cluster.loadtest.report import write_report
    from cluster.loadtest.traces import read_trace
    from cluster.simulator.deployment import Deployment
    from cluster.simulator.profile import read_profile
    from cluster.simulator.simulated_report import simulated_report
    from cluster.simulator.simulation import Simulation
    from cluster.simulator.workload import arrivals_of
    from core.errors import InvalidConfig

    config = load_config(file, os.environ, context.args, _NO_PULL)
    worker = read_profile(profile)
    _make_folder(out)
    console = Console(highlight=False)
    records = read_trace(trace, limit)
    found = [
        record
        for record in records
        if record.num_prompt_tokens + record.num_output_tokens <= worker.max_context
    ]
    try:
        deployment = Deployment(
            worker.layout,
            worker.num_blocks,
            worker.price,
            worker.link,
            num_prefill,
            num_decode,
            worker.max_context,
            config.router.default_timeout_s,
            config.prefill,
            config.decode,
            config.router,
            sharing=None if own_hosts else worker.sharing,
            front=worker.front,
            jitter=worker.jitter,
            is_length_known=known_lengths,
        )
        slo = Slo(slo_ttft, slo_itl, attainment=attainment)
        arrivals = arrivals_of(found, speed, spread, seed)
        began = time.perf_counter()
        scaling = replace(config.autoscaling, is_enabled=True) if autoscale else None
        outcome = Simulation(deployment, seed, scaling=scaling).play(arrivals)
        report = simulated_report(deployment, arrivals, outcome, slo, warm_up, time.perf_counter() - began)
    except ValueError as error:
        raise InvalidConfig(str(error), key="simulate") from error
    write_report(report, out / "report.json")
    (out / "report.html").write_text(render_html(report), encoding="utf-8")
    lines = [f"  {line}" for line in (*report.verdict.reasons, *report.verdict.warnings)]
    left_out = f"{len(records) - len(found)} left out as longer than {worker.max_context} tokens"
    told = f"{len(found)} requests, {left_out}; {report.took_s:.1f} s; report in {out}"
    if autoscale:
        lines.append(f"  {_told_of(outcome.decisions)}")
    for line in (report.verdict.headline, *lines, told):
        console.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(0 if report.verdict.has_passed else 1)


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    link_bytes_per_s: Annotated[
        float | None,
        typer.Option(help="Between two workers; default: what the router assumes."),
    ] = None,
    link_latency: Annotated[float, typer.Option(help="Seconds of one message.")] = 0.0005,
    url: Annotated[
        str | None, typer.Option(help="A running service, without /v1: measure that, sharing and router too.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--config", help="As of `baton serve`.")] = None,
) -> None:
    """Measure what steps of the configured engine take here, for `baton simulate`.

    Settings: as of `baton serve`, also --section.key=value; with --url, those of that service. It should have
    nothing else to do, and one prefill worker at least. Leave the machine alone meanwhile.
    """
    from cluster.config import load_config
    from cluster.loadtest.client import NoAnswer
    from cluster.loadtest.settings import Target
    from cluster.simulator.calibration import Calibration, Grid, unmeasured
    from cluster.simulator.profile import write_profile
    from cluster.simulator.served_calibration import Questions, ServedCalibration
    from cluster.simulator.step_price import LinkPrice
    from core.errors import InvalidConfig

    config = load_config(file, os.environ, context.args, {})
    console = Console(highlight=False)
    try:
        link = LinkPrice(link_bytes_per_s or config.router.assumed_bytes_per_s, link_latency)
    except ValueError as error:
        raise InvalidConfig(str(error), key="link") from error
    _make_folder(out.parent)
    if url is None:
        profile = Calibration(config.engine, console.print).measure(Grid(), link)
    else:
        budget, chunk = config.prefill.token_budget, config.decode.prefill_chunk
        asked = ServedCalibration(Target(url), budget, chunk, console.print)
        try:
            profile = asked.measure(unmeasured(config.engine, link), Questions())
        except (NoAnswer, ValueError) as error:
            raise InvalidConfig(f"{url}: {error}", key="url") from error
    write_profile(profile, out)
    told = f"{profile.price}; measured steps differ by {profile.typical_error:.0%} (median); in {out}"
    console.print(told, soft_wrap=True)


def _told_of(decisions: Sequence[DecisionEvent]) -> str:
    """How many workers there were, at least, at most and in the end."""
    pools = [
        f"{name} {min(counts)} to {max(counts)}, in the end {counts[-1]}"
        for name, counts in (
            ("prefill", [event.applied_prefill for event in decisions]),
            ("decode", [event.applied_decode for event in decisions]),
        )
    ]
    num_flips = sum(len(event.decision.flips) for event in decisions)
    return f"autoscaler: {'; '.join(pools)}; {num_flips} changes of role in {len(decisions)} decisions"


def _make_folder(folder: Path) -> None:
    """Before there is anything to lose."""
    from core.errors import InvalidConfig

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--out: {error}", key="out") from error
