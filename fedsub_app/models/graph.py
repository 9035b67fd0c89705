"""Units of any network, by its graph: torch-pruning finds rows and columns that belong together, a test decides.

A unit can be removed if the network without it computes the same as with the unit's rows and columns at zero. That
holds for the channels between two convolutions, with BatchNorm or without, for a residual stream of them and for a
transformer's feed-forward units. It does not hold for the stream of a network with LayerNorm: removing a channel
changes the mean over all channels. GroupNorm's channels go only by whole groups, attention's features by whole heads.
:func:`traced_groups` tries each group that torch-pruning offers, with random weights in float64, and returns those that
pass.
"""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree

from fedsub_app.common.errors import one_line
from fedsub_app.common.inputs import Batch, Shape, drawn
from fedsub_app.models.groups import Place, UnitGroup, executed, is_turned, kept_positions, narrowed
from fedsub_app.models.networks import load_tensors, tensors_of

Positions = dict[int, list[int]]  # channel -> its positions along an axis
COMPUTED = "its weight is computed from other tensors"  # as torch.nn.utils.parametrizations have it
EQUAL = 1e-9  # of the effect that the removed units have; rounding in float64 stays far below


def traced_groups(model: nn.Module, in_shape: Shape) -> tuple[UnitGroup, ...]:
    """Return the groups of units that can be removed, in order of execution; TypeError says why there are none."""
    x = drawn(4, in_shape, torch.Generator().manual_seed(0), torch.float64)
    reasons: dict[str, str] = {}
    try:
        ghost = _randomised(model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch-pruning's, about what it does not follow: the test decides
            offered = _offered(ghost, x, reasons)
        groups = _passing(ghost, x, offered, reasons)
    except Exception as error:  # torch-pruning takes many networks, not all
        turned = any(map(is_turned, model.modules()))
        why = "its layers are transformers' Conv1D, [in, out]" if turned else _first(reasons) or one_line(error)[:200]
        raise TypeError(f"no units are known for a {type(model).__name__}: {why}") from error
    if not groups:
        why = _first(reasons) or "it has one layer"
        raise TypeError(f"no units can be removed from a {type(model).__name__}: {why}")
    return tuple(groups)


def _first(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])


def _randomised(model: nn.Module, x: Batch) -> nn.Module:
    """Return a copy in evaluation mode in which no tensor is zero or constant: nothing passes by accident."""
    ghost = copy.deepcopy(model).cpu().double().train().requires_grad_(True)
    ghost.register_forward_hook(_joined, prepend=True)
    draws = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for tensor in tensors_of(ghost).values():
            noise = torch.rand(tensor.shape, generator=draws, dtype=torch.float64) + 0.5
            tensor.copy_(tensor * noise if tensor.dim() > 1 and bool(tensor.any()) else noise - 0.4)
        for module in ghost.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0
        ghost(x)  # BatchNorm takes the statistics of x, so that no signal fades on its way through many layers
    return ghost.eval()


def _joined(module: nn.Module, inputs: object, output: Any) -> Any:
    """Return the outputs of a network with several heads as one tensor [n, ...]: a unit is removed from all heads."""
    outputs = [t.flatten(1) for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.dim() > 1]
    return torch.cat(outputs, 1) if len(outputs) > 1 else output


# --- what torch-pruning offers ---------------------------------------------------------------------------------------


def _offered(model: nn.Module, x: Batch, reasons: dict[str, str]) -> list[UnitGroup]:
    """Return the groups of torch-pruning in order of execution; in ``reasons`` why others are left out, by name."""
    import torch_pruning  # on demand: it takes a second

    names = {module: name for name, module in model.named_modules()}
    turns = {module: turn for turn, (_, module) in enumerate(executed(model))}
    recurrent = {m: name for m, name in names.items() if isinstance(m, nn.RNNBase | nn.RNNCellBase)}
    reasons |= {name: f"the units of a {type(module).__name__} read each other" for module, name in recurrent.items()}
    with torch.enable_grad():
        graph = torch_pruning.DependencyGraph().build_dependency(model, x, verbose=False)
    last = next(iter(graph.module2node))  # it is built from the output
    tensors, kinds = tensors_of(model), graph.ops.OPTYPE
    seen: set[nn.Module] = set()
    offered: dict[int, UnitGroup] = {}
    for module in [m for m in graph.module2node if isinstance(m, nn.modules.conv._ConvNd | nn.Linear)]:
        if module in seen:
            continue
        pruner = graph.get_pruner_of_module(module).prune_out_channels
        node = graph.module2node[module]
        if reason := COMPUTED if is_parametrized(module) else _inseparable(kinds, node, pruner, names):
            reasons[names[module]] = reason
            continue
        try:
            items = graph.get_pruning_group(module, pruner, [0])
        except Exception:  # such as a Linear before a GRU, whose weights torch-pruning takes for loose ones
            reasons[names[module]] = "its units are not followed to their end"
            continue
        written = {item.dep.target.module for item in items if _writes(item)} & turns.keys()
        seen |= written
        if last in written or (last not in names and any(item.dep.target.module is last for item in items)):
            continue  # the classes
        first = min(written, key=turns.__getitem__)
        try:
            items = graph.get_pruning_group(module, pruner, list(range(graph.get_out_channels(module))))
            offered[turns[first]] = _group(names[first], *_places(kinds, items, names, tensors), tensors)
        except TypeError as error:
            reasons[names[first]] = str(error)
    return [offered[turn] for turn in sorted(offered)]


def _inseparable(kinds: Any, start: Any, pruner: Any, names: Mapping[nn.Module, str]) -> str:
    """Return a layer that is coupled to a node and cannot lose single channels, with the reason; "" for none.

    Positions are not followed: in a network with windows of attention, or with rotary embeddings, torch-pruning
    multiplies them without end.
    """
    reached, to_follow, met = {(start, pruner)}, [(start, pruner)], set()
    while to_follow:
        node, pruned = to_follow.pop()
        met.add(node.type)
        if kinds.CONCAT in met and met & {kinds.SPLIT, kinds.SLICE}:
            return "its units are split and joined again"
        if node.type in (kinds.LN, kinds.MHA, kinds.LSTM):
            return f"{names[node.module]}, a {type(node.module).__name__}, computes with all units at once"
        if node.type == kinds.CONV and (node.module.transposed or node.module.groups > 1):
            return f"{names[node.module]} is a grouped or transposed convolution"
        for edge in node.dependencies:
            coupled = (edge.target, edge.handler)
            if edge.is_triggered_by(pruned) and coupled not in reached:
                reached.add(coupled)
                to_follow.append(coupled)
    return ""


def _writes(item: Any) -> bool:
    """Say whether an item is of a layer with weights whose outputs are the units."""
    module = item.dep.target.module
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and item.dep.handler.__name__ != "prune_in_channels"


def _places(
    kinds: Any, items: Any, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[tuple[str, int], Positions], int]:
    """Return each channel's positions along the axes of the tensors, and how many channels can only go together."""
    places: dict[tuple[str, int], Positions] = {}
    together = 1
    for item in items:
        module, kind = item.dep.target.module, item.dep.target.type
        if kind == kinds.GN:
            together = math.lcm(together, module.num_channels // module.num_groups)
        if kind == kinds.PARAMETER:
            axes = [(name, item.dep.target.pruning_dim) for name, tensor in tensors.items() if tensor is module]
        elif module not in names:  # an operation without tensors
            continue
        elif kind in (kinds.CONV, kinds.LINEAR) and not _writes(item):
            axes = [(f"{names[module]}.weight", 1)]
        else:
            axes = [(f"{names[module]}.{leaf}", int(kind == kinds.EMBED)) for leaf in tensors_of(module)]
        for key in axes:
            positions = places.setdefault(key, {})
            for unit, position in zip(item.root_idxs, item.idxs, strict=True):
                positions.setdefault(unit, []).append(position)
    return places, together


def _group(
    name: str, positions: Mapping[tuple[str, int], Positions], together: int, tensors: Mapping[str, Tensor]
) -> UnitGroup:
    """Return the group of these positions; TypeError where they are in no order that a ``Place`` can tell."""
    channels = len(next(iter(positions.values())))
    size = channels // together
    places = []
    for (tensor, axis), of_units in positions.items():
        if tensor not in tensors or axis not in (0, 1) or len(of_units) != channels:
            raise TypeError(f"{tensor} is tied, or has some of the units alone")
        length = tensors[tensor].shape[axis]
        if max(map(max, of_units.values())) >= length:  # torch-pruning loses count where channels are split and joined
            raise TypeError(f"its units are not found in {tensor}")
        if {len(each) for each in of_units.values()} != {length} or length > 1:  # one number for all units: PReLU's
            places += [Place(tensor, axis, *at, length) for at in _runs(tensor, of_units, together)]
    if size < 2 or not any(place.whole(size) for place in places):
        raise TypeError("its units do not fill a tensor")
    order = {tensor: turn for turn, tensor in enumerate(tensors)}
    return _arranged(name, size, sorted(places, key=lambda place: (order[place.name], place)))


def _arranged(name: str, size: int, places: Sequence[Place]) -> UnitGroup:
    """Return the group of these places: rows that it fills alone, columns that it fills, and the rest."""
    rows = [place for place in places if place == Place(place.name, 0, 0, 1, size)]
    cols = [place for place in places if place.axis == 1 and place.whole(size)]
    rest = tuple(place for place in places if place not in rows and place not in cols)
    columns = tuple((place.name, place.repeat) for place in cols)
    return UnitGroup(name, size, tuple(place.name for place in rows), columns, rest, chain=False)


def _runs(tensor: str, of_units: Positions, together: int) -> list[tuple[int, int]]:
    """Return start and repeat of a tensor's places: all positions of a unit side by side, or each in a run of units."""
    table = torch.tensor([sorted(of_units[unit]) for unit in sorted(of_units)])
    channels, repeat = table.shape
    if torch.equal(table.flatten(), table[0, 0] + torch.arange(channels * repeat)):
        return [(int(table[0, 0]), repeat * together)]
    if all(torch.equal(column, column[0] + torch.arange(channels)) for column in table.T):
        return [(int(column[0]), together) for column in table.T]
    raise TypeError(f"the units lie in {tensor} in no regular order")


# --- what passes -----------------------------------------------------------------------------------------------------


def _passing(model: nn.Module, x: Batch, groups: Sequence[UnitGroup], reasons: dict[str, str]) -> list[UnitGroup]:
    """Return the groups that can be removed; all are tried at once, and halves of them where that fails."""
    fault = _fault(model, x, groups) if groups else ""
    if not fault:
        return list(groups)
    if len(groups) == 1:
        if (heads := _as_heads(model, groups[0])) and not _fault(model, x, [heads]):
            return [heads]
        reasons[groups[0].name] = fault
        return []
    middle = len(groups) // 2
    return _passing(model, x, groups[:middle], reasons) + _passing(model, x, groups[middle:], reasons)


def _as_heads(model: nn.Module, group: UnitGroup) -> UnitGroup | None:
    """Return the group with attention's heads as its units, where the module around it says how large a head is."""
    attention = model.get_submodule(group.name.rpartition(".")[0])
    sizes = [getattr(attention, name, None) for name in ("head_dim", "attention_head_size")]
    size = next((size for size in sizes if isinstance(size, int)), 1)
    if size < 2 or group.size % size or group.size == size:
        return None
    return _arranged(group.name, group.size // size, [p._replace(repeat=p.repeat * size) for p in group.places])


@torch.no_grad()
def _fault(model: nn.Module, x: Batch, groups: Sequence[UnitGroup]) -> str:
    """Return how the network without some units differs from the network with these units at zero; "" if it does not.

    The test removes all units but one in the middle, then the middle half. Half of attention's features may happen to
    be whole heads, and the first units may keep their neighbours, as in LocalResponseNorm.
    """
    whole, sizes, effects = model(x), {group.name: group.size for group in groups}, list[float]()
    but_one = {name: torch.arange(size) != size // 2 for name, size in sizes.items()}
    half = {name: torch.arange(size).roll(size // 4) < (size + 1) // 2 for name, size in sizes.items()}
    with_zeros = copy.deepcopy(model)
    for units in (but_one, half):
        zeroed, left = dict(tensors_of(model)), dict(tensors_of(model))
        for (name, axis), kept in kept_positions(groups, units).items():
            zeroed[name] = zeroed[name] * kept.view([-1 if k == axis else 1 for k in range(zeroed[name].dim())])
            left[name] = left[name].index_select(axis, kept.nonzero().flatten())
        load_tensors(tensors_of(with_zeros), zeroed)  # functional_call does not take a layer of two names
        expected = with_zeros(x)
        try:
            small = narrowed(model, groups, {name: int(on.sum()) for name, on in units.items()})
            load_tensors(tensors_of(small), left)
            difference = float((small(x) - expected).abs().max())
            with torch.random.fork_rng(devices=[]):  # dropout draws
                small.train()(x)  # auxiliary heads run in training alone
        except Exception as error:  # the network's own code knows its width, or torch has no layer of it
            return f"a narrower network does not run: {one_line(error)[:100]}"
        effects.append(float((whole - expected).abs().max()))  # 0 of one unit that a ReLU cuts off in all of x
        if not difference <= EQUAL * (effects[-1] or float(whole.abs().max())):  # or not a number
            return "a removed unit is not a unit of zeros"
    return "" if any(effects) else "its units have no effect"
