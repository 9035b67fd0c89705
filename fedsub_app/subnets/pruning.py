"""Pruning of weights and channels of a client's network, and the paper's formula for its bytes.

Vahidian, Morafah, Lin: Personalized Federated Learning by Structured and Unstructured Pruning under Data Heterogeneity
(Sub-FedAvg), ICDCS Workshops 2021, https://arxiv.org/abs/2105.00562. "As published": https://github.com/MMorafah/Sub-FedAvg.

A sub-network is one dict of bool masks, 1: kept. The entry of a unit group (``"conv1"``) is the mask of its channels,
``[size]``; the entry of a tensor (``"fc1.weight"``) is the mask of its weights, of its shape. Masks only shrink.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsub_app.common.tensors import Tensors
from fedsub_app.models import UnitGroup, is_turned, tensors_of, trainable, unit_groups
from fedsub_app.subnets.masks import expand
from fedsub_app.subnets.slices import put, take

Pruning = Literal["unstructured", "structured", "hybrid"]


@dataclass(frozen=True)
class Prunable:
    """The parts of a network that can be pruned."""

    groups: tuple[UnitGroup, ...]  # whose channels can go
    scales: Mapping[str, str]  # group name -> name of the BatchNorm weight (gamma) that is the channels' importance
    weights: tuple[str, ...]  # names of the tensors whose single positions can go
    shapes: Mapping[str, torch.Size]  # of all tensors of the whole network
    sizes: Mapping[str, int]  # elements of each of its parameters

    def everything(self) -> Tensors:
        """Return the masks of the whole network."""
        shapes = {group.name: torch.Size([group.size]) for group in self.groups}
        shapes |= {name: self.shapes[name] for name in self.weights}
        return {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}

    def positions(self, masks: Mapping[str, Tensor]) -> Tensors:
        """Return the positions kept of every tensor that can be pruned: tensor name -> bool of its shape."""
        indexed = {place.name for group in self.groups for place in group.places}
        shapes = {name: shape for name, shape in self.shapes.items() if name in indexed}
        kept = expand(self.groups, masks, shapes)
        return kept | {name: kept[name] & masks[name] if name in kept else masks[name] for name in self.weights}

    def cut(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensors:
        """Return the smaller network: pruned channels are cut out, pruned weights are 0."""
        zeroed = {name: tensors[name] * masks[name] for name in self.weights}
        return take({**tensors, **zeroed}, self.groups, masks)

    def widen(self, tensors: Mapping[str, Tensor], masks: Tensors) -> Tensors:
        """Return a smaller network's tensors in the shapes of the whole one, 0 at the positions that it lacks."""
        return put(tensors, self.groups, masks, self.shapes)

    def pruned(self, masks: Mapping[str, Tensor]) -> float:
        """Return the fraction of all parameters, biases and BatchNorm's included, that is gone."""
        gone = sum(int((~kept).sum()) for name, kept in self.positions(masks).items() if name in self.sizes)
        return gone / sum(self.sizes.values())

    def published_bytes(self, masks: Mapping[str, Tensor]) -> float:
        """Return Table 1's formula (:func:`published_bytes`) for a client in a round, with its masks as they are.

        Hybrid: the formula counts the linear layers' weights and the remaining weights of the convolutions; biases go
        down only. Structured, which the formula does not have: the remaining weights of both.
        """
        norms = {name.rpartition(".")[0] for name in self.scales.values()}
        parameters = sum(size for name, size in self.sizes.items() if name.rpartition(".")[0] not in norms)
        positions = self.positions(masks)
        if not self.groups:
            return published_bytes(parameters, self.pruned(masks))
        sent = sum(self.sizes[name] for name in self.weights)
        gone = sum(int((~positions[name]).sum()) for name in self.weights)
        whole = {n: size for n, size in self.sizes.items() if len(self.shapes[n]) > 1 and n not in self.weights}
        dense = sum(int(positions[n].sum()) if n in positions else size for n, size in whole.items())
        return published_bytes(parameters, gone / max(1, sent), sent, dense)


def prunable(model: nn.Module, pruning: Pruning) -> Prunable:
    """Return the parts of a network that can be pruned.

    Unstructured: the trained weights of convolutions and linear layers. Structured: the units of each layer that has a
    BatchNorm with scaling factors behind it; where there are several, as in a residual stream, the last one counts.
    Hybrid: these units, and the weights of the linear layers. ValueError: no layer has such a BatchNorm; TypeError: the
    structure holds a layer whose units are not known.
    """
    kinds = {"unstructured": (nn.modules.conv._ConvNd, nn.Linear), "structured": (), "hybrid": (nn.Linear,)}[pruning]
    shapes = {name: tensor.shape for name, tensor in tensors_of(model).items()}
    linear = nn.Linear in kinds
    layers = [name for name, m in model.named_modules() if isinstance(m, kinds) or (linear and is_turned(m))]
    names = (f"{name}.weight".removeprefix(".") for name in layers)  # the network may be one layer
    trained = trainable(model)
    weights = tuple(name for name in names if name in trained)
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    every = () if pruning == "unstructured" else unit_groups(model)
    scales = {group.name: row for group in every for row in group.rows if row in norms}
    if pruning != "unstructured" and not scales:
        raise ValueError("no layer has a BatchNorm behind it whose scaling factors could say which channels go")
    groups = tuple(group for group in every if group.name in scales)
    sizes = {name: p.numel() for name, p in model.named_parameters() if name in shapes}
    return Prunable(groups, scales, weights, shapes, sizes)


def prune_weights(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor], share: float) -> Tensors:
    """Return masks without the smallest weights of each tensor (Algorithm 1, as published).

    Weights with an absolute value below the ``share`` quantile of the nonzero absolute values are removed (linear
    between two values). The largest one always stays. ``share`` is r_us in [0, 1], of the weights that remain.
    """
    pruned = dict(masks)
    for name, mask in masks.items():
        size = torch.where(mask, tensors[name], 0).abs_().numpy()
        if len(alive := size[size > 0]):
            # An array, in float64: with a float the quantile would be rounded to float32.
            pruned[name] = mask & torch.from_numpy(size >= np.quantile(alive, np.array(share)))
    return pruned


def prune_channels(scales: Mapping[str, Tensor], masks: Mapping[str, Tensor], share: float, floor: float) -> Tensors:
    """Return masks without the channels that have the smallest scaling factors (Liu et al. 2017, as published).

    The channels up to position ``int(n * share)`` of the n sorted ``|gamma|`` are removed: one more than the share, r_s
    in [0, 1). A layer that would keep fewer than ``floor``, in [0, 1], of the whole network's channels (rounded down,
    at least 1) is not pruned. ``scales`` are a group's gamma, float ``[size]``.
    """
    pruned = {}
    for name, mask in masks.items():
        size = scales[name].abs()
        ordered = size[mask].sort().values
        kept = mask & (size > ordered[int(len(ordered) * share)])
        pruned[name] = kept if int(kept.sum()) >= max(1, int(floor * len(mask))) else mask
    return pruned


def mask_distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the mean over the tensors of the fraction of positions at which two masks differ; 0 without any."""
    parts = [float((mask != right[name]).double().mean()) for name, mask in left.items()]
    return sum(parts) / max(1, len(parts))


def last_share(pruned: float, target: float, share: float, hybrid: bool) -> float:
    """Return the share that an event prunes: ``share``, or less if ``target`` is nearer.

    Then it is x = ``(target - pruned) / (1 - pruned)``: unstructured at most 0.05, hybrid x - 0.05 if x is above 0.16
    (as published).
    """
    if target - pruned >= share:
        return share
    rest = (target - pruned) / (1 - pruned)
    return (rest - 0.05 if rest > 0.16 else rest) if hybrid else min(0.05, rest)


def published_bytes(parameters: int, pruned: float = 0.0, sent: int | None = None, dense: int = 0) -> float:
    """Return Table 1's bytes of a client in a round: down the whole network, up 32 bit a kept, 1 bit a pruned number.

    ``Cost = R x B x |W| x 2`` of R rounds of B clients, decoded from the numbers that it prints: no mask bits, the
    target's pruning from the first round on. For hybrid pruning it reproduces few of them to the digit.
    ``parameters`` is |W|, biases included, without BatchNorm's; ``pruned`` in [0, 1] is a fraction of the ``sent``
    numbers, by default all, with hybrid pruning the linear layers' weights; ``dense`` counts further numbers that are
    sent whole, with hybrid pruning the remaining weights of the convolutions.
    """
    sent = parameters if sent is None else sent
    return (32 * parameters + 32 * (1 - pruned) * sent + pruned * sent + 32 * dense) / 8
