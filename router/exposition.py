"""One scrape for the router and all workers: Prometheus text of many processes made one legal text.

Owns the merge (HELP and TYPE once for each family, series told apart by worker_id and role) and the last
text known of each worker, for when it does not answer in time. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from core.ids import WorkerRef
from router.worker_entry import WorkerEntry, WorkerState

_log = logging.getLogger(__name__)


class WorkerExpositions:
    """Fetches what the workers say of themselves, side by side and bounded in time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[WorkerRef, str] = {}

    async def fetch(self, entries: Iterable[WorkerEntry]) -> list[tuple[Mapping[str, str], str]]:
        """(labels, text) of each worker; the last known text of those that do not answer."""
        entries = list(entries)
        await asyncio.gather(*(self._fetch(entry) for entry in entries))
        refs = {entry.ref for entry in entries}
        self._known = {ref: text for ref, text in self._known.items() if ref in refs}
        return [
            ({"worker_id": ref.worker_id, "role": ref.role.value}, text)
            for ref, text in sorted(self._known.items(), key=lambda item: item[0].worker_id)
        ]

    async def _fetch(self, entry: WorkerEntry) -> None:
        if entry.state is WorkerState.DEAD:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                self._known[entry.ref] = (await entry.worker.metrics()).decode("utf-8", "replace")
        except Exception as error:  # noqa: BLE001 - a scrape answers with what is known
            _log.debug("no metrics from %s: %s", entry.ref.worker_id, error)


class _Family:
    def __init__(self) -> None:
        self.header: dict[str, str] = {}
        self.samples: list[str] = []


def merge(
    own: str, others: Iterable[tuple[Mapping[str, str], str]], labels: Mapping[str, str] | None = None
) -> bytes:
    """`own` with `labels`, the samples of the others with theirs added, grouped by family.

    A family whose type differs from the first one seen is left out: no scraper could read it.
    """
    families: dict[str, _Family] = {}
    for added, text in [(labels or {}, own), *others]:
        _add(families, added, text)
    lines = [line for family in families.values() for line in (*family.header.values(), *family.samples)]
    return ("\n".join(lines) + "\n").encode()


def _add(families: dict[str, _Family], labels: Mapping[str, str], text: str) -> None:
    added = {name: f'{name}="{_escape(value)}"' for name, value in labels.items()}
    family: _Family | None = None
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *_ = line.split(" ", 3)
            known = families.setdefault(name, _Family())
            if known.header.setdefault(kind, line) != line and kind == "TYPE":
                _log.warning("workers disagree on the type of %s", name)
                family = None
            elif kind == "TYPE" or family is not known:
                family = known
        elif line and not line.startswith("#") and family is not None:
            family.samples.append(_labelled(line, added))


def _labelled(sample: str, added: Mapping[str, str]) -> str:
    """`name{a="b"} 1` or `name 1` with those labels of `added` that it does not have itself."""
    start = min(index for index in (sample.find("{"), sample.find(" ")) if index >= 0)
    name, rest = sample[:start], sample[start:]
    if rest[0] == " ":
        return f"{name}{{{','.join(added.values())}}}{rest}" if added else sample
    # inside a value a quote is escaped, so this finds label names only
    missing = [
        text for label, text in added.items() if f'{{{label}="' not in rest and f',{label}="' not in rest
    ]
    if rest[1] != "}":
        missing.append("")
    return f"{name}{{{','.join(missing)}{rest[1:]}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
