"""SSFL, client side; the paper and deviations from it: ``strategies/ssfl.py``."""

from client_apps.sparse import SparseClient
from fedsub_app.common.tensors import Json, Tensors
from strategies.settings import SparseSettings


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
