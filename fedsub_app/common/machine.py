"""What this process may use of the machine."""

import os


def cores() -> int:
    """Return the number of cores that this process may run on: in a batch job or container fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
