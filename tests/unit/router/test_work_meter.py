"""What the router counts for the autoscaler: sums that only grow, and what is inside."""

from __future__ import annotations

from core.telemetry import TTFTPart
from router.work_meter import WorkMeter


def test_a_request_is_counted_where_it_is_and_leaves_nothing_inside() -> None:
    meter = WorkMeter()
    work = meter.open(num_prompt_tokens=100, max_tokens=5000)
    stats = meter.stats()
    assert (stats["open"], stats["waiting"], stats["waiting_tokens"]) == (1, 1, 100)
    assert (stats["arrived"], stats["arrived_tokens"], stats["expected_tokens"]) == (1, 100, 256)
    work.placed()
    assert (meter.stats()["open"], meter.stats()["waiting_tokens"]) == (1, 0)
    work.lost()
    assert meter.stats()["waiting"] == 1
    work.placed()
    work.first_token(30, {TTFTPart.ADMIT: 0.1, TTFTPart.PLACE: 0.2, TTFTPart.QUEUE: 0.5})
    work.next_tokens(4, 0.2)
    work.close(num_output_tokens=5, transfer_wait_s=0.01)
    stats = meter.stats()
    assert (stats["open"], stats["waiting"], stats["waiting_tokens"]) == (0, 0, 0)
    assert (stats["read_tokens"], stats["cached_tokens"], stats["ended"], stats["output_tokens"]) == (
        *(100, 30),
        *(1, 5),
    )
    assert (round(stats["router_wait_s"], 6), stats["queue_wait_s"]) == (0.3, 0.5)
    assert (stats["gaps"], stats["gaps_s"], stats["transfers"], stats["transfer_wait_s"]) == (4, 0.2, 1, 0.01)


def test_one_that_was_given_up_while_it_waited_waits_no_more_and_has_no_length() -> None:
    meter = WorkMeter()
    work = meter.open(100, 16)
    work.close(num_output_tokens=0, transfer_wait_s=None)
    work.lost()
    stats = meter.stats()
    assert (stats["open"], stats["waiting"], stats["waiting_tokens"], stats["ended"]) == (0, 0, 0, 0)
    assert stats["expected_tokens"] == 16
