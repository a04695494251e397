"""The committed protobuf modules are what the .proto files generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GENERATED = sorted(
    path.name
    for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
    for path in (ROOT / "protos").glob(pattern)
)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    assert sources
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}", f"--pyi_out={out}"]
    subprocess.run([*command, f"--grpc_python_out={out}", *sources], cwd=ROOT, check=True)
    return out / "protos"


def test_every_proto_file_has_its_modules_committed(regenerated: Path) -> None:
    assert sorted(path.name for path in regenerated.iterdir()) == GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_committed_module_equals_a_fresh_one(regenerated: Path, name: str) -> None:
    assert (ROOT / "protos" / name).read_text() == (regenerated / name).read_text(), "run `make proto`"
