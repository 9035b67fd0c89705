"""Sparse networks, client side; papers and deviations: ``strategies/sparse.py`` and those of the methods."""

from collections.abc import Collection

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, brought, prefixed, unprefixed
from fedsub_app.secure.client import AT
from fedsub_app.subnets.masks import gather, pack_bits, scatter, unpack_bits
from fedsub_app.subnets.sparsity import exchanged, largest_of_layers
from strategies.asked import GROW, LOSSES, SLOPE, exchange_counts
from strategies.sparse import MASK, weight_names
from strategies.sparse_settings import RegrownSettings


class SparseClient(Client):
    """Trains the weights that the mask keeps. Its state is the mask, as bits."""

    irreplaceable = "its mask is not there"

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained values at the kept positions and, if masks are adjusted, the findings."""
        masks = self.received(sent)
        self.load({name: sent[name] for name in self.network.tensors} | scatter(sent, masks))
        self.fit(keep=masks)
        self.state = {n: t for n, t in self.state.items() if not n.startswith(MASK)} | prefixed(MASK, pack_bits(masks))
        model = self.trained()
        return self.answer(model, masks) if config["adjust"] else model | gather(model, masks)

    def answer(self, model: Tensors, masks: Tensors) -> Tensors:
        """Return the values that the masks keep, with the method's findings, in a round that adjusts the masks."""
        return model | gather(model, masks)

    def slopes_of(self, names: Collection[str], batch: Tensor | None = None) -> Tensors:
        """Return, on the CPU, the loss's gradient in these tensors on a mini-batch, which is drawn by default."""
        self.network.training_mode()
        batch = next(self.batches(1, "slopes")) if batch is None else batch
        return brought(self.slopes({name: self.network.tensors[name] for name in names}, batch)[1])

    def received(self, sent: Tensors) -> Tensors:
        """Return the masks: as sent, or those of the client's last merged round."""
        if masks := unprefixed(MASK, sent):
            return masks
        bits = unprefixed(MASK, self.state)
        return unpack_bits(bits, {name: self.network.tensors[name].shape for name in bits})


class FedDSTClient(SparseClient):
    """Exchanges a share of its weights after its training."""

    options: RegrownSettings

    def answer(self, model: Tensors, masks: Tensors) -> Tensors:
        """Return a new mask of the client's own and the values under it, 0 at the positions that have grown."""
        new, survived = exchanged(model, self.slopes_of(masks), masks, self.options.share_at(self.round))
        model = model | {name: model[name] * kept for name, kept in survived.items()}
        if self.settings.secure_aggregation:
            return model | prefixed(AT, new)
        return super().answer(model, new) | prefixed(MASK, new)


class PruneFLClient(SparseClient):
    """Measures the squared gradients of all weights after its training."""

    def answer(self, model: Tensors, masks: Tensors) -> Tensors:
        """Add the roots of the mean squared gradients of all weights, pruned ones included."""
        names = weight_names(self.settings, self.network.module)
        slopes = [self.slopes_of(names, batch) for batch in self.batches(1, "slopes")]
        roots = {name: torch.stack([each[name] for each in slopes]).square().mean(0).sqrt() for name in names}
        return super().answer(model, masks) | prefixed(SLOPE, roots)


class FedRTSClient(SparseClient):
    """Names the pruned weights with the largest gradients."""

    options: RegrownSettings
    sends_slopes = False

    def answer(self, model: Tensors, masks: Tensors) -> Tensors:
        in_order = {name: masks[name] for name in self.network.tensors if name in masks}
        counts = exchange_counts(self.options, self.round, in_order)
        slopes = self.slopes_of(counts)
        sizes = {name: slope.abs().masked_fill(masks[name], -1) for name, slope in slopes.items()}
        named = largest_of_layers(sizes, counts)
        values = prefixed(SLOPE, gather(slopes, named)) if self.sends_slopes else {}
        return super().answer(model, masks) | prefixed(GROW, named) | values


class FedTinyClient(FedRTSClient):
    """Judges the candidates in round 1; sends gradients with the weights that it names."""

    sends_slopes = True

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return each candidate's mean loss over a pass if the server asks for it, else the trained values."""
        if "candidates" not in config:
            return super().train(sent, config)
        losses, batches = [], [*self.batches(1, "candidates")]
        for number in range(config["candidates"]):
            masks = unprefixed(f"{MASK}{number}/", sent)
            self.load({name: sent[name] * masks.get(name, 1) for name in self.network.tensors})
            self.network.training_mode()  # BatchNorm takes the mini-batch's statistics
            with torch.no_grad():
                parts = [self.loss(self.network(self.x[batch]), self.y[batch]) * len(batch) for batch in batches]
            losses.append(torch.stack(parts).sum() / sum(map(len, batches)))
        self.flops += len(losses) * len(self.y) * self.place.forward_flops(self.network)
        self.metrics["train-loss"] = float(losses[0])
        return {LOSSES: torch.stack(losses)}


class SSFLClient(SparseClient):
    """Computes the saliencies in the first round, and trains under the mask in the others."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the saliencies if the server asks for them, else the trained values."""
        if "saliency" not in config:
            return super().train(sent, config)
        self.load(sent)
        self.network.training_mode()
        weights = {name: self.network.tensors[name] for name in config["saliency"]}
        loss, slopes = self.slopes(weights, next(self.batches(1, "slopes")))
        self.metrics["train-loss"] = float(loss)
        return {name: (weight.detach() * slopes[name]).abs() for name, weight in weights.items()}
