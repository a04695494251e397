"""Workers for the tests of the pipeline, in few words."""

from __future__ import annotations

from core.ids import Role
from router.config import PlanSetting
from tests.unit.router.scripted import ScriptedWorker

REMOTE = {"plan": PlanSetting.REMOTE}


def prefill_worker(name: str = "p", **script: object) -> ScriptedWorker:
    return ScriptedWorker(Role.PREFILL, name, **script)  # type: ignore[arg-type]


def decode_worker(name: str = "d", **script: object) -> ScriptedWorker:
    return ScriptedWorker(Role.DECODE, name, **script)  # type: ignore[arg-type]
