"""The structure of a network as the subnet methods see it: units, layers, head.

A *unit* is a hidden neuron or channel. Removing it removes row ``j`` of every tensor that produces it (weight, bias,
the BatchNorm behind it) and column ``j`` of the weight that reads it. :func:`unit_groups` finds these tensors by
walking the modules, so that masks (FedPeWS), vertical slices (IST) and channel pruning (Sub-FedAvg) share one
description.
"""

import re
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fedsub_app.common.errors import UserError
from fedsub_app.models.graph import COMPUTED, traced_groups
from fedsub_app.models.groups import UnitGroup, adapters, executed, in_training, rank_groups
from fedsub_app.models.networks import tensors_of, ties
from fedsub_app.models.sources import answer, base_names, in_shape_of

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d)
_HEAD = "_fedsub_head"
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: BatchNorm, InstanceNorm
# Layers that act on each unit alone: a unit that is zero before them affects no other unit behind them.
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_UNIT_WISE = (nn.ReLU, nn.Dropout, nn.Dropout2d, *_POOLS, nn.Flatten, nn.Identity)

_traced: WeakKeyDictionary[nn.Module, "tuple[UnitGroup, ...]"] = WeakKeyDictionary()


def is_norm(module: nn.Module) -> bool:
    """Say whether a module is a normalisation layer, also one of another library's own, such as LlamaRMSNorm."""
    by_name = re.search(r"Norm([1-3]d)?$", type(module).__name__) and not [*module.children()]
    return isinstance(module, NORMS) or bool(by_name)


def _names(prefix: str, module: nn.Module) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}".removeprefix(".") for name in tensors_of(module))


def _known(module: nn.Module) -> bool:
    """Say whether a module's forward is that of a library, and no code of the user's."""
    return type(module).forward.__module__.partition(".")[0] in ("torch", "torchvision", "fedsub_app")


def unit_groups(model: nn.Module) -> tuple[UnitGroup, ...]:
    """Return the hidden layers' units, from the input to the output; the output layer's units belong to no group.

    A network of a source (:func:`~fedsub_app.models.sources.adopted`) has the units of its graph
    (:func:`~fedsub_app.models.graph.traced_groups`), a network with LoRA its adapters' ranks. In a listed
    ``nn.Sequential`` the units are those of every Linear and Conv2d but the last, in a ResNet the inner channels of
    each block (``conv1``, ``bn1`` -> ``conv2``): the residual stream ties the other channels of a stage to each other.

    TypeError where a layer is not known, or no unit can be removed.
    """
    if ranks := rank_groups(model):
        return ranks
    if (shape := in_shape_of(model)) is not None:
        if model not in _traced:
            _traced[model] = traced_groups(model, shape)
        return _traced[model]
    if base_names(model):
        raise TypeError("a part of its units is frozen")
    if isinstance(model, nn.Sequential) and _known(model):
        return _sequential_groups(model)
    blocks = [(name, m) for name, m in model.named_modules() if type(m).__name__ == "BasicBlock" and _known(m)]
    if not blocks:
        raise TypeError(f"units of a {type(model).__name__} are found with the shape of a sample only, in_shape=")
    groups = []
    for name, block in blocks:
        inner = block.get_submodule("conv1")
        assert isinstance(inner, nn.Conv2d)
        rows = _names(f"{name}.conv1", inner) + _names(f"{name}.bn1", block.get_submodule("bn1"))
        groups.append(UnitGroup(f"{name}.conv1", inner.out_channels, rows, ((f"{name}.conv2.weight", 1),)))
    return tuple(groups)


def _sequential_groups(model: nn.Sequential) -> tuple[UnitGroup, ...]:
    if tied := ties(model):
        raise TypeError(f"{next(iter(tied.values()))} is in two places")
    groups: list[UnitGroup] = []
    # The last layer met that produces units; size 0: none yet.
    name, size = "", 0
    rows: tuple[str, ...] = ()
    flat = False  # whether all that a sample has is behind a flatten
    for child_name, child in model.named_children():
        if not _known(child):
            raise TypeError(f"layer {child_name}: no units are known for a {type(child).__name__}")
        if isinstance(child, nn.Linear) or (isinstance(child, nn.Conv2d) and child.groups == 1):
            if is_parametrized(child):
                raise TypeError(f"layer {child_name}: {COMPUTED}")
            if isinstance(child, nn.Linear) and name and not flat and isinstance(model.get_submodule(name), nn.Conv2d):
                raise TypeError(f"layer {child_name} reads columns of pixels, not the channels of {name}")
            outputs, inputs = child.weight.shape[:2]
            if size and inputs % size:
                raise TypeError(f"layer {child_name} has {inputs} inputs, no multiple of the {size} units of {name}")
            if size:
                groups.append(UnitGroup(name, size, rows, ((f"{child_name}.weight", inputs // size),)))
            name, size, rows = child_name, outputs, _names(child_name, child)
        elif isinstance(child, _BATCH_NORM):
            if size and child.num_features != size:  # behind a flatten it has several numbers a unit
                raise TypeError(f"layer {child_name} has {child.num_features} features, {name} has {size} units")
            rows += _names(child_name, child)
        elif isinstance(child, nn.Flatten) and rows and isinstance(model.get_submodule(name), nn.Linear):
            raise TypeError(f"layer {child_name}: the units of {name} may lie apart behind it, as those of tokens do")
        elif isinstance(child, nn.Flatten):
            flat = (child.start_dim, child.end_dim) == (1, -1)
        elif not isinstance(child, _UNIT_WISE):
            raise TypeError(f"layer {child_name}: no units are known for a {type(child).__name__}")
    return tuple(groups)


def layer_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return FedPart's layers in order of execution: the names of :func:`tensors_of`, each in exactly one group.

    A convolution or linear layer and the normalisation behind it are one group, unless that layer is frozen. A tensor
    of a module that has layers in it (a class token, attention's ``in_proj_weight``) is in the group of the first of
    these layers. The shortcut convolutions of a ResNet are groups of their own, behind the second convolution of their
    block: ResNet-18 has 21 groups. The two factors of a LoRA adapter are one group.
    """
    groups: list[tuple[str, ...]] = []
    first: tuple[str, ...] = ()  # tensors of a module that has layers in it, whose first layer is to come
    owned: dict[str, list[str]] = {}
    frozen = False  # the layer in front
    adapted = {adapter.layer for adapter in adapters(tensors_of(model))}
    for name in tensors_of(model):
        layer = name.partition(".lora_")[0]
        owned.setdefault(layer if layer in adapted else name.rpartition(".")[0], []).append(name)
    for name, module in executed(model):
        names = first + tuple(owned.get(name, ()))
        if name not in adapted and any(True for _ in module.children()):
            first = names
        elif name in owned:
            if is_norm(module) and groups and not frozen:
                groups[-1] += names
            else:
                groups.append(names)
            first, frozen = (), False
        elif any(True for _ in module.parameters(recurse=False)):
            frozen = True
    if first:  # of a module in which no layer has tensors
        groups.append(first)
    return tuple(groups)


def with_head(model: nn.Module, head: str) -> nn.Module:
    """Return the model with the head that the key ``head`` names; UserError: it is no layer, or the whole model."""
    try:
        # Twice, because "head" alone is the part that is looked for.
        if head and part_names(model, f"{head}, {head}") and head not in dict(model.named_modules()):
            raise ValueError(f"{head!r} is no layer")
    except ValueError as error:
        raise UserError(f"head = {head!r}: {error}") from None
    setattr(model, _HEAD, head)
    return model


def head_layer(model: nn.Module) -> str:
    """Return the name of the head: the layer that :func:`with_head` set, else the last Linear in order of execution.

    An auxiliary head, which runs in training alone, does not count. Without a Linear it is the last layer whose weight
    has several axes; without such a layer "", the whole model.
    """
    if named := getattr(model, _HEAD, ""):
        return str(named)
    tensors = tensors_of(model)
    modules = [(name, module) for name, module in executed(model) if name not in in_training.get(model, ())]
    linear = [name for name, module in modules if isinstance(module, nn.Linear)]
    others = [name for name, _ in modules if f"{name}.weight" in tensors and tensors[f"{name}.weight"].dim() > 1]
    return (linear or others or [""])[-1]


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the head's tensors, the head of the personalised methods; all others are the body."""
    layer = head_layer(model)
    return _names(layer, model.get_submodule(layer))


def output_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the head's tensors where it is one layer, whose rows are the classes; else TypeError."""
    names, tensors, shape = head_names(model), tensors_of(model), in_shape_of(model)
    if any(True for _ in model.get_submodule(head_layer(model)).children()):
        raise TypeError(f"its head {head_layer(model)!r} has several layers; allowed is one")
    if not names or not tensors.keys() >= {*names}:
        raise TypeError(f"its head {head_layer(model)!r} is frozen or tied; allowed is another head")
    rows = len(tensors[names[0]])
    if shape is not None and (classes := answer(model, type(model).__name__, shape).shape[-1]) != rows:
        what = f"the {rows} rows of its head {head_layer(model)!r} are not the {classes} classes"
        raise TypeError(f"{what}; allowed is another head")
    return names


def part_names(model: nn.Module, part: str) -> tuple[str, ...]:
    """Return the names of a part of the model, in the order of :func:`tensors_of`: what is shared or personal.

    ``part``: ``"head"`` (:func:`head_layer`), ``"body"`` (all but the head), or names of layers and tensors,
    comma-separated: ``"conv1, layer4.1"`` is all tensors of these layers. ValueError where a name is of none, or the
    part is empty or the whole model.
    """
    every = tuple(tensors_of(model))
    if part in ("head", "body"):
        head = head_names(model)
        names = tuple(name for name in every if (name in head) == (part == "head"))
    else:
        prefixes = [prefix.strip() for prefix in part.split(",")]
        for prefix in prefixes:
            if not any(name == prefix or name.startswith(f"{prefix}.") for name in every):
                layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in every))
                raise ValueError(f"{prefix!r} is no layer; allowed are head, body or some of {layers}")
        names = tuple(n for n in every if any(n == prefix or n.startswith(f"{prefix}.") for prefix in prefixes))
    if not 0 < len(names) < len(every):
        raise ValueError(f"{len(names)} of {len(every)} tensors; allowed is a part of the model")
    return names
