"""Groups of units: their places in the network's tensors, LoRA's ranks as units, and networks with fewer units."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Shape, blank
from fedsub_app.models.networks import tensors_of
from fedsub_app.models.sources import in_shape_of, refused

# Ends of the names of LoRA's tensors, as the package peft gives them.
_A, _B, _W = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"
_orders: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
in_training: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # modules that run in training alone
as_defined: WeakSet[nn.Module] = WeakSet()  # networks whose layer order was asked for without an input's shape


class Place(NamedTuple):
    """Positions of a group's units along an axis of a tensor: unit j has those from ``start + j * repeat`` on.

    ``axis``: 0 for rows, 1 for columns; ``repeat``: number of consecutive positions of one unit; ``length``: of the
    whole axis, whose positions before and behind the units belong to others.
    """

    name: str
    axis: int
    start: int
    repeat: int
    length: int

    def whole(self, size: int) -> bool:
        """Say whether ``size`` units take the axis up."""
        return self.length == size * self.repeat


@dataclass(frozen=True)
class UnitGroup:
    """The units of one hidden layer and the tensors that they index.

    Attributes
    ----------
    name : name of the layer that produces the units, e.g. ``"fc1"`` or ``"layer1.0.conv1"``.
    rows : names of the tensors whose axis 0 is indexed by the units: weight, bias, and those of a BatchNorm behind it.
    cols : ``(name, repeat)`` of the tensors whose axis 1, of ``size * repeat`` entries, is indexed by the units: repeat
        is height x width behind a flatten, else 1.
    blocks : places that ``rows`` and ``cols`` cannot describe: parts of an axis, several rows a unit.
    chain : one layer produces the units and one reads them, as in a listed network; ``False``: there may be several of
        both, and layers in between.
    """

    name: str
    size: int
    rows: tuple[str, ...]
    cols: tuple[tuple[str, int], ...]
    blocks: tuple[Place, ...] = ()
    chain: bool = True

    @cached_property
    def places(self) -> tuple[Place, ...]:
        rows = (Place(name, 0, 0, 1, self.size) for name in self.rows)
        return (*rows, *(Place(name, 1, 0, repeat, self.size * repeat) for name, repeat in self.cols), *self.blocks)

    def kept(self, width: float) -> int:
        """Return the number of units of a network of this width, a fraction above 0 of the units, rounded up."""
        return max(1, ceil(round(width * self.size, 6)))  # rounded first: 0.07 * 100 is 7.000000000000001


def split(vector: Tensor, groups: Sequence[UnitGroup]) -> dict[str, Tensor]:
    """Return the parts of a vector over all hidden units: group name -> view ``[group.size]``, in the groups' order."""
    parts = vector.split([group.size for group in groups])
    return {group.name: part for group, part in zip(groups, parts, strict=True)}


def executed(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules by name in the order in which a forward pass in training enters them.

    A module that is not entered follows its parent; listed networks define their modules in that order.
    """
    named = dict(model.named_modules())
    if (shape := in_shape_of(model)) is not None and {*_orders.get(model, ())} != named.keys():  # adapters are added
        _orders[model] = _order(model, shape)
    if shape is None:
        as_defined.add(model)
    return [(name, named[name]) for name in _orders.get(model, named)]


def _order(model: nn.Module, in_shape: Shape) -> list[str]:
    ghost = copy.deepcopy(model).train()  # auxiliary heads are entered in training alone
    entered: dict[nn.Module, int] = {}

    def enter(module: nn.Module, inputs: object) -> None:
        entered.setdefault(module, len(entered))

    for module in ghost.modules():
        module.register_forward_pre_hook(enter)
    like = next(ghost.parameters())
    try:
        with torch.random.fork_rng(), torch.no_grad():  # dropout draws
            ghost(blank(2, in_shape, like.device, like.dtype))
            order, entered = entered, {}
            ghost.eval()(blank(2, in_shape, like.device, like.dtype))
    except Exception as error:  # code of others
        raise refused(f"model = {type(model).__name__}", in_shape, error) from error
    turns: dict[str, int] = {}
    for name, module in ghost.named_modules():
        turns[name] = order.get(module, turns.get(name.rpartition(".")[0], 0))
    in_training[model] = {name for name, module in ghost.named_modules() if module in order.keys() - entered.keys()}
    return sorted(turns, key=turns.__getitem__)  # stable


# --- ranks of adapters ---------------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """The names of an adapter's tensors: A ``[r, in, ...]``, B ``[out, r, ...]``, and of W ``[out, in, ...]``.

    :func:`turned` has those W that are ``[in, out]``.
    """

    a: str
    b: str
    weight: str

    @property
    def layer(self) -> str:
        return self.weight.removesuffix(_W)


def adapters(names: Collection[str]) -> tuple[Adapter, ...]:
    """Return the LoRA adapters among a network's tensors, in their order."""
    layers = [name.removesuffix(_A) for name in names if name.endswith(_A)]
    return tuple(Adapter(f"{layer}{_A}", f"{layer}{_B}", f"{layer}{_W}") for layer in layers)


def is_turned(module: nn.Module) -> bool:
    """Say whether a layer's weight is [in, out], as of transformers' Conv1D in GPT-2; a Linear's is [out, in]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def turned(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights [in, out]."""
    return frozenset(f"{name}.weight".removeprefix(".") for name, layer in model.named_modules() if is_turned(layer))


def scale_of(model: nn.Module) -> float:
    """Return alpha / r, the factor of B A in a network's adapters; 1 without any. Adapters of a lower rank keep it.

    :class:`UserError` if a network's adapters have several such factors.
    """
    scales = (vars(module).get("scaling") for _, module in model.named_modules())
    found = {float(scale["default"]) for scale in scales if isinstance(scale, dict)} or {1.0}
    if len(found) > 1:
        raise UserError(f"the network's adapters have {sorted(found)} as alpha / r; allowed is one for all")
    return found.pop()


def rank_groups(model: nn.Module) -> tuple[UnitGroup, ...]:
    """Return the ranks of each adapter as units: rows of A and columns of B; ``()`` without adapters."""
    tensors = tensors_of(model)
    return tuple(
        UnitGroup(each.a.removesuffix(".weight"), len(tensors[each.a]), (each.a,), ((each.b, 1),), chain=False)
        for each in adapters(tensors)
    )


# --- fewer units ---------------------------------------------------------------------------------------------------


def kept_positions(groups: Sequence[UnitGroup], units: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """Return the positions that are left if only the units that are on stay: (tensor name, axis) -> bool ``[length]``.

    ``units``: group name -> bool ``[group.size]``; a missing group keeps all its units and adds no entry.
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
    values, are loaded into it: ``load_tensors(narrowed(model, groups, widths), take(tensors, groups, units))``. The
    model has no hooks. The copy shares no memory with it, is in the same mode and on the same device.

    ``widths``: group name -> number of units kept, 1 to ``group.size``, else ValueError; a missing group keeps all.
    """
    for group in groups:
        width = widths.get(group.name, group.size)
        if not 1 <= width <= group.size:
            raise ValueError(f"width of {group.name} = {width}: allowed is 1 to {group.size}")
    small = copy.deepcopy(model)
    small.zero_grad(set_to_none=True)
    whole = tensors_of(small)
    cut = {name: tensor.detach() for name, tensor in whole.items()}
    first = {group.name: torch.arange(group.size) < widths.get(group.name, group.size) for group in groups}
    for (name, axis), kept in kept_positions(groups, first).items():
        cut[name] = cut[name].index_select(axis, kept.nonzero().flatten().to(cut[name].device))
    for name, old in whole.items():
        if cut[name].shape != old.shape:
            owner, _, leaf = name.rpartition(".")
            new = nn.Parameter(cut[name], old.requires_grad) if isinstance(old, nn.Parameter) else cut[name]
            setattr(small.get_submodule(owner), leaf, new)
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
