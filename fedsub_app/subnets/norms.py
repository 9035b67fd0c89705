"""How far updates move the model, and which of a round's updates are far larger than the others."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

BLOCK = 1 << 17  # elements that are subtracted at a time, in a buffer that stays in the processor's cache
MAJORITY = 3  # the median of fewer norms does not tell which of them is odd
# Of the model's norm: a median counts as at least that. Clients whose own task is solved, as FedRep's on a few classes,
# hardly move the model, and one with more to learn may move it a hundred times as far.
LEAST = 0.01


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of float tensors taken together; inf where their squares overflow float32."""
    return math.hypot(*(torch.linalg.vector_norm(tensor).item() for tensor in tensors))


def squares(rows: Tensor, start: Tensor) -> list[float]:
    """Return ``||row - start||²`` for each of ``rows``; inf where it overflows float32, nan where a row holds NaN.

    That of a row does not depend on the others. A sixth of the time of one call a row, where rows are small.

    Parameters
    ----------
    rows : float32 ``[n, ...]``, contiguous.
    start : float32 ``[...]``.
    """
    flat, at = rows.reshape(len(rows), start.numel()), start.reshape(-1)
    if not rows.numel():
        return [0.0] * len(rows)
    height, width = max(1, BLOCK // len(at)), min(len(at), BLOCK)
    buffer = torch.empty(min(height, len(flat)), width)
    found = torch.empty(-(-len(at) // width), len(flat))
    for k, (columns, begin) in enumerate(zip(flat.split(width, 1), at.split(width), strict=True)):
        for some, norms in zip(columns.split(height), found[k].split(height), strict=True):
            away = torch.sub(some, begin, out=buffer[: len(some), : len(begin)])
            torch.linalg.vector_norm(away, dim=1, out=norms)
    total = torch.zeros(len(flat), dtype=torch.float64)
    for norms in found:
        total += norms.double().square()
    return total.tolist()


def square(x: Tensor, start: Tensor, mask: Tensor | None = None) -> float:
    """Return ``||mask (x - start)||²``, as :func:`squares` does; ``mask``: bool that broadcasts, None for all."""
    if mask is None:
        return squares(x[None], start)[0]
    away = (x - start).mul_(mask)
    return float(torch.linalg.vector_norm(away)) ** 2


def too_large(norms: Sequence[Mapping[str, float]], most: float, model: float) -> dict[int, str]:
    """Return which of a round's updates are far larger than the others: position -> reason.

    A norm is too large where it exceeds ``most`` times the median of all that are above 0: one hostile client cannot
    move the median far, nor clients that did not train make it 0. Fewer than three have no majority: they are held
    against the norm of the model itself, and no median counts as less than a hundredth of that.

    The median is known when all updates of the round are there. A mean that is summed as the answers come in needs
    nothing of them but these norms until then; it must hold back the summing, or sum in a second pass.

    Parameters
    ----------
    norms : for each update, what is measured -> Euclidean norm, >= 0.
    most : multiple of the median, > 0.
    model : norm of the model that the updates started from, >= 0.
    """
    refused: dict[int, str] = {}
    for kind in {kind: None for said in norms for kind in said}:
        found = {k: said[kind] for k, said in enumerate(norms) if said.get(kind)}
        usual, whose = model, "the model's own"
        if len(found) >= MAJORITY:
            usual, whose = max(
                (median(found.values()), "the round's median"), (LEAST * model, "a hundredth of the model's")
            )
        for k, value in found.items():
            if not math.isfinite(value) or 0 < most * usual < value:
                limit = f"max-update-norm = {most:g} times {whose} {usual:.3g}"
                refused.setdefault(k, f"{kind} of norm {value:.3g}: more than {limit}")
    return refused
