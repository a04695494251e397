"""Packed weights are made once, shared, whole, and those of the checkpoint that is there now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.native import packed_store
from engine.native.packed_store import Store, open_store
from engine.native.packing import PackedWeight, pack_dense

NAMES = ("layers.0.mlp.down_proj", "lm_head")


class Checkpoint:
    """A folder with a file of weights, and how often one of them was packed."""

    def __init__(self, folder: Path, value: float = 1.0) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.num_packed = 0
        self.write(value)

    def write(self, value: float) -> None:
        self.value = value
        save_file({"w": torch.full((8, 8), value)}, str(self.folder / "model.safetensors"))

    def pack(self, name: str) -> PackedWeight:
        self.num_packed += 1
        weight = torch.arange(70 * 24, dtype=torch.float32).reshape(70, 24) + self.value + NAMES.index(name)
        return pack_dense(weight)

    def ask(self, cache: Path) -> tuple[list[PackedWeight], Store]:
        with open_store(self.folder, cache, worth_bytes=0) as store:
            return [store.weight(name, lambda name=name: self.pack(name)) for name in NAMES], store  # type: ignore[misc]

    def check(self, weights: list[PackedWeight]) -> None:
        for name, weight in zip(NAMES, weights, strict=True):
            expected = self.pack(name)
            assert torch.equal(weight.data, expected.data)
            assert (weight.kind, weight.num_out, weight.num_in) == (expected.kind, 70, 24)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "model")


def test_the_second_worker_maps_what_the_first_has_packed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, store = checkpoint.ask(tmp_path / "cache")
    assert store.is_shared
    assert checkpoint.num_packed == 2
    second, store = checkpoint.ask(tmp_path / "cache")
    assert store.is_shared
    assert checkpoint.num_packed == 2
    checkpoint.check(first)
    checkpoint.check(second)


def test_what_a_worker_does_to_its_weights_reaches_nobody_else(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, _ = checkpoint.ask(tmp_path / "cache")
    first[0].data.zero_()
    second, _ = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(second)


def test_a_changed_checkpoint_is_packed_anew(checkpoint: Checkpoint, tmp_path: Path) -> None:
    old, _ = checkpoint.ask(tmp_path / "cache")
    kept = [weight.data.clone() for weight in old]
    checkpoint.write(5.0)
    new, _ = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(new)
    assert all(torch.equal(weight.data, before) for weight, before in zip(old, kept, strict=True))


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
def test_a_damaged_file_is_never_used(
    checkpoint: Checkpoint, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    checkpoint.ask(tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*/weights.bin")
    damage(file)
    weights, store = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(weights)
    assert store.is_shared
    num_packed = checkpoint.num_packed
    checkpoint.ask(tmp_path / "cache")
    assert checkpoint.num_packed == num_packed  # it was mended


def test_nothing_is_kept_of_a_load_that_failed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def go_away(name: str) -> PackedWeight:
        if name == NAMES[1]:
            raise OSError("the checkpoint went away")
        return pack_dense(torch.ones(8, 8))

    checkpoint.pack = go_away  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the checkpoint went away"):
        checkpoint.ask(tmp_path / "cache")
    assert [file for file in (tmp_path / "cache").iterdir() if file.is_dir()] == []


def test_where_nothing_can_be_written_each_worker_has_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    weights, store = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(weights)
    assert not store.is_shared


def test_a_full_disk_leaves_private_copies_and_no_file(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> PackedWeight:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_store._MakingStore, "_append", refuse)
    weights, store = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(weights)
    assert not store.is_shared
    assert list((tmp_path / "cache").glob("*/*")) == []


def test_workers_that_start_together_pack_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    is_packing, may_go_on = threading.Event(), threading.Event()
    pack = checkpoint.pack

    def slowly(name: str) -> PackedWeight:
        is_packing.set()
        assert may_go_on.wait(20)
        return pack(name)

    checkpoint.pack = slowly  # type: ignore[method-assign]
    found: list[list[PackedWeight]] = []
    threads = [
        threading.Thread(target=lambda: found.append(checkpoint.ask(tmp_path / "cache")[0])) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert is_packing.wait(20)
    may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    assert checkpoint.num_packed == 2
    for weights in found:
        checkpoint.check(weights)


def test_the_store_of_a_checkpoint_that_is_gone_is_removed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.ask(tmp_path / "cache")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model").rmdir()
    Checkpoint(tmp_path / "other").ask(tmp_path / "cache")
    assert [file.name.split("-")[0] for file in (tmp_path / "cache").iterdir() if file.is_dir()] == ["other"]


def stores(cache: Path) -> int:
    return len(list(cache.glob("*/weights.bin")))


def test_what_somebody_has_mapped_is_not_removed_by_a_host_that_lacks_its_checkpoint(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    made, _ = checkpoint.ask(cache)
    found, _ = checkpoint.ask(cache)
    (tmp_path / "model").rename(tmp_path / "on another host")
    del made
    Checkpoint(tmp_path / "other").ask(cache)
    assert stores(cache) == 2
    assert torch.equal(found[0].data, checkpoint.pack(NAMES[0]).data)
    del found
    Checkpoint(tmp_path / "third").ask(cache)
    assert stores(cache) == 2, "nobody has it mapped any more"


def test_two_checkpoints_of_one_path_do_not_take_turns_and_the_one_that_is_not_used_goes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    before, _ = checkpoint.ask(cache)
    checkpoint.write(5.0)
    after, _ = checkpoint.ask(cache)
    assert stores(cache) == 2, "the host with the old one still has it mapped"
    num_packed = checkpoint.num_packed
    checkpoint.ask(cache)
    assert checkpoint.num_packed == num_packed
    del before, after
    checkpoint.write(6.0)
    checkpoint.ask(cache)
    assert stores(cache) == 1


def test_where_files_cannot_be_locked_each_worker_has_its_own(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("engine.native.packed_store.fcntl.flock", refuse)
    weights, store = checkpoint.ask(tmp_path / "cache")
    checkpoint.check(weights)
    assert not store.is_shared


def test_a_small_checkpoint_is_not_worth_a_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with open_store(checkpoint.folder, tmp_path / "cache") as store:
        assert not store.is_shared
    assert not (tmp_path / "cache").exists()
