"""A method's state on the server, between its attributes and the named tensors of a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.tensors import Tensors, unprefixed
from fedsub_app.subnets.masks import pack_bits, unpack_bits

Memory = Tensor | Tensors | list[Tensors]  # a list has an entry for each client


def flattened(values: Mapping[str, Memory]) -> Tensors:
    """Return remembered values as named tensors: ``name``, ``name/key`` or ``name/client/key``, bools as bits."""
    tensors = dict(leaves("", values))
    return tensors | pack_bits({name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bool})


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of remembered values; :class:`UserError` for anything else."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if not isinstance(value, list | Mapping):
        kinds = "a tensor, a dict of tensors or a list of such dicts"
        raise UserError(f"remembers {name!r}, which is {shown(value)}: must be {kinds}")
    for key, each in enumerate(value) if isinstance(value, list) else value.items():
        yield from leaves(f"{name}/{key}" if name else str(key), each)


def restored(state: Tensors, values: Mapping[str, Memory]) -> dict[str, Memory]:
    """Return the inverse of :func:`flattened`: values of the structure, and for bools the shapes, of ``values``.

    A dict of other tensors may have more names in ``state``. :class:`UserError` where ``state`` lacks a tensor.
    """
    return {name: _restored(state, name, value) for name, value in values.items()}


def _restored(state: Tensors, name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(state, f"{name}/{client}", each) for client, each in enumerate(value)]
    if isinstance(value, dict):
        known = {key: _restored(state, f"{name}/{key}", each) for key, each in value.items()}
        return known | {key: t.clone() for key, t in unprefixed(f"{name}/", state).items() if key not in known}
    if name not in state:
        raise UserError(f"state of the method lacks {name!r}: another version of the code wrote it")
    if value.dtype == torch.bool:
        return unpack_bits({name: state[name]}, {name: value.shape})[name]
    return state[name].clone()
