"""Smaller networks out of a large one and back: the rows and columns of some of its hidden units."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsub_app.models.narrow import narrow_shapes
from fedsub_app.models.units import UnitGroup
from fedsub_app.subnets.masks import expand, scatter


def take(tensors: Mapping[str, Tensor], groups: Sequence[UnitGroup], units: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the network that has only the units that are on.

    Parameters
    ----------
    tensors : tensor name -> tensor, of the whole network.
    groups : its unit groups.
    units : group name -> bool ``[group.size]``; a group that is lacking keeps all its units.

    Returns
    -------
    tensor name -> tensor, for every name of ``tensors``: of a group's rows ``[on, ...]``, of its columns
    ``[:, on * repeat, ...]``, others as they are. Differentiable: the gradient is that of the slice, 0 elsewhere.
    """
    taken = dict(tensors)
    for group in groups:
        if group.name not in units:
            continue
        mask = units[group.name]
        index = mask.nonzero().flatten()
        for name in group.rows:
            if name in taken:
                taken[name] = taken[name].index_select(0, index)
        for name, repeat in group.cols:
            if name in taken:
                columns = index if repeat == 1 else mask.repeat_interleave(repeat).nonzero().flatten()
                taken[name] = taken[name].index_select(1, columns)
    return taken


def put(
    tensors: Mapping[str, Tensor],
    groups: Sequence[UnitGroup],
    units: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Return the tensors of a smaller network at their rows and columns of the whole one, 0 elsewhere.

    Inverse of :func:`take`. The positions that it fills are those of
    :func:`~fedsub_app.subnets.masks.expand` with the same arguments, which are the masks of such an update for
    :func:`~fedsub_app.subnets.averaging.masked_mean`::

        updates.append((put(tensors, groups, units, shapes), expand(groups, units, shapes), weight))

    Parameters
    ----------
    tensors : tensor name -> tensor of the smaller network, of any dtype.
    groups, units : as for :func:`take`.
    shapes : tensor name -> shape in the whole network, at least for the names of ``tensors``.

    Returns
    -------
    tensor name -> tensor of the full shape, for every name of ``tensors``, sharing no memory with them.

    Raises
    ------
    ValueError
        If a mask is of no group or of the wrong size, or a tensor is not as large as the units that are on.
    """
    wanted = {name: shapes[name] for name in tensors}
    masks = expand(groups, units, wanted)
    small = narrow_shapes(groups, {name: int(mask.sum()) for name, mask in units.items()}, wanted)
    for name, shape in small.items():
        if tensors[name].shape != shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensors[name].shape)}, its units on are {tuple(shape)}")
    return scatter(tensors, masks)


def insert(
    whole: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    groups: Sequence[UnitGroup],
    units: Mapping[str, Tensor],
) -> None:
    """Write the tensors of a smaller network to their rows and columns of the whole one, in place.

    Parameters
    ----------
    whole : tensor name -> tensor of the whole network, at least for the names of ``tensors``.
    tensors : tensor name -> tensor of the smaller one, shaped as :func:`take` returns it.
    groups, units : as for :func:`take`.
    """
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for group in groups:
        if group.name in units:
            mask = units[group.name]
            rows |= dict.fromkeys(group.rows, mask.nonzero().flatten())
            columns |= {name: mask.repeat_interleave(repeat).nonzero().flatten() for name, repeat in group.cols}
    for name, tensor in tensors.items():
        if name in rows and name in columns:
            whole[name][rows[name][:, None], columns[name]] = tensor
        elif name in columns:
            whole[name].index_copy_(1, columns[name], tensor)
        elif name in rows:
            whole[name].index_copy_(0, rows[name], tensor)
        else:
            whole[name].copy_(tensor)
