"""How far updates move the model, and which of a round's updates are far larger than the others."""

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
BLOCK = 1 << 17  # elements that are subtracted at a time, in a buffer that stays in the processor's cache
FIRST = 8  # updates that are compared with each other before any of them is summed
MAJORITY = 3  # the median of fewer norms does not tell which of them is odd


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of float tensors taken together; inf where their squares overflow float32."""
    return math.hypot(*(torch.linalg.vector_norm(tensor).item() for tensor in tensors))


class Distances:
    """Euclidean distances of updates to the model that they started from.

    A message holds equal-named tensors of its clients stacked; the rows of a stack are measured together when the first
    of them is asked for. A row's distance does not depend on what it is stacked with.

    Parameters
    ----------
    old : the model, tensor name -> float tensor on the CPU. Not modified.
    """

    def __init__(self, old: Mapping[str, Tensor]) -> None:
        self.old = old
        self._stacks = WeakTensorKeyDictionary()  # a message may be forgotten once its updates are summed

    def __call__(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> float:
        """Return ``sqrt(sum_n ||m_n (x_n - old_n)||²)`` over the names n of ``tensors``; inf where that overflows.

        Parameters
        ----------
        tensors : tensor name -> values x_n, of the shape of old_n.
        masks : tensor name -> bool m_n that broadcasts to its tensor; all positions count where one is lacking.
        """
        total = 0.0
        for name, x in tensors.items():
            mask = masks.get(name) if masks else None
            if mask is None:
                total += self._square(name, x)
            else:
                total += torch.linalg.vector_norm((x - self.old[name]).mul_(mask)).item() ** 2
        return math.sqrt(total)

    def _square(self, name: str, x: Tensor) -> float:
        """Return ``||x - old||²``, with those of all tensors of its size in the tensor that ``x`` is a view of."""
        old, base = self.old[name], x._base
        count = x.numel()
        if not count:
            return 0.0
        if base is None or not x.is_contiguous():
            return _squares(x.reshape(1, -1), old.flatten())[0]
        row, rest = divmod(int(x.storage_offset() - base.storage_offset()), count)
        if rest or base.numel() % count or not base.is_contiguous():
            return _squares(x.reshape(1, -1), old.flatten())[0]
        if base not in self._stacks:
            self._stacks[base] = _squares(base.reshape(-1, count), old.flatten())
        found: float = self._stacks[base][row]
        return found


def _squares(rows: Tensor, old: Tensor) -> list[float]:
    """Return ``||row - old||²`` for each of ``rows``, float [n, d]; ``old``: float [d]."""
    height, width = max(1, BLOCK // len(old)), min(len(old), BLOCK)
    buffer = torch.empty(min(height, len(rows)), width)
    found: list[float] = []
    for some in rows.split(height):
        squares = torch.zeros(len(some), dtype=torch.float64)
        for x, start in zip(some.split(width, 1), old.split(width), strict=True):
            away = torch.sub(x, start, out=buffer[: len(x), : len(start)])
            squares += torch.linalg.vector_norm(away, dim=1).double().square()
        found += squares.tolist()
    return found


class NormGuard(Generic[T]):
    """Refuses those of a round's updates that are far larger than the others, as they come.

    A norm is too large where it exceeds ``most`` times the median of those that passed before, itself among them. Norms
    of 0, of clients that did not train, do not count. The first ``FIRST`` updates are held back and compared with each
    other, so that a hostile client cannot move the median far unless most of the first ones are hostile. What is
    refused depends on the order of the clients alone. Fewer than three norms have no majority: they are held against
    ``otherwise``.

    Parameters
    ----------
    most : multiple of the median, > 0.
    otherwise : what stands for the median of fewer than three; 0: nothing but infinite norms is refused then.
    """

    def __init__(self, most: float, otherwise: float) -> None:
        self.most, self.otherwise = most, otherwise
        self._passed: dict[str, list[float]] = {}  # sorted
        self._waiting: list[tuple[T, Mapping[str, float]]] = []
        self._begun = False

    def add(self, item: T, norms: Mapping[str, float]) -> list[tuple[T, str]]:
        """Return the updates that are decided now, in their order, each with the reason why it is refused or "".

        ``norms``: what is measured -> Euclidean norm, >= 0.
        """
        self._waiting.append((item, norms))
        return self.rest() if self._begun or len(self._waiting) == FIRST else []

    def rest(self) -> list[tuple[T, str]]:
        """Return those that are still held back."""
        self._begun = True
        usual = {kind: self._usual(kind) for kind in {kind: None for _, norms in self._waiting for kind in norms}}
        decided = []
        for item, norms in self._waiting:
            reason = next(filter(None, (self._refuse(kind, value, *usual[kind]) for kind, value in norms.items())), "")
            for kind, value in norms.items() if not reason else ():
                if value:
                    insort(self._passed.setdefault(kind, []), value)
            decided.append((item, reason))
        self._waiting = []
        return decided

    def norms(self, kind: str) -> list[float]:
        """Return the norms above 0 of those that have passed."""
        return self._passed.get(kind, [])

    def _usual(self, kind: str) -> tuple[float, str]:
        """Return what a norm is held against, and what that is."""
        found = [*self.norms(kind), *(norms[kind] for _, norms in self._waiting if norms.get(kind))]
        return (median(found), "the round's median") if len(found) >= MAJORITY else (self.otherwise, "the model's own")

    def _refuse(self, kind: str, value: float, usual: float, against: str) -> str:
        if math.isfinite(value) and not 0 < self.most * usual < value:
            return ""
        limit = f"max-update-norm = {self.most:g} times {against} {usual:.3g}"
        return f"{kind} of norm {value:.3g}: more than {limit}"
