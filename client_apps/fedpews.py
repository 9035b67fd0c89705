"""FedPeWS and FedPeWS-Fixed, client side (Algorithm 1, lines 7 to 19); what it deviates in: ``strategies/fedpews.py``.

A neuron mask is drawn anew from Bernoulli(sigmoid(s)) before both procedures of every step. The gradient of the loss in
the mask passes straight through the sampling; that of the diversity term is exact.
"""

import torch
from torch.func import functional_call
from torch.nn import functional as F

from client_apps.fedprox import FedProxClient
from fedsub_app.costs import subnet_flops
from fedsub_app.protocol import Json, Tensors
from fedsub_app.subnets import masks
from strategies.fedpews import FedPeWSSettings, with_prefix, without_prefix


class FedPeWSClient(FedProxClient):
    """Learns a mask and the weights under it in the warm-up; FedAvg or FedProx (``mu`` > 0) afterwards."""

    options: FedPeWSSettings  # type: ignore[assignment]
    warming_up = False

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Lines 8 to 18."""
        if not config.get("warm-up"):
            return super().train(sent, config)
        self.warming_up = True
        self.sampler = self.generator("masks")
        shapes = {name: tensor.shape for name, tensor in self.place.tensors.items()}
        self.fixed = without_prefix("mask", sent)
        if self.fixed:
            values = without_prefix("value", sent)
            self.load(masks.scatter(values, masks.expand(self.units, self.fixed, shapes)))
            self.fit()
        else:
            device = self.place.device
            self.others = {name: theta.to(device) for name, theta in without_prefix("theta", sent).items()}
            scores = {group.name: self.state.get(group.name, torch.zeros(group.size)) for group in self.units}
            self.scores = {name: score.to(device).requires_grad_() for name, score in scores.items()}
            self.load({name: sent[name] for name in shapes})
            self.fit(passes=2)
            self.state = {name: score.detach() for name, score in self.scores.items()}
        drawn = self.fixed or {name: mask.detach().cpu() > 0.5 for name, mask in self.draw().items()}  # line 18
        sizes = [mask.float().mean() for mask in drawn.values()]
        self.metrics["mask-density"] = float(sum(sizes)) / len(sizes)
        share = subnet_flops(self.model, self.place.in_shape, 1, self.units, drawn) / self.place.flops_per_sample
        self.subnet_flops = self.flops * share
        answer = with_prefix("value", masks.gather(self.trained(), masks.expand(self.units, drawn, shapes)))
        if not self.fixed:
            answer |= with_prefix("mask", drawn)
            answer |= with_prefix("theta", {name: torch.sigmoid(score) for name, score in self.state.items()})
        return answer

    def draw(self) -> Tensors:
        """Return the neuron mask of one procedure: G(s), differentiable in s; or the fixed one."""
        if self.fixed:
            return {name: mask.to(self.place.device, torch.float32) for name, mask in self.fixed.items()}
        return {name: masks.bernoulli_ste(score, self.sampler) for name, score in self.scores.items()}

    def loss(self, mask: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return f(x ∘ G(s)) on a mini-batch."""
        parameters = masks.apply(dict(self.model.named_parameters()), self.units, mask)
        return F.cross_entropy(functional_call(self.model, parameters, (x,)), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Lines 11 to 16."""
        if not self.warming_up:
            return super().step(x, y)
        if not self.fixed:  # Procedure I: the weights are frozen
            objective = self.loss(self.draw(), x, y)
            objective = objective - self.options.lambda_ * masks.diversity(self.scores, self.others)
            gradients = torch.autograd.grad(objective, list(self.scores.values()))
            with torch.no_grad():
                for score, gradient in zip(self.scores.values(), gradients, strict=True):
                    score -= self.options.mask_lr * gradient
        self.optimizer.zero_grad()  # Procedure II: the mask scores are frozen
        loss = self.loss({name: mask.detach() for name, mask in self.draw().items()}, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.correct_gradients()
        self.optimizer.step()
        return loss.detach()
