"""Failures of the machine, not of a client: memory that is used up, a full disk, a GPU that is lost."""

import errno

import torch

from fedsub_app.common.errors import one_line

# Texts of torch's errors that have no class of their own: of the CPU's allocator, of CUDA and of cuBLAS.
USED_UP = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MachineFailed(Exception):
    """The machine on which clients train has failed; the message says how, and which client was at work."""


def machine_failure(error: BaseException) -> str:
    """Return in one line how the machine has failed, or "" if the exception has another cause."""
    if isinstance(error, MachineFailed):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return one_line(error)
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    no_memory |= isinstance(error, RuntimeError) and any(words in str(error) for words in USED_UP)
    if no_memory or isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return f"out of memory: {one_line(error)}"
    return f"the GPU failed: {one_line(error)}" if gpu_lost() else ""


def gpu_lost() -> bool:
    """Say whether an error has made the GPU useless for this process, so that every later call on it fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # torch.AcceleratorError is one
        return True
    return False
