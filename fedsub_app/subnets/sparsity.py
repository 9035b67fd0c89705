"""Masks on single weights: how many each layer keeps, their exchange in dynamic sparse training, FedSelect's growth."""

from collections.abc import Collection, Mapping
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors

LayerRule = Literal["erk", "uniform"]
Choose = Literal["most", "least", "random"]


def kept_counts(shapes: Mapping[str, torch.Size], density: float, rule: LayerRule) -> dict[str, int]:
    """Return the number of weights that each layer keeps, at least 1, so that all keep about ``density`` together.

    ``"uniform"``: the same share of every layer. ``"erk"``, the Erdős–Rényi kernel (Evci et al.: Rigging the Lottery,
    ICML 2020, Section 3): a layer's density is proportional to the sum of its sizes over their product; layers that
    this would fill beyond their size are dense, and the others share the rest. ``density`` in (0, 1].
    """
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    if rule == "uniform":
        return {name: max(1, round(density * size)) for name, size in sizes.items()}
    return shared_out({name: sum(shape) for name, shape in shapes.items()}, sizes, density * sum(sizes.values()))


def shared_out(parts: Mapping[str, float], sizes: Mapping[str, int], total: float) -> dict[str, int]:
    """Return a number from 1 to its size for each name: ``total`` shared in proportion to ``parts``.

    Names whose share is above their size have their size, and the others share the rest.
    """
    sparse, left = dict(parts), total
    while sparse:
        factor = left / sum(sparse.values())
        fullest = max(sparse, key=lambda name: parts[name] / sizes[name])
        if factor * parts[fullest] < sizes[fullest]:
            return {n: max(1, round(factor * parts[n])) if n in sparse else size for n, size in sizes.items()}
        left -= sizes[fullest]
        del sparse[fullest]
    return dict(sizes)


def largest(values: Tensor, count: int) -> Tensor:
    """Return where the ``count`` largest values are, bool of their shape; the first ones of equal values."""
    flat, count = values.flatten(), min(count, values.numel())
    if not count:
        return torch.zeros(values.shape, dtype=torch.bool)
    edge = flat.kthvalue(len(flat) - count + 1).values
    mask = flat > edge
    ties = np.flatnonzero((flat == edge).numpy())  # torch takes 17 times as long
    mask[ties[: count - int(mask.sum())]] = True
    return mask.view(values.shape)


def largest_of_layers(values: Mapping[str, Tensor], counts: Mapping[str, int]) -> Tensors:
    """Return :func:`largest` of each tensor named in ``counts``."""
    return {name: largest(values[name], count) for name, count in counts.items()}


def largest_of_all(values: Mapping[str, Tensor], count: int) -> Tensors:
    """Return where the ``count`` largest of all values are, in one ranking of all tensors."""
    flat = largest(torch.cat([tensor.flatten() for tensor in values.values()]), count)
    parts = flat.split([tensor.numel() for tensor in values.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(values.items(), parts, strict=True)}


def exchanged(weights: Tensors, slopes: Tensors, masks: Tensors, share: float) -> tuple[Tensors, Tensors]:
    """Exchange a share of each layer's weights: prune the smallest, grow where gradients are largest (RigL).

    ``slopes`` is the loss's gradient at all positions; ``masks``, bool, 1: kept. The share is of a layer's kept
    weights, rounded down, and at most its number of pruned ones: a dense layer stays as it is. Returns the new masks,
    which keep as many weights as the old ones, and the positions that survived; a pruned one may grow again at once.
    """
    new, survived = {}, {}
    for name, mask in masks.items():
        count = int(mask.sum())
        grown = min(int(share * count), mask.numel() - count)
        survived[name] = largest(weights[name].abs().masked_fill(~mask, -1), count - grown)
        new[name] = survived[name] | largest(slopes[name].abs().masked_fill(survived[name], -1), grown)
    return new, survived


def worth_their_time(squares: Tensors, staying: Tensors, constant: float, density: float) -> Tensors:
    """Return the weights that make the sum of squared gradients over time largest (PruneFL, Algorithm 2).

    The time is 1 for each returned weight plus ``constant`` for each of all. After the ``staying`` ones (bool) others
    follow in the order of their squares, >= 0, while these lie above the quotient so far, up to ``density``.
    """
    flat, must = (torch.cat([each[name].flatten() for name in squares]) for each in (squares, staying))
    rest, count = flat[~must].double().sort(descending=True).values, int(must.sum())
    before = flat[must].double().sum() + rest.cumsum(0) - rest
    above = rest > before / (constant * len(flat) + count + torch.arange(len(rest)))
    more = min(int(above.long().cumprod(0).sum()), max(0, round(density * len(flat)) - count))
    return largest_of_all({name: s.masked_fill(staying[name], torch.inf) for name, s in squares.items()}, count + more)


def grow(
    masks: Tensors,
    moved: Tensors,
    share: float,
    limit: float,
    limit_included: bool = False,
    choose: Choose = "most",
    generator: torch.Generator | None = None,
) -> Tensors:
    """Return masks in which a ``share`` of the positions that are off is turned on: the ones that training moved most.

    ``n - round((1 - share) * n)`` of the n positions that are off are turned on (halves to even, as published); ties go
    to the first positions in the tensor. No position is ever turned off.

    Parameters
    ----------
    masks, moved : tensor name -> bool, 1: personal; tensor name -> how far training moved each position, any sign.
    share : p in [0, 1] (Tamirisa et al., FedSelect, Section 4).
    limit : alpha in [0, 1]: a mask grows if its fraction of ones is below alpha (``limit_included``: at most alpha).
    choose : the positions that moved most, that moved least, or random ones, by the CPU ``generator`` (ablation).
    """
    result = {}
    for name, mask in masks.items():
        result[name] = mask
        ones = int(mask.sum())
        full = ones > limit * mask.numel() if limit_included else ones >= limit * mask.numel()
        count = mask.numel() - ones - round((1 - share) * (mask.numel() - ones))
        if full or not count:
            continue
        if choose == "random":
            off = (~mask).flatten().nonzero().flatten()
            chosen = off[torch.randperm(len(off), generator=generator)[:count]]
            result[name] = mask.flatten().index_fill(0, chosen, True).view(mask.shape)
        else:
            distances = moved[name].abs()
            distances = distances if choose == "most" else -distances
            result[name] = mask | largest(distances.masked_fill(mask, -torch.inf), count)
    return result


def selectable(names: Collection[str], layer: str | None = None) -> list[str]:
    """Return the names that GradSelect may make personal: weights, BatchNorm's included, of one layer if given."""
    return [n for n in names if f".{n}".endswith(".weight") and (not layer or n.startswith(f"{layer}."))]
