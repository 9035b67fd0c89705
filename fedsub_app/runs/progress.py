"""How far it is: on a terminal one line that is written over, in a pipe plain lines.

Other records stand above that line. It changes when something has happened and not by a thread of its own, which
would be copied into the workers that are forked.
"""

import logging
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR = 20  # columns


class LiveLine:
    """A line at the bottom of a terminal. ``file``: the terminal."""

    def __init__(self, file: TextIO) -> None:
        self.console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def show(self, done: float, total: float, text: str, below: Sequence[str] = ()) -> None:
        """Write a bar and what is said of it over what stood there; ``below``: further lines."""
        first = Table.grid(padding=(0, 1))
        first.add_column(width=BAR)
        first.add_column(no_wrap=True, overflow="ellipsis")
        first.add_row(ProgressBar(max(total, 1), done, BAR), Text(text))
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
            self.console.show_cursor(True)  # Live hides it, and a process that is killed would leave it so
        lines = Group(first, *(Text(line, no_wrap=True, overflow="ellipsis") for line in below))
        self._live.update(lines, refresh=True)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def end(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None


class LiveHandler(logging.Handler):
    """Shows a run's rounds, and work before them, in one line of a terminal.

    What else is logged stays, and so does a record with ``stays``, a round that lost replies. Both kinds of work have
    ``done`` and ``total`` (common/progress.py).
    """

    live = True

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._line = LiveLine(file)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            moves = hasattr(record, "done")
            if not moves:
                self._line.end()
            if not moves or getattr(record, "stays", False):
                self._line.say(record.getMessage())
            if moves:
                done, total = (getattr(record, key) for key in ("done", "total"))
                self._line.show(done if total else 0, total, record.getMessage())
        except Exception:  # as every handler of logging: what is shown must not end what is run
            self.handleError(record)

    def close(self) -> None:
        self._line.end()
        super().close()
