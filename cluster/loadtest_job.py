"""The load test inside a Ray job: reads its settings from a file, prints progress and then the report.

Started by `loadtest_submit` as `python -m cluster.loadtest_job settings.json`. Needs no connection to Ray: it
only sends HTTP. Main thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from cluster.loadtest.client import NoAnswer
from cluster.loadtest.load_test import run_load_test
from cluster.loadtest.parcel import wrapped
from cluster.loadtest.progress import ConsoleWatcher
from cluster.loadtest.settings import LoadTestSettings
from cluster.loadtest_command import EXIT_FAILED, EXIT_NO_RESULT, KEY_VARIABLE
from core.config import from_mapping


def main(path: Path) -> int:
    """The exit status of `baton loadtest`."""
    settings = from_mapping(LoadTestSettings, json.loads(path.read_text(encoding="utf-8")))
    console = Console(highlight=False, force_terminal=False, width=200)
    try:
        with ConsoleWatcher(console) as watcher:
            report = asyncio.run(run_load_test(settings, os.environ.get(KEY_VARIABLE), watcher))
    except NoAnswer as error:
        console.print(f"no result: {error}", markup=False, soft_wrap=True)
        return EXIT_NO_RESULT
    for line in wrapped(report):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    return 0 if report.verdict.has_passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
