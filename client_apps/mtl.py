"""Federated multi-task learning, client side: one model, pulled to 0 and to the mean of the others' models."""

from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from strategies.settings import MTLSettings


class MTLClient(Client):
    """Trains its own model round after round, and sends it to the server."""

    options: MTLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the client's own model on ``loss + c (||w||² + ||w - mean||²)``; return it."""
        self.load(self.own or self.initial())
        mean = self.network.like(sent)

        def pull(gradients: dict[str, Tensor]) -> None:
            for name, gradient in gradients.items():
                weight = self.network.tensors[name].detach()
                gradient.add_(2 * weight - mean[name], alpha=2 * self.options.lambda_)

        self.fit(correct=pull)
        return self.keep_own()
