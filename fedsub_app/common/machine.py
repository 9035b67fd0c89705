"""Cores and memory of this process, and what is written down of the machine."""

import ctypes
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

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


def machine_facts() -> dict[str, str | int | None]:
    """Return cores, processor and system of this machine; the processor's model where Linux says it."""
    facts = {"cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.system()}
    with suppress(OSError):
        if model := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            facts["model"] = model[1]
    return facts
