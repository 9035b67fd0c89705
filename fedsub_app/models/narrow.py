"""Networks with fewer hidden units: the real module, and the widths read off its tensors."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedsub_app.models.groups import UnitGroup
from fedsub_app.models.networks import tensors_of


def kept_positions(groups: Sequence[UnitGroup], units: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """Return which positions along which axis of a tensor are left when only the units that are on are.

    ``units``: group name -> bool ``[group.size]``; a group that is lacking keeps all its units and has no positions
    here.
    """
    kept: dict[tuple[str, int], Tensor] = {}
    for group in groups:
        if group.name not in units:
            continue
        for name, axis, start, repeat, length in group.places:
            axis_kept = kept.setdefault((name, axis), torch.ones(length, dtype=torch.bool))
            axis_kept[start : start + group.size * repeat] &= units[group.name].repeat_interleave(repeat)
    return kept


def narrowed(model: nn.Module, groups: Sequence[UnitGroup], widths: Mapping[str, int]) -> nn.Module:
    """Return a copy of the model that has only the first units of each group: a network that is really that small.

    Its tensors have the names of the model's and the values of its leading rows and columns. Other units, or other
    values, are loaded into it: ``load_tensors(narrowed(model, groups, widths), take(tensors, groups, units))``.

    Parameters
    ----------
    model : a network that :func:`~fedsub_app.models.units.unit_groups` knows, without hooks. Not modified; the copy
        shares no memory with it, is in the same mode and on the same device, and has no gradients yet.
    widths : group name -> number of units kept, 1 to ``group.size``, else ValueError; one that is lacking keeps all.
    """
    if unknown := widths.keys() - {group.name for group in groups}:
        allowed = ", ".join(group.name for group in groups)
        raise ValueError(f"widths of {', '.join(sorted(unknown))}: no such group; allowed: {allowed}")
    for group in groups:
        width = widths.get(group.name, group.size)
        if not 1 <= width <= group.size:
            raise ValueError(f"width of {group.name} = {width}: allowed is 1 to {group.size}")
    small = copy.deepcopy(model)
    small.zero_grad(set_to_none=True)
    tensors = tensors_of(small)
    first = {group.name: torch.arange(group.size) < widths.get(group.name, group.size) for group in groups}
    positions = kept_positions(groups, first)
    for name, old in tensors.items():
        new = old.detach().clone()
        for axis in (0, 1):
            if (name, axis) in positions:
                new = new.index_select(axis, positions[name, axis].nonzero().flatten().to(new.device))
        if new.shape == old.shape:
            continue
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
    if isinstance(module, nn.modules.conv._ConvNd):
        if 1 < module.groups == module.in_channels == module.out_channels:  # each channel is convolved alone
            module.groups = len(module.weight)
        module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        tensor = next(iter(tensors_of(module).values()), None)
        if tensor is not None:
            module.num_features = len(tensor)
    elif isinstance(module, nn.GroupNorm) and module.affine:
        each = module.num_channels // module.num_groups
        module.num_channels = len(module.weight)
        module.num_groups = module.num_channels // each


def widths_of(groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of units of every group in a narrow network of these tensors: group name -> width."""
    whole = {group.name: next(place for place in group.places if place.whole(group.size)) for group in groups}
    return {name: tensors[place.name].shape[place.axis] // place.repeat for name, place in whole.items()}
