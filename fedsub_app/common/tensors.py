"""Tensors by name, and the names' prefixes."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]


def prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors with ``prefix`` before each name."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors whose names begin with ``prefix``, without it: the inverse of :func:`prefixed`."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def chosen(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> Tensors:
    """Return the tensors of these names, in the order of ``tensors``."""
    return {name: tensor for name, tensor in tensors.items() if name in names}
