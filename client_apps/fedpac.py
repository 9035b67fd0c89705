"""FedPAC, client side; deviations from the paper: ``strategies/fedpac.py``."""

import torch
from torch import Tensor
from torch.nn import functional as F

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import Output, head_names
from fedsub_app.subnets.collaboration import feature_statistics
from strategies.fedpac import CENTROIDS, COUNTS, KNOWN, MEANS, H, V
from strategies.settings import FedPACSettings


class FedPACClient(Client):
    """Trains the head, then the body with features drawn to the class centroids."""

    options: FedPACSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained model, its class means, and the statistics of the received body's features."""
        self.load({name: sent[name] for name in self.network.tensors})
        before, _, h, variance = self.statistics()
        known = sent[KNOWN].to(before.device)[:, None]
        # A class without a centroid takes the client's own mean before training; the first round has no alignment.
        centroids = torch.where(known, sent[CENTROIDS].to(before.device), before)

        def aligned(output: Output, y: Tensor) -> Tensor:
            return self.loss(output, y) + self.options.lambda_ * F.mse_loss(output.features, centroids[y])

        head = head_names(self.network.module)
        body = [name for name in self.network.tensors if name not in head]
        self.fit(head, lr=self.options.head_lr, epochs=self.options.head_epochs, purpose="head batches")
        self.fit(body, loss=aligned if bool(known.any()) else None)
        means, counts, _, _ = self.statistics()
        return self.trained() | {MEANS: means, COUNTS: counts, H: h, V: torch.tensor([variance])}

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return :func:`feature_statistics` of the client's training data under the network in evaluation mode."""
        return feature_statistics(self.outputs().features, self.y, self.place.problem.data.num_classes)
