"""FedDST, client side; the paper and deviations from it: ``strategies/feddst.py``."""

from client_apps.sparse import SparseClient
from fedsub_app.common.tensors import Tensors, brought
from fedsub_app.subnets.sparsity import exchanged
from strategies.settings import FedDSTSettings


class FedDSTClient(SparseClient):
    """Exchanges a share of its weights after its training."""

    options: FedDSTSettings

    def adjust(self, model: Tensors, masks: Tensors) -> tuple[Tensors, Tensors]:
        """Return the model with 0 at the positions that have grown, and the new masks."""
        self.network.training_mode()
        _, slopes = self.slopes({name: self.network.tensors[name] for name in masks}, next(self.batches(1, "slopes")))
        new, survived = exchanged(model, brought(slopes), masks, self.options.share_at(self.round))
        return model | {name: model[name] * kept for name, kept in survived.items()}, new
