"""How far a batch of runs is: on a terminal one line that is written over, in a pipe plain lines."""

import contextlib
import sys
import time

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
        self._begun[job.name] = (job, _last_line(job)["round"])

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
            rounds = job.settings.num_rounds
            line = {"round": rounds} if name in self._ended else _last_line(job)
            before, done, known = before + first, done + line["round"], known + rounds
            if name not in self._ended:
                words = [f"  {name}  round {line['round']}/{rounds}", *measured(line, job.settings.score)]
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


def _last_line(job: Job) -> Json:
    """Return a run's last line; round 0 before it, and where a line is damaged, which the run itself will say."""
    with contextlib.suppress(UserError):
        return (job.lines() or [{"round": 0}])[-1]
    return {"round": 0}
