"""What is written down of a call, and what its headers say is left."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from core.errors import InvalidConfig
from core.ids import TenantId
from router.leases import Lease
from router.limits import LimitKind, LimitName
from router.rate_headers import duration, rate_headers
from router.usage_log import UsageLog


def test_every_record_is_a_line_of_its_own_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "usage.jsonl"
    lost: list[int] = []
    for start in (0, 3000):  # a router that starts again goes on behind what is there
        log = UsageLog(path, lost.append)
        for number in range(start, start + 3000):
            log.note({"number": number})
        log.close()
    assert [orjson.loads(line)["number"] for line in path.read_bytes().splitlines()] == list(range(6000))
    assert lost == []


def test_a_file_that_cannot_be_written_stops_the_start_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"router\.tenants\.usage_file"):
        UsageLog(tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s"), (61.25, "1m1.25s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_what_is_left_and_when_all_is_back() -> None:
    def lease(kind: LimitKind, size: int, num_out: int) -> Lease:
        made = Lease(LimitName(TenantId("a"), kind), size)
        made.bucket.add(size)
        made.num_elsewhere = 0
        assert made.bucket.try_take(num_out, 0.0) is not None
        return made

    headers = rate_headers(
        {
            LimitKind.REQUESTS: lease(LimitKind.REQUESTS, 10, 3),
            LimitKind.PROMPT_TOKENS: lease(LimitKind.PROMPT_TOKENS, 1000, 100),
            LimitKind.OUTPUT_TOKENS: lease(LimitKind.OUTPUT_TOKENS, 100, 90),
            LimitKind.CONCURRENT_TOKENS: lease(LimitKind.CONCURRENT_TOKENS, 100, 90),
        },
        now=20.0,
    )
    assert headers["x-ratelimit-remaining-requests"] == "7"
    assert headers["x-ratelimit-reset-requests"] == "40s"
    assert headers["x-ratelimit-limit-tokens"] == headers["x-ratelimit-limit-output-tokens"] == "100"
    assert headers["x-ratelimit-remaining-prompt-tokens"] == "900"
    assert rate_headers({}, 0.0) == {}
