"""Networks with fewer hidden units: the real module, its shapes, and the widths read off its tensors."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedsub_app.models.networks import tensors_of
from fedsub_app.models.units import UnitGroup


def narrow_shapes(
    groups: Sequence[UnitGroup], widths: Mapping[str, int], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Size]:
    """Return the shapes of the tensors of a network with fewer units.

    Parameters
    ----------
    groups : the full network's :func:`~fedsub_app.models.units.unit_groups`.
    widths : group name -> number of units kept, 0 to ``group.size``; a group that is lacking keeps all.
    shapes : tensor name -> shape in the full network, of the tensors wanted.

    Returns
    -------
    tensor name -> shape, for every name of ``shapes``: ``[width, ...]`` of a group's rows, ``[:, width * repeat, ...]``
    of its columns, others as they are.

    Raises
    ------
    ValueError
        If a width is of no group or out of range.
    """
    unknown = widths.keys() - {group.name for group in groups}
    if unknown:
        allowed = ", ".join(group.name for group in groups)
        raise ValueError(f"widths of {', '.join(sorted(unknown))}: no such group; allowed: {allowed}")
    sizes = {name: list(shape) for name, shape in shapes.items()}
    for group in groups:
        width = widths.get(group.name, group.size)
        if not 0 <= width <= group.size:
            raise ValueError(f"width of {group.name} = {width}: the group has {group.size} units")
        for name in group.rows:
            if name in sizes:
                sizes[name][0] = width
        for name, repeat in group.cols:
            if name in sizes:
                sizes[name][1] = width * repeat
    return {name: torch.Size(size) for name, size in sizes.items()}


def narrowed(model: nn.Module, groups: Sequence[UnitGroup], widths: Mapping[str, int]) -> nn.Module:
    """Return a copy of the model that has only the first units of each group: a network that is really that small.

    Its tensors have the names of the model's and the values of its leading rows and columns. Other units, or other
    values, are loaded into it: ``load_tensors(narrowed(model, groups, widths), take(tensors, groups, units))``.

    Parameters
    ----------
    model : a network that :func:`~fedsub_app.models.units.unit_groups` knows, without hooks. Not modified; the copy
        shares no memory with it, is in the same mode and on the same device, and has no gradients yet.
    groups : its unit groups.
    widths : group name -> number of units kept, 1 to ``group.size``; a group that is lacking keeps all.

    Raises
    ------
    ValueError
        If a width is of no group or out of range.
    """
    for group in groups:
        width = widths.get(group.name, group.size)
        if not 1 <= width <= group.size:
            raise ValueError(f"width of {group.name} = {width}: allowed is 1 to {group.size}")
    small = copy.deepcopy(model)
    small.zero_grad(set_to_none=True)
    tensors = tensors_of(small)
    for name, shape in narrow_shapes(groups, widths, {n: t.shape for n, t in tensors.items()}).items():
        old = tensors[name]
        if shape == old.shape:
            continue
        new = old.detach()[tuple(slice(size) for size in shape)].clone()
        owner, _, leaf = name.rpartition(".")
        setattr(
            small.get_submodule(owner),
            leaf,
            nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new,
        )
    for module in small.modules():
        _read_sizes(module)
    return small


def _read_sizes(module: nn.Module) -> None:
    """Set the sizes that a layer states about itself from the shapes of its tensors."""
    if isinstance(module, nn.Conv2d):
        module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        tensor = next(iter(tensors_of(module).values()), None)
        if tensor is not None:
            module.num_features = len(tensor)


def widths_of(groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of units of every group in a narrow network: group name -> width.

    Parameters
    ----------
    groups : the full network's unit groups.
    tensors : tensor name -> tensor, of the narrow network: :func:`~fedsub_app.models.networks.tensors_of`.
    """
    return {group.name: len(tensors[group.rows[0]]) for group in groups}
