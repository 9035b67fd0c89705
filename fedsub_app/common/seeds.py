"""Randomness: one generator per purpose, never the global ones."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(*purpose: int | str) -> int:
    """Return a 63-bit seed from all of ``purpose``, as ``(seed, round, "batches")``, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in purpose)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*purpose: int | str) -> torch.Generator:
    """Return a CPU generator seeded by :func:`derive`."""
    return torch.Generator().manual_seed(derive(*purpose))


@contextmanager
def drawing(device: torch.device, *purpose: int | str) -> Iterator[None]:
    """Seed torch's global generators, for layers such as dropout, by a purpose; restore them after this block."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # the tests' pretended GPU has no generator
    seed = derive(*purpose)
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # Not torch.manual_seed(): without a GPU it keeps a stack trace for each kind of device, 1 ms a call.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
