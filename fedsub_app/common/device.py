"""The device to compute on: its choice, what makes a GPU's numbers repeatable, and the facts that are recorded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Json

VISIBLE = "CUDA_VISIBLE_DEVICES"


def pick_device(name: str, exact: bool = True) -> torch.device:
    """Resolve the setting ``device`` (auto, cpu or cuda); for a GPU, set up this process.

    ``exact``: deterministic kernels and float32 products in full precision; otherwise torch's fastest kernels, such as
    TF32 and atomic additions, whose sums differ from run to run.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': this machine has no CUDA device; allowed here are auto, cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if exact:  # https://pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time only
    torch.use_deterministic_algorithms(exact, warn_only=True)
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not exact
    return torch.device("cuda", torch.cuda.current_device())


def check_defaults() -> None:
    """Raise :class:`UserError` where the program has changed the device or type of tensors that torch makes."""
    found = torch.get_default_device(), torch.get_default_dtype()
    for name, value, wanted in zip(("device", "dtype"), found, ("cpu", "torch.float32"), strict=True):
        if str(value) != wanted:
            raise UserError(f"torch.set_default_{name}: {value}: must be {wanted}; the key device names a GPU")


def device_facts(device: torch.device) -> Json:
    """Return the facts about the device that a run's ``settings.json`` records."""
    if device.type == "cpu":
        return {"type": "cpu"}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"type": device.type, "name": torch.cuda.get_device_name(device), **versions}


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [name for name in named.split(",") if name.strip()]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute on ``count`` threads within this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeing(gpu: str | None) -> Iterator[None]:
    """Let processes that start within this block see this GPU only; ``None``: all GPUs that this process sees."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        os.environ.pop(VISIBLE, None)
        if before is not None:
            os.environ[VISIBLE] = before
