"""How far long work is, told to the log: in the live line of a terminal as it happens, else a plain line now and then.

A handler that shows such a line has the attribute ``live``, and a record for it ``done`` and ``total``; the line stands
until the next record.
"""

import logging
import time

log = logging.getLogger("fedsub")
SAY_SECONDS, SHOW_SECONDS = 30.0, 0.2  # between two plain lines, and two changes of a live one


def human_seconds(seconds: float) -> str:
    """Return a duration: ``42 s``, ``3:07 min``, ``1:02 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _live() -> bool:
    return any(getattr(handler, "live", False) for handler in log.handlers)


def doing(what: str) -> None:
    """Show what begins, which may take seconds; where there is no live line nothing is said."""
    if _live():
        log.info("%s", what, extra={"done": 0, "total": 0})


class Progress:
    """How many images of so many: ``at`` is called for each of them, or for some at a time, and says it when it is due.

    ``total``: 0 where it is not known.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._start = self._said = time.monotonic()

    def at(self, done: int) -> None:
        """Take note that so many are done, 1 or more."""
        now = time.monotonic()
        if now - self._said < (SHOW_SECONDS if _live() else SAY_SECONDS):
            return
        self._said = now
        rate = done / (now - self._start)
        left = f", left {human_seconds((self._total - done) / rate)}" if self._total else ""
        of = f" of {self._total}" if self._total else ""
        extra = {"done": done, "total": self._total}
        log.info("%s: %d%s images, %.1f a second%s", self._what, done, of, rate, left, extra=extra)
