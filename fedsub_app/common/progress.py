"""Progress of long work in the log, a line now and then."""

import logging
import time

log = logging.getLogger("fedsub")
LINE_SECONDS = 30.0  # between two lines


def human_seconds(seconds: float) -> str:
    """Return a duration: ``42 s``, ``3:07 min``, ``1:02 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class Progress:
    """Logs now and then how many images of ``total`` are done; 0: the total is not known."""

    def __init__(self, task: str, total: int) -> None:
        self._task, self._total = task, total
        self._start = self._last = time.monotonic()

    def update(self, done: int) -> None:
        """Log that ``done`` images are done, 1 or more, unless the last line is too recent."""
        now = time.monotonic()
        if now - self._last < LINE_SECONDS:
            return
        self._last = now
        rate = done / (now - self._start)
        left = f", left {human_seconds((self._total - done) / rate)}" if self._total else ""
        of = f" of {self._total}" if self._total else ""
        log.info("%s: %d%s images, %.1f a second%s", self._task, done, of, rate, left)
