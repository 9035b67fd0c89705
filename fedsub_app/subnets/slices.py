"""Slices of a large network, which make a smaller one: the rows and columns of some of its hidden units."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors
from fedsub_app.models import UnitGroup, kept_positions

Index = tuple[Tensor | None, Tensor | None]  # rows and columns of a tensor: int64, ascending; None: all of them
ALL: Index = (None, None)


def indices(groups: Sequence[UnitGroup], units: Mapping[str, Tensor]) -> dict[str, Index]:
    """Return the rows and columns of each tensor that belong to the units that are on; the other tensors are whole.

    ``groups`` are the whole network's; ``units``: group name -> bool ``[group.size]``; a missing group is whole.
    """
    kept = {key: on.nonzero().flatten() for key, on in kept_positions(groups, units).items()}
    return {name: (kept.get((name, 0)), kept.get((name, 1))) for name, _ in kept}


def select(tensor: Tensor, index: Index) -> Tensor:
    """Return the rows and columns of a tensor; the tensor itself where the index is :data:`ALL`. Differentiable."""
    for axis, wanted in enumerate(index):
        tensor = tensor if wanted is None else tensor.index_select(axis, wanted.to(tensor.device))
    return tensor


def position(index: Index) -> tuple[Any, ...]:
    """Return the index in a form for reads and writes: ``tensor[position(index)] = values``."""
    rows, columns = index
    if columns is None:
        return (...,) if rows is None else (rows,)
    return (slice(None) if rows is None else rows[:, None], columns)


def sliced_shape(shape: torch.Size, index: Index) -> torch.Size:
    """Return a slice's shape; ValueError, continuing a name: the index is not ascending int64, or outside the shape."""
    sizes = list(shape)
    for axis, wanted in enumerate(index):
        if wanted is None:
            continue
        kind = ("rows", "columns")[axis]
        if wanted.dtype != torch.int64 or wanted.dim() != 1 or bool((wanted.diff() <= 0).any()):
            raise ValueError(f"has {kind} that are not ascending int64 numbers")
        if axis >= len(sizes) or (len(wanted) and not 0 <= wanted[0] <= wanted[-1] < sizes[axis]):
            raise ValueError(f"has {kind} outside the shape {tuple(shape)}")
        sizes[axis] = len(wanted)
    return torch.Size(sizes)


def take(tensors: Mapping[str, Tensor], groups: Sequence[UnitGroup], units: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors of the network that has only the units that are on (:func:`indices`).

    It has a group's rows ``[on, ...]`` and columns ``[:, on * repeat, ...]`` of the whole network's tensors, and the
    others unchanged. Differentiable: the gradient is the slice's, 0 elsewhere.
    """
    index = indices(groups, units)
    return {name: select(tensor, index.get(name, ALL)) for name, tensor in tensors.items()}


def put(
    tensors: Mapping[str, Tensor], groups: Sequence[UnitGroup], units: Tensors, shapes: Mapping[str, torch.Size]
) -> Tensors:
    """Return a smaller network's tensors, of any dtype, at their rows and columns of the whole one, 0 elsewhere.

    Inverse of :func:`take` at those positions; ``shapes`` are those of the whole network. The result shares no memory
    with ``tensors``.
    """
    index = indices(groups, units)
    whole = {name: tensor.new_zeros(shapes[name]) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        whole[name][position(index.get(name, ALL))] = tensor
    return whole
