"""Overdue jobs are found in time, and ended ones are not kept until their deadline."""

from __future__ import annotations

from core.clock import Deadline
from decode_worker.deadlines import Deadlines
from decode_worker.generation import Generation
from decode_worker.stream import Stream
from tests.unit.decode_worker.decode_cases import make_job, make_request


def make_generation(at: float, name: str = "r") -> Generation:
    job = make_job(make_request(4, name))
    return Generation(job, Stream(job), Deadline(at))


def test_overdue_jobs_are_told_once_and_the_earliest_first() -> None:
    deadlines = Deadlines(lambda generation: True)
    late, early, later = (make_generation(at) for at in (20.0, 10.0, 30.0))
    for generation in (late, early, later):
        deadlines.add(generation)
    assert deadlines.take_overdue(9.9) == []
    assert deadlines.take_overdue(20.0) == [early, late]
    assert deadlines.take_overdue(29.0) == []
    assert deadlines.take_overdue(31.0) == [later]


def test_an_ended_job_is_not_overdue() -> None:
    ended = make_generation(10.0)
    deadlines = Deadlines(lambda generation: generation is not ended)
    deadlines.add(ended)
    assert deadlines.take_overdue(11.0) == []
    assert len(deadlines) == 0


def test_jobs_that_ended_long_before_their_deadline_are_let_go() -> None:
    running = {make_generation(1e9, f"r{index}") for index in range(10)}
    deadlines = Deadlines(running.__contains__)
    for generation in running:
        deadlines.add(generation)
    for _ in range(10_000):
        deadlines.add(make_generation(1e9))
        assert len(deadlines) <= 2 * len(running) + 65
    assert set(deadlines.take_overdue(1e9)) == running
