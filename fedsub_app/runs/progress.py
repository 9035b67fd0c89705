"""How far it is: on a terminal one line that is written over, in a pipe plain lines.

Other records stand above that line. It changes when something has happened and not by a thread of its own, which
would be copied into the workers that are forked.
"""

import logging
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

BAR = 20  # columns


class LiveLine:
    """A bar and its text at the bottom of a terminal. ``file``: the terminal."""

    def __init__(self, file: TextIO) -> None:
        console = Console(file=file, highlight=False, markup=False, emoji=False)
        cut = Column(no_wrap=True, overflow="ellipsis")
        columns = (BarColumn(BAR), TextColumn("{task.description}", markup=False, table_column=cut))
        self._bars = Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._bar = self._bars.add_task("")

    def show(self, done: float, total: float, text: str) -> None:
        """Write the bar and what is said of it, one line or several, over what stood there."""
        self._bars.start()
        self._bars.console.show_cursor(True)  # it was hidden, and a process that is killed would leave it so
        self._bars.update(self._bar, completed=done, total=max(total, 1), description=text, refresh=True)

    def say(self, text: str) -> None:
        self._bars.console.print(text, soft_wrap=True)

    def end(self) -> None:
        self._bars.stop()


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
