"""Sparse networks, client side: the base of the methods of ``strategies/sparse.py``."""

from collections.abc import Collection

from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, brought, prefixed, unprefixed
from fedsub_app.subnets.masks import gather, pack_bits, scatter, unpack_bits
from fedsub_app.training.optimizer import Optimizer
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

    def slopes(self, names: Collection[str]) -> tuple[Tensor, Tensors]:
        """Return the loss on a mini-batch of a pass of its own, and its gradients in tensors of the network."""
        batch = next(self.batches(1, "slopes"))
        weights = {name: self.network.tensors[name].detach().requires_grad_() for name in names}
        others = {name: tensor.detach().clone() for name, tensor in self.network.tensors.items() if name not in weights}
        self.network.training_mode()
        loss = self.loss(self.network(self.x[batch], others | weights), self.y[batch])
        self.flops += len(batch) * self.place.training_flops(self.network, frozenset(weights))
        return loss.detach(), brought(Optimizer(self.settings, weights, 0).gradients(loss))

    def adjust(self, model: Tensors, masks: Tensors) -> tuple[Tensors, Tensors]:
        """Return the trained model under a mask of the client's own, and that mask."""
        return model, masks
