"""Workers of one host share its cores by who computes at present."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine import cores
from engine.cores import CoreShare, usable_cores
from engine.step_costs import StepWork

READING = StepWork(num_prefill_tokens=16, num_streams=0)
DECODING = StepWork(num_prefill_tokens=0, num_streams=8)


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_LOOK_PERIOD_NS", 0)


def parts(*shares: CoreShare) -> list[int]:
    """The threads that each would use, if all computed at the same time; the first looks again at last."""
    with ExitStack() as stack:
        for share in shares:
            stack.enter_context(share.step(READING))
        # entered one after the other, the first have not seen the last
        return [share._num_threads(time.monotonic_ns()) for share in shares]


def test_a_worker_that_computes_alone_takes_all_cores(tmp_path: Path) -> None:
    one, other = CoreShare(4, tmp_path / "c"), CoreShare(4, tmp_path / "c")
    with one.step(READING) as num_threads:
        assert num_threads == 4
    assert parts(other) == [2], "the first has just ended a step: its next may follow"


def test_idle_workers_take_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = CoreShare(4, tmp_path / "c"), CoreShare(4, tmp_path / "c")
    with one.step(READING):
        pass
    monkeypatch.setattr(cores, "_LINGER_NS", 0)
    with other.step(READING) as num_threads:
        assert num_threads == 4


def test_a_step_is_alone_or_beside_others_only_if_it_was_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = CoreShare(4, tmp_path / "c"), CoreShare(4, tmp_path / "c")
    monkeypatch.setattr(cores, "_LINGER_NS", 0)
    with one.step(READING):
        pass
    assert one.was_beside is False
    with other.step(READING), one.step(READING):
        pass
    assert one.was_beside is True
    assert other.was_beside is None, "the other came later"
    with one.step(READING), other.step(READING):
        pass
    assert one.was_beside is None, "the other came and went meanwhile"
    with ExitStack() as stack:
        stack.enter_context(other.step(READING))
        with one.step(READING):
            stack.close()
    assert one.was_beside is None, "the other left"


@pytest.mark.parametrize(("num_cores", "num_workers"), [(2, 2), (8, 3), (5, 2), (2, 3), (1, 2)])
def test_all_cores_are_given_out_and_everyone_has_one(
    tmp_path: Path, num_cores: int, num_workers: int
) -> None:
    found = parts(*(CoreShare(num_cores, tmp_path / "c") for _ in range(num_workers)))
    assert sum(found) == max(num_cores, num_workers)
    assert max(found) - min(found) <= 1


def test_a_worker_that_leaves_or_is_collected_gives_its_part_back(tmp_path: Path) -> None:
    one, other, third = (CoreShare(6, tmp_path / "c") for _ in range(3))
    assert parts(one, other, third) == [2, 2, 2]
    third.close()
    third.close()
    assert parts(one, other) == [3, 3]
    del other
    with one.step(READING) as num_threads:
        assert num_threads == 6
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(PermissionError):
        CoreShare(2, tmp_path / "c")
    (tmp_path / "d").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        CoreShare(2, tmp_path / "d")


def test_usable_cores_are_those_of_the_affinity_at_most() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_a_folder_that_is_cleared_away_fails_no_step_and_is_made_again(tmp_path: Path) -> None:
    one, other = CoreShare(4, tmp_path / "c"), CoreShare(4, tmp_path / "c")
    assert parts(one, other) == [2, 2]
    shutil.rmtree(tmp_path / "c")
    for share in (one, other, one):  # each comes back at its next step, and is seen by the other then
        with share.step(READING):
            pass
    assert parts(one, other) == [2, 2]
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_a_folder_that_cannot_be_read_fails_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left(path: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    share = CoreShare(4, tmp_path / "c")
    monkeypatch.setattr(os, "scandir", no_descriptor_left)
    with share.step(READING) as num_threads:
        assert num_threads == 4


def test_only_a_worker_that_reads_prompts_makes_one_that_decodes_wait(tmp_path: Path) -> None:
    decode, other = CoreShare(2, tmp_path / "c", stretch=1000.0), CoreShare(2, tmp_path / "c")
    with decode.step(DECODING):
        pass
    assert decode.was_beside is False
    assert decode.pause_s() == 0.0
    with other.step(DECODING), decode.step(DECODING):
        assert decode.pause_s() == 0.0, "the other decodes, too"
    with other.step(READING):
        assert decode.pause_s() > 0.0
    assert decode.pause_s() == 0.0, "the other has ended its step"


def test_the_division_names_the_words_of_all_others_in_their_order(tmp_path: Path) -> None:
    shares = [CoreShare(4, tmp_path / "c") for _ in range(3)]
    ranks = set()
    for share in shares:
        others = [other for other in shares if other is not share]
        with share.step(DECODING):
            division = share.division
            words = [ctypes.c_uint64.from_address(address or 0) for address in division.addresses]
            assert [word.value for word in words] == [0, 0]
            with others[0].step(READING):
                assert sorted(word.value for word in words) == [0, 2]
        assert division.num_cores == 4
        ranks.add(division.rank)
    assert ranks == {0, 1, 2}
