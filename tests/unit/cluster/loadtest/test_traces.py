"""Published traces are read as they are, and a faulty line is named."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from cluster.loadtest.traces import TraceRecord, read_trace
from core.errors import InvalidConfig

MOONCAKE = '{"timestamp": 27500, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
SHARED = Path(__file__).parents[4].parent / "shared" / "traces"


def trace(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    data = "\n".join([*lines, ""]).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_mooncake_lines_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    later = '{"timestamp": 30500, "input_length": 512, "output_length": 1, "hash_ids": [46]}'
    expected = [TraceRecord(0.0, 600, 52, (46, 47)), TraceRecord(3.0, 512, 1, (46,))]
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_trace(trace(tmp_path, name, later, "", MOONCAKE)) == expected


def test_azure_times_keep_their_fractions(tmp_path: Path) -> None:
    lines = (AZURE_HEAD, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951691,396,109")
    for name in ("a.csv", "a.csv.gz"):
        first, second = read_trace(trace(tmp_path, name, *lines))
        assert first == TraceRecord(0.0, 374, 44)
        assert second.arrival_s == pytest.approx(4.314579)
        assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read_trace(trace(tmp_path, "a.jsonl", MOONCAKE, MOONCAKE, "not JSON"), limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "lines", "place"),
    [
        ("a.jsonl", (MOONCAKE, "{"), "a.jsonl:2:line"),
        ("a.jsonl", ("[]",), "a.jsonl:1:line"),
        ("a.jsonl", (MOONCAKE.replace("27500", '"soon"'),), "a.jsonl:1:timestamp"),
        ("a.jsonl", (MOONCAKE, MOONCAKE.replace("600", "0")), "a.jsonl:2:input_length"),
        ("a.jsonl", (MOONCAKE.replace("52", "2.5"),), "a.jsonl:1:output_length"),
        ("a.jsonl", (MOONCAKE.replace(', "output_length": 52', ""),), "a.jsonl:1:output_length"),
        ("a.jsonl.gz", (MOONCAKE.replace("[46, 47]", "[46]"),), "a.jsonl.gz:1:hash_ids"),
        ("a.jsonl", (MOONCAKE.replace("[46, 47]", '["46", 47]'),), "a.jsonl:1:hash_ids"),
        ("a.csv", ("TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,3"), "a.csv:1:GeneratedTokens"),
        ("a.csv", (AZURE_HEAD, "2023-11-16 18:15:46,3,4", "yesterday,3,4"), "a.csv:3:TIMESTAMP"),
        ("a.csv", (AZURE_HEAD, "2023-11-16 18:15:46,-3,4"), "a.csv:2:ContextTokens"),
        ("a.csv", (AZURE_HEAD, "2023-11-16 18:15:46,3"), "a.csv:2:GeneratedTokens"),
    ],
)
def test_a_fault_is_named_by_file_line_and_field(
    tmp_path: Path, name: str, lines: tuple[str, ...], place: str
) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(place)):
        read_trace(trace(tmp_path, name, *lines))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="must end in"):
        read_trace(tmp_path / "a.txt")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "torn.csv.gz").write_bytes(gzip.compress(b"x" * 100)[:-10])
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_trace(tmp_path / "torn.csv.gz")
    with pytest.raises(InvalidConfig, match="no request"):
        read_trace(trace(tmp_path, "empty.csv", AZURE_HEAD))


@pytest.mark.parametrize(
    ("name", "count", "last"),
    [
        ("mooncake_conversation.jsonl.gz", 12031, (20774, 508)),
        ("azure_llm_2023_conv.csv.gz", 19366, None),
    ],
)
def test_the_published_traces_are_read_whole(name: str, count: int, last: tuple[int, int] | None) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"the trace {name} is not at hand")
    records = read_trace(SHARED / name)
    assert len(records) == count
    assert 3500 < records[-1].arrival_s < 3700
    if last is not None:
        assert (records[-1].num_prompt_tokens, records[-1].num_output_tokens) == last
