"""Cores and memory of this process, a check that data fit into the memory, and the recorded facts on the machine."""

import ctypes
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedsub_app.common.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = 1 << 28
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container or batch job


def cores() -> int:
    """Return the number of cores that this process may run on; a batch job or container may have fewer than exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let malloc, if it is glibc's, keep up to 256 MB of freed memory.

    By default freed blocks of 32 MB go back to the system; then each page of the next message costs a page fault, which
    takes six times as long as its copy.
    """
    with suppress(AttributeError, OSError):
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEPT_BYTES)


@cache
def memory_bytes() -> int:
    """Return the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def check_memory(subject: str, needed: int) -> None:
    """Raise :class:`UserError` if ``needed`` bytes, and as many again to build them, exceed the memory."""
    if 2 * needed > memory_bytes():
        raise UserError(f"{subject}: {needed / 1e9:.3g} GB in memory, this machine has {memory_bytes() / 1e9:.3g} GB")


def machine_facts() -> dict[str, str | int | None]:
    """Return cores, processor and system of this machine; the processor's model where Linux says it."""
    facts = {"cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.system()}
    with suppress(OSError):
        if model := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            facts["model"] = model[1]
    return facts
