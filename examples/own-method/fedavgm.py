"""FedAvgM, FedAvg with momentum on the server: a method in a file of one's own.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019,
https://arxiv.org/abs/1909.06335. Deviation: running statistics of BatchNorm are averaged, without momentum.

    fedsub run quickstart/digits method=examples/own-method/fedavgm.py:FedAvgM fedavgm.beta=0.7
"""

import torch

from fedsub import Merged, Method, MethodSettings, SubnetStrategy
from fedsub_app.common.section import Fraction
from fedsub_app.models import trainable


class FedAvgMSettings(MethodSettings):
    """Keys of FedAvgM."""

    beta: Fraction = 0.9
    """Fraction of the last round's change that is added to a round's; 0: FedAvg."""


class FedAvgMServer(SubnetStrategy):
    """v = beta v + (mean - w), w = w + v: of the mean of the clients' models and the global model w."""

    options: FedAvgMSettings
    remembers = ("velocity",)

    def setup(self) -> None:
        self.velocity = {name: torch.zeros_like(self.current[name]) for name in trainable(self.model)}

    def merge(self, mean, updates):
        """Return the next model, and its change, which is the next v."""
        model = mean.result(self.settings.server_lr)
        model |= {name: model[name] + self.options.beta * v for name, v in self.velocity.items()}
        return Merged(model, {"velocity": {name: model[name] - self.current[name] for name in self.velocity}})


FedAvgM = Method("Hsu, Qi, Brown 2019", FedAvgMSettings, FedAvgMServer)
