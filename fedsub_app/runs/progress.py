"""How far it is: on a terminal one line that is written over, in a pipe plain lines.

What else is said stands above that line. It changes when something has happened and not by a thread of its own, which
would be copied into the workers that are forked.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedsub_app.common.errors import UserError
from fedsub_app.common.progress import SAY_SECONDS, human_seconds
from fedsub_app.common.tensors import Json
from fedsub_app.runs.job import Job
from fedsub_app.runs.report import LOST
from fedsub_app.runs.rounds import ACCURACIES

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
        """Write text above the line."""
        self.console.print(text, soft_wrap=True)

    def end(self) -> None:
        """Take the line away."""
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
        self._accuracies: dict[str, float] = {}
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
            self._accuracies |= {key: line[key] for key in ACCURACIES if key in line}
            self._dropped += len(line.get("dropped", ()))
            rounds, left, pace = (getattr(record, key) for key in ("rounds", "left", "pace"))
            measured = _measured(self._accuracies | {"train-loss": line.get("train-loss")})
            speed = f"{1 / pace:.1f} rounds/s" if pace < 1 else f"{pace:.1f} s a round"
            stage = [line["stage"]] if "stage" in line else []
            words = [f"round {line['round']}/{rounds}", *stage, *measured, speed, f"left {human_seconds(left)}"]
            self._line.show(line["round"], rounds, "  ".join([*words, f"dropped {self._dropped}"]))
        except Exception:  # as every handler of logging: what is shown must not end what is run
            self.handleError(record)

    def close(self) -> None:
        """Take the line away."""
        self._line.end()
        super().close()


def _measured(numbers: Json) -> list[str]:
    words = [f"{key.removesuffix('-accuracy')} {numbers[key]:.2f} %" for key in ACCURACIES if key in numbers]
    if (loss := numbers.get("train-loss")) is not None:
        words.append(f"loss {loss:.4f}")
    return words


class BatchProgress:
    """How far several runs are. ``total``: how many there will be at most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._running: dict[str, Job] = {}
        self._rounds: dict[str, tuple[float, float, float]] = {}  # of a job: at its begin, now, at its end
        self._ended = 0
        self._start = self._said = time.monotonic()
        self._line = LiveLine(sys.stdout) if sys.stdout.isatty() else None

    def __enter__(self) -> "BatchProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._line:
            self._line.end()

    def begin(self, job: Job) -> None:
        """Count a run that begins or goes on."""
        done = _last(_lines(job), "round") or 0
        self._running[job.name] = job
        self._rounds[job.name] = (done, done, job.settings.num_rounds)

    def end(self, job: Job, failed: bool) -> None:
        """Say that a run has ended."""
        del self._running[job.name]
        before, _, rounds = self._rounds[job.name]
        self._rounds[job.name] = (before, rounds, rounds)
        self._ended += 1
        text = f"{'FAILED' if failed else 'done'}  {job.name}"
        if self._line:
            self._line.say(text)
        else:
            print(text, flush=True)

    def look(self) -> None:
        """Say how far the running ones are."""
        now = time.monotonic()
        if not self._running or (not self._line and now - self._said <= SAY_SECONDS):
            return
        self._said = now
        below = []
        for job in self._running.values():
            lines = _lines(job)
            before, _, rounds = self._rounds[job.name]
            done = _last(lines, "round") or 0
            self._rounds[job.name] = (before, done, rounds)
            numbers = {key: _last(lines, key) for key in (*ACCURACIES, "train-loss")}
            found = _measured({key: value for key, value in numbers.items() if value is not None})
            dropped = sum(len(line.get("dropped", ())) for line in lines)
            below.append("  ".join([f"  {job.name}  round {done:.0f}/{rounds:.0f}", *found, f"dropped {dropped}"]))
        before, done, known = (sum(counts) for counts in zip(*self._rounds.values(), strict=True))
        total = known + (self._total - len(self._rounds)) * known / len(self._rounds)
        # A resumed run first goes back to its last checkpoint.
        rate = (done - before) / (now - self._start)
        left = human_seconds((total - done) / rate) if rate > 0 else "unknown"
        to_go = f"{done:.0f} of {total:.0f} rounds, {self._total - self._ended} runs to go, left {left}"
        if self._line:
            self._line.show(done, total, f"{to_go}, {rate:.1f} rounds/s", below)
        else:
            print(to_go, flush=True)


def _lines(job: Job) -> list[Json]:
    """Return a run's lines; none where one is damaged, which the run itself will say."""
    with contextlib.suppress(UserError):
        return job.lines()
    return []


def _last(lines: Sequence[Json], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)
