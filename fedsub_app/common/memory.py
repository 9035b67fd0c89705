"""Check that data fit into this machine's memory, before they are built."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedsub_app.common.errors import UserError

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container or batch job


@cache
def memory_bytes() -> float:
    """Return the bytes of memory that this process may use; infinity where the system does not tell."""
    limits = [float("inf")]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def check_memory(subject: str, needed: int) -> None:
    """Raise :class:`UserError` where ``needed`` bytes, and as much again to build them, are more than the memory."""
    if 2 * needed > memory_bytes():
        raise UserError(f"{subject}: {needed / 1e9:.3g} GB in memory, this machine has {memory_bytes() / 1e9:.3g} GB")
