"""Packed weights of a checkpoint in one file that all workers of a host map.

Owns where the file lies, that it is only ever seen whole, and that its bytes are those that were written: it
is made beside its place under a file lock and renamed into it, an index written last says what it was made
from, and each weight is compared with its digest before it is used. A worker that finds no place for it keeps
private copies. Where several hosts have the same folder, none removes what another one has mapped: that would
end its process. Used at start, from any thread or process; what is mapped lives as long as its tensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, Self, TypeVar

import torch
import xxhash

from engine.native.packing import PANEL, PackedWeight, WeightKind

_FORMAT = 1  # raised when the layout of `packing.py` changes, so that older files are made anew
_DATA = "weights.bin"
_INDEX = "index.json"
_SOURCES = ("*.safetensors", "*.safetensors.index.json")
_WORTH_BYTES = 32 << 20  # of a checkpoint: a smaller one is packed faster than it is looked up

_log = logging.getLogger(__name__)

Make = Callable[[], PackedWeight]
F = TypeVar("F", bound=IO[Any])


class Store(Protocol):
    """Where packed weights are kept."""

    def weight(self, name: str, make: Make) -> PackedWeight:
        """The weight called `name`, made by `make` if it is not there."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes map the same memory."""
        ...


class PrivateStore:
    """Keeps nothing: each worker has copies of its own."""

    is_shared = False

    def weight(self, name: str, make: Make) -> PackedWeight:
        return make()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A weight's place in the file; `offset` begins a page."""

    kind: int
    num_out: int
    num_in: int
    offset: int
    num_bytes: int
    digest: str


class MappedStore:
    """The file of one checkpoint, found whole."""

    is_shared = True

    def __init__(self, data: BinaryIO, entries: dict[str, _Entry]) -> None:
        self._data = data
        self._entries = entries

    @classmethod
    def open(cls, folder: Path, origin: dict[str, Any]) -> Self | None:
        """None when there is no such file, or it was made from something else, or it is damaged."""
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            if index["origin"] != origin:
                return None
            entries = {name: _Entry(**entry) for name, entry in index["weights"].items()}
            store = cls(_in_use((folder / _DATA).open("rb")), entries)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        damaged = [name for name in store._entries if not store._is_sound(name)]
        if damaged:
            store.close()
            _log.warning("%s is damaged (%s) and is made anew", folder / _DATA, ", ".join(damaged[:3]))
            return None
        return store

    def close(self) -> None:
        """What is mapped stays so."""
        self._data.close()

    def weight(self, name: str, make: Make) -> PackedWeight:
        """Falls back to `make` for a weight that the file does not have."""
        entry = self._entries.get(name)
        return make() if entry is None else _mapped(self._data, entry)

    def _is_sound(self, name: str) -> bool:
        try:
            weight = _mapped(self._data, self._entries[name])
        except (OSError, ValueError):
            return False  # shorter than its index says
        return _digest(weight.data) == self._entries[name].digest


class _MakingStore:
    """The file while it is made: each weight is appended and mapped from there."""

    def __init__(self, folder: Path, origin: dict[str, Any]) -> None:
        self._folder = folder
        self._origin = origin
        self._entries: dict[str, _Entry] = {}
        self._failure: OSError | None = None
        self._data = _in_use((folder / _DATA).open("w+b"))

    @property
    def is_shared(self) -> bool:
        return self._failure is None

    def weight(self, name: str, make: Make) -> PackedWeight:
        packed = make()
        if self._failure is not None:
            return packed
        try:
            return self._append(name, packed)
        except OSError as error:
            self._failure = error
            return packed

    def _append(self, name: str, packed: PackedWeight) -> PackedWeight:
        offset = -(-self._data.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._data.seek(offset)
        self._data.write(packed.data.numpy().data)
        self._data.flush()
        entry = _Entry(
            int(packed.kind), packed.num_out, packed.num_in, offset, packed.num_bytes, _digest(packed.data)
        )
        self._entries[name] = entry
        return _mapped(self._data, entry)

    def finish(self) -> None:
        """All weights are there. Raises OSError when the file could not be written."""
        if self._failure is not None:
            raise self._failure
        os.fsync(self._data.fileno())
        index = {
            "origin": self._origin,
            "weights": {name: _fields(entry) for name, entry in self._entries.items()},
        }
        with (self._folder / _INDEX).open("w", encoding="utf-8") as stream:
            json.dump(index, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """What is mapped stays so."""
        self._data.close()


@contextmanager
def open_store(checkpoint: Path, cache: Path, worth_bytes: int = _WORTH_BYTES) -> Iterator[Store]:
    """The store of the weights of the folder `checkpoint`, kept under `cache`; open while they are asked for.

    The first worker of a host makes it and the others wait for that; a store that cannot be kept is a private
    one, and a warning says why. When the body ends without an error, what it made is kept, unless the
    checkpoint has less than `worth_bytes`.
    """
    origin = _origin_of(checkpoint)
    if sum(size for _, size, *_ in origin["files"]) < worth_bytes:
        yield PrivateStore()
        return
    place = cache / _place_name(checkpoint, origin)
    found = MappedStore.open(place, origin)
    if found is not None:
        with closing(found):
            yield found
        return
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        # dropped by the kernel if the process dies
        lock = _locked((cache / f".{place.name}.lock").open("w"), fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("weights are packed for this worker alone: %s cannot be written (%s)", cache, error)
        yield PrivateStore()
        return
    with lock:
        found = MappedStore.open(place, origin)
        if found is None:
            with _made(place, origin) as store:
                yield store
            return
    with closing(found):
        yield found


@contextmanager
def _made(place: Path, origin: dict[str, Any]) -> Iterator[Store]:
    making = place.with_name(f".{place.name}.making")
    try:
        shutil.rmtree(making, ignore_errors=True)  # of one that was killed; we hold the lock
        making.mkdir(mode=0o700)
        store = _MakingStore(making, origin)
    except OSError as error:
        _log.warning("weights are packed for this worker alone: %s", error)
        yield PrivateStore()
        return
    try:
        yield store
        _keep(store, making, place)
    finally:
        store.close()
        shutil.rmtree(making, ignore_errors=True)


def _keep(store: _MakingStore, making: Path, place: Path) -> None:
    try:
        store.finish()
        shutil.rmtree(place, ignore_errors=True)  # it is damaged
        making.rename(place)
        _remove_orphans(place)
    except OSError as error:
        _log.warning("packed weights were not kept for other workers: %s", error)


def _remove_orphans(kept: Path) -> None:
    """Stores beside `kept` whose checkpoint is gone, or is the same and was another one then."""
    checkpoint = _checkpoint_of(kept)
    for folder in kept.parent.iterdir():
        if folder.name.startswith(".") or folder == kept:
            continue
        found = _checkpoint_of(folder)
        if found is not None and (found == checkpoint or not Path(found).exists()):
            _discard(folder)


def _checkpoint_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["origin"]["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _discard(folder: Path) -> None:
    """Unless somebody has it mapped, here or on another host."""
    try:
        # exclusive, which network file systems grant to those only who may write
        with _locked((folder / _DATA).open("r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        _log.info("%s is left: %s", folder, error)


def _in_use(data: BinaryIO) -> BinaryIO:
    """Locked against `_discard` for as long as it is open or mapped: a mapping keeps the open file."""
    return _locked(data, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _locked(file: F, operation: int) -> F:
    """Raises OSError, and closes it, where that cannot be had."""
    try:
        fcntl.flock(file, operation)
    except OSError:
        file.close()
        raise
    return file


def _origin_of(checkpoint: Path) -> dict[str, Any]:
    """What a store is made from: a changed file has another size, time of change or inode."""
    files = []
    for file in sorted(file for pattern in _SOURCES for file in checkpoint.glob(pattern)):
        state = file.stat()
        files.append([file.name, state.st_size, state.st_ctime_ns, state.st_ino])
    return {"format": _FORMAT, "checkpoint": str(checkpoint.resolve()), "files": files}


def _place_name(checkpoint: Path, origin: dict[str, Any]) -> str:
    """Another one for each origin: two hosts that share the cache may each have a checkpoint of that path."""
    return f"{checkpoint.resolve().name}-{hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:12]}"


def _mapped(data: BinaryIO, entry: _Entry) -> PackedWeight:
    """Copy on write, so that nothing this process does reaches the file."""
    memory = mmap.mmap(data.fileno(), entry.num_bytes, access=mmap.ACCESS_COPY, offset=entry.offset)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    num_panels = -(-entry.num_out // PANEL)
    return PackedWeight(WeightKind(entry.kind), entry.num_out, entry.num_in, values.view(num_panels, -1))


def _digest(data: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def _fields(entry: _Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in _Entry.__slots__}
