"""`baton decisions`: shows the autoscaler's decisions, and makes them again from what they were made from.

Owns the command line of it. Needs neither Ray nor a running service. Main thread.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision_log import DecisionEvent
from cluster.autoscaler.replay import Replayed, replay_file
from core.ids import Role

decisions = typer.Typer(help="The autoscaler's decisions: replay.", no_args_is_help=True)

_EXIT_DIFFERENT = 1
_MAX_SHOWN = 20
_WIDE = 160


@decisions.command()
def replay(
    file: Annotated[
        Path, typer.Argument(help="A file of autoscaling.log_file.", exists=True, dir_okay=False)
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Decide by the section autoscaling of this YAML file instead."),
    ] = None,
    is_changes: Annotated[
        bool, typer.Option("--changes", help="List the decisions that changed something.")
    ] = False,
) -> None:
    """Decide again what the file tells of; exit status 1 if any decision comes out otherwise."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    replayed = replay_file(file, _other(config))
    if is_changes:
        console.print(_changes(replayed))
    for difference in replayed.differences[:_MAX_SHOWN]:
        was, now = difference.event.decision, difference.decision
        told = ", ".join(
            f"{role.value} {was.pool(role).num_replicas} ({was.pool(role).rule.value})"
            f" → {now.pool(role).num_replicas} ({now.pool(role).rule.value})"
            for role in Role
        )
        console.print(f"{_when(difference.event)}: {told}", soft_wrap=True)
    num = len(replayed.differences)
    console.print(f"{replayed.num_decisions} decisions, {num or 'none'} of them otherwise")
    if num:
        raise typer.Exit(_EXIT_DIFFERENT)


def _other(config: Path | None) -> AutoscalingConfig | None:
    if config is None:
        return None
    from cluster.config import load_config

    return load_config(config, os.environ).autoscaling


def _changes(replayed: Replayed) -> Table:
    table = Table("UTC", "pool", "wanted", "applied", "running", "rule", "need", "of", "flips", box=None)
    last: dict[Role, tuple[object, ...]] = {}
    for event in replayed.events:
        applied = {Role.PREFILL: event.applied_prefill, Role.DECODE: event.applied_decode}
        for role in Role:
            pool = event.decision.pool(role)
            flips = [flip.worker_id for flip in event.decision.flips if flip.role is role]
            row = (pool.num_replicas, applied[role], tuple(flips))
            if last.get(role) == row:
                continue
            last[role] = row
            need = pool.need.num_workers
            table.add_row(
                _when(event),
                role.value,
                str(pool.num_replicas),
                str(applied[role]),
                str(event.inputs.pool(role).num_running),
                pool.rule.value,
                "unknown" if need is None else f"{need:.2f}",
                pool.need.cause.value,
                " ".join(flips),
            )
    return table


def _when(event: DecisionEvent) -> str:
    return datetime.fromtimestamp(event.time, UTC).strftime("%m-%d %H:%M:%S")
