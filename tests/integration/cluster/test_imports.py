"""What may be imported without what: each package in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def modules(package: str) -> list[str]:
    folder = ROOT / package
    found = [package]
    found += [item.name for item in pkgutil.walk_packages([str(folder)], f"{package}.")]
    return found


def test_engine_bridge_and_workers_import_with_ray_blocked() -> None:
    lines = ["from tests.without_ray import block_ray", "block_ray()", "import importlib"]
    for package in ("core", "protos", "engine", "kv_transfer", "prefill_worker", "decode_worker"):
        names = modules(package)
        assert len(names) > 3
        lines += [f"importlib.import_module({name!r})" for name in names]
    run = run_python("\n".join(lines))
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("router.app", ("torch", "ray", "transformers")),
        ("cluster.router_shell", ("torch", "transformers")),
        ("cluster.worker_shell", ("torch", "transformers")),
        ("cluster.cli", ("torch", "ray", "transformers")),
        ("prefill_worker.service, decode_worker.service", ("starlette", "pydantic", "transformers")),
    ],
)
def test_importing_a_module_does_not_load_what_it_has_no_use_for(
    imported: str, absent: tuple[str, ...]
) -> None:
    run = run_python(f"import sys, {imported}\nprint([name for name in {absent!r} if name in sys.modules])")
    assert run.stdout.strip() == "[]", run.stderr


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
