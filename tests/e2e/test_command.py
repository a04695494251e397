"""The command line: what is refused at start, by name, and how a start and a stop look from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import wire
from tests.e2e.fleet import Fleet
from tests.e2e.harness import BATON, ROOT, Profile


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BATON, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_the_version_is_printed() -> None:
    done = run("version")
    assert done.returncode == 0
    assert done.stdout.startswith("baton ")


@pytest.mark.parametrize("kind", [["--local"], []], ids=["local", "Ray"])
@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--router.no_such_key=1"], {}, "router.no_such_key"),
        (["--no_such_section.key=1"], {}, "no_such_section"),
        (["--engine.block_size=many"], {}, "engine.block_size"),
        (["--decode.max_num_seqs=0"], {}, "max_num_seqs"),
        ([], {"BATON_PREFILL__TOKEN_BUDGET": "x"}, "prefill.token_budget"),
        (["--model", "/no/such/folder"], {}, "/no/such/folder"),
        (["--config", "/no/such/file.yaml"], {}, "/no/such/file.yaml"),
    ],
)
def test_a_wrong_setting_is_refused_at_start_by_name(
    kind: list[str], arguments: list[str], environment: dict[str, str], named: str
) -> None:
    start = time.monotonic()
    done = run("serve", *kind, *arguments, environment=environment)
    assert done.returncode not in (0, None)
    assert named in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("kind", [["--local"], []], ids=["local", "Ray"])
def test_a_port_in_use_is_refused_and_its_owner_left_alone(kind: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = str(owner.getsockname()[1])
        done = run("serve", *kind, "--port", port)
        assert done.returncode not in (0, None)
        assert port in done.stdout + done.stderr
        with socket.create_connection(("127.0.0.1", int(port))) as probe:
            accepted, _ = owner.accept()
            accepted.close()
            probe.close()


def test_an_interrupt_stops_a_local_system_with_a_stream_open(fleet: Fleet, tmp_path: Path) -> None:
    del tmp_path
    with fleet.once(Profile("interrupted"), fleet.models.toy()) as system:
        body = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with system.client.open("/v1/completions", body) as connection:
            assert connection.read_head().status == 200
            system.process.send_signal(signal.SIGINT)
            start = time.monotonic()
            system.process.wait(60.0)
            assert time.monotonic() - start < 60.0
        with pytest.raises(OSError, match=r".*"):
            wire.request(system.port, "GET", "/health")
