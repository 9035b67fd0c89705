"""SCAFFOLD, client side; the paper and deviations from it: ``strategies/scaffold.py``."""

import torch

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, brought, chosen, prefixed, unprefixed
from strategies.scaffold import VARIATE


class ScaffoldClient(Client):
    """Trains along g - c_i + c. Its state is c_i, ``variate/<parameter>``."""

    irreplaceable = "its variate is nowhere else"

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return y_i and c_i+ - c_i = (x - y_i) / (K lr) - c (Algorithm 1, lines 7 to 13)."""
        x, c = chosen(sent, self.network.tensors), unprefixed(VARIATE, sent)
        variate = unprefixed(VARIATE, self.state) or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        self.load(x)
        shift = brought({name: c[name] - variate[name] for name in self.network.parameters}, self.network.device)

        training = self.fit(shift=shift)
        y = self.trained()
        distance = training.steps * training.optimizer.lr
        change = {n: (x[n] - y[n]) / distance - c[n] if distance else torch.zeros_like(c[n]) for n in c}
        self.state |= prefixed(VARIATE, {name: variate[name] + change[name] for name in c})
        return y | prefixed(VARIATE, change)
