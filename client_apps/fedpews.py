"""FedPeWS and FedPeWS-Fixed, client side (Algorithm 1, lines 7 to 19); what it deviates in: ``strategies/fedpews.py``.

A neuron mask is drawn anew from Bernoulli(sigmoid(s)) before both procedures of every step. The gradient of the loss in
the mask passes straight through the sampling; that of the diversity term is exact.
"""

import torch
from torch.nn import functional as F

from client_apps.fedprox import FedProxClient
from fedsub_app.costs import subnet_flops
from fedsub_app.protocol import Json, Tensors
from fedsub_app.subnets.gates import Gates
from fedsub_app.subnets.masks import bernoulli_ste, diversity, expand, gather, scatter, split
from strategies.fedpews import FedPeWSSettings


class FedPeWSClient(FedProxClient):
    """Learns a mask and the weights under it in the warm-up; FedAvg or FedProx (``mu`` > 0) afterwards."""

    options: FedPeWSSettings  # type: ignore[assignment]
    gates: Gates | None = None

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Lines 8 to 18."""
        if not config.get("warm-up"):
            return super().train(sent, config)
        self.gates = Gates(self.model, self.units)
        try:
            mask = self.warm_up(sent)
        finally:
            self.gates.remove()
        units = split(mask, self.units)
        flops = subnet_flops(self.model, self.place.in_shape, 1, self.units, units)
        self.subnet_share = flops / self.place.flops_per_sample
        self.metrics["mask-density"] = float(mask.float().mean())
        trained = self.trained()
        shapes = {name: tensor.shape for name, tensor in trained.items()}
        answer = gather(trained, expand(self.units, units, shapes))
        return answer if "mask" in sent else answer | {"mask": mask, "theta": torch.sigmoid(self.state["scores"])}

    def warm_up(self, sent: Tensors) -> torch.Tensor:
        """Train the sub-network that the server fixed, or one that is learned; returns its mask, bool [h]."""
        shapes = {name: tensor.shape for name, tensor in self.place.tensors.items()}
        device = self.place.device
        self.fixed = sent["mask"].to(device, torch.float32) if "mask" in sent else None
        self.sampler = self.generator("masks")
        if self.fixed is not None:
            self.load(scatter(sent, expand(self.units, split(sent["mask"], self.units), shapes)))
            self.fit()
        else:
            self.others = sent["theta"].to(device)
            start = self.state.get("scores", torch.zeros(len(self.others)))
            self.scores = start.to(device).requires_grad_()
            self.load({name: sent[name] for name in shapes})
            self.fit(passes=2)
            self.state = {"scores": self.scores.detach()}
        return self.draw().detach().cpu().bool()  # line 18

    def draw(self) -> torch.Tensor:
        """Return the mask of one procedure, float [h] of 0 and 1: G(s), differentiable in s; or the fixed one."""
        return bernoulli_ste(self.scores, self.sampler) if self.fixed is None else self.fixed

    def loss(self, mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return f(x ∘ m) on a mini-batch."""
        assert self.gates
        self.gates.masks = split(mask, self.units)
        return F.cross_entropy(self.model(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Lines 11 to 16."""
        if not self.gates:
            return super().step(x, y)
        if self.fixed is None:  # Procedure I: the weights are frozen
            objective = self.loss(self.draw(), x, y)
            objective = objective - self.options.lambda_ * diversity(self.scores, self.others)
            (gradient,) = torch.autograd.grad(objective, [self.scores])
            with torch.no_grad():
                self.scores -= self.options.mask_lr * gradient
        loss = self.loss(self.draw().detach(), x, y)  # Procedure II: the mask scores are frozen
        self.descend(loss)
        return loss.detach()
