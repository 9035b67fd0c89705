"""A group of units and the places that it has in the network's tensors; the order in which modules are executed."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsub_app.common.inputs import Shape, blank
from fedsub_app.models.sources import in_shape_of

_orders: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


class Place(NamedTuple):
    """Positions of a group's units along an axis of a tensor: unit j has ``start + j * repeat`` and what follows it.

    ``axis``: 0 for rows, 1 for columns; ``repeat``: consecutive positions of one unit; ``length``: of the whole axis,
    of which positions before and behind the units are those of others.
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
    size : number of units.
    rows : names of the tensors whose axis 0 is indexed by the units: weight, bias, and weight, bias and running
        statistics of a BatchNorm behind it.
    cols : ``(name, repeat)`` of the tensors whose axis 1 is indexed by the units. ``repeat`` consecutive columns belong
        to one unit: height x width behind a flatten, else 1. The axis has ``size * repeat`` entries.
    blocks : places of which ``rows`` and ``cols`` cannot speak: parts of an axis, several rows a unit.
    chain : one layer produces the units and one reads them, as in :func:`unit_groups` of a listed network; ``False``:
        there may be several of both, and layers in between.
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
        cols = (Place(name, 1, 0, repeat, self.size * repeat) for name, repeat in self.cols)
        return (*rows, *cols, *self.blocks)

    def kept(self, width: float) -> int:
        """Return the number of units of a network of this width, a fraction of the units, rounded up."""
        return ceil(round(width * self.size, 6))  # rounded first: 0.07 * 100 is 7.000000000000001


def split(vector: Tensor, groups: Sequence[UnitGroup]) -> dict[str, Tensor]:
    """Return the parts of a vector over all hidden units: group name -> view ``[group.size]``, in the groups' order."""
    parts = vector.split([group.size for group in groups])
    return {group.name: part for group, part in zip(groups, parts, strict=True)}


def executed(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules by name in the order in which a forward pass in training enters them.

    A module that is not entered stands behind the one that it is in. Networks of this package's register, whose inputs
    are not known here, are registered in that order.
    """
    named = dict(model.named_modules())
    if (shape := in_shape_of(model)) is not None and model not in _orders:
        _orders[model] = _order(model, shape)
    return [(name, named[name]) for name in _orders.get(model, named)]


def forget_order(model: nn.Module) -> None:
    _orders.pop(model, None)


def _order(model: nn.Module, in_shape: Shape) -> list[str]:
    ghost = copy.deepcopy(model).train()  # auxiliary heads are entered in training alone
    entered: dict[nn.Module, int] = {}

    def enter(module: nn.Module, inputs: object) -> None:
        entered.setdefault(module, len(entered))

    for module in ghost.modules():
        module.register_forward_pre_hook(enter)
    like = next(ghost.parameters())
    with torch.random.fork_rng(), torch.no_grad():  # dropout draws
        ghost(blank(2, in_shape, like.device, like.dtype))
    turns: dict[str, int] = {}
    for name, module in ghost.named_modules():
        turns[name] = entered.get(module, turns.get(name.rpartition(".")[0], 0))
    return sorted(turns, key=turns.__getitem__)  # stable
