"""SGD, Adam, AdamW and RMSprop on named tensors, and an optimizer of the user's."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors
from fedsub_app.settings import TrainingSettings

MakeOptimizer = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]  # parameters, learning rate -> a fresh one


class Optimizer:
    """SGD, Adam, AdamW or RMSprop on some named parameters, fresh; equal to ``torch.optim``'s classes bit for bit.

    It calls torch's functional forms, as these classes do (fused, but for RMSprop: one kernel for all tensors). On a
    small network the classes' own bookkeeping and ``backward()`` into ``.grad`` take a fifth of a step.

    Parameters
    ----------
    settings : optimizer, momentum, weight-decay.
    parameters : name -> tensor that the steps move, in place; gradients are computed for these tensors only.
    lr : learning rate.

    Attributes
    ----------
    first, second : Adam's moments by name, shaped as the parameters; ``first`` is the momentum, if any, of SGD and
        RMSprop, whose second moment is ``second``.
    steps : the steps behind each parameter's moments, float scalars by name; none with SGD.
    """

    def __init__(self, settings: TrainingSettings, parameters: Mapping[str, Tensor], lr: float) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.lr = lr
        kept = self.parameters if settings.optimizer in ("adam", "adamw") or settings.momentum else {}
        moved = self.parameters if settings.optimizer != "sgd" else {}
        self.first = {name: torch.zeros_like(p) for name, p in kept.items()}
        self.second = {name: torch.zeros_like(p) for name, p in moved.items()}
        self.steps = {name: torch.zeros((), device=p.device) for name, p in moved.items()}

    def gradients(self, loss: Tensor) -> Tensors:
        """Return the gradients of ``loss`` in the parameters, by name, laid out as the parameters; 0 where unused."""
        parameters = list(self.parameters.values())
        if not parameters:  # a layer of frozen tensors
            return {}
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return {
            name: gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient.to_dense())
            for (name, p), gradient in zip(self.parameters.items(), gradients, strict=True)
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Move the parameters, in place, down their gradients; each of them needs one."""
        moved = list(self.parameters.values())
        along = [gradients[name] for name in self.parameters]
        if not moved:
            return
        first, second, steps = (list(of.values()) for of in (self.first, self.second, self.steps))
        settings = self.settings
        how: dict[str, Any] = {"lr": self.lr, "weight_decay": settings.weight_decay, "maximize": False}
        if settings.optimizer == "sgd":
            how |= {"momentum": settings.momentum, "dampening": 0, "nesterov": False, "fused": True}
            sgd(moved, along, [*first] or [None] * len(moved), **how)
        elif settings.optimizer == "rmsprop":
            how |= {"momentum": settings.momentum, "alpha": 0.99, "eps": 1e-8, "centered": False}
            rmsprop(moved, along, second, [], first, steps, **how)
        else:
            how |= {"decoupled_weight_decay": settings.optimizer == "adamw", "amsgrad": False, "fused": True}
            adam(moved, along, first, second, [], steps, beta1=0.9, beta2=0.999, eps=1e-8, **how)


class OwnOptimizer(Optimizer):
    """An optimizer of the user's in the place of SGD."""

    def __init__(
        self, make: MakeOptimizer, settings: TrainingSettings, parameters: Mapping[str, Tensor], lr: float
    ) -> None:
        super().__init__(settings, parameters, lr)
        self.own = make(list(self.parameters.values()), lr) if parameters else None  # torch's need at least one
        if parameters and not isinstance(self.own, torch.optim.Optimizer):
            what = f"returned a {type(self.own).__name__}, must be a torch.optim.Optimizer"
            raise UserError(f"optimizer= of client_app: {what}")
        if not self.own:
            return
        try:
            inspect.signature(type(self.own).step).bind(self.own)
        except TypeError as error:
            what = f"{type(self.own).__name__}.step: {error}; allowed are optimizers that need no closure"
            raise UserError(f"optimizer= of client_app: {what}") from None
        given = {id(parameter) for parameter in self.parameters.values()}
        if not given >= {id(moved) for group in self.own.param_groups for moved in group["params"]}:
            raise UserError("optimizer= of client_app: moves other tensors than the parameters that it was given")

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        if self.own:
            self.own.step()
            self.own.zero_grad()
