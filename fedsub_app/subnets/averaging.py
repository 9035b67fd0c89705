"""The server's mean of what clients send, with or without masks: FedAvg, FedPeWS, FedPart, Sub-FedAvg, FedSelect."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Elements that are summed over all updates before the next ones are touched. Four float32 buffers of this size stay in
# the processor's cache, so that each update is read from memory once and nothing but the result is written to it.
BLOCK = 1 << 16


class Contribution(NamedTuple):
    """What one client adds to the mean.

    Attributes
    ----------
    tensors : tensor name -> values, of the full shape. A tensor that is lacking gets nothing from this client.
    masks : tensor name -> bool that broadcasts to its tensor: the positions that count; all where one is lacking.
    weight : of the client; finite.
    """

    tensors: Mapping[str, Tensor]
    masks: Mapping[str, Tensor] | None = None
    weight: float = 1.0


def masked_mean(
    old: Mapping[str, Tensor], updates: Sequence[Contribution], server_lr: float = 1.0
) -> dict[str, Tensor]:
    """Return, for every position, the weighted mean of those updates that cover it; the old value where none does.

    ``new = old + server_lr * (sum_i w_i m_i x_i / sum_i w_i m_i - old)`` where ``sum_i w_i m_i > 0``, else ``old``.
    FedPeWS (2024), Eq. 4; without masks Eq. 2, which is FedAvg.

    What holds: no mask and an all-ones mask give bit-identical results; ``server_lr = 1`` gives exactly the quotient
    above, 0 exactly ``old``; the result depends on the order of the updates in the last bits only, and that order is
    the caller's (sorted by client id). The mean of equal tensors is that tensor up to rounding (relative error of about
    ``len(updates) * 2**-24``), exactly so where each weight and each partial sum of the weights is a power of two.

    Parameters
    ----------
    old : tensor name -> float tensor of any shape, on the CPU or all on one device. Not modified.
    updates : what each client adds, in the order of the sum. Values must be finite also where they are masked. Where
        negative weights make the denominator 0 or less, the old value stays.
    server_lr : step from ``old`` (0) to the mean (1).

    Returns
    -------
    tensor name -> float32, contiguous, for every name of ``old``, sharing no memory with the arguments. Besides it
    a few blocks of ``BLOCK`` elements are allocated and, for tensors that have masks, one float a position.

    Raises
    ------
    ValueError
        If an update has an unknown name, or a shape other than that of ``old``, or a mask that is not bool.
    """
    mean = MaskedMean(old)
    mean.add(updates)
    return mean.result(server_lr)


class MaskedMean:
    """:func:`masked_mean` of updates that come one after the other: what is kept are sums, not updates.

    The result is bit for bit that of all updates at once in the same order, however they are cut into :meth:`add`s.
    Weights are divided by the first one, so that equal weights cancel exactly.

    Parameters
    ----------
    old : tensor name -> float tensor of any shape, on the CPU or all on one device. Not modified, and not copied.
    """

    def __init__(self, old: Mapping[str, Tensor]) -> None:
        self._old = old
        self._sums: dict[str, Tensor] = {}  # float32, of the shape of the old one; [1] for a 0-dim tensor
        self._weights: dict[str, Tensor] = {}  # their weights: 0-dim until a mask comes, then one a position
        self._total = torch.zeros(())
        self._unit: float | None = None
        self._counted = True  # all weights are 1 and fewer than 256: a byte a position holds them

    @torch.no_grad()
    def add(self, updates: Sequence[Contribution]) -> None:
        """Add what clients contribute, in the order of the sum.

        Raises
        ------
        ValueError
            If an update has an unknown name, or a shape other than that of ``old``, or a mask that is not bool.
        """
        for tensors, masks, _ in updates:
            check(self._old, tensors, masks or {})
        if self._unit is None and updates:
            self._unit = updates[0][2] if updates[0][2] > 0 else 1.0
        scaled = [(x, masks or {}, weight / (self._unit or 1.0)) for x, masks, weight in updates]
        for _, _, weight in scaled:
            self._total += weight
        self._counted = self._counted and all(weight == 1 for *_, weight in scaled) and bool(self._total < 256)
        for name in self._old:
            own = [(x[name], masks.get(name), weight) for x, masks, weight in scaled if name in x]
            if own and self._old[name].numel():
                self._add_to(name, own)

    def _add_to(self, name: str, updates: Sequence[tuple[Tensor, Tensor | None, float]]) -> None:
        """Add to one tensor, block by block, so that each update is read from memory once."""
        old = self._old[name]
        if old.dim() == 0:  # blocks are cut along axis 0
            updates = [(x[None], None if m is None else m[None], weight) for x, m, weight in updates]
        shape = old.shape or (1,)
        if name not in self._sums:
            self._sums[name] = torch.zeros(shape, device=old.device)
            self._weights[name] = torch.zeros((), device=old.device)
        sums, weights = self._sums[name], self._weights[name]
        masked = bool(weights.dim()) or any(m is not None for _, m, _ in updates)
        if masked:
            weights = weights.to(torch.uint8 if self._counted else torch.float32)
            weights = self._weights[name] = weights if weights.dim() else weights.expand(shape).clone()
        else:
            for _, _, weight in updates:
                weights += weight
        rows = max(1, BLOCK * len(sums) // sums.numel())
        # Splitting a tensor that fits one block costs as much as summing it: a third of the time of 1,000 LeNets.
        values = [x.split(rows) if rows < len(sums) else (x,) for x, _, _ in updates]
        # uint8 is the same bytes as bool and becomes a float two to three times faster. expand is a view, for any mask.
        masks = [None if m is None else m.view(torch.uint8).expand(shape).split(rows) for _, m, _ in updates]
        buffer, ones = torch.empty_like(sums[:rows]), torch.ones_like(sums[:rows])
        for k, part in enumerate(sums.split(rows)):
            size, covering = len(part), weights[k * rows :][: len(part)] if masked else weights
            for x, m, (_, _, weight) in zip(values, masks, updates, strict=True):
                # The same sums with and without a mask, so that a mask of ones changes no bit.
                mask = ones[:size] if m is None else buffer[:size].copy_(m[k])
                if m is None and weight == 1:
                    part.add_(x[k])
                else:
                    part.addcmul_(x[k], mask, value=weight)
                if masked and self._counted:
                    covering.add_(1 if m is None else m[k])
                elif masked:
                    covering.add_(mask, alpha=weight)

    def everybody(self, name: str) -> Tensor:
        """Return where all updates so far cover a tensor, bool, of its shape or one that broadcasts to it."""
        weights = self._weights.get(name, torch.zeros(()))
        return (weights if weights.numel() > 1 else weights.reshape(())) == self._total

    @torch.no_grad()
    def result(self, server_lr: float = 1.0) -> dict[str, Tensor]:
        """Return what :func:`masked_mean` says; to be called once, because the sums become the result."""
        new = {}
        for name, old in self._old.items():
            mean = self._sums.pop(name, None)
            if mean is None:
                new[name] = old.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
                continue
            weights = self._weights.pop(name)
            rows = max(1, BLOCK * len(mean) // mean.numel())
            parts = (mean.split(rows), weights.expand(mean.shape).split(rows), old.reshape(mean.shape).split(rows))
            for part, weight, before in zip(*parts, strict=True):
                part.div_(weight)
                if server_lr != 1:
                    torch.lerp(before.float(), part, server_lr, out=part)
                torch.where(weight > 0, part, before.float(), out=part)
            new[name] = mean.reshape(old.shape)
        return new


def check(old: Mapping[str, Tensor], tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    for name, x in tensors.items():
        if name not in old:
            raise ValueError(f"update has a tensor {name} that the old model lacks")
        if x.shape != old[name].shape:
            raise ValueError(f"tensor {name} has shape {tuple(x.shape)}, the old one {tuple(old[name].shape)}")
        if name in masks and masks[name].dtype != torch.bool:
            raise ValueError(f"mask {name} has dtype {masks[name].dtype}; allowed: torch.bool")
