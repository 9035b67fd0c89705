"""FedNova, client side: FedAvg's, which also says how many steps it made."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors


class FedNovaClient(Client):
    """Tells its steps tau_i."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained model."""
        self.load(sent)
        self.metrics["steps"] = float(self.fit().steps)
        return self.trained()
