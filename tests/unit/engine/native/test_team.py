"""Helpers of a loop: whoever comes late or not at all, each part is done once, and the bits are the same."""

from __future__ import annotations

import ctypes
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.cores import Division
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


@pytest.mark.timeout(120)
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
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0


def _division(*words: ctypes.c_uint64, num_cores: int = 2) -> Division:
    addresses = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
    return Division(num_cores, 0, addresses)


def _helpers() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _processor_s(task: str) -> float:
    return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) / 1e9


def test_a_loop_has_helpers_only_while_no_other_worker_computes(ops: NativeOps) -> None:
    word, found = ctypes.c_uint64(1), []

    def call() -> None:
        torch.set_num_threads(1)
        before = _helpers()
        with ops.divided(_division(word)):
            ops.linear(*_layer(0))
            found.append(len(_helpers() - before))
            word.value = 0
            ops.linear(*_layer(0))
            found.append(len(_helpers() - before))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [0, 1]


def test_a_helper_leaves_a_loop_in_which_another_worker_begins(ops: NativeOps) -> None:
    word, helpers = ctypes.c_uint64(0), queue.SimpleQueue[set[str]]()
    rows, weight = torch.randn(4000, 2048), pack_dense(torch.randn(2048, 2048))
    results, caller = [], list[str]()

    def call() -> None:
        torch.set_num_threads(1)
        caller.append(str(threading.get_native_id()))
        before = _helpers()
        with ops.divided(_division(word)):
            ops.linear(*_layer(0))
            helpers.put(_helpers() - before)
            results.append(ops.linear(rows, weight))
            finished.set()
            ended.wait(60)  # its helper lives as long

    finished, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=call)
    thread.start()
    (helper,) = helpers.get(timeout=60)
    while _processor_s(helper) < 0.005 and not finished.is_set():
        pass
    word.value = 1
    before_s = [_processor_s(task) for task in (helper, caller[0])]
    assert finished.wait(60)
    helped_s, called_s = (
        _processor_s(task) - s for task, s in zip((helper, caller[0]), before_s, strict=True)
    )
    ended.set()
    thread.join()
    assert helped_s < 0.25 * called_s + 0.01
    torch.set_num_threads(1)
    assert torch.equal(results[0], ops.linear(rows, weight)), "the same bits, whoever computed them"
