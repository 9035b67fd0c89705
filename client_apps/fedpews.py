"""FedPeWS and FedPeWS-Fixed, client side (Algorithm 1, lines 7 to 19); deviations: ``strategies/fedpews.py``."""

from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, chosen, prefixed
from fedsub_app.models.groups import split
from fedsub_app.secure.client import AT
from fedsub_app.subnets.gates import gated
from fedsub_app.subnets.masks import gather, scatter, score_gradient
from fedsub_app.training.client import Training
from fedsub_app.training.costs import subnet_flops
from strategies.fedpews import MASK, NEURONS, THETA, first_scores, positions
from strategies.settings import FedPeWSSettings

NARROW_FLOPS = 1e8  # from this many FLOPs of a plain step on, cutting weights saves time on a CPU
DRAWS = 64  # masks whose random numbers are made at once


class FedPeWSClient(Client):
    """Learns a mask and the weights under it in the warm-up; FedAvg (or FedProx, or MOON) afterwards."""

    options: FedPeWSSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the mask and the weights under it; return the covered values and the mask (lines 8 to 18)."""
        if not config.get("warm-up"):
            return super().train(sent, config)
        if self.options.masks == "fixed":
            mask, learned = sent[NEURONS], {}
            self.load(scatter(sent, positions(self.network.units, mask, self.network.tensors)))
            self.fit(step=partial(train_under, mask.to(self.place.device, torch.float32), self.narrow))
        else:
            self.load(chosen(sent, self.network.tensors))
            mask, theta = self.learned(self.others(sent[THETA], config.get("counted", 0)))
            learned = {NEURONS: mask} | ({} if self.options.others == "masks" else {THETA: theta})
        units = self.network.units
        flops = subnet_flops(self.place.problem, self.network.module, units, split(mask, units))
        self.metrics["subnet-flops"] = self.flops * (flops / self.place.training_flops(self.network))
        self.metrics["mask-density"] = float(mask.float().mean())
        trained, covered = self.trained(), positions(units, mask, self.network.tensors)
        if not self.settings.secure_aggregation:
            return gather(trained, covered) | learned
        self.state["counted"] = learned.get(THETA, mask.float())
        return trained | prefixed(AT, covered | {MASK: mask}) | learned | {MASK: torch.zeros(len(mask))}

    def learned(self, others: Tensor) -> tuple[Tensor, Tensor]:
        """Train a mask's scores and the weights under it (lines 11 to 16); return a mask, bool [h], and theta, [h].

        A mask is drawn anew from theta = sigmoid(s) before both procedures of every step; the scores s continue from
        the client's last round. The CPU draws the random numbers, the same for every device, and copies many at a time.
        """
        device, options, narrow, parameters = self.place.device, self.options, self.narrow, self.network.parameters
        scores = self.state.get("scores", first_scores(options, self.settings.seed, self.id, len(others))).to(device)
        others, draws = others.to(device), self.generator("masks")
        numbers = chain.from_iterable(torch.rand(DRAWS, len(others), generator=draws).to(device) for _ in count())
        # The gradient of a layer's bias takes the same passes as that of the mask of its units.
        rows = [[place.name for place in group.places if place.axis == 0] for group in self.network.units]
        trained = ([name for name in names if name in parameters] for names in rows)  # none of a frozen layer
        biases = [min(names, key=lambda name: parameters[name].dim()) for names in trained if names]

        def draw() -> Tensor:
            return torch.lt(next(numbers), torch.sigmoid(scores)).float()

        def step(training: Training, x: Tensor, y: Tensor) -> Tensor:
            nonlocal scores
            trial = draw().requires_grad_()  # Procedure I: the weights are frozen
            outputs = options.mask_gradient == "activations"
            output = gated(training.network, trial, x, narrow=narrow and not outputs, outputs=outputs)
            (gradient,) = torch.autograd.grad(training.loss(output, y), [trial])
            training.spend(len(y), biases)  # no gradient of a weight is computed
            scores = scores - options.mask_lr * score_gradient(scores, gradient, others, options.lambda_)
            return train_under(draw(), narrow, training, x, y)  # Procedure II: the scores are frozen

        self.fit(step=step)
        self.state["scores"] = scores
        return draw().cpu().bool(), torch.sigmoid(scores).cpu()  # line 18

    def others(self, theta: Tensor, counted: int) -> Tensor:
        """Return the others' mean probabilities, [h]; with ``counted`` > 0 the mean ``theta`` includes this client."""
        if counted and "counted" in self.state:
            theta = ((counted * theta - self.state["counted"]) / (counted - 1)).clamp(0, 1)
        return theta

    @property
    def narrow(self) -> bool:
        """Say whether the computation leaves out the units that are off (bench/README.md has the break-even)."""
        small = self.place.training_flops(self.network) * self.settings.batch_size < NARROW_FLOPS
        return not small and self.place.device.type == "cpu" and not any(True for _ in self.network.module.buffers())


def train_under(mask: Tensor, narrow: bool, training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Make a step of the weights under a mask, float [h] of 0 and 1 (Procedure II); returns the loss before it."""
    return training.descend(x, y, partial(gated, training.network, mask, narrow=narrow))
