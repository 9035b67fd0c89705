"""FedPeWS and FedPeWS-Fixed, client side (Algorithm 1, lines 7 to 19); deviations: ``strategies/fedpews.py``."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, chosen, prefixed
from fedsub_app.models.groups import split
from fedsub_app.secure.client import AT
from fedsub_app.subnets.gates import gated
from fedsub_app.subnets.masks import expand, gather, scatter, score_gradient
from fedsub_app.training.client import Training
from fedsub_app.training.costs import subnet_flops
from strategies.fedpews import MASK, first_scores
from strategies.settings import FedPeWSSettings

NARROW_FLOPS = 1e8  # FLOPs of a plain step from which on cutting weights costs less than it saves on a CPU
DRAWS = 64  # masks whose random numbers are made at once


class FedPeWSClient(Client):
    """Learns a mask and the weights under it in the warm-up; FedAvg (or FedProx, or MOON) afterwards."""

    options: FedPeWSSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the mask and the weights under it; return the covered values and the mask (lines 8 to 18)."""
        if not config.get("warm-up"):
            return super().train(sent, config)
        if self.options.masks == "fixed":
            mask, learned = sent["mask"], {}
            self.load(scatter(sent, self.positions(mask)))
            self.fit(step=partial(train_under, mask.to(self.place.device, torch.float32), self.narrow))
        else:
            self.load(chosen(sent, self.network.tensors))
            learning = MaskLearning(self, self.others(sent["theta"], config.get("counted", 0)))
            self.fit(step=learning)
            self.state["scores"] = learning.scores
            mask = learning.draw().cpu().bool()  # line 18
            learned = {"mask": mask} | ({} if self.options.others == "masks" else {"theta": learning.theta.cpu()})
        units = self.network.units
        flops = subnet_flops(self.place.problem, self.network.module, units, split(mask, units))
        self.metrics["subnet-flops"] = self.flops * (flops / self.place.training_flops(self.network))
        self.metrics["mask-density"] = float(mask.float().mean())
        trained, positions = self.trained(), self.positions(mask)
        if not self.settings.secure_aggregation:
            return gather(trained, positions) | learned
        self.state["counted"] = learned.get("theta", mask.float())
        return trained | prefixed(AT, positions | {MASK: mask}) | learned | {MASK: torch.zeros(len(mask))}

    def others(self, theta: Tensor, counted: int) -> Tensor:
        """Return the others' probabilities, [h]; where ``counted``, ``theta`` is a mean with this client's."""
        if counted and "counted" in self.state:
            theta = ((counted * theta - self.state["counted"]) / (counted - 1)).clamp(0, 1)
        return theta

    @property
    def gated_tensors(self) -> list[str]:
        """The bias of each layer with units: its gradient takes the same passes as the gradient of their mask."""
        parameters = self.network.parameters
        rows = [[place.name for place in group.places if place.axis == 0] for group in self.network.units]
        return [min((n for n in names if n in parameters), key=lambda n: parameters[n].dim()) for names in rows]

    @property
    def narrow(self) -> bool:
        """Say whether the computation leaves out the units that are off (bench/README.md has the break-even)."""
        small = self.place.training_flops(self.network) * self.settings.batch_size < NARROW_FLOPS
        return not small and self.place.device.type == "cpu" and not any(True for _ in self.network.module.buffers())

    def positions(self, mask: Tensor) -> Tensors:
        """Return the positions of every tensor that a neuron mask [h] covers: tensor name -> bool."""
        shapes = {name: tensor.shape for name, tensor in self.network.tensors.items()}
        return expand(self.network.units, split(mask, self.network.units), shapes)


def train_under(mask: Tensor, narrow: bool, training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Make a step of the weights under a mask, float [h] of 0 and 1 (Procedure II); returns the loss before it."""
    return training.descend(x, y, partial(gated, training.network, mask, narrow=narrow))


class MaskLearning:
    """A step that trains a neuron mask's scores and then the weights (lines 11 to 16).

    A mask is drawn anew from Bernoulli(sigmoid(s)) before both procedures of every step; the scores s, float ``[h]``,
    continue from the client's last round.
    """

    def __init__(self, client: FedPeWSClient, others: Tensor) -> None:
        device = client.place.device
        start = first_scores(client.options, client.settings.seed, client.id, len(others))
        self.scores, self.others = client.state.get("scores", start).to(device), others.to(device)
        self.options, self.narrow, self.gated_tensors = client.options, client.narrow, client.gated_tensors
        draws = client.generator("masks")  # uniform numbers, on the CPU, which are copied to the device many at a time
        many = (torch.rand(DRAWS, len(others), generator=draws).to(device) for _ in count())
        self._numbers: Iterator[Tensor] = chain.from_iterable(many)

    @property
    def theta(self) -> Tensor:
        """Probabilities of the mask, [h]."""
        return torch.sigmoid(self.scores)

    def draw(self) -> Tensor:
        """Return a mask G(s), float [h] of 0 and 1; from the CPU's random numbers, so the same on every device."""
        return (next(self._numbers) < self.theta).float()

    def __call__(self, training: Training, x: Tensor, y: Tensor) -> Tensor:
        """Train the scores under one mask, the weights under the next; returns the second loss."""
        trial = self.draw().requires_grad_()  # Procedure I: the weights are frozen
        outputs = self.options.mask_gradient == "activations"
        output = gated(training.network, trial, x, narrow=self.narrow and not outputs, outputs=outputs)
        (gradient,) = torch.autograd.grad(training.loss(output, y), [trial])
        training.spend(len(y), self.gated_tensors)  # no gradient of a weight is computed
        gradient = score_gradient(self.scores, gradient, self.others, self.options.lambda_)
        self.scores = self.scores - self.options.mask_lr * gradient
        # Procedure II: the scores are frozen
        return train_under(self.draw(), self.narrow, training, x, y)
