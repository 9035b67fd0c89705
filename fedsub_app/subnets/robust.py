"""Means that a minority of hostile clients cannot move far, and the clipping of a client's change.

- Median and trimmed mean of each position: Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning:
  Towards Optimal Statistical Rates, ICML 2018, https://arxiv.org/abs/1803.01498, Definitions 1 and 2. The median of an
  even number of values is the mean of the two in the middle. The paper takes them of gradients, this module of models.
  Both are the same, because a value that is added to all inputs is added to the result.
- Krum: Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient
  Descent, NeurIPS 2017, https://arxiv.org/abs/1703.02757, Section 4.

All rules count every client once. With masks only the clients that cover a position have a value there, so the values
that are left out, and the size of a minority, differ from position to position. A slice counts at its own positions,
tensor by tensor.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsub_app.subnets.averaging import Contribution, check
from fedsub_app.subnets.slices import ALL, select

BLOCK = 1 << 18  # values of all clients together that are sorted at a time


def clipped(contribution: Contribution, old: Mapping[str, Tensor], distance: float, limit: float) -> Contribution:
    """Return a contribution with its change of the model scaled down to a norm of ``limit``, if it is longer.

    ``old + (x - old) min(1, limit / distance)``, up to the rounding of float32; McMahan et al. 2018,
    https://arxiv.org/abs/1710.06963, flat clipping. ``old``: the model that the client started from. ``distance``:
    Euclidean norm of the change, at the positions that the contribution's masks cover; finite. ``limit``: upper bound
    on that norm, > 0.
    """
    if distance <= limit:
        return contribution
    slices = contribution.slices or {}
    start = {name: select(old[name], slices.get(name, ALL)) for name in contribution.tensors}
    tensors = {name: torch.lerp(start[name], x, limit / distance) for name, x in contribution.tensors.items()}
    return contribution._replace(tensors=tensors)


class RobustMean:
    """A robust mean that replaces the weighted one; it keeps all contributions until :meth:`result` is called.

    ``old``: tensor name -> float tensor of any shape. Not modified, and not copied. ``rule``: "median", "trimmed" or
    "krum". ``trim_fraction``: beta in [0, 0.5): of the c values of a position the floor(beta c) smallest and as many of
    the largest are left out. ``byzantine``: Krum's f >= 0.
    """

    def __init__(self, old: Mapping[str, Tensor], rule: str, trim_fraction: float = 0.0, byzantine: int = 0) -> None:
        self._old = old
        self._rule, self._trim_fraction, self._byzantine = rule, trim_fraction, byzantine
        self._kept: list[Contribution] = []

    def add(self, updates: Sequence[Contribution]) -> None:
        """Keep the clients' contributions.

        ValueError: if an update does not fit the old model, or with Krum has masks or slices or other tensors than the
        first.
        """
        for update in updates:
            check(self._old, update)
            self._kept.append(update)
            partial = update.masks or update.slices or update.tensors.keys() != self._kept[0].tensors.keys()
            if self._rule == "krum" and partial:
                raise ValueError("krum compares whole updates: all must hold the same tensors, without masks or slices")

    @torch.no_grad()
    def result(self, server_lr: float = 1.0) -> dict[str, Tensor]:
        """Return the robust mean, old values where no client covers; ``server_lr``: step from the old model to it."""
        if self._rule == "krum":
            chosen = self._kept[krum([update.tensors for update in self._kept], self._byzantine)].tensors
            means = {name: chosen.get(name, old) for name, old in self._old.items()}
        else:
            means = {name: self._inner_mean(name) for name in self._old}
        new = {}
        for name, old in self._old.items():
            mean = means[name].to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            new[name] = mean if server_lr == 1 else torch.lerp(old.float(), mean, server_lr)
        return new

    def _left_out(self, count: int) -> int:
        """Return the number of a position's values that are left out at each end; a median keeps one or two."""
        trimmed = math.floor(self._trim_fraction * count + 1e-9)  # 0.29 * 100 is 28.999999999999996
        return max(0, count - 1) // 2 if self._rule == "median" else trimmed

    def _inner_mean(self, name: str) -> Tensor:
        """Return, for every position, the mean of the values that cover it without the smallest and the largest ones.

        The order of the values has no influence, and the result lies between the smallest and the largest value that is
        not left out, because sums are in float64. The result is float32; a position that no value covers keeps the old.
        """
        old = self._old[name]
        held = [update.whole(name, old) for update in self._kept if name in update.tensors]
        if not held:
            return old.float()
        count_of = len(held)
        cuts = torch.tensor([self._left_out(count) for count in range(count_of + 1)])
        rank = torch.arange(count_of)[:, None]
        rows = [x.reshape(-1) for x, _ in held]
        everywhere = torch.ones(old.numel(), dtype=torch.bool)
        covers = [everywhere if m is None else m.expand(old.shape).reshape(-1) for _, m in held]
        result = old.reshape(-1).float().clone()
        width = max(1, BLOCK // count_of)
        for start in range(0, len(result), width):
            part = slice(start, start + width)
            covered = torch.stack([cover[part] for cover in covers])
            block = torch.stack([row[part] for row in rows]).float()
            block = torch.where(covered, block, math.inf).sort(0).values  # behind all values that count
            counts = covered.sum(0)
            cut = cuts[counts]
            inner = torch.where((rank >= cut) & (rank < counts - cut), block, 0.0)
            mean = (inner.sum(0, dtype=torch.float64) / (counts - 2 * cut)).float()
            result[part] = torch.where(counts > 0, mean, result[part])
        return result.reshape(old.shape)


def krum(updates: Sequence[Mapping[str, Tensor]], byzantine: int) -> int:
    """Return the position of the update with the smallest score, the first one of equal scores.

    The score of an update is the sum of its squared distances to the n - f - 2 closest others. ``updates``: named float
    tensors, the same names and shapes in all. ``byzantine``: f >= 0, number of updates that may be hostile. ValueError:
    fewer than 2 f + 3 updates.
    """
    count = len(updates)
    if count < 2 * byzantine + 3:
        raise ValueError(f"krum of {count} updates: with {byzantine} hostile ones at least {2 * byzantine + 3}")
    squares = torch.zeros(count, count, dtype=torch.float64)
    for name in updates[0]:
        rows = torch.stack([update[name].reshape(-1) for update in updates])
        for block in rows.split(max(1, BLOCK // count), 1):
            # Not by matrix products, which lose the small difference of two large vectors.
            block = block.double()
            squares += torch.cdist(block, block, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares.fill_diagonal_(math.inf)
    scores = squares.sort(1).values[:, : count - byzantine - 2].sum(1).tolist()
    return min(range(count), key=scores.__getitem__)
