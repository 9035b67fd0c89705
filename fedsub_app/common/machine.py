"""Cores and memory of this process."""

import ctypes
import os
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = 1 << 28


def cores() -> int:
    """Return the number of cores that this process may run on: in a batch job or container fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have malloc keep up to 256 MB that were freed, where it is glibc's.

    By default it hands blocks of more than 32 MB back to the system, and every page of the next message costs a page
    fault: six times the time of copying it.
    """
    with suppress(AttributeError, OSError, TypeError):  # the last one is Windows's
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEPT_BYTES)
