"""Growth of a mask of personal parameters by their movement in training: FedSelect's GradSelect."""

from collections.abc import Collection
from typing import Literal

import torch

from fedsub_app.common.tensors import Tensors
from fedsub_app.subnets.sparsity import largest

Choose = Literal["most", "least", "random"]


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
