"""A process that was stopped by a signal knows for how long, whatever else the machine does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PROGRAM = """
from cluster.awake_watch import AwakeWatch
from core.clock import MonotonicClock
clock = MonotonicClock()
watch = AwakeWatch(clock)
watch.start()
began_at = clock.now()
print("runs", flush=True)
input()
print(watch.awake.lost_s(began_at), clock.now() - began_at, flush=True)
watch.close()
"""

STOPPED_S = 2.0


def test_a_stopped_process_notices_that_it_was() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "runs\n"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    time.sleep(STOPPED_S)  # the length of the stop is what is measured
    child.send_signal(signal.SIGCONT)
    lost_s, passed_s = map(float, child.communicate("\n", timeout=60)[0].split())
    assert child.returncode == 0
    # less at most what may pass between two looks
    assert STOPPED_S - 0.5 <= lost_s < passed_s
