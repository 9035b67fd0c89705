"""FedAdam, FedYogi and FedAdagrad, server side: an adaptive optimizer on the server; clients train as in FedAvg.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
https://arxiv.org/abs/2003.00295, Algorithm 2. With the pseudo-gradient ``D = mean_i(w_i) - w``::

    m <- beta1 m + (1 - beta1) D
    v <- v + D²                                (FedAdagrad)
    v <- v - (1 - beta2) D² sign(v - D²)       (FedYogi)
    v <- beta2 v + (1 - beta2) D²              (FedAdam)
    w <- w + lr m / (sqrt(v) + tau)

FedAdam's defaults are those of Hu et al. 2023, https://arxiv.org/abs/2309.03237; FedYogi has the same, and FedAdagrad
no first moment. Deviations:

- v begins at 0 as in Hu et al.'s experiments; Reddi's smallest start is tau². There is no bias correction.
- Their code adds the first client's weights to D instead of the change of these weights, makes a new client optimizer
  for every batch, and gives FedAdam ten times the others' samples; none of this is repeated.
- BatchNorm's running statistics are averaged: v does not measure them.
- ``server-lr`` is a step from the model to the optimizer's result, on top of ``lr``.
- A round that is abandoned changes neither m nor v. A tensor position that no client sends has D = 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsub_app.models import trainable
from strategies.base import Mean, Merged, SubnetStrategy, Update
from strategies.settings import FedAdagradSettings, FedAdamSettings


class FedAdagrad(SubnetStrategy):
    """Adagrad on the server, and the base of the others."""

    options: FedAdagradSettings
    secure = ""
    remembers = ("first", "second")

    def setup(self) -> None:
        self.first = {name: torch.zeros_like(self.current[name]) for name in trainable(self.model)}  # m
        self.second = {name: torch.zeros_like(m) for name, m in self.first.items()}  # v

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from the last one and D²."""
        return v + square

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        options, rate = self.options, self.settings.server_lr
        model = mean.result()
        first, second = {}, {}
        for name, m in self.first.items():
            change = model[name] - self.current[name]
            first[name] = torch.lerp(change, m, options.beta1)
            second[name] = self.second_moment(self.second[name], change.square())
            model[name] = self.current[name] + options.lr * first[name] / (second[name].sqrt() + options.tau)
        if rate != 1:
            model = {name: torch.lerp(self.current[name], tensor, rate) for name, tensor in model.items()}
        return Merged(model, {"first": first, "second": second})


class FedAdam(FedAdagrad):
    """Adam on the server, without bias correction."""

    options: FedAdamSettings

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return torch.lerp(square, v, self.options.beta2)


class FedYogi(FedAdagrad):
    """Yogi on the server: the size of v's change depends on D² alone, not on their distance."""

    options: FedAdamSettings

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.options.beta2) * square * torch.sign(v - square)
