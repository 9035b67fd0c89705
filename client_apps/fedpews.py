"""FedPeWS and FedPeWS-Fixed, client side (Algorithm 1, lines 7 to 19); what it deviates in: ``strategies/fedpews.py``.

A neuron mask is drawn anew from Bernoulli(sigmoid(s)) before both procedures of every step.
"""

import torch
from torch.nn import functional as F

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.subnets.gates import Gates
from fedsub_app.subnets.masks import expand, gather, scatter, score_gradient, split
from fedsub_app.training.costs import subnet_flops
from strategies.fedpews import FedPeWSSettings

NARROW_FLOPS = 1e8  # of a plain step, from which on cutting weights costs less than it saves on a CPU


class FedPeWSClient(Client):
    """Learns a mask and the weights under it in the warm-up; FedAvg (or FedProx, or MOON) afterwards."""

    options: FedPeWSSettings
    gates: Gates | None = None

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Lines 8 to 18."""
        if not config.get("warm-up"):
            return super().train(sent, config)
        self.gates = Gates(self.model, self.units, self.narrow)
        try:
            mask = self.warm_up(sent)
        finally:
            self.gates.remove()
        units = split(mask, self.units)
        flops = subnet_flops(self.model, self.place.in_shape, 1, self.units, units)
        self.subnet_share = flops / self.place.flops_per_sample
        self.metrics["mask-density"] = float(mask.float().mean())
        trained = self.trained()
        answer = gather(trained, self.positions(mask))
        if self.fixed is not None:
            return answer
        answer["mask"] = mask
        return answer if self.options.others == "masks" else answer | {"theta": self.theta.cpu()}

    @property
    def narrow(self) -> bool:
        """Say whether to leave the units that are off out of the computation (bench/README.md: where it pays)."""
        small = self.place.flops_per_sample * self.settings.batch_size < NARROW_FLOPS
        return not small and self.place.device.type == "cpu" and not any(True for _ in self.model.buffers())

    def positions(self, mask: torch.Tensor) -> Tensors:
        """Return which positions of every tensor a neuron mask [h] covers."""
        shapes = {name: tensor.shape for name, tensor in self.place.tensors.items()}
        return expand(self.units, split(mask, self.units), shapes, self.options.mask_rule == "out")

    def warm_up(self, sent: Tensors) -> torch.Tensor:
        """Train the sub-network that the server fixed, or one that is learned; returns its mask, bool [h]."""
        device = self.place.device
        self.fixed = sent["mask"].to(device, torch.float32) if "mask" in sent else None
        if self.fixed is not None:
            self.load(scatter(sent, self.positions(sent["mask"])))
            self.fit()
            return sent["mask"]
        self.sampler = self.generator("masks")
        self.others = sent["theta"].to(device)
        start = self.options.first_scores(self.settings.seed, self.id, len(sent["theta"]))
        self.scores = self.state.get("scores", start).to(device)
        self.load({name: sent[name] for name in self.place.tensors})
        self.drawn = self.draw() if self.options.draws == "round" else None
        self.fit(passes=2)
        self.state |= {"scores": self.scores}
        return (self.draw() if self.drawn is None else self.drawn).cpu().bool()  # line 18

    @property
    def theta(self) -> torch.Tensor:
        """Probabilities of the mask, [h]."""
        return torch.sigmoid(self.scores)

    def draw(self) -> torch.Tensor:
        """Return a mask G(s), float [h] of 0 and 1; the same on every device."""
        return torch.bernoulli(self.theta.cpu(), generator=self.sampler).to(self.place.device)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Lines 11 to 16."""
        if not self.gates:
            return super().step(x, y)
        mask = self.fixed
        if mask is None:
            trial = self.draw().requires_grad_()  # Procedure I: the weights are frozen
            (gradient,) = torch.autograd.grad(F.cross_entropy(self.gates.forward(x, trial), y), [trial])
            gradient = score_gradient(self.scores, gradient, self.others, self.options.lambda_)
            self.scores = self.scores - self.options.mask_lr * gradient
            mask = self.draw() if self.drawn is None else self.drawn
        loss = self.loss(self.gates.forward(x, mask), x, y)  # Procedure II: the scores are frozen
        self.descend(loss)
        return loss.detach()
