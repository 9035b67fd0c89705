"""A method's state on the server, between its attributes and the named tensors of a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors, unprefixed
from fedsub_app.subnets.masks import pack_bits, unpack_bits

Memory = Tensor | Tensors | list[Tensors]  # a list has an entry for each client


def flattened(values: Mapping[str, Memory]) -> Tensors:
    """Return remembered values as named tensors: ``name``, ``name/key`` or ``name/client/key``, bools as bits."""
    tensors: Tensors = {}
    for name, value in values.items():
        match value:
            case Tensor():
                tensors[name] = value
            case list():
                tensors |= flattened({f"{name}/{client}": each for client, each in enumerate(value)})
            case _:
                tensors |= {f"{name}/{key}": tensor for key, tensor in value.items()}
    bits = pack_bits({name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bool})
    return tensors | bits


def restored(state: Tensors, values: Mapping[str, Memory]) -> dict[str, Memory]:
    """Return the inverse of :func:`flattened`.

    Parameters
    ----------
    state : named tensors, in any order.
    values : remembered values of the same structure, whose order and, for bools, whose shapes the result has. A dict of
        other tensors may have more names in ``state``.
    """
    return {name: _restored(state, name, value) for name, value in values.items()}


def _restored(state: Tensors, name: str, value: Memory) -> Memory:
    if isinstance(value, list):
        return [_like(state, f"{name}/{client}/", each) for client, each in enumerate(value)]
    if isinstance(value, Tensor):
        return _like(state, "", {name: value})[name]
    more = {key: tensor.clone() for key, tensor in unprefixed(f"{name}/", state).items() if key not in value}
    return _like(state, f"{name}/", value) | more


def _like(state: Tensors, prefix: str, values: Tensors) -> Tensors:
    """Return the tensors of ``state`` that stand in the place of ``values``."""
    for name in values:
        if f"{prefix}{name}" not in state:
            raise UserError(f"state of the method lacks {prefix + name!r}: another version of the code wrote it")
    tensors = {name: state[f"{prefix}{name}"].clone() for name in values}
    shapes = {name: value.shape for name, value in values.items() if value.dtype == torch.bool}
    return tensors | unpack_bits({name: tensors[name] for name in shapes}, shapes)
