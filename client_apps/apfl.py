"""APFL, client side; the paper and deviations from it: ``strategies/apfl.py``."""

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors, prefixed
from fedsub_app.training.client import OWN, Training
from fedsub_app.training.optimizer import Optimizer
from strategies.settings import APFLSettings


class APFLClient(Client):
    """Trains w as FedAvg does, and v through the mixture. Its state is v, with the mixture's statistics, and alpha."""

    options: APFLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained w; keep v and alpha (Algorithm 1, lines 4 to 7)."""
        self.load(sent)
        network, alpha = self.network, self.alpha.to(self.network.device)
        own = network.like(self.own or self.initial())
        v = {name: own[name] for name in network.parameters}
        personal = Optimizer(self.settings, v, self.settings.lr_at(self.round))

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            w = {name: tensor.detach() for name, tensor in network.parameters.items()}
            mixture = {name: torch.lerp(w[name], v[name], alpha).requires_grad_() for name in v}
            loss = self.loss(network(x, own | mixture), y)
            slopes = Optimizer(self.settings, mixture, 0).gradients(loss)
            training.spend(len(y), v)
            slope = sum(((v[name] - w[name]) * slopes[name]).sum() for name in v)
            trained = training.descend(x, y)
            personal.step({name: alpha * slopes[name] for name in v})
            if self.options.adapt == "step" or (self.options.adapt == "round" and training.steps == 1):
                alpha.sub_(personal.lr * slope).clamp_(0, 1)
            return trained

        self.fit(step=step)
        self.state |= prefixed(OWN, own) | {"alpha": alpha}
        return self.trained()

    @property
    def alpha(self) -> Tensor:
        """The client's alpha, a float scalar of its own."""
        return self.state.get("alpha", torch.tensor(self.options.alpha)).clone()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return ``alpha v + (1 - alpha) w`` with the global w; v is the initial model at first."""
        own = self.own or self.initial()
        mixture = {name: torch.lerp(sent[name], own[name], self.alpha) for name in self.network.parameters}
        return own | mixture
