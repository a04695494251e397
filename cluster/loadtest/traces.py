"""TraceRecord: one request of a trace, and readers of the formats in which traces are published.

Owns the formats and their errors, which name file, line and field. When a request is sent belongs to
`arrivals`, its text to `prompts`. Pure apart from reading files.

Formats, each also gzipped (`.gz`):
- Mooncake: JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id
  for each 512 tokens of the prompt, equal where prompts are equal from their beginning (kvcache-ai/Mooncake,
  FAST25-release/traces).
- Azure: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from core.errors import InvalidConfig

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request: when it came, how long it was, and what it shares with others.

    `arrival_s`: seconds since the trace's first request. `block_ids`: one id for each `block_tokens` tokens
    of the prompt, the last one perhaps for fewer; two prompts are equal as far as their ids are. No ids: the
    prompt shares nothing.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """The first `limit` requests in the order of their arrival, in the format that the name tells.

    Raises InvalidConfig for an unknown format, a file that cannot be read, or a faulty line.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return read_mooncake(path, limit)
    if name.endswith(".csv"):
        return read_azure(path, limit)
    raise InvalidConfig(f"{path}: not a trace: it must end in .jsonl or .csv, perhaps with .gz", key="trace")


def read_mooncake(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """Raises InvalidConfig, naming file, line and field."""
    with _opened(path) as stream:
        return _in_order(islice(_mooncake_records(path, stream), limit), path)


def read_azure(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """Raises InvalidConfig, naming file, line and field."""
    with _opened(path) as stream:
        return _in_order(islice(_azure_records(path, stream), limit), path)


def _mooncake_records(path: Path, stream: IO[str]) -> Iterator[TraceRecord]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise _fault(path, number, "line", f"is not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise _fault(path, number, "line", "is not a JSON object")
        num_prompt_tokens = _count(path, number, "input_length", entry.get("input_length"))
        yield TraceRecord(
            arrival_s=_number(path, number, "timestamp", entry.get("timestamp")) / 1e3,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(path, number, "output_length", entry.get("output_length")),
            block_ids=_ids(path, number, entry.get("hash_ids", []), num_prompt_tokens),
        )


def _ids(path: Path, line: int, value: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _fault(path, line, "hash_ids", "must be a list of whole numbers")
    wanted = math.ceil(num_prompt_tokens / MOONCAKE_BLOCK_TOKENS)
    if value and len(value) != wanted:
        raise _fault(path, line, "hash_ids", f"has {len(value)} ids, not {wanted} as the length needs")
    return tuple(value)


def _azure_records(path: Path, stream: IO[str]) -> Iterator[TraceRecord]:
    reader = csv.DictReader(stream)
    missing = [name for name in _AZURE_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise _fault(path, 1, missing[0], "is not among the columns")
    start: datetime | None = None
    for row in reader:
        number = reader.line_num
        moment = _moment(path, number, row["TIMESTAMP"])
        start = moment if start is None else start
        yield TraceRecord(
            arrival_s=(moment - start).total_seconds(),
            num_prompt_tokens=_count(path, number, "ContextTokens", row["ContextTokens"]),
            num_output_tokens=_count(path, number, "GeneratedTokens", row["GeneratedTokens"]),
        )


def _moment(path: Path, line: int, text: str | None) -> datetime:
    head, dot, fraction = (text or "").partition(".")
    try:  # seven digits in the trace, six are what datetime knows
        return datetime.fromisoformat(f"{head}{dot}{fraction[:6].ljust(6, '0')}" if dot else head)
    except ValueError as error:
        raise _fault(path, line, "TIMESTAMP", f"is not a time: {text!r}") from error


def _count(path: Path, line: int, field: str, value: Any) -> int:
    """A whole number of at least 1, from JSON or from text."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int or value < 1:
        raise _fault(path, line, field, f"must be a whole number above 0, not {value!r}")
    return value


def _number(path: Path, line: int, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _fault(path, line, field, f"must be a number, not {value!r}")
    return float(value)


def _opened(path: Path) -> IO[str]:
    try:
        if path.name.endswith(".gz"):
            # read whole: a damaged archive shows here, not in the middle of a run
            return io.StringIO(gzip.decompress(path.read_bytes()).decode("utf-8"))
        return path.open(encoding="utf-8", newline="")
    except (OSError, EOFError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", key="trace") from error


def _in_order(records: Iterable[TraceRecord], path: Path) -> list[TraceRecord]:
    try:
        found = sorted(records, key=lambda record: record.arrival_s)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not UTF-8 text: {error}", key="trace") from error
    if not found:
        raise InvalidConfig(f"{path} holds no request", key="trace")
    start = found[0].arrival_s
    if start == 0.0:
        return found
    return [replace(record, arrival_s=record.arrival_s - start) for record in found]


def _fault(path: Path, line: int, field: str, what: str) -> InvalidConfig:
    return InvalidConfig(f"{path}:{line}:{field}: {what}", key=field)
