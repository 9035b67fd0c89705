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

    def correct_gradients(self) -> None:
        """Add ``mu * (w - w_global)`` to the gradients of the parameters that are trained."""
        if self.options.mu == 0:
            return
        pairs = [(p, s) for p, s in zip(self.model.parameters(), self.start, strict=True) if p.grad is not None]
        with torch.no_grad():
            away = torch._foreach_sub([p for p, _ in pairs], [s for _, s in pairs])
            torch._foreach_add_([p.grad for p, _ in pairs], away, alpha=self.options.mu)
