"""Inputs of a network: one tensor of numbers, one of tokens, or several tensors by name or in order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True, eq=False)
class Inputs:
    """Several tensors [n, ...] of the same samples, such as token ids and mask; indexing takes the same part of each.

    ``names``: the network's keyword arguments for the tensors; (): the tensors are its arguments in order.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] = ()

    @staticmethod
    def of(parts: Mapping[str, Tensor] | Sequence[Tensor]) -> "Inputs":
        if isinstance(parts, Mapping):
            return Inputs(tuple(parts.values()), tuple(map(str, parts)))
        return Inputs(tuple(parts))

    def ordered(self, names: Collection[str]) -> list[Tensor]:
        """Return the tensors in the order of ``names``; ValueError if the input has other names."""
        if sorted(names) != sorted(self.names):
            raise ValueError(f"has {', '.join(self.names)}: must have {', '.join(names)}, as the first one")
        return [self.tensors[self.names.index(name)] for name in names] or [*self.tensors]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, chosen: Any) -> "Inputs":
        return self.map(lambda tensor: tensor[chosen])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs(tuple(map(function, self.tensors)), self.names)

    def to(self, device: torch.device) -> "Inputs":
        return self.map(lambda tensor: tensor.to(device))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


_pytree.register_pytree_node(Inputs, lambda x: (list(x.tensors), x.names), lambda t, names: Inputs(tuple(t), names))
Batch = Tensor | Inputs


class Part(NamedTuple):
    """One tensor of an input: its shape without the batch axis, its dtype, and the number that integers stay below."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: int = 0


@dataclass(frozen=True)
class Form:
    """The form of one input that is not one tensor of numbers: its tensors, their names as in :class:`Inputs`.

    ``single``: it is one tensor, not :class:`Inputs` of one.
    """

    parts: tuple[Part, ...]
    names: tuple[str, ...] = ()
    single: bool = False

    @property
    def given(self) -> Any:
        """The shapes, as a network's parameter ``in_shape`` is given them: a tuple, several, or by name."""
        shapes = tuple(part.shape for part in self.parts)
        if self.single:
            return shapes[0]
        return dict(zip(self.names, shapes, strict=True)) if self.names else shapes

    @property
    def tokens(self) -> int:
        return max(part.limit for part in self.parts)


Shape = tuple[int, ...] | Form  # of one input; a tuple: one tensor of float32


def form_of(*stored: Batch, tokens: int = 0) -> Shape:
    """Return the form of one of the samples [n, ...]; ``tokens``: tokens stay below it, or below the largest + 1."""
    first = stored[0]
    if isinstance(first, Tensor) and (first.is_floating_point() or first.dtype == torch.uint8):
        return tuple(first.shape[1:])
    every = [x.tensors if isinstance(x, Inputs) else (x,) for x in stored]
    parts = []
    for same in zip(*every, strict=True):
        limit = 0
        if not same[0].is_floating_point():
            last = max((int(tensor.max()) for tensor in same if tensor.numel()), default=0)
            limit = max(last + 1, tokens if last > 1 else 0)
        parts.append(Part(tuple(same[0].shape[1:]), same[0].dtype, limit))
    return Form(tuple(parts), first.names if isinstance(first, Inputs) else (), isinstance(first, Tensor))


def blank(n: int, shape: Shape, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
    """Return inputs of zeros, masks of ones; ``dtype``: of floating-point tensors."""

    def made(part: Part) -> Tensor:
        kind = dtype if dtype and part.dtype.is_floating_point else part.dtype
        return torch.full((n, *part.shape), int(_is_mask(part)), dtype=kind, device=device)

    return _batch(shape, made)


def drawn(count: int, shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """Return random inputs on the CPU: normal numbers, uniform tokens, masks of ones."""

    def made(part: Part) -> Tensor:
        size = (count, *part.shape)
        if part.dtype.is_floating_point:
            return torch.randn(size, generator=generator, dtype=dtype)
        if _is_mask(part):
            return torch.ones(size, dtype=part.dtype)
        return torch.randint(part.limit, size, generator=generator)

    return _batch(shape, made)


def _batch(shape: Shape, made: Callable[[Part], Tensor]) -> Batch:
    if not isinstance(shape, Form):
        return made(Part(shape, torch.get_default_dtype()))
    tensors = tuple(map(made, shape.parts))
    return tensors[0] if shape.single else Inputs(tensors, shape.names)


def _is_mask(part: Part) -> bool:
    return not part.dtype.is_floating_point and part.limit <= 2


def _kind(x: Batch) -> str:
    if not isinstance(x, Inputs):
        return "one tensor"
    return "a mapping" if x.names else f"a tuple of {len(x.tensors)}"


def joined(parts: Sequence[Batch], join: Callable[[list[Tensor]], Tensor]) -> Batch:
    """Return batches of one form as one: ``torch.cat`` or ``torch.stack`` of each tensor.

    ValueError, whose text continues "an item": a batch has other tensors than the first.
    """
    first, kinds = parts[0], [*dict.fromkeys(map(_kind, parts))]
    if len(kinds) > 1:
        raise ValueError(f"is {kinds[1]}: must be {kinds[0]}, as the first one")
    if isinstance(first, Inputs):
        columns = zip(*(part.ordered(first.names) for part in parts if isinstance(part, Inputs)), strict=True)
        return Inputs(tuple(join(list(column)) for column in columns), first.names)
    return join([part for part in parts if isinstance(part, Tensor)])


def shape_shown(shape: Shape) -> Any:
    """Return the shape of one input as users see it: a tuple, or one of each tensor."""
    return shape.given if isinstance(shape, Form) else tuple(shape)


def size_of(shape: Shape) -> int:
    """Return the bytes of one input in memory."""
    return blank(1, shape, "meta").nbytes
