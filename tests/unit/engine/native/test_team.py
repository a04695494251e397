"""Helpers of a loop: whoever comes late or not at all, each part is done once, and the bits are the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.native.operators import NativeOps
from engine.native.packing import PackedWeight, pack_dense


def _layer(seed: int) -> tuple[torch.Tensor, PackedWeight]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(320, 64, generator=generator)
    return torch.randn(3, 64, generator=generator), pack_dense(weight)


def test_callers_with_more_helpers_than_cores_each_get_their_own_result(ops: NativeOps) -> None:
    wanted = []
    torch.set_num_threads(1)
    for seed in range(4):
        wanted.append(ops.linear(*_layer(seed)))

    def call_often(seed: int) -> int:
        torch.set_num_threads(5)
        x, weight = _layer(seed)
        return sum(not torch.equal(ops.linear(x, weight), wanted[seed]) for _ in range(2000))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call_often, range(4))) == [0] * 4
    torch.set_num_threads(1)


def test_a_caller_takes_its_helpers_with_it_when_it_ends(ops: NativeOps) -> None:
    def call(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        ops.linear(*_layer(0))

    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        thread = threading.Thread(target=call, args=(3,))
        thread.start()
        thread.join()
    # those of torch itself, if any, are made once
    assert len(os.listdir("/proc/self/task")) < before + 20


def test_a_forked_child_computes_alone() -> None:
    code = """
import os, sys, torch
from engine.native.operators import load_ops
from engine.native.packing import pack_dense
torch.set_num_threads(3)
ops, x, weight = load_ops(), torch.ones(2, 64), pack_dense(torch.ones(320, 64))
wanted = ops.linear(x, weight)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, weight), wanted) else 7)  # torch's own pool survives no fork
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
