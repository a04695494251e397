from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.steps import Steps


def test_into_a_log_a_step_prints_its_beginning_each_new_word_once_and_its_end() -> None:
    out = io.StringIO()
    with Steps(Console(file=out, width=40)).step("loading [engine]") as tell:
        for word in ("half", "half", f"{'long ' * 20}end", "[/] done"):
            tell(word)
    lines = out.getvalue().splitlines()
    assert lines[:4] == ["loading [engine] …", "    half", f"    {'long ' * 20}end", "    [/] done"]
    assert lines[4].startswith("✓ loading [engine] (")


def test_a_step_that_fails_is_not_ticked_off() -> None:
    out = io.StringIO()
    with pytest.raises(KeyError), Steps(Console(file=out)).step("loading"):
        raise KeyError
    assert "✓" not in out.getvalue()
