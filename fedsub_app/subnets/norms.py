"""Norms of updates, and a guard that refuses updates far larger than the round's others."""

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BLOCK = 1 << 17  # elements that are subtracted at a time, in memory that stays in the processor's cache
FIRST = 8  # updates that are compared with each other before any of them is summed
MAJORITY = 3  # the median of fewer norms does not tell which of them is odd
# A median counts as at least this fraction of the model's norm. Clients whose own task is solved, as FedRep's on a few
# classes, hardly move the model, and a client with more to learn may move it a hundred times as far.
MIN_MEDIAN = 0.01


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of float tensors taken together; inf where their squares overflow float32.

    Block by block: one float32 sum of 10^8 squares came out 4 % too small, and clipping left changes too long.
    """
    blocks = (block for tensor in tensors for block in tensor.reshape(-1).split(BLOCK))
    return math.hypot(*(torch.linalg.vector_norm(block).item() for block in blocks))


def squares(rows: Tensor, start: Tensor) -> list[float]:
    """Return ``||row - start||²`` for each of ``rows``; inf where it overflows float32, nan where a row holds NaN.

    The result of a row does not depend on other rows. For small rows it takes a sixth of the time of one call a row.
    ``rows``: float32 ``[n, ...]``, contiguous. ``start``: float32 ``[...]``.
    """
    flat, at = rows.reshape(len(rows), start.numel()), start.reshape(-1)
    if rows.numel() <= BLOCK:
        total = torch.linalg.vector_norm(flat - at, dim=1).double().square()
        return total.tolist()  # type: ignore[no-any-return]
    height, width = max(1, BLOCK // len(at)), min(len(at), BLOCK)
    total = torch.zeros(len(flat), dtype=torch.float64)
    for columns, begin in zip(flat.split(width, 1), at.split(width), strict=True):
        norms = [torch.linalg.vector_norm(some - begin, dim=1) for some in columns.split(height)]
        total += torch.cat(norms).double().square()
    return total.tolist()


def squares_of(rows: Sequence[Tensor], start: Tensor) -> list[float]:
    """Return :func:`squares` of tensors that lie apart; small ones are stacked for it."""
    if rows and start.numel() < BLOCK:
        return squares(torch.stack(list(rows)), start)
    return [square(row, start) for row in rows]


def square(x: Tensor, start: Tensor, mask: Tensor | None = None) -> float:
    """Return ``||mask (x - start)||²`` like :func:`squares`; ``mask``: bool that broadcasts, None for all positions."""
    if mask is None:
        return squares(x[None], start)[0]
    return norm([(x - start).mul_(mask)]) ** 2


class NormGuard(Generic[T]):
    """Refuses updates that are far larger than the others of their round, one after the other.

    A norm is too large if it exceeds ``factor`` times the median of the accepted norms and itself. Norms of 0, from
    clients that did not train, do not count. The first ``FIRST`` updates wait and are compared with each other, so that
    hostile clients cannot move the median far unless they are most of the first ones. The decisions depend on the order
    of the clients alone. Fewer than three norms have no majority and are compared with the norm of the model; no median
    counts as less than a hundredth of that norm.

    Parameters
    ----------
    factor : multiple of the median, > 0.
    model : norm of the model that the updates started from, >= 0.
    first : number of updates that are compared with each other before any is decided; inf: all of the round. Then the
        lower median of an even number counts, so that half of the updates do not decide it.
    """

    def __init__(self, factor: float, model: float, first: float = FIRST) -> None:
        self.factor, self.model, self.first = factor, model, first
        self._median = median_low if first == math.inf else median
        self._passed: dict[str, list[float]] = {}  # norms above 0 of the accepted updates, sorted
        self._waiting: list[tuple[T, Mapping[str, float]]] = []
        self._begun = False

    def add(self, item: T, norms: Mapping[str, float]) -> list[tuple[T, str]]:
        """Return the updates that are decided by now, each with its refusal or ""; ``norms``: kind -> norm >= 0."""
        self._waiting.append((item, norms))
        return self.rest() if self._begun or len(self._waiting) == self.first else []

    def rest(self) -> list[tuple[T, str]]:
        """Return the updates that still wait."""
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

    def _usual(self, kind: str) -> tuple[float, str]:
        """Return the norm with which others are compared, and its name."""
        usual = [*self._passed.get(kind, ()), *(norms[kind] for _, norms in self._waiting if norms.get(kind))]
        if len(usual) < MAJORITY:
            return self.model, "the model's own"
        return max((self._median(usual), "the round's median"), (MIN_MEDIAN * self.model, "a hundredth of the model's"))

    def _refuse(self, kind: str, value: float, usual: float, against: str) -> str:
        if math.isfinite(value) and not 0 < self.factor * usual < value:
            return ""
        limit = f"max-update-norm = {self.factor:g} times {against} {usual:.3g}"
        return f"{kind} of norm {value:.3g}: more than {limit}"
