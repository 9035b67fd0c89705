"""SGD and Adam on named tensors."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedsub_app.settings import Settings


class Optimizer:
    """SGD with momentum or Adam on a fixed list of parameters, fresh; as ``torch.optim.SGD`` and ``Adam`` bit for bit.

    It calls what those call, torch's functional forms (fused: one kernel for all tensors). On a small network the
    classes' own bookkeeping and ``backward()`` into ``.grad`` take a fifth of a step.

    Attributes
    ----------
    parameters : what is trained; gradients are computed for these only.
    first, second, steps : Adam's moments, shaped as the parameters, and the steps behind each (float scalars); with SGD
        ``first`` is the momentum.
    """

    def __init__(self, settings: Settings, parameters: Iterable[nn.Parameter], server_round: int = 1) -> None:
        self.settings = settings
        self.lr = settings.lr_at(server_round)
        self.parameters: list[torch.Tensor] = list(parameters)
        adaptive = settings.optimizer == "adam"
        self.first = [torch.zeros_like(p) for p in self.parameters] if adaptive or settings.momentum else []
        self.second = [torch.zeros_like(p) for p in self.parameters] if adaptive else []
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of ``loss`` in the parameters, laid out as these."""
        found = torch.autograd.grad(loss, self.parameters)
        return [
            gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient)
            for gradient, p in zip(found, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """Move the parameters, in place."""
        if self.settings.optimizer == "adam":
            adam(
                self.parameters,
                gradients,
                self.first,
                self.second,
                [],
                self.steps,
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.lr,
                weight_decay=self.settings.weight_decay,
                eps=1e-8,
                maximize=False,
            )
        else:
            sgd(
                self.parameters,
                gradients,
                list(self.first) or [None] * len(gradients),
                fused=True,
                weight_decay=self.settings.weight_decay,
                momentum=self.settings.momentum,
                lr=self.lr,
                dampening=0,
                nesterov=False,
                maximize=False,
            )
