"""Tasks, updates, and the requirements that each tensor and number of an update must meet (strategies/hooks.py)."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fedsub_app.common.errors import printable
from fedsub_app.common.tensors import Json, Tensors

MAX_EXAMPLES = 10**9
TEST = "query.test"  # Flower's message type of the global model's test on simulated nodes (runs/evaluation.py)
MEASURE = "query.measure"  # Flower's message type of a phase after the merge (strategies/measurement.py)
SECURE = "query.secure"  # Flower's message type of the phases around a training (fedsub_app/secure/)
GLOBAL = "global/"  # prefix, in an evaluation, of the global model's tensors that a client's own model does not share
NUMBERS = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.bool, *NUMBERS)}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class BadReply(Exception):
    """A client's or node's reply is not valid; the message is the reason, one printable line."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class Diverged(BadReply):
    """A client's numbers are not finite, or its loss is beyond all bounds."""


class StateLost(BadReply):
    """A client cannot train: the state of its last merged reply is gone."""


FAILURES = {"lost": StateLost, "diverged": Diverged}  # attributes of the :class:`Update` of a client that failed


@dataclass(frozen=True)
class Task:
    """One client's task in one phase: named tensors and a JSON-able ``config``."""

    client: int
    tensors: Tensors = field(default_factory=dict)
    config: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One client's reply: tensors, metrics (finite numbers), number of examples; or only an ``error``."""

    client: int
    tensors: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_examples: int = 0
    error: str = ""
    squares: dict[str, float] = field(default_factory=dict)  # tensor's squared distance to Spec.start, by the server
    state: tuple[int, int] = (0, 0)  # rounds of the client's durable state before its task and after it, 0 for none
    lost: bool = False  # it failed because the state that its task named is gone
    diverged: bool = False  # its values are not finite


@dataclass(frozen=True)
class Spec:
    """Requirements that a tensor of an update must meet: its shape, dtype and values."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    optional: bool = False  # it may be left out
    up_to: bool = False  # sizes may be smaller
    low: float = -math.inf  # range of the values
    high: float = math.inf
    start: torch.Tensor | None = field(default=None, compare=False)  # from which the distance is measured

    @property
    def nbytes(self) -> int:
        """Upper bound on the tensor's bytes on the wire."""
        count = math.prod(self.shape)
        return -(-count // 8) if self.dtype == torch.bool else count * self.dtype.itemsize

    def gathered(self) -> "Spec":
        """Return the spec of the values at some of the positions, as a vector."""
        return replace(self, shape=(math.prod(self.shape),), up_to=True, start=None)

    def of_shape(self, shape: Sequence[int]) -> "Spec":
        return replace(self, shape=tuple(shape), start=None)

    def check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise :class:`BadReply` where an array that is not decoded yet cannot be this tensor."""
        if dtype != NAMES[self.dtype]:
            raise BadReply(f"tensor {name!r}: dtype {printable(dtype, 20)}, expected {NAMES[self.dtype]}")
        if shape != self.shape and not (
            self.up_to and len(shape) == len(self.shape) and all(map(int.__le__, shape, self.shape))
        ):
            raise BadReply(f"tensor {name!r}: shape {shape}, expected {'at most ' * self.up_to}{self.shape}")

    @property
    def unbounded(self) -> bool:
        """Say whether all finite values are allowed."""
        return (self.low, self.high) == (-math.inf, math.inf)

    def check_values(self, name: str, tensor: torch.Tensor) -> None:
        """Raise :class:`BadReply` where values are out of range, :class:`Diverged` where they are not finite."""
        if not finite(tensor):
            raise Diverged(f"tensor {name!r}: NaN or infinite values")
        if self.unbounded or not tensor.numel():
            return
        low, high = torch.aminmax(tensor)
        if low < self.low or high > self.high:
            raise BadReply(f"tensor {name!r}: values {low:g} to {high:g}, expected {self.low:g} to {self.high:g}")


class Range(NamedTuple):
    """Requirements that a metric of an update must meet: a number from ``low`` to ``high``."""

    low: float
    high: float
    integer: bool = False
    needed: bool = False  # it may not be left out
    loss: bool = False  # a number out of range means :class:`Diverged`

    def check(self, name: str, value: object) -> None:
        """Raise :class:`BadReply` where ``value`` is not such a number."""
        number = type(value) in (int, float)
        fits = number and abs(value) <= sys.float_info.max and self.low <= value <= self.high  # type: ignore[arg-type, operator]
        if fits and not (self.integer and value != int(value)):  # type: ignore[call-overload]
            return
        allowed = f"an integer from {self.low} to {self.high}"
        if not self.integer:
            allowed = f"a number from {self.low:g} to {self.high:g}"
        message = f"metric {name!r} = {printable(repr(value), 40)}: must be {allowed}"
        raise (Diverged if self.loss and number else BadReply)(message)


def specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Return the specs of tensors that start from ``tensors``; BatchNorm's running variance must not be negative."""
    lowest = {name: 0.0 if name.endswith("running_var") else -math.inf for name in tensors}
    return {name: Spec(tuple(t.shape), t.dtype, low=lowest[name], start=t) for name, t in tensors.items()}


def formula_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that the papers would count: 4 for a number, 1 for a byte, 1 bit a mask entry, rounded up."""
    eighths = {torch.bool: 1, torch.uint8: 8}
    return sum(-(-t.numel() * eighths.get(t.dtype, 32) // 8) for t in tensors.values())


def finite(tensor: torch.Tensor) -> bool:
    """Say whether a tensor holds neither NaN nor infinities."""
    if not tensor.is_floating_point():
        return True
    if math.isfinite(torch.linalg.vector_norm(tensor).item()):  # half the time of aminmax; large squares overflow
        return True
    low, high = torch.aminmax(tensor)  # one pass; NaN propagates
    return math.isfinite(low.item()) and math.isfinite(high.item())  # a fifth of the time of torch.isfinite
