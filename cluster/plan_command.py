"""`baton plan`: how many GPUs a workload needs, how fast they are and what they cost.

Owns the command line of it; the arithmetic is in `cluster.planner`. Main thread.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.planner.capacity import Shares
from cluster.planner.hardware import Catalogue, Link
from cluster.planner.model_config import read_model_shape
from cluster.planner.model_shape import ModelShape
from cluster.planner.plan import Plan, Targets, Workload, make_plan
from cluster.planner.plan_report import PlanReport
from cluster.planner.speculation import Speculation
from core.errors import InvalidConfig
from engine.model.source import resolve_model

_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}


def plan(
    model: Annotated[
        str, typer.Option(help="A config.json, a folder with one, owner/name, or the bundled model.")
    ],
    gpu: Annotated[str, typer.Option(help="As in cluster/planner/gpus.yaml, say h100.")],
    isl: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048,
    osl: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    slo_ttft: Annotated[float, typer.Option(help="Time to first token that 90 % keep, in ms.")] = 1000.0,
    slo_itl: Annotated[float, typer.Option(help="Inter-token latency that 90 % keep, in ms.")] = 50.0,
    cached: Annotated[int, typer.Option(help="Tokens of each prompt that are cached.")] = 0,
    weights: Annotated[
        str | None, typer.Option(help="fp16, bf16, fp8, int8, int4; default as in config.json.")
    ] = None,
    kv: Annotated[str | None, typer.Option(help="Type of KV values; default 16 bits.")] = None,
    params: Annotated[float | None, typer.Option(help="Nominal parameter count, say 70e9.")] = None,
    gpus_per_worker: Annotated[
        int | None, typer.Option(help="Fixes it; default: the fewest GPUs in all.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="Links to show; default all between nodes and the GPU's.")
    ] = None,
    memory_share: Annotated[float, typer.Option(help="Of GPU memory for weights and KV.")] = 0.9,
    bandwidth_share: Annotated[float, typer.Option(help="Of memory bandwidth, reached in decode.")] = 0.8,
    flops_share: Annotated[float, typer.Option(help="Of dense FLOP/s, reached in prefill.")] = 0.5,
    spec_alpha: Annotated[float, typer.Option(help="Acceptance of a draft token.")] = 0.8,
    spec_gamma: Annotated[int, typer.Option(help="Draft tokens per verify step.")] = 5,
    spec_cost: Annotated[float, typer.Option(help="Draft token's time as a share of a step.")] = 0.0,
    price_on_demand: Annotated[float | None, typer.Option(help="USD per GPU and hour.")] = None,
    price_reserved: Annotated[float | None, typer.Option(help="USD per GPU and hour.")] = None,
    price_spot: Annotated[float | None, typer.Option(help="USD per GPU and hour.")] = None,
    simulate: Annotated[
        int, typer.Option(help="Correct the counts by simulating so many requests; 0: arithmetic alone.")
    ] = 0,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Size a deployment: memory, speed, transfer, pools and cost, with the assumptions."""
    catalogue = Catalogue()
    weight_bits = _bits("weights", weights)
    shape = _shape(model, weight_bits).with_bits(weight_bits, _bits("kv", kv))
    if params is not None:
        shape = shape.with_num_params(params)
    device = catalogue.gpu(gpu)
    try:
        shares = Shares(memory=memory_share, bandwidth=bandwidth_share, flops=flops_share)
    except ValueError as error:
        raise InvalidConfig(str(error), key="share") from error
    targets = Targets(slo_ttft / 1e3, slo_itl / 1e3)
    speculation = Speculation(spec_alpha, spec_gamma, spec_cost)
    made = make_plan(shape, device, Workload(isl, osl, rate, cached), targets, shares, gpus_per_worker)
    links = [catalogue.link(name) for name in link or ()]
    if not links:
        links = [device.scale_up, *(item for item in catalogue.links.values() if not item.is_within_node)]
    prices = device.prices.replaced(price_on_demand, price_reserved, price_spot)
    report = PlanReport(made, tuple(links), prices, speculation)
    simulated = _simulate(made, links[-1], simulate) if simulate else {}
    if is_json:
        typer.echo(json.dumps(report.as_dict() | simulated, indent=2))
        return
    console = Console(highlight=False)
    report.print(console)
    for name, found in simulated.items():
        console.print(f"[bold]{name.replace('_', ', ')}[/]: {_in_words(found)}", soft_wrap=True)


def _in_words(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not within reach of four times as many workers"
    pools = " + ".join(str(found[name]) for name in ("num_prefill", "num_decode") if found[name])
    size = found["gpus_per_worker"]
    num_gpus = (found["num_prefill"] + found["num_decode"]) * size
    kept = f"{found['share']:.0%} keep both targets"
    return f"{pools} workers of {size} GPUs, {num_gpus} in all, KV over {found['link']}: {kept}"


def _simulate(made: Plan, link: Link, num_requests: int) -> dict[str, Any]:
    """Both pools of the decode pool's kind of worker, since the simulator has one kind; over the slowest link
    shown.
    """
    from cluster.planner.simulated import SimulatedSearch, Trial

    console = Console(stderr=True, highlight=False)

    def tell(trial: Trial) -> None:
        console.print(
            f"simulated {trial.num_prefill} + {trial.num_decode}: {trial.share:.0%} keep both targets"
        )

    worker = made.decode.capacity
    search = SimulatedSearch(worker, made.workload, made.targets, link, num_requests, tell)
    num_prefill = max(1, round(made.prefill.num_gpus / worker.num_gpus))
    apart = search.disaggregated(num_prefill, made.decode.num_workers)
    together = search.aggregated(apart.num_workers)
    told = {"gpus_per_worker": worker.num_gpus, "link": link.name}
    return {
        "simulated_disaggregated": asdict(apart) | told,
        "simulated_aggregated": None if together is None else asdict(together) | told,
    }


def _shape(model: str, weight_bits: float | None) -> ModelShape:
    path = Path(model).expanduser()
    return read_model_shape(path if path.exists() else resolve_model(model), weight_bits)


def _bits(name: str, given: str | None) -> float | None:
    if given is None:
        return None
    if given.lower() not in _BITS:
        raise InvalidConfig(f"--{name} is {given!r}, but must be one of {', '.join(_BITS)}", key=name)
    return _BITS[given.lower()]
