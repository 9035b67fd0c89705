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
        pairs = zip(self.model.parameters(), self.start, strict=True)
        trained = [(p, p.grad, start) for p, start in pairs if p.grad is not None]
        with torch.no_grad():
            away = torch._foreach_sub([p for p, _, _ in trained], [start for _, _, start in trained])
            torch._foreach_add_([gradient for _, gradient, _ in trained], away, alpha=self.options.mu)
