"""SCAFFOLD, client side; the paper, and where this leaves it: ``strategies/scaffold.py``."""

import torch

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors, brought, chosen, prefixed, unprefixed
from strategies.scaffold import VARIATE


class ScaffoldClient(Client):
    """Trains along g - c_i + c. Its state is ``variate/<round>/<parameter>``: the c_i in use, and its successor."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Lines 7 to 13 of Algorithm 1: return y_i and c_i+ - c_i = (x - y_i) / (K lr) - c."""
        x, c = chosen(sent, self.network.tensors), unprefixed(VARIATE, sent)
        current = f"{VARIATE}{config['merged']}/"
        own = unprefixed(current, self.state)
        if config["merged"] and not own:
            raise UserError(f"client {self.id} has lost its state: its variate is nowhere else")
        own = own or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        self.load(x)
        shift = brought({name: c[name] - own[name] for name in self.network.parameters}, self.network.device)

        def correct(gradients: Tensors) -> None:
            torch._foreach_add_(list(gradients.values()), [shift[name] for name in gradients])

        training = self.fit(correct=correct)
        y = self.trained()
        way = training.steps * training.optimizer.lr
        change = {n: (x[n] - y[n]) / way - c[n] if way else torch.zeros_like(c[n]) for n in c}
        kept = {name: t for name, t in self.state.items() if name.startswith(current) or not name.startswith(VARIATE)}
        self.state = kept | prefixed(f"{VARIATE}{self.round}/", {name: own[name] + change[name] for name in c})
        return y | prefixed(VARIATE, change)
