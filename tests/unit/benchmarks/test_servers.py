"""Servers are read from a file that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.servers import ServerSpec, command_line, environment_of, load_specs, version_of
from benchmarks.workloads import Workload
from core.errors import InvalidConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "benchmarks" / "peers.example.yaml"


def written(folder: Path, text: str) -> Path:
    file = folder / "servers.yaml"
    file.write_text(text)
    return file


def test_the_example_names_peers_and_three_forms_of_ours_for_each_precision() -> None:
    specs = load_specs(EXAMPLE)
    assert {spec.name for spec in specs if spec.is_peer} == {"vllm-fp32", "llama-f16", "llama-q4"}
    ours = [spec for spec in specs if not spec.is_peer]
    assert [spec.weights for spec in ours] == ["fp16"] * 3 + ["4-bit"] * 3
    assert all(not Path(word).is_absolute() for spec in specs for word in spec.command.split())


def test_port_and_variables_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER", "/bin/server")
    spec = ServerSpec("s", "${SERVER} --port ${PORT} --name 'two words'", environment=("WHERE=${SERVER}=x",))
    assert command_line(spec, 81) == ["/bin/server", "--port", "81", "--name", "two words"]
    assert environment_of(spec)["WHERE"] == "/bin/server=x"


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ValueError, match="NOT_SET is not set"):
        command_line(ServerSpec("s", "${NOT_SET} serve"), 81)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("servers: [{name: a, command: b, colour: red}]", InvalidConfig, "colour"),
        ("servers: [{name: a}]", InvalidConfig, "command"),
        ("servers: [{name: a, command: b}, {name: a, command: c}]", ValueError, "one name"),
        ("peers: []", ValueError, "named servers"),
        ("servers: a", ValueError, "named servers"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_specs(written(tmp_path, text))


def test_a_server_may_be_limited_to_some_workloads(tmp_path: Path) -> None:
    [spec] = load_specs(written(tmp_path, "servers: [{name: a, command: b, workloads: AC}]"))
    assert [workload for workload in Workload if spec.runs(workload)] == [Workload.A, Workload.C]


def test_the_version_is_the_last_line_that_its_command_says() -> None:
    assert version_of(ServerSpec("s", "x", version="printf 'a warning\\nversion 7\\n'")) == "version 7"
    assert version_of(ServerSpec("s", "x")) == ""
