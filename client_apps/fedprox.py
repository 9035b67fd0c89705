"""FedProx, client side: the local objective gets ``mu / 2 * ||w - w_global||²`` (Li et al. 2020, Eq. 2)."""

from collections.abc import Mapping

import torch

from client_apps.base import Client
from strategies.fedprox import FedProxSettings


class FedProxClient(Client):
    """Adds the term's gradient ``mu * (w - w_global)``, which costs two fused operations instead of a graph."""

    options: FedProxSettings

    def load(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Load the model and remember where it started."""
        super().load(sent)
        self.start = [parameter.detach().clone() for parameter in self.model.parameters()]

    def correct_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Add ``mu * (w - w_global)``."""
        if self.options.mu == 0:
            return
        with torch.no_grad():
            away = torch._foreach_sub(self.optimizer.parameters, self.start)
            torch._foreach_add_(gradients, away, alpha=self.options.mu)
