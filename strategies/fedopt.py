"""FedAdam, FedYogi and FedAdagrad, server side: an adaptive optimizer on the server; clients train as in FedAvg.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
https://arxiv.org/abs/2003.00295, Algorithm 2. With the pseudo-gradient ``D = mean_i(w_i) - w``::

    m <- beta1 m + (1 - beta1) D
    v <- v + D²                                (FedAdagrad)
    v <- v - (1 - beta2) D² sign(v - D²)       (FedYogi)
    v <- beta2 v + (1 - beta2) D²              (FedAdam)
    w <- w + lr m / (sqrt(v) + tau)

The defaults are those of Hu et al. 2023, https://arxiv.org/abs/2309.03237. Deviations:

- v begins at 0 as in their experiments; ``first-v = "tau"`` is Reddi's smallest start, tau². No bias correction.
- Their code adds the first client's weights themselves to D instead of their change, makes a new client optimizer for
  every batch, and gives FedAdam ten times the others' samples; none of this is repeated.
- BatchNorm's running statistics are averaged: v is no measure of theirs.
- ``server-lr`` goes from the model to the optimizer's next one, on top of ``lr``.
- A round that is abandoned changes neither m nor v. A tensor position that no client sends has D = 0.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsub_app.common.section import Positive
from fedsub_app.federation.protocol import Update
from fedsub_app.models import trainable
from fedsub_app.settings import MethodSettings, Settings
from fedsub_app.subnets.averaging import MaskedMean
from strategies.base import SubnetStrategy
from strategies.hooks import Merged

Decay = Annotated[float, Field(ge=0, lt=1)]


class FedAdagradSettings(MethodSettings):
    """Keys of FedAdagrad."""

    lr: Positive = 0.01
    """eta, the server's learning rate."""
    beta1: Decay = 0.0
    """Decay of the first moment m; 0: none."""
    tau: Positive = 0.01
    """Added to the root of v: the larger, the less adaptive."""
    first_v: Literal["zero", "tau"] = "zero"
    """v at the start: 0, or tau²."""


class FedAdamSettings(FedAdagradSettings):
    """Keys of FedAdam and FedYogi."""

    beta1: Decay = 0.9
    """Decay of the first moment m; 0: none."""
    beta2: Decay = 0.99
    """Decay of the second moment v."""


class FedAdagrad(SubnetStrategy):
    """Adagrad on the server, and the base of the others.

    Attributes
    ----------
    first, second : m and v by name, of the parameters.
    """

    options: FedAdagradSettings
    remembers = ("first", "second")

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        start = self.options.tau**2 if self.options.first_v == "tau" else 0.0
        parameters = list(trainable(model))
        self.first = {name: torch.zeros_like(self.current[name]) for name in parameters}
        self.second = {name: torch.full_like(self.current[name], start) for name in parameters}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from the last one and D²."""
        return v + square

    def merge(self, mean: MaskedMean, updates: Sequence[Update]) -> Merged:
        """Make the optimizer's step."""
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
        """Move v towards D²."""
        return torch.lerp(square, v, self.options.beta2)


class FedYogi(FedAdagrad):
    """Yogi on the server: the size of v's change depends on D² alone, not on their distance."""

    options: FedAdamSettings

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Move v by a part of D²."""
        return v - (1 - self.options.beta2) * square * torch.sign(v - square)
