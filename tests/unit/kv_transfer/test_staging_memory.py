"""Staging memory has no name, cannot shrink under a reader, and is writable for one side only."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_transfer.shm_memory import StagingMemory, create_memory


@contextmanager
def memory(num_bytes: int) -> Iterator[int]:
    descriptor = create_memory(num_bytes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:baton-staging")


def test_both_sides_see_the_same_bytes_and_each_others_nonce() -> None:
    with memory(8192) as descriptor:
        prefill = StagingMemory(descriptor, 8192, is_writable=True)
        decode = StagingMemory(descriptor, 8192, is_writable=False)
    prefill.slots[5000:5004] = b"abcd"
    assert bytes(decode.slots[5000:5004]) == b"abcd"
    assert len(decode.slots) == 8192
    assert prefill.decode_nonce == decode.decode_nonce != bytes(16)
    prefill.write_prefill_nonce(b"n" * 16)
    assert decode.prefill_nonce == b"n" * 16
    assert bytes(decode.slots[:16]) == bytes(16), "the nonces lie outside the slots"


def test_decode_cannot_write() -> None:
    with memory(4096) as descriptor:
        decode = StagingMemory(descriptor, 4096, is_writable=False)
    with pytest.raises(TypeError):
        decode.slots[0:1] = b"x"


def test_its_size_cannot_be_changed_and_memory_that_is_not_sealed_or_not_of_that_size_is_refused() -> None:
    with memory(4096) as descriptor:
        for size in (0, 1 << 20):
            with pytest.raises(OSError):
                os.ftruncate(descriptor, size)
        for size in (0, 8192):
            with pytest.raises(OSError):
                StagingMemory(descriptor, size, is_writable=True)
    unsealed = os.memfd_create("baton-test")
    try:
        os.ftruncate(unsealed, mmap.PAGESIZE + 4096)
        with pytest.raises(OSError):
            StagingMemory(unsealed, 4096, is_writable=True)
    finally:
        os.close(unsealed)


def test_it_lies_in_no_file_system_and_is_unmapped_with_the_last_reference() -> None:
    before = mappings()
    with memory(4096) as descriptor:
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:baton-staging")
        assert os.fstat(descriptor).st_nlink == 0
        found = StagingMemory(descriptor, 4096, is_writable=True)
    assert mappings() == before + 1
    reading = found.slots[:8]
    found.close()
    assert bytes(reading) == bytes(8), "a copy that is under way keeps its source"
    assert mappings() == before + 1
    reading.release()
    del found, reading
    assert mappings() == before


def test_closing_it_unmaps_it_at_once_if_nothing_is_under_way() -> None:
    before = mappings()
    with memory(4096) as descriptor:
        found = StagingMemory(descriptor, 4096, is_writable=False)
    assert mappings() == before + 1
    found.close()
    assert mappings() == before
