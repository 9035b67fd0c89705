"""FedPM, client side; the paper and deviations from it: ``strategies/fedpm.py``."""

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, brought, chosen, prefixed, unprefixed
from fedsub_app.training.client import Training
from fedsub_app.training.objectives import Prox
from fedsub_app.training.optimizer import Optimizer
from strategies.fedpm import THETA, signed_constants
from strategies.sparse import MASK


class FedPMClient(Client):
    """Trains the scores of the masks, and the tensors without a mask."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return a mask drawn from the trained scores, and the other tensors (Algorithm 1, lines 8 to 14).

        With ``attack = "sign-flip"`` it is the mask's complement, whatever ``attack-scale``.
        """
        network, device, draws = self.network, self.place.device, self.generator("masks")
        initial = self.initial()
        self.load(initial | chosen(sent, initial))
        signed = brought(signed_constants(network.module, initial), device)
        scores = {name: theta.logit() for name, theta in brought(unprefixed(THETA, sent), device).items()}
        others = {name: tensor for name, tensor in network.parameters.items() if name not in scores}
        optimizer = self.place.optimizer(self.settings, scores | others, self.lr)
        anchor = {name: tensor.detach().clone() for name, tensor in optimizer.parameters.items()}
        pull = Prox(anchor, self.settings.pull)

        def draw() -> Tensors:
            numbers = brought({name: torch.rand(s.shape, generator=draws) for name, s in scores.items()}, device)
            return {name: (numbers[name] < torch.sigmoid(s)).float() for name, s in scores.items()}

        def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
            masks = {name: mask.requires_grad_() for name, mask in draw().items()}
            loss = self.loss(network(x, {**network.tensors, **{n: signed[n] * m for n, m in masks.items()}}), y)
            gradients = Optimizer(self.settings, masks | others, 0).gradients(loss)
            training.spend(len(y), network.parameters)
            for name, score in scores.items():
                theta = torch.sigmoid(score)
                gradients[name] = gradients[name] * theta * (1 - theta)
            pull.correct(gradients, optimizer.parameters)
            optimizer.step(gradients)
            return loss.detach()

        self.fit(step=step)
        trained = {name: tensor for name, tensor in self.trained().items() if name not in scores}
        flips = self.attack == "sign-flip"
        return trained | prefixed(MASK, {name: mask.bool() ^ flips for name, mask in draw().items()})
