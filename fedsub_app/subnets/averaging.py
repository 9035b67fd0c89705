"""The server's mean of the clients' tensors, with or without masks: FedAvg, FedPeWS, FedPart, Sub-FedAvg, FedSelect."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors
from fedsub_app.subnets.slices import ALL, Index, position, sliced_shape

# Elements that are summed over all updates before the next ones are touched. Four float32 buffers of this size stay in
# the processor's cache, so that each update is read from memory once and nothing but the result is written to it.
BLOCK = 1 << 16
# Contributions of this many bytes are summed together: one after the other costs three times the memory traffic.
WAITING_BYTES = 1 << 26
LEAST = 1e-12  # a weight that others are divided by: HetLoRA's, a norm, may be any, and quotients overflow float32


class Contribution(NamedTuple):
    """One client's contribution to the mean, by tensor name; a missing tensor gets nothing from this client."""

    tensors: Mapping[str, Tensor]
    masks: Mapping[str, Tensor] | None = None  # bool that broadcasts to its tensor: the positions that count, else all
    weight: float = 1.0  # finite
    slices: Mapping[str, Index] | None = None  # rows and columns of the whole that a tensor without a mask holds
    # Tensors at whose positions no other client contributes. They are added with weight 1, so that the mean is exactly
    # the value; any other weight w gives (w x) / w, rounded twice.
    alone: Collection[str] = ()

    def whole(self, name: str, old: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the values and the mask of a tensor in the shape of ``old``; beside a slice the values are 0."""
        x, index = self.tensors[name], (self.slices or {}).get(name)
        if index is None:
            return x, (self.masks or {}).get(name)
        where = position(index)
        values, mask = x.new_zeros(old.shape), torch.zeros(old.shape, dtype=torch.bool, device=x.device)
        values[where], mask[where] = x, True
        return values, mask


class Mean(Protocol):
    """The mean of a round's contributions: :class:`MaskedMean`, or a class that replaces it."""

    def result(self, server_lr: float = 1.0) -> Tensors:
        """Return the new model, float32; ``server_lr``: step from the old model (0) to the mean (1). Call it once."""
        ...


def masked_mean(old: Mapping[str, Tensor], updates: Sequence[Contribution], server_lr: float = 1.0) -> Tensors:
    """Return, for every position, the weighted mean of the updates that cover it; the old value where none does.

    ``new = old + server_lr * (sum_i w_i m_i x_i / sum_i w_i m_i - old)`` where ``sum_i w_i m_i > 0``, else ``old``.
    FedPeWS (2024), Eq. 4; without masks Eq. 2, which is FedAvg.

    Invariants: no mask and an all-ones mask give bit-identical results, and so do a slice and the whole tensor with a
    mask that is on at the slice's positions (:meth:`Contribution.whole`); ``server_lr = 1`` gives exactly the quotient
    above, 0 exactly ``old``; the order of the updates, which is the caller's, changes the last bits only. The mean of
    equal tensors is that tensor up to a relative error of about ``len(updates) * 2**-24``.

    ``old`` are float tensors of any shape, on the CPU or all on one device; values must be finite also where they are
    masked. The result is float32, contiguous, for every name of ``old``, and shares no memory with the arguments.
    ValueError: an update does not fit ``old`` (:func:`check`).
    """
    mean = MaskedMean(old)
    mean.add(updates)
    return mean.result(server_lr)


class MaskedMean:
    """:func:`masked_mean` of updates that come one after the other; it keeps sums, not updates, and refers to ``old``.

    The result is bit for bit that of all updates at once in the same order, however they are cut into :meth:`add`s.
    Weights are divided by the first one, unless it is tiny, so that equal weights cancel exactly.
    """

    def __init__(self, old: Mapping[str, Tensor]) -> None:
        self._old = old
        self._sums: dict[str, Tensor] = {}  # float32, of the shape of the old one; [1] for a 0-dim tensor
        self._weights: dict[str, Tensor] = {}  # their weights: 0-dim until a mask comes, then one a position
        self._total = torch.zeros(())
        self._unit: float | None = None
        self._counted = True  # there are fewer than 256 weights, all 1: a byte a position holds their sum

    @torch.no_grad()
    def add(self, updates: Sequence[Contribution]) -> None:
        """Add contributions, in the order of the sum; ValueError for one that does not fit the old model."""
        for update in updates:
            check(self._old, update)
        if self._unit is None and updates:
            self._unit = updates[0].weight if updates[0].weight > LEAST else 1.0
        scaled = [update._replace(weight=update.weight / (self._unit or 1.0)) for update in updates]
        for update in scaled:
            self._total += update.weight
        self._counted = self._counted and all(update.weight == 1 for update in scaled) and bool(self._total < 256)
        for name, old in self._old.items():
            terms = [_Term.of(update, name) for update in scaled if name in update.tensors]
            if terms and old.numel():
                self._add_to(name, terms)

    def _add_to(self, name: str, terms: Sequence["_Term"]) -> None:
        old = self._old[name]
        shape = old.shape or (1,)
        if name not in self._sums:
            self._sums[name] = torch.zeros(shape, device=old.device)
            self._weights[name] = torch.zeros((), device=old.device)
        weights = self._weights[name]
        if weights.dim() or any(term.mask is not None or term.place is not None for term in terms):
            weights = weights.to(torch.uint8 if self._counted else torch.float32)
            self._weights[name] = weights if weights.dim() else weights.expand(shape).clone()
        else:
            for weight in [len(terms)] if self._counted else [term.weight for term in terms]:
                weights += weight
        for whole, some in groupby(terms, lambda term: term.place is None):
            (self._add_whole if whole else self._add_slices)(name, list(some))

    def _add_slices(self, name: str, terms: Sequence["_Term"]) -> None:
        """Add to some rows and columns of a tensor, of which nothing else is touched."""
        sums, weights = self._sums[name], self._weights[name]
        one = torch.ones((), device=sums.device)
        for x, _, place, weight in terms:
            where = position(place or ALL)
            sums[where] = sums[where].addcmul_(x, one, value=weight)  # the sum of _add_whole, bit for bit
            weights[where] += 1 if self._counted else weight

    def _add_whole(self, name: str, terms: Sequence["_Term"]) -> None:
        """Add to a tensor block by block, so that each update is read from memory once."""
        sums, weights = self._sums[name], self._weights[name]
        if self._old[name].dim() == 0:  # blocks are cut along axis 0; torch adds a 0-dim float64 as float32
            terms = [t._replace(x=t.x[None], mask=t.mask if t.mask is None else t.mask[None]) for t in terms]
        masked, rows = bool(weights.dim()), max(1, BLOCK * len(sums) // sums.numel())
        fits = rows >= len(sums)
        if fits and not masked and all(term.weight == 1 for term in terms):
            for term in terms:  # as below, where the preparations take longer than these sums
                sums.add_(term.x)
            return

        def cut(x: Tensor) -> Sequence[Tensor]:  # splitting a tensor that fits one block costs as much as summing it
            return (x,) if fits else x.split(rows)

        values = [cut(term.x) for term in terms]
        # uint8 is the same bytes as bool and becomes a float two to three times faster. expand is a view, for any mask.
        masks = [t.mask if t.mask is None else cut(t.mask.view(torch.uint8).expand(sums.shape)) for t in terms]
        buffer, ones = torch.empty_like(sums[:rows]), torch.ones_like(sums[:rows])
        for k, part in enumerate(cut(sums)):
            room, whole = buffer[: len(part)], ones[: len(part)]
            covering = weights[k * rows :][: len(part)] if masked else weights
            for x, m, (*_, weight) in zip(values, masks, terms, strict=True):
                # The same sums with and without a mask, so that a mask of ones changes no bit.
                mask = whole if m is None else room.copy_(m[k])
                if m is None and weight == 1:
                    part.add_(x[k])
                else:
                    part.addcmul_(x[k], mask, value=weight)
                if masked and self._counted:
                    covering.add_(1 if m is None else m[k])
                elif masked:
                    covering.add_(mask, alpha=weight)

    @torch.no_grad()
    def result(self, server_lr: float = 1.0) -> Tensors:
        """Return the mean (:func:`masked_mean`); to be called once, because the sums become the result."""
        new = {}
        for name, old in self._old.items():
            mean = self._sums.pop(name, None)
            if mean is None:
                new[name] = old.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
                continue
            weights = self._weights.pop(name)
            covered = bool(weights.min() > 0)
            rows = max(1, BLOCK * len(mean) // mean.numel())
            whole = (mean, weights.expand(mean.shape), old.reshape(mean.shape))
            parts = zip(*(each.split(rows) for each in whole), strict=True) if rows < len(mean) else [whole]
            for part, weight, before in parts:
                part.div_(weight)
                if server_lr != 1:
                    torch.lerp(before.float(), part, server_lr, out=part)
                if not covered:  # two thirds of the time that this function takes
                    torch.where(weight > 0, part, before.float(), out=part)
            new[name] = mean.reshape(old.shape)
        return new


class _Term(NamedTuple):
    x: Tensor
    mask: Tensor | None
    place: Index | None
    weight: float

    @classmethod
    def of(cls, update: Contribution, name: str) -> "_Term":
        mask, place = (update.masks or {}).get(name), (update.slices or {}).get(name)
        return cls(update.tensors[name], mask, place, 1.0 if name in update.alone else update.weight)


def check(old: Mapping[str, Tensor], update: Contribution) -> None:
    """Raise ValueError where an update does not fit the old model.

    Faults: a weight that is not finite, an unknown name, another shape, a mask that is not bool, does not broadcast or
    has a slice beside it, rows or columns that ``old`` lacks or that do not ascend.
    """
    masks, slices = update.masks or {}, update.slices or {}
    if not math.isfinite(update.weight):
        raise ValueError(f"update has weight {update.weight}; allowed: finite numbers")
    for name, x in update.tensors.items():
        if name not in old:
            raise ValueError(f"update has a tensor {name} that the old model lacks")
        shape, whose = old[name].shape, "the old one"
        if name in slices:
            if name in masks:
                raise ValueError(f"tensor {name} has a slice and a mask; allowed is one of them")
            try:
                shape, whose = sliced_shape(shape, slices[name]), "its slice"
            except ValueError as error:
                raise ValueError(f"slice of tensor {name} {error}") from None
        if x.shape != shape:
            raise ValueError(f"tensor {name} has shape {tuple(x.shape)}, {whose} {tuple(shape)}")
        if name not in masks:
            continue
        if masks[name].dtype != torch.bool:
            raise ValueError(f"mask {name} has dtype {masks[name].dtype}; allowed: torch.bool")
        try:
            masks[name].expand(shape)
        except RuntimeError:
            raise ValueError(f"mask {name} has shape {tuple(masks[name].shape)}, its tensor {tuple(shape)}") from None
