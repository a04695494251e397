"""What `baton status` prints is what it was told, whatever characters are in it."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from cluster.status_command import show

PROBLEM = "[fe80::1]:7000 refused [/it]"


def _worker() -> dict[str, Any]:
    pair: dict[str, Any] = {
        "to": "d",
        "transport": None,
        "gb_per_s": None,
        "bytes": {},
        "fallbacks": {},
        "is_warm": False,
    }
    status = {"running": 0, "max_running": 8, "waiting": 0, "waiting_tokens": 0, "kv_utilization": 0.0}
    return {
        "id": "p",
        "role": "prefill",
        "home_role": "prefill",
        "epoch": "0",
        "state": "alive",
        "status": status
        | {"blocks": {"cached": 0, "free": 4}, "step_ms": 0.0, "pairs": [pair | {"problem": PROBLEM}]},
    }


def test_names_and_problems_with_brackets_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=200)
    router = {"model": "m[bold]x", "running": 0, "waiting": 0}
    show("http://[fe80::1]:8000", {"router": router, "workers": [_worker()]}, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in (PROBLEM, "m[bold]x", "http://[fe80::1]:8000"):
        assert text in shown, shown
