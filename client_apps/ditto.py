"""Ditto, client side (Algorithm 1): a personal model beside the global one, pulled towards it."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.training.objectives import Prox
from strategies.settings import DittoSettings


class DittoClient(Client):
    """Trains the global model as FedAvg does, then its own, which never leaves it."""

    options: DittoSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained global model; keep the personal one, trained on ``F(v) + lambda / 2 ||v - w||²``."""
        answer = super().train(sent, config)
        self.load(self.own or self.initial())  # v^0 is the initial model
        self.fit(objective=Prox(self.network.like(sent), self.options.lambda_), purpose="personal batches")
        self.keep_own()
        return answer
