"""Contributions as vectors of integers: what a client clips, weighs and rounds, and the mean of their sum.

A vector has the rounded weighted change of every position of the tensors that are merged, then how many of the values
were clipped. The positions that a client contributes are counted in vectors of small integers.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.secure.secagg import Vector

LARGEST = 2**31 - 1  # of the sum: integers modulo 2^32 are read with a sign
PARTS = 2**20  # the fraction of clipped values is counted in parts of this size, of all clients together


@dataclass(frozen=True)
class Layout:
    """The positions of a round's vectors, the same for all clients.

    ``shapes``: tensor name -> shape. ``absolute``: names of the tensors whose values are summed, not their changes: the
    clients are not sent the values that they start from.
    """

    shapes: Mapping[str, Sequence[int]]
    absolute: Collection[str] = ()

    @property
    def sizes(self) -> list[int]:
        """Numbers of positions of the tensors."""
        return [math.prod(shape) for shape in self.shapes.values()]

    def flat(self, masks: Tensors) -> Tensor:
        """Return masks that broadcast to their tensors as one vector; of a tensor without one all positions count."""
        whole = torch.tensor(True)
        each = (masks.get(name, whole).expand(tuple(shape)).flatten() for name, shape in self.shapes.items())
        return torch.cat([*each])

    def split(self, vector: Tensor) -> Tensors:
        """Return a vector as named tensors: the inverse of :meth:`flat`."""
        parts = zip(self.shapes.items(), vector.split(self.sizes), strict=True)
        return {name: part.view(tuple(shape)) for (name, shape), part in parts}

    def change(self, tensors: Tensors, sent: Tensors, at: Tensors, own: Tensors) -> tuple[Tensor, Tensor]:
        """Return a client's change, float32, and the positions that it contributes, bool, as vectors.

        Parameters
        ----------
        tensors, sent : the client's values, and those that it started from, of a tensor's shape; or those at the
            positions in ``at`` alone, in the order of the whole tensor.
        at : tensor name -> bool of its shape; the positions of narrower values.
        own : tensor name -> bool that broadcasts to it: the positions that the client contributes by its own choice.
        """
        changes, masks = [], Tensors()
        for name, shape in self.shapes.items():
            mask = at.get(name, torch.tensor(True)).expand(tuple(shape))
            change = _whole(tensors[name], mask)
            if name not in self.absolute:
                change = change - _whole(sent[name], mask)
            if tensors[name].shape == mask.shape:
                mask = torch.ones_like(mask)
            masks[name] = mask & own.get(name, torch.tensor(True))
            changes.append(change.flatten())
        covered = self.flat(masks)
        return torch.cat(changes).mul_(covered), covered

    def mean(self, change: Tensor, weights: Tensor, current: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Return what the sum of the weighted changes makes of the model: values, positions covered, other sums.

        ``change``: float64, a number a position; ``weights``: sum of its contributors' weights, a number a position or
        one for all. Values are float32, the mean where any client contributes; covered are bool; sums of other tensors.
        """
        sums = {name: part for name, part in self.split(change).items() if name not in current}
        parts = chosen(self.split(change / torch.where(weights > 0, weights, 1.0)), current)
        means = {n: (part if n in self.absolute else part + current[n]).float() for n, part in parts.items()}
        return means, chosen(self.split((weights > 0).expand(len(change))), means), sums


@dataclass(frozen=True)
class Scale:
    """The form of a vector's integers.

    ``clients``: upper bound on the vectors in a sum, >= 1. ``limit``: bound of a position's change, > 0; larger ones
    are clipped. ``norm``: bound of a client's whole change, L2; 0: none. ``sums``: the last positions, as many, are no
    change: ``norm`` does not count or clip them, and they are not weighed.
    """

    clients: int
    limit: float
    norm: float = 0.0
    sums: int = 0

    @property
    def step(self) -> float:
        """Return the change of an integer step; the mean is off by half of it times ``clients`` / weights at most."""
        return self.limit / (LARGEST // self.clients)

    def vector(self, change: Tensor, weight: float = 1.0, enough: Tensor | None = None) -> Vector:
        """Return a client's vector, one integer longer than its change.

        Its weight is at most 1. ``enough``: the positions that are not 0 in it, by default all; the norm is of all.
        """
        change = change.to(torch.float64, copy=True)
        moved = change[: len(change) - self.sums]
        if self.norm:
            moved *= min(1.0, self.norm / max(float(moved.norm()), 1e-30))
        if enough is not None:
            change *= enough
        clipped = int((change.abs() > self.limit).sum()) / len(change)
        change.clamp_(-self.limit, self.limit)
        moved *= min(weight, 1.0)
        values = change.div_(self.step).round_()
        parts = torch.tensor([math.ceil(PARTS // self.clients * clipped)])
        return torch.cat([values.int(), parts.int()]).numpy().view(np.uint32)

    def change(self, total: Vector, clients: int) -> tuple[Tensor, float]:
        """Return the sum of the weighted changes of ``clients`` vectors, and the fraction of clipped values."""
        signed = torch.from_numpy(total.view(np.int32).astype(np.int64))
        return signed[:-1].double() * self.step, float(signed[-1]) / (PARTS // self.clients) / clients


def counting(covered: Tensor, clients: int) -> Vector:
    """Return positions, bool, as a vector whose sum over as many clients has their counts, several in an integer."""
    numbers = np.zeros(4 * -(-len(covered) // 4), np.min_scalar_type(clients))
    numbers[: len(covered)] = covered.numpy()
    return numbers.view(np.uint32)


def counted(total: Vector, length: int, clients: int) -> Tensor:
    """Return the counts in the sum of the vectors of :func:`counting`, int32 ``[length]``."""
    return torch.from_numpy(total.view(np.min_scalar_type(clients))[:length].astype(np.int32))


def _whole(values: Tensor, mask: Tensor) -> Tensor:
    """Return values in the shape of the mask, 0 where it is off; values of that shape as they are."""
    values = values.float()
    return values if values.shape == mask.shape else values.new_zeros(mask.shape).masked_scatter_(mask, values)
