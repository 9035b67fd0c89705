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


@torch.no_grad()
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
    tensor name -> float32, contiguous, for every name of ``old``, sharing no memory with the arguments. Besides it, up
    to four blocks of ``BLOCK`` elements are allocated (more only if one row ``x[0]`` of a tensor is larger).

    Raises
    ------
    ValueError
        If an update has an unknown name, or a shape other than that of ``old``, or a mask that is not bool.
    """
    for tensors, masks, _ in updates:
        _check(old, tensors, masks or {})
    return {
        name: _mean_of_one(
            tensor,
            [(x[name], None if m is None else m.get(name), weight) for x, m, weight in updates if name in x],
            server_lr,
        )
        for name, tensor in old.items()
    }


def _check(old: Mapping[str, Tensor], tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    for name, x in tensors.items():
        if name not in old:
            raise ValueError(f"update has a tensor {name} that the old model lacks")
        if x.shape != old[name].shape:
            raise ValueError(f"tensor {name} has shape {tuple(x.shape)}, the old one {tuple(old[name].shape)}")
        if name in masks and masks[name].dtype != torch.bool:
            raise ValueError(f"mask {name} has dtype {masks[name].dtype}; allowed: torch.bool")


def _mean_of_one(old: Tensor, updates: Sequence[tuple[Tensor, Tensor | None, float]], server_lr: float) -> Tensor:
    """:func:`masked_mean` of one tensor."""
    if not updates or old.numel() == 0:
        return old.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if old.dim() == 0:  # blocks are cut along axis 0
        return _mean_of_one(
            old[None], [(x[None], None if m is None else m[None], w) for x, m, w in updates], server_lr
        )[0]
    new = torch.empty(old.shape, dtype=torch.float32, device=old.device)
    rows = max(1, BLOCK * len(new) // new.numel())
    # Splitting a tensor that fits one block costs as much as summing it: a third of the time of 1,000 LeNets.
    values = [x.split(rows) if rows < len(new) else (x,) for x, _, _ in updates]
    # uint8 is the same bytes as bool and becomes a float two to three times faster. expand is a view, for any mask.
    masks = [None if m is None else m.view(torch.uint8).expand(new.shape).split(rows) for _, m, _ in updates]
    weights = [weight for _, _, weight in updates]
    any_mask = any(m is not None for m in masks)
    equal = weights[0] > 0 and len(set(weights)) == 1
    if equal:  # they cancel, and what is left of the denominator is a count: a byte a position instead of a float
        weights = [1.0] * len(weights)
    counted = any_mask and equal and len(weights) < 256
    numerator, denominator, buffer, ones = (torch.ones_like(new[:rows]) for _ in range(4))
    count = torch.empty_like(numerator, dtype=torch.uint8)
    if not any_mask:  # the same for all blocks
        denominator.zero_()
        for weight in weights:
            denominator.add_(ones, alpha=weight)
    for k, (before, result) in enumerate(zip(old.float().split(rows), new.split(rows), strict=True)):
        if len(result) < rows:  # the last block
            numerator, denominator, buffer, ones, count = (
                t[: len(result)] for t in (numerator, denominator, buffer, ones, count)
            )
        numerator.zero_()
        if counted:
            count.zero_()
        elif any_mask:
            denominator.zero_()
        for x, m, weight in zip(values, masks, weights, strict=True):
            # The same sums with and without a mask, so that a mask of ones changes no bit.
            mask = ones if m is None else buffer.copy_(m[k])
            if m is None and weight == 1:
                numerator.add_(x[k])
            else:
                numerator.addcmul_(x[k], mask, value=weight)
            if counted:
                count.add_(1 if m is None else m[k])
            elif any_mask:
                denominator.add_(mask, alpha=weight)
        if counted:
            denominator.copy_(count)
        mean = numerator.div_(denominator)
        if server_lr != 1:
            torch.lerp(before, mean, server_lr, out=mean)
        torch.where(denominator > 0, mean, before, out=result)
    return new
