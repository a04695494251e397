"""SIGTERM to the whole process group, Ray's daemons included: the end is that of SIGTERM to the command."""

from __future__ import annotations

import os
import signal
import time

from tests.e2e import wire
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile

# Ray gives up a cluster that is gone after 60 s
BOUND_S = 30.0
ENDLESS = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def test_a_signal_to_the_whole_group_drains_and_ends_in_time(fleet: Fleet) -> None:
    profile = Profile("group", {"cluster.drain_timeout_s": 3.0}, is_local=False)
    with fleet.once(profile, fleet.models.toy()) as system:
        with system.client.open("/v1/completions", ENDLESS) as stream:
            head = stream.read_head()
            assert head.status == 200
            os.killpg(system.process.pid, signal.SIGTERM)
            start = time.monotonic()
            for _ in stream.pieces(head):
                pass
            last = head.body.decode().rstrip("\n").rsplit("data: ", 1)[-1]
            assert last == wire.DONE or "no_worker_available" in last
        system.process.wait(BOUND_S)
        assert time.monotonic() - start < BOUND_S
        assert system.process.returncode == 0
        # leaving the block proves that no process of the run is left
    log = system.log()
    assert "Traceback" not in log
    assert "SIGTERM received" not in log
