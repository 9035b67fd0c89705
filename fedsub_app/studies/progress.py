"""How far a batch of runs is: on a terminal one line that is written over, in a pipe plain lines."""

import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from fedsub_app.common.errors import UserError
from fedsub_app.common.progress import PLAIN_SECONDS, human_seconds
from fedsub_app.common.section import Json
from fedsub_app.runs.progress import LiveLine, measured
from fedsub_app.studies.job import Job


class BatchProgress:
    """How far several runs are. ``total``: how many there will be at most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._running: dict[str, Job] = {}
        self._rounds: dict[str, tuple[float, float, float]] = {}  # of a job: at its begin, now, at its end
        self._ended = 0
        self._start = self._last = time.monotonic()
        self._line = LiveLine(sys.stdout) if sys.stdout.isatty() else None

    def __enter__(self) -> "BatchProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._line:
            self._line.end()

    def start(self, job: Job) -> None:
        """Count a run that starts or is resumed."""
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
        if not self._running or (not self._line and now - self._last <= PLAIN_SECONDS):
            return
        self._last = now
        below = []
        for job in self._running.values():
            lines = _lines(job)
            before, _, rounds = self._rounds[job.name]
            done = _last(lines, "round") or 0
            self._rounds[job.name] = (before, done, rounds)
            score = job.settings.score
            numbers = {key: _last(lines, key) for key in (*score.keys, "train-loss")}
            scores = measured({key: value for key, value in numbers.items() if value is not None}, score)
            dropped = sum(len(line.get("dropped", ())) for line in lines)
            below.append("  ".join([f"  {job.name}  round {done:.0f}/{rounds:.0f}", *scores, f"dropped {dropped}"]))
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
