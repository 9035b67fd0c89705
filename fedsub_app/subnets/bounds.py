"""Adaptive clipping, tensor by tensor: other clients' changes of a tensor bound each client's change of it.

Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS 2021,
https://arxiv.org/abs/1905.03871, whose bound is a quantile of the clients' norms and moves by a factor a round. Here

- the quantile is the median of this round's changes and of the last rounds' medians; the latter decide if a round has
  too few clients for a majority;
- a change has two sizes, each with its bound: its root mean square over the positions that it covers, so that a mask
  buys no length, and its largest value, so that a whole tensor's length cannot go into one position;
- a client that trains on k > 1 times the median client's samples may go k times as far.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 5  # rounds whose medians count beside this one's values
GROWTH = 2.0  # a usual size is remembered as at most this many times the one before
FLOOR = 0.01  # a median counts as at least this fraction of the size of the values that the change started from


class Size(NamedTuple):
    """The root mean square and the largest absolute value of a change."""

    rms: float
    peak: float

    def __mul__(self, factor: float) -> "Size":  # type: ignore[override]
        return Size(self.rms * factor, self.peak * factor)


def size(x: Tensor, start: Tensor, mask: Tensor | None = None) -> Size | None:
    """Return the size of ``x - start``, finite, at the positions that the mask covers; None where it covers none."""
    change = x - start
    count = change.numel()
    if mask is not None:
        mask = mask.expand_as(change)
        change, count = change * mask, int(mask.sum())
    if not count:
        return None
    least, most = change.aminmax()
    return Size(torch.linalg.vector_norm(change).item() / count**0.5, max(most.item(), -least.item()))


def usual(values: Sequence[Size], past: Tensor | None, start: Size) -> Size:
    """Return the usual size of a tensor's change, from this round's sizes (at least one) and those of the last rounds.

    ``past`` is float64 ``[rounds, 2]``; ``start``, the size of the tensor that the changes started from, is a floor.
    """
    every = [*values, *(past.tolist() if past is not None else ())]
    return Size(*(max(median_low([v[k] for v in every]), FLOOR * start[k]) for k in (0, 1)))


def remembered(past: Tensor | None, values: Sequence[Size], bound: Size) -> Tensor:
    """Return the last rounds' usual sizes and this round's median, which counts as at most ``GROWTH * bound``."""
    new = [min(median_low([v[k] for v in values]), GROWTH * bound[k]) for k in (0, 1)]
    rows = torch.tensor([new], dtype=torch.float64)
    return rows if past is None else torch.cat([past, rows])[-WINDOW:]


def fits(have: Size, bound: Size) -> bool:
    return have.rms <= bound.rms and have.peak <= bound.peak


def within(x: Tensor, start: Tensor, have: Size, bound: Size) -> Tensor:
    """Return ``x`` with its change from ``start`` brought within a bound; ``x`` itself if the change fits.

    The change is scaled down to the root mean square of ``bound``, then each of its values is cut at the peak.
    """
    if fits(have, bound):
        return x
    return (x - start).mul_(min(1.0, bound.rms / have.rms)).clamp_(-bound.peak, bound.peak).add_(start)


Sizes = Mapping[str, Size]  # tensor name -> size of its change
