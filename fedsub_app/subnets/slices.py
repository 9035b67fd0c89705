"""Smaller networks out of a large one: the rows and columns of some of its hidden units."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedsub_app.models.units import UnitGroup


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
