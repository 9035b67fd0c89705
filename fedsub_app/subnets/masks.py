"""Neuron masks: functions that draw them, fix them and expand them to the positions that they cover.

A mask of a network is a dict: name of a unit group -> bool ``[group.size]``, an entry for each hidden unit. Inputs,
outputs and groups without a mask are on.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors
from fedsub_app.models import UnitGroup, kept_positions


def expand(groups: Sequence[UnitGroup], unit_masks: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> Tensors:
    """Return the mask of every tensor in ``shapes``, bool of its shape, by FedPeWS's rule "and" (the rule of IST).

    ``W_l[b, a] = m_l[b] & m_{l-1}[a]``, bias and BatchNorm ``m_l[b]``; a convolution's ``W_l[o, i, :, :] = m_l[o] &
    m_{l-1}[i]``; behind a flatten each channel stands for its height x width columns. Everything else, the output bias
    included, is on.
    """
    masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for (name, axis), kept in kept_positions(groups, unit_masks).items():
        if name in masks:
            masks[name] &= kept.view([-1 if k == axis else 1 for k in range(masks[name].dim())])
    return masks


def score_gradient(scores: Tensor, mask_gradient: Tensor, others: Tensor, lambda_: float) -> Tensor:
    """Return the gradient of FedPeWS's mask objective (Tastan et al. 2024, Eq. 6) in the scores; all float ``[h]``.

    ``L_s = loss(x ∘ m) - lambda * ||theta - theta_others||²`` with m drawn from Bernoulli(theta), theta = sigmoid(s).
    The loss's gradient in the mask goes straight through the sampling, as if the mask were theta; the diversity's is
    exact. ``others`` in [0, 1] are the probabilities of the other clients, taken together.
    """
    theta = torch.sigmoid(scores)
    return (mask_gradient - 2 * lambda_ * (theta - others)) * theta * (1 - theta)


def fixed_masks(groups: Sequence[UnitGroup], shares: Sequence[float]) -> list[dict[str, Tensor]]:
    """Return FedPeWS-Fixed's masks, one a client: disjoint slices of every hidden layer, which cover it.

    In a layer of width w, client i owns ``[floor(w * (p_0 + .. + p_{i-1})), floor(w * (p_0 + .. + p_i)))``; ``shares``
    p_i add up to 1 (Appendix C.4 tests 0.25 and 0.75), 0 is no units. :class:`UserError` if a client of a larger
    share would own no unit of a layer, so that its network would be dead.
    """
    num_clients = len(shares)
    clients: list[dict[str, Tensor]] = [{} for _ in range(num_clients)]
    for group in groups:
        # 1e-6 of a unit: floats that should add up to a whole number of units may miss it from below.
        bounds = [int(group.size * sum(shares[:i]) + 1e-6) for i in range(num_clients + 1)]
        for client, masks in enumerate(clients):
            if shares[client] and bounds[client] == bounds[client + 1]:
                none = f"client {client} would own none of the {group.size} units of layer {group.name}"
                allowed = "allowed: a share of at least one unit of every layer for each client"
                raise UserError(f"num-clients = {num_clients}: {none}; {allowed}")
            masks[group.name] = torch.zeros(group.size, dtype=torch.bool)
            masks[group.name][bounds[client] : bounds[client + 1]] = True
    return clients


def deal(groups: Sequence[UnitGroup], widths: Sequence[float], draws: torch.Generator) -> list[dict[str, Tensor]]:
    """Return IST's partition, one mask a client: every unit of every hidden layer in one mask at most, at random.

    Each layer is dealt by a permutation of its own, from the CPU generator ``draws``. ``widths`` are the fractions of
    each layer, above 0, that the clients can hold. If all are 1, the parts are as equal as possible. Otherwise each
    client has one unit and a share of the others in proportion to its width, together no more than its width holds. A
    mask of a layer with fewer units than clients may be empty.
    """
    dealt: list[dict[str, Tensor]] = [{} for _ in widths]
    shares = [width / max(1.0, sum(widths)) for width in widths]
    for group in groups:
        order = torch.randperm(group.size, generator=draws)
        parts = order.tensor_split(len(widths) or 1)  # 0: a round for which no client is there
        if {*widths} != {1.0}:
            rest = group.size - len(widths)
            parts = order.tensor_split([k + round(rest * x) for k, x in enumerate(accumulate(shares), 1)])
            parts = tuple(part[: group.kept(width)] for part, width in zip(parts, widths, strict=False))
        for masks, index in zip(dealt, parts, strict=False):
            masks[group.name] = torch.zeros(group.size, dtype=torch.bool).index_fill_(0, index, True)
    return dealt


def gather(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensors:
    """Return, for every mask, its tensor's values at the positions that are on: ``[positions]``, in row-major order."""
    # NumPy's compress: seven times faster than torch's indexing with a mask, on the CPU.
    return {
        n: torch.from_numpy(np.compress(m.numpy().ravel(), tensors[n].cpu().numpy().ravel())) for n, m in masks.items()
    }


def scatter(values: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensors:
    """Return tensors with the gathered ``values`` at the positions that are on, 0 elsewhere: undoes :func:`gather`."""
    return {n: values[n].new_zeros(mask.shape).masked_scatter_(mask, values[n]) for n, mask in masks.items()}


def pack_bits(masks: Mapping[str, Tensor]) -> Tensors:
    """Return bool masks as bits, for storage: tensor name -> uint8 ``[ceil(numel / 8)]``, in row-major order."""
    return {name: torch.from_numpy(np.packbits(mask.numpy())) for name, mask in masks.items()}


def unpack_bits(bits: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> Tensors:
    """Inverse of :func:`pack_bits`, for every name of ``shapes``; a mask that ``bits`` lacks is all off."""
    masks = {}
    for name, shape in shapes.items():
        masks[name] = torch.zeros(shape, dtype=torch.bool)
        if name in bits:
            values = np.unpackbits(bits[name].numpy(), count=shape.numel())
            masks[name] = torch.from_numpy(values.view(bool)).view(shape)
    return masks
