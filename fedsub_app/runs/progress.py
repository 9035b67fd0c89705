"""How far it is: on a terminal one line that is written over, in a pipe plain lines.

What else is said stands above that line. It changes when something has happened and not by a thread of its own, which
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

from fedsub_app.common.progress import human_seconds
from fedsub_app.common.score import Score, kind_of
from fedsub_app.common.section import Json
from fedsub_app.runs.console import LOST

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

    What else is logged stays, and so do rounds that lost replies. The record of a round has ``line``, that of
    rounds.jsonl, ``rounds``, the run's, ``left`` and ``pace``, seconds; that of other work is common/progress.py's.
    """

    live = True

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._line = LiveLine(file)
        self._scores: dict[str, float] = {}
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            if hasattr(record, "done"):
                done, total = (getattr(record, key) for key in ("done", "total"))
                self._line.show(done if total else 0, total, record.getMessage())
                return
            line: Json | None = getattr(record, "line", None)
            if line is None:
                self._line.end()
                self._line.say(record.getMessage())
                return
            if line.get("dropped") or line["status"] != "ok" or any(key in line for key in LOST):
                self._line.say(record.getMessage())
            score: Score = getattr(record, "score", Score())
            self._scores |= {key: line[key] for key in score.keys if key in line}
            self._dropped += len(line.get("dropped", ()))
            rounds, left, pace = (getattr(record, key) for key in ("rounds", "left", "pace"))
            numbers = measured(self._scores | {"train-loss": line.get("train-loss")}, score)
            speed = f"{1 / pace:.1f} rounds/s" if pace < 1 else f"{pace:.1f} s a round"
            stage = [line["stage"]] if "stage" in line else []
            words = [f"round {line['round']}/{rounds}", *stage, *numbers, speed, f"left {human_seconds(left)}"]
            self._line.show(line["round"], rounds, "  ".join([*words, f"dropped {self._dropped}"]))
        except Exception:  # as every handler of logging: what is shown must not end what is run
            self.handleError(record)

    def close(self) -> None:
        self._line.end()
        super().close()


def measured(numbers: Json, score: Score) -> list[str]:
    """Return the scores and the training loss of a round's line as words."""
    words = [f"{kind_of(key)} {score.text(numbers[key])}" for key in score.keys if key in numbers]
    if (loss := numbers.get("train-loss")) is not None:
        words.append(f"loss {loss:.4f}")
    return words
