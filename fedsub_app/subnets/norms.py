"""How far updates move the model, and which of a round's updates are far larger than the others."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

BLOCK = 1 << 17  # elements that are subtracted at a time, in a buffer that stays in the processor's cache
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
        self._stacks: dict[tuple[str, int], tuple[Tensor, list[float]]] = {}

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
        known = self._stacks.get((name, id(base)))
        if known is None:
            known = self._stacks[name, id(base)] = (base, _squares(base.reshape(-1, count), old.flatten()))
        return known[1][row]


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


def too_large(norms: Sequence[Mapping[str, float]], most: float, otherwise: float) -> dict[int, str]:
    """Return which of a round's updates are far larger than the others: position -> reason.

    A norm is too large where it exceeds ``most`` times the median of all that are above 0, so that one hostile client
    cannot move the median far, nor clients that did not train make it 0. Fewer than three have no majority: then it is
    held against ``otherwise``.

    The median is known when all updates of the round are there. A mean that is summed as the answers come in needs
    nothing of them but these norms until then; it must hold back the summing, or sum in a second pass.

    Parameters
    ----------
    norms : for each update, what is measured -> Euclidean norm, >= 0.
    most : multiple of the median, > 0.
    otherwise : what stands for the median of fewer than three; 0: nothing but infinite norms is refused then.
    """
    refused: dict[int, str] = {}
    for kind in {kind: None for said in norms for kind in said}:
        found = {k: said[kind] for k, said in enumerate(norms) if said.get(kind)}
        enough = len(found) >= MAJORITY
        usual = median(found.values()) if enough else otherwise
        for k, value in found.items():
            if not math.isfinite(value) or 0 < most * usual < value:
                against = "the round's median" if enough else "the model's own"
                limit = f"max-update-norm = {most:g} times {against} {usual:.3g}"
                refused.setdefault(k, f"{kind} of norm {value:.3g}: more than {limit}")
    return refused
