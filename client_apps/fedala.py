"""FedALA, client side; the paper and deviations from it: ``strategies/fedala.py``."""

from statistics import pstdev

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors, brought, prefixed, unprefixed
from fedsub_app.models import layer_groups
from fedsub_app.training.client import Training
from fedsub_app.training.objectives import Objective
from fedsub_app.training.optimizer import Optimizer
from strategies.settings import FedALASettings

WEIGHT = "merge/"  # prefix of W in the state
RECENT, CONVERGED = 10, 0.1  # passes, and the standard deviation of their losses below which W has converged


class FedALAClient(Client):
    """Merges the global model into its own last layers, then trains. Its state is these layers and W."""

    options: FedALASettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the model that was trained from the merged one (Algorithm 1, lines 4 to 14)."""
        self.load(sent)
        self.network.load(self.merged(sent))
        self.fit()
        groups = layer_groups(self.network.module)
        last = {name for group in groups[len(groups) - self.options.layers :] for name in group}
        self.keep_own(last & self.network.parameters.keys())
        return self.trained()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the merged model; the global one for a client that has not trained."""
        self.load(sent)
        return self.merged(sent)

    def merged(self, sent: Tensors) -> Tensors:
        """Return ``own + (global - own) W`` in the last layers, and the global values elsewhere; learn W before."""
        if not self.own:
            return sent
        network, known = self.network, unprefixed(WEIGHT, self.state)
        whole, own = network.like(sent), brought(self.own, network.device)
        change = {name: whole[name] - own[name] for name in own}
        ones = {name: torch.ones_like(tensor) for name, tensor in own.items()}
        weights = {name: w.clone().requires_grad_() for name, w in brought(known or ones, network.device).items()}
        optimizer = Optimizer(self.settings, weights, self.options.merge_lr)

        def merge() -> Tensors:
            return whole | {name: torch.addcmul(own[name], change[name], w) for name, w in weights.items()}

        def learn(training: Training, x: Batch, y: Tensor) -> Tensor:
            loss = self.loss(network(x, merge()), y)
            training.spend(len(y), weights)
            for name, slope in optimizer.gradients(loss).items():
                weights[name].data.sub_(optimizer.lr * slope).clamp_(0, 1)
            return loss.detach()

        learning = Training(self, weights, step=learn, objective=Objective(), batch_statistics=True)
        losses: list[float] = []
        for batches in self.epochs(1 if known else self.options.learn_passes, "merge"):
            learning.run(batches[: max(1, int(len(batches) * self.options.percent / 100))])
            losses.append(self.metrics["train-loss"])
            if len(losses) > RECENT and pstdev(losses[-RECENT:]) < CONVERGED:
                break
        self.state |= prefixed(WEIGHT, {name: w.detach() for name, w in weights.items()})
        return {name: tensor.detach() for name, tensor in merge().items()}
