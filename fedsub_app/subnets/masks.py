"""Neuron masks: functions that draw them, fix them and expand them to the positions that they cover.

FedPeWS (Tastan et al., "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated Learning",
2024; equations 4 to 6). A mask of a network is a dict ``group name -> bool tensor [group.size]``, one entry per hidden
unit (:class:`fedsub_app.models.units.UnitGroup`); inputs and outputs are always on. A group
that has no mask is fully on.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.models import UnitGroup
from fedsub_app.models.groups import kept_positions


def expand(
    groups: Sequence[UnitGroup],
    unit_masks: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Return the mask of every entry of every tensor, by FedPeWS's rule "and" (the rule of IST).

    ``W_l[b, a] = m_l[b] & m_{l-1}[a]``, bias and BatchNorm ``m_l[b]``; a convolution's ``W_l[o, i, :, :] = m_l[o] &
    m_{l-1}[i]``; behind a flatten each channel stands for its height x width columns. Everything else, the output bias
    included, is on.

    Parameters
    ----------
    groups : the network's :func:`~fedsub_app.models.units.unit_groups`.
    unit_masks : group name -> bool ``[group.size]``.
    shapes : tensor name -> shape, of the tensors wanted.

    Returns
    -------
    tensor name -> bool of the full shape, for every name of ``shapes``.
    """
    masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for (name, axis), kept in kept_positions(groups, unit_masks).items():
        if name in masks:
            masks[name] &= kept.view([-1 if k == axis else 1 for k in range(masks[name].dim())])
    return masks


def score_gradient(scores: Tensor, mask_gradient: Tensor, others: Tensor, lambda_: float) -> Tensor:
    """Return the gradient of FedPeWS's mask objective (Eq. 6) in the scores.

    ``L_s = loss(x ∘ m) - lambda * ||theta - theta_others||²`` with m drawn from Bernoulli(theta), theta = sigmoid(s).
    The loss's gradient goes straight through the sampling, as if the mask were theta; the diversity's is exact.

    Parameters
    ----------
    scores : float ``[h]``.
    mask_gradient : float ``[h]``, the gradient of the loss in the mask that was drawn.
    others : float ``[h]`` in [0, 1]: the probabilities of the other clients, taken together.
    """
    theta = torch.sigmoid(scores)
    return (mask_gradient - 2 * lambda_ * (theta - others)) * theta * (1 - theta)


def fixed_masks(groups: Sequence[UnitGroup], shares: Sequence[float]) -> list[dict[str, Tensor]]:
    """Return FedPeWS-Fixed's masks: disjoint slices of every hidden layer, one per client, that cover it.

    In a layer of width w, client i owns ``[floor(w * (p_0 + .. + p_{i-1})), floor(w * (p_0 + .. + p_i)))``.

    Parameters
    ----------
    groups : the network's unit groups.
    shares : p_i > 0, each client's fraction of every layer, adding up to 1 (Appendix C.4 tests 0.25 and 0.75).

    Returns
    -------
    One mask per client: group name -> bool ``[group.size]``.

    Raises
    ------
    UserError
        A layer has too few units, so that a client would own none of them and its network would be dead.
    """
    num_clients = len(shares)
    clients: list[dict[str, Tensor]] = [{} for _ in range(num_clients)]
    for group in groups:
        # 1e-6 of a unit: floats that should add up to a whole number of units may miss it from below.
        bounds = [int(group.size * sum(shares[:i]) + 1e-6) for i in range(num_clients + 1)]
        for client, masks in enumerate(clients):
            if bounds[client] == bounds[client + 1]:
                raise UserError(
                    f"num-clients = {num_clients}: client {client} would own none of the {group.size} units of layer "
                    f"{group.name}; allowed: a share of at least one unit of every layer for each client"
                )
            masks[group.name] = torch.zeros(group.size, dtype=torch.bool)
            masks[group.name][bounds[client] : bounds[client + 1]] = True
    return clients


def deal(groups: Sequence[UnitGroup], widths: Sequence[float], draws: torch.Generator) -> list[dict[str, Tensor]]:
    """Return IST's partition: every unit of every hidden layer in exactly one mask, at random.

    Each layer is dealt by a permutation of its own; its parts are as equal as possible.

    Parameters
    ----------
    groups : the network's unit groups.
    widths : fraction of each layer, above 0, that each client can hold. Unless all are 1, each client has one unit and
        a part of the others in proportion to its width, at most as large as its width.
    draws : CPU generator of the permutations.

    Returns
    -------
    One mask a client: group name -> bool ``[group.size]``; of a layer with fewer units than clients it may be empty.
    """
    dealt: list[dict[str, Tensor]] = [{} for _ in widths]
    shares = [width / max(1.0, sum(widths)) for width in widths]
    for group in groups:
        order = torch.randperm(group.size, generator=draws)
        parts = order.tensor_split(len(widths))
        if {*widths} != {1.0}:
            rest = group.size - len(widths)
            parts = order.tensor_split([k + round(rest * x) for k, x in enumerate(accumulate(shares), 1)])
        for masks, index in zip(dealt, parts, strict=False):
            masks[group.name] = torch.zeros(group.size, dtype=torch.bool).index_fill_(0, index, True)
    return dealt


def gather(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values at the positions that are on: tensor name -> ``[number of positions]``, in row-major order.

    Parameters
    ----------
    tensors, masks : tensor name -> values, and bool of the same shape, for the same names.
    """
    # NumPy's compress: seven times faster than torch's indexing with a mask, on the CPU.
    return {
        name: torch.from_numpy(np.compress(mask.numpy().ravel(), tensors[name].cpu().numpy().ravel()))
        for name, mask in masks.items()
    }


def scatter(values: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors with the gathered ``values`` at the positions that are on and 0 elsewhere.

    Inverse of :func:`gather` on those positions.
    """
    return {
        name: values[name].new_zeros(mask.shape).masked_scatter_(mask, values[name]) for name, mask in masks.items()
    }


def pack_bits(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return bool masks as bits, for storage: tensor name -> uint8 ``[ceil(numel / 8)]``, in row-major order."""
    return {name: torch.from_numpy(np.packbits(mask.numpy())) for name, mask in masks.items()}


def unpack_bits(bits: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Inverse of :func:`pack_bits`, for every name of ``shapes``; a mask that ``bits`` lacks is all off."""
    masks = {}
    for name, shape in shapes.items():
        masks[name] = torch.zeros(shape, dtype=torch.bool)
        if name in bits:
            values = np.unpackbits(bits[name].numpy(), count=shape.numel())
            masks[name] = torch.from_numpy(values.view(bool)).view(shape)
    return masks
