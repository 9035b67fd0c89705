"""FedNova, server side: clients' changes are normalised by their local steps before they are averaged.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, https://arxiv.org/abs/2007.07481::

    w <- w + tau_eff * sum_i p_i (w_i - w) / a_i,   tau_eff = sum_i p_i a_i

a_i is how far client i's tau_i steps go under a gradient that stays 1, in learning rates: tau_i for plain SGD. p_i are
the weights of the setting ``weighting`` (the paper's: ``"examples"``). Where all a_i are equal this is FedAvg.

Deviations:

- With momentum and the proximal term at once a_i is that of the two together, which the paper does not state.
  ``normalisation = "authors"`` is the recurrence of the published code, where both add a step of their own, with
  its tau_eff: the mean number of steps where there is a proximal term. With few steps that makes the server's step
  shorter than 1, also where all clients do the same: in the tables of Hu et al. 2023 about 0.3.
- With Adam a_i = tau_i.
- BatchNorm's running statistics are averaged without normalisation, as tau_eff may leave the range of the clients'.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.federation.protocol import Range, Update
from fedsub_app.settings import MethodSettings, Settings
from fedsub_app.subnets.averaging import Contribution, masked_mean
from strategies.base import SubnetStrategy

MOST_STEPS = 10**6


class FedNovaSettings(MethodSettings):
    """Keys of FedNova."""

    normalisation: Literal["paper", "authors"] = "paper"
    """What the changes are divided and multiplied by: as in the paper, or in the authors' code."""


def normaliser(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return a, how far ``steps`` of SGD go under a gradient that stays 1, in learning rates; FedNova's ||a_i||_1.

    Parameters
    ----------
    steps : tau_i >= 0.
    momentum : rho of SGD.
    pull : learning rate times the weight mu of the proximal term, whose gradient grows with the way gone.
    """
    buffer = way = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1 - pull * way
        way += buffer
    return way


def authors_normaliser(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return a as the published code counts it: with momentum and pull, both branches of every step add to it."""
    counter = way = 0.0
    for _ in range(steps):
        counter = momentum * counter + 1
        if momentum or not pull:
            way += counter
        if pull:
            way = way * (1 - pull) + 1
    return way


class FedNova(SubnetStrategy):
    """FedAvg with normalised changes."""

    options: FedNovaSettings

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        self.parameters = [name for name, _ in model.named_parameters()]

    def metrics(self, client: int) -> Mapping[str, Range]:
        """A client must say how many steps it made."""
        most = min(MOST_STEPS, self.settings.local_steps or self.most_samples(client))
        return {**super().metrics(client), "steps": Range(0, most, integer=True, needed=True)}

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        """What is averaged is the change a step."""
        said = super().norms(update, contribution)
        return {**said, "update a step": said["update"] / self.way(update)}

    def way(self, update: Update) -> float:
        """Return a_i; of a client without a step, whose change is 0, that of one."""
        settings, steps = self.settings, max(1, int(update.metrics["steps"]))
        if settings.optimizer == "adam":
            return float(steps)
        pull = settings.lr_at(self.round) * settings.prox_mu if settings.objective == "prox" else 0.0
        count = normaliser if self.options.normalisation == "paper" else authors_normaliser
        return count(steps, settings.momentum, pull)

    needs_all = True

    def merge_all(self, updates: Sequence[Update], contributions: Sequence[Contribution]) -> Tensors:
        """Mean with the weights p_i / a_i, and a step to it that makes up for their sum.

        ``w + tau_eff * sum_i p_i (w_i - w) / a_i = w + s * (mean - w)`` with ``s = tau_eff * sum_i p_i / a_i``. All a
        are divided by the largest one, so that s is exactly 1 where they are equal.
        """
        ways = [self.way(update) for update in updates]
        most, total = max(ways), sum(c.weight for c in contributions)
        shares = [c.weight / total for c in contributions]
        effective = sum(c.weight * (a / most) for c, a in zip(contributions, ways, strict=True)) / total
        if self.options.normalisation == "authors" and self.settings.objective == "prox" and self.settings.prox_mu:
            effective = sum(p * update.metrics["steps"] for p, update in zip(shares, updates, strict=True)) / most
        scaled = [c.weight * (most / a) for c, a in zip(contributions, ways, strict=True)]
        weighed = [
            Contribution(chosen(c.tensors, self.parameters), c.masks, weight)
            for c, weight in zip(contributions, scaled, strict=True)
        ]
        rest = [name for name in self.current if name not in self.parameters]
        others = [c._replace(tensors=chosen(c.tensors, rest)) for c in contributions]
        step = self.settings.server_lr * effective * (sum(scaled) / total)
        merged = masked_mean(chosen(self.current, self.parameters), weighed, step)
        averaged = masked_mean(chosen(self.current, rest), others, self.settings.server_lr)
        return {name: merged[name] if name in merged else averaged[name] for name in self.current}
