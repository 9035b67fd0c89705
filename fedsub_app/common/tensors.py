"""Tensors by name, and the names' prefixes."""

from collections.abc import Collection, Mapping

import torch

from fedsub_app.common.files import Json as Json

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors whose names begin with ``prefix``, without it: the inverse of :func:`prefixed`."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def brought(tensors: Mapping[str, torch.Tensor], device: torch.device = CPU) -> Tensors:
    """Return the tensors on a device, in C order, in one copy a dtype; to a GPU from pinned memory, without waiting."""
    moved = dict(tensors)
    away = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device != device}
    pinned = device.type == "cuda" and torch.cuda.is_initialized()  # the tests' pretended GPU cannot pin
    for dtype in {tensor.dtype: None for tensor in away.values()}:
        some = {name: tensor for name, tensor in away.items() if tensor.dtype == dtype}
        values = [tensor.reshape(-1) for tensor in some.values()]
        sizes = [len(part) for part in values]
        out = torch.empty(sum(sizes), dtype=dtype, pin_memory=True) if pinned else None
        parts = torch.cat(values, out=out).to(device, non_blocking=pinned).split(sizes)
        moved |= {name: part.view(some[name].shape) for name, part in zip(some, parts, strict=True)}
    return moved


def chosen(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> Tensors:
    """Return the tensors of these names, in the order of ``tensors``."""
    return {name: tensor for name, tensor in tensors.items() if name in names}
