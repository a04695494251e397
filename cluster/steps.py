"""What a person sees while a start takes its time: one line a step, with what is going on in it and how long
it took.

Owns the look only. On a terminal the running step is live; into a file or a log each step prints when it
begins and ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

Tell = Callable[[str], None]


class Steps:
    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, title: str) -> Iterator[Tell]:
        """Show `title` while the body runs, which may tell what it is at; a repeated word is shown once."""
        started, shown = time.monotonic(), escape(title)
        if self._console.is_terminal:
            with self._console.status(shown) as status:
                yield lambda what: status.update(f"{shown} [dim]{escape(what)}[/]")
        else:
            self._console.print(f"{shown} …", highlight=False)
            yield self._tell_new_words()
        took = time.monotonic() - started
        self._console.print(f"[green]✓[/] {shown} [dim]({took:.1f} s)[/]", highlight=False)

    def _tell_new_words(self) -> Tell:
        last = ""

        def tell(what: str) -> None:
            nonlocal last
            if what != last:
                last = what
                self._console.print(f"    {what}", highlight=False, markup=False, soft_wrap=True)

        return tell
