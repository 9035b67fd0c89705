"""Sparse networks, client side: the base of the methods of ``strategies/sparse.py``."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, prefixed, unprefixed
from fedsub_app.subnets.masks import gather, pack_bits, scatter, unpack_bits
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
