"""Process groups of torch.distributed for two processes: the bridge's Groups, by shape.

Owns how a group is formed without a rendezvous server, and its memory. Each is an object of its own, beside
the default world and unknown to it. NCCL where the pool is on a GPU, else gloo; the code is the same. Calls
block; they are made on one thread for each group.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from engine.gpu.ipc_memory import DeviceWork, PoolRegion
from engine.kv.pool import KVPool

_POLL_S = 20e-6


class Keys(Protocol):
    """A table that both ends share. See the bridge's KeyExchange."""

    def set(self, key: str, value: bytes) -> None: ...

    def has(self, key: str) -> bool: ...

    def wait(self, key: str, timeout_s: float) -> bytes: ...


def groups_of(pool: KVPool, host: str) -> TorchGroups | None:
    """Groups for payloads of `pool`, whose sockets listen at `host`; None without a backend."""
    if pool.device.type == "cuda":
        return TorchGroups(pool, "nccl", host) if dist.is_nccl_available() else None
    return TorchGroups(pool, "gloo", host) if dist.is_gloo_available() else None


class TorchGroups:
    """`backend` as torch.distributed names it."""

    def __init__(self, pool: KVPool, backend: str, host: str) -> None:
        self.backend = backend
        self._pool = pool
        self._host = host

    def form(self, rank: int, keys: Keys, num_bytes: int, attach_s: float, op_s: float) -> TorchPairGroup:
        """Join the other end. Raises OSError or RuntimeError (torch's DistError is one)."""
        store = _KeyStore(keys, attach_s)
        group = self._gloo(store, rank, attach_s) if self.backend == "gloo" else self._nccl(store, rank, op_s)
        return TorchPairGroup(self._pool, group, rank, num_bytes, op_s)

    def _gloo(self, store: Store, rank: int, attach_s: float) -> Any:
        gloo: Any = c10d.ProcessGroupGloo  # its published types are incomplete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._threads = 1
        options._timeout = timedelta(seconds=attach_s)
        return gloo(store, rank, 2, options)

    def _nccl(self, store: Store, rank: int, op_s: float) -> Any:
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=op_s)
        return nccl(store, rank, 2, options)


class _KeyStore(Store):
    """What torch asks of a store, answered by `Keys`. Called from torch's threads."""

    def __init__(self, keys: Keys, timeout_s: float) -> None:
        super().__init__()
        self._keys = keys
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._keys.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._keys.wait(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._keys.wait(key, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return all(self._keys.has(key) for key in keys)

    def clone(self) -> _KeyStore:
        return _KeyStore(self._keys, self._timeout_s)


class TorchPairGroup:
    """A PairGroup. `slots`: on a CPU the bytes of its memory, on a GPU a region of the device."""

    def __init__(self, pool: KVPool, group: Any, rank: int, num_bytes: int, op_s: float) -> None:
        self._group = group
        self._other = 1 - rank
        self._op_s = op_s
        # not touched before it is used: pages of the host are taken one by one
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)
        self._work = DeviceWork(pool)
        self.slots: memoryview | PoolRegion
        if pool.device.type == "cpu":
            self.slots = self._memory.numpy().data
        else:
            self.slots = PoolRegion(self._work, _GroupBytes(self._memory), num_bytes)

    def swap(self, mine: bytes) -> bytes:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._memory.device)
        received = torch.empty_like(sent)
        # the lower rank speaks first
        if self._other == 1:
            self._finish(self._group.send([sent], self._other, 0))
            self._finish(self._group.recv([received], self._other, 0))
        else:
            self._finish(self._group.recv([received], self._other, 0))
            self._finish(self._group.send([sent], self._other, 0))
        return bytes(received.cpu().numpy())

    def send(self, offset: int, num_bytes: int) -> None:
        with self._work.alone():
            self._finish(self._group.send([self._memory[offset : offset + num_bytes]], self._other, 0))

    def receive(self, offset: int, num_bytes: int) -> None:
        with self._work.alone():
            self._finish(self._group.recv([self._memory[offset : offset + num_bytes]], self._other, 0))

    def close(self) -> None:
        """The sockets or the communicator end with the group, at the other end, too."""
        self._group.abort()
        del self._group
        if isinstance(self.slots, PoolRegion):
            self.slots.close()
        del self.slots, self._memory

    def _finish(self, work: Any) -> None:
        """Wait for it, bounded. gloo blocks as told; NCCL's wait would only hold up the stream."""
        if self._memory.device.type == "cpu":
            work.wait(timedelta(seconds=self._op_s))
            return
        until = time.monotonic() + self._op_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"the other end did not take or give a payload in {self._op_s:g} s")
            time.sleep(_POLL_S)
        work.wait()


class _GroupBytes:
    """SharedBytes, of which no other process has a handle."""

    handle = b""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def close(self) -> None:
        del self.data
