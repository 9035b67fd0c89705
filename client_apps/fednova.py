"""FedNova, client side: FedAvg's, which also reports its number of steps."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors


class FedNovaClient(Client):
    """Trains as FedAvg's client does and reports its steps tau_i."""

    computes_with_sgd = True

    def train(self, sent: Tensors, config: Json) -> Tensors:
        self.load(sent)
        self.metrics["steps"] = float(self.fit().steps)
        return self.trained()
