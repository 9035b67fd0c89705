"""Sparse networks, client side; papers and deviations: ``strategies/sparse.py`` and those of the methods."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, brought, prefixed, unprefixed
from fedsub_app.subnets.masks import gather, pack_bits, scatter, unpack_bits
from fedsub_app.subnets.sparsity import exchanged
from strategies.settings import FedDSTSettings, SparseSettings
from strategies.sparse import MASK


class SparseClient(Client):
    """Trains the weights that the mask keeps. Its state is the mask, as bits."""

    irreplaceable = "its mask is not there"

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained values at the positions that are kept and, where masks are adjusted, the new mask."""
        masks = self.received(sent)
        self.load({name: sent[name] for name in self.network.tensors} | scatter(sent, masks))
        self.fit(keep=masks)
        model = self.trained()
        self.state = {n: t for n, t in self.state.items() if not n.startswith(MASK)} | prefixed(MASK, pack_bits(masks))
        own = {}
        if config["adjust"]:
            model, masks = self.adjust(model, masks)
            own = prefixed(MASK, masks)
        return model | gather(model, masks) | own

    def received(self, sent: Tensors) -> Tensors:
        """Return the masks: as sent, or those of the client's last merged round."""
        if masks := unprefixed(MASK, sent):
            return masks
        bits = unprefixed(MASK, self.state)
        return unpack_bits(bits, {name: self.network.tensors[name].shape for name in bits})

    def adjust(self, model: Tensors, masks: Tensors) -> tuple[Tensors, Tensors]:
        """Return the trained model under a mask of the client's own, and that mask."""
        return model, masks


class FedDSTClient(SparseClient):
    """Exchanges a share of its weights after its training."""

    options: FedDSTSettings

    def adjust(self, model: Tensors, masks: Tensors) -> tuple[Tensors, Tensors]:
        """Return the model with 0 at the positions that have grown, and the new masks."""
        self.network.training_mode()
        _, slopes = self.slopes({name: self.network.tensors[name] for name in masks}, next(self.batches(1, "slopes")))
        new, survived = exchanged(model, brought(slopes), masks, self.options.share_at(self.round))
        return model | {name: model[name] * kept for name, kept in survived.items()}, new


class SSFLClient(SparseClient):
    """Computes the saliencies in the first round, and trains under the mask in the others."""

    options: SparseSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the saliencies where the server asks for them, or the trained values."""
        if "saliency" not in config:
            return super().train(sent, config)
        self.load(sent)
        self.network.training_mode()
        weights = {name: self.network.tensors[name] for name in config["saliency"]}
        loss, slopes = self.slopes(weights, next(self.batches(1, "slopes")))
        self.metrics["train-loss"] = float(loss)
        return {name: (weight.detach() * slopes[name]).abs() for name, weight in weights.items()}
