"""FedPAC, client side; what it deviates in: ``strategies/fedpac.py``."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import head_names
from fedsub_app.subnets.collaboration import feature_statistics
from fedsub_app.training.local import EVALUATION_BATCH
from fedsub_app.training.optimizer import Optimizer
from strategies.fedpac import CENTROIDS, COUNTS, KNOWN, MEANS, FedPACSettings, H, V


class FedPACClient(Client):
    """Trains the head, then the body with features drawn to the class centroids."""

    options: FedPACSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained model, its class means, and the statistics of the received body's features."""
        self.load({name: sent[name] for name in self.place.tensors})
        head = head_names(self.model)
        layer = self.model.get_submodule(head[0].rpartition(".")[0])
        handle = layer.register_forward_pre_hook(self._keep)
        try:
            before, _, h, variance = self.statistics()
            known = sent[KNOWN].to(before.device)[:, None]
            # Own means before training where no client has told of the class; no alignment in the first round.
            self.centroids = torch.where(known, sent[CENTROIDS].to(before.device), before)
            self.aligning = False
            self.fit(names=head, epochs=self.options.head_epochs, purpose="head batches")
            self.aligning = bool(known.any())
            self.fit(names=[name for name in self.place.tensors if name not in head])
            means, counts, _, _ = self.statistics()
        finally:
            handle.remove()
        return self.trained() | {MEANS: means, COUNTS: counts, H: h, V: torch.tensor([variance])}

    def _keep(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.features = inputs[0]

    @torch.no_grad()
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Return :func:`feature_statistics` of the client's training data under the model in evaluation mode."""
        self.model.eval()
        found = []
        for part in self.x.split(EVALUATION_BATCH):
            self.model(part)
            found.append(self.features)
        return feature_statistics(torch.cat(found), self.y, self.place.dataset.num_classes)

    def loss(self, output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss, when the body is trained with the distance of the features to their centroids."""
        loss = super().loss(output, x, y)
        if not self.aligning:
            return loss
        return loss + self.options.lambda_ * F.mse_loss(self.features, self.centroids[y])

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Return an optimizer; the head's has a learning rate of its own."""
        optimizer = super().make_optimizer(parameters)
        head = {id(self.place.tensors[name]) for name in head_names(self.model)}
        if all(id(parameter) in head for parameter in parameters):
            optimizer.lr = self.options.head_lr
        return optimizer
