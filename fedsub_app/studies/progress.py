"""How far a batch of runs is: on a terminal one line that is written over, in a pipe plain lines."""

import contextlib
import sys
import time
from collections.abc import Sequence

from fedsub_app.common.errors import UserError
from fedsub_app.common.progress import PLAIN_SECONDS, human_seconds
from fedsub_app.common.section import Json
from fedsub_app.runs.console import measured
from fedsub_app.runs.progress import LiveLine
from fedsub_app.studies.job import Job


class BatchProgress:
    """How far several runs are. ``total``: how many there will be at most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun: dict[str, tuple[Job, float]] = {}  # and the round in which it did
        self._ended: set[str] = set()
        self._start = self._last = time.monotonic()
        self._line = LiveLine(sys.stdout) if sys.stdout.isatty() else None

    def __enter__(self) -> "BatchProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._line:
            self._line.end()

    def start(self, job: Job) -> None:
        self._begun[job.name] = (job, _last(_lines(job), "round") or 0)

    def end(self, job: Job, failed: bool) -> None:
        self._ended.add(job.name)
        text = f"{'FAILED' if failed else 'done'}  {job.name}"
        if self._line:
            self._line.say(text)
        else:
            print(text, flush=True)

    def look(self) -> None:
        """Say how far the running ones are."""
        now = time.monotonic()
        if len(self._begun) == len(self._ended) or (not self._line and now - self._last <= PLAIN_SECONDS):
            return
        self._last = now
        below = []
        before = done = known = 0.0
        for name, (job, first) in self._begun.items():
            rounds, lines = job.settings.num_rounds, [] if name in self._ended else _lines(job)
            reached = rounds if name in self._ended else _last(lines, "round") or 0
            before, done, known = before + first, done + reached, known + rounds
            if name not in self._ended:
                numbers = {key: _last(lines, key) for key in (*job.settings.score.keys, "train-loss")}
                kept = {key: value for key, value in numbers.items() if value is not None}
                dropped = f"dropped {sum(len(line.get('dropped', ())) for line in lines)}"
                words = [f"  {name}  round {reached:.0f}/{rounds}", *measured(kept, job.settings.score), dropped]
                below.append("  ".join(words))
        total = known + (self._total - len(self._begun)) * known / len(self._begun)
        # A resumed run first goes back to its last checkpoint.
        rate = (done - before) / (now - self._start)
        left = human_seconds((total - done) / rate) if rate > 0 else "unknown"
        to_go = f"{done:.0f} of {total:.0f} rounds, {self._total - len(self._ended)} runs to go, left {left}"
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
