"""FedNova, server side: clients' changes are normalised by their local steps before they are averaged.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, https://arxiv.org/abs/2007.07481::

    w <- w + tau_eff * sum_i p_i (w_i - w) / a_i,   tau_eff = sum_i p_i a_i

a_i is the distance, in learning rates, of client i's tau_i steps under a gradient that stays 1; for plain SGD it is
tau_i. p_i are the weights of the setting ``weighting`` (the paper's: ``"examples"``). Where all a_i are equal this is
FedAvg. The clients are FedAvg's; the server counts their steps by their samples.

Deviations:

- With momentum and the proximal term at once a_i is the distance under both, which the paper does not state.
  ``normalisation = "authors"`` takes the recurrence of the published code, where both add a step of their own, and its
  tau_eff, with a proximal term the mean number of steps. With few steps this makes the server's step shorter than 1,
  also where all clients do the same; in the tables of Hu et al. 2023 it is about 0.3.
- With Adam, AdamW and RMSprop a_i = tau_i.
- BatchNorm's running statistics are averaged without normalisation, as tau_eff may leave the range of the clients'
  statistics.
"""

from collections.abc import Mapping, Sequence

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import chosen
from fedsub_app.models import trainable
from fedsub_app.subnets.averaging import masked_mean
from strategies.base import BadReply, Contribution, Mean, Merged, SubnetStrategy, Update
from strategies.settings import FedNovaSettings

MAX_STEPS = 10**6


def normaliser(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return ||a_i||_1, the distance that tau_i ``steps`` of SGD go under a gradient that stays 1, in learning rates.

    ``pull``: learning rate times the weight mu of the proximal term, whose gradient grows with the distance.
    """
    buffer = distance = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1 - pull * distance
        distance += buffer
    return distance


def authors_normaliser(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return a as the published code counts it: with momentum and pull, both branches of every step add to it."""
    counter = distance = 0.0
    for _ in range(steps):
        counter = momentum * counter + 1
        if momentum or not pull:
            distance += counter
        if pull:
            distance = distance * (1 - pull) + 1
    return distance


class FedNova(SubnetStrategy):
    """FedAvg with normalised changes."""

    options: FedNovaSettings
    computes_with_sgd = True
    secure = ""
    refused = "its server weighs a round's answers by one another"

    def setup(self) -> None:
        self.parameters = list(trainable(self.model))
        if self.settings.optimizer == "sgd" and (pull := self.settings.lr * self.settings.pull) > 1:  # a_i may be 0
            what = f"prox-mu = {self.settings.prox_mu:g}: lr * prox-mu is {pull:g}"
            raise UserError(f"{what}, must be at most 1 with method = 'fednova'")

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        norms = super().norms(update, super().contribution(update))
        return {**norms, "update a step": norms["update"] / self.distance_of_steps(update)}

    def distance_of_steps(self, update: Update) -> float:
        """Return a_i; for a client without a step, whose change is 0, the a_i of one step."""
        settings, steps = self.settings, max(1, self.steps(update.num_examples))
        if settings.optimizer != "sgd":
            return float(steps)
        count = normaliser if self.options.normalisation == "paper" else authors_normaliser
        return count(steps, settings.momentum, self.lr * settings.pull)

    def contribution(self, update: Update) -> Contribution:
        """Add the parameters, weighed by p_i / a_i."""
        if (steps := self.steps(update.num_examples)) > MAX_STEPS:
            raise BadReply(f"num-examples = {update.num_examples}: {steps} steps, at most {MAX_STEPS}")
        return Contribution(chosen(update.tensors, self.parameters), None, self.summed_weight(update))

    def summed_weight(self, update: Update) -> float:
        return self.weight(update) / self.distance_of_steps(update)

    def refuses(self) -> Mapping[str, str]:
        alone = {"secure-aggregation": "BatchNorm's statistics are averaged with other weights"}
        return {**super().refuses(), **(alone if self.current.keys() - self.parameters else {})}

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Make a step towards the mean that compensates for the sum of its weights.

        ``w + tau_eff * sum_i p_i (w_i - w) / a_i = w + s * (mean - w)`` with ``s = tau_eff * sum_i p_i / a_i``. All a
        are divided by the largest one, so that s is exactly 1 where they are equal.
        """
        weights, distances = [self.weight(u) for u in updates], [self.distance_of_steps(u) for u in updates]
        largest, total = max(distances), sum(weights)
        effective = sum(p * (a / largest) for p, a in zip(weights, distances, strict=True)) / total
        if self.options.normalisation == "authors" and self.settings.pull:
            steps = [self.steps(update.num_examples) for update in updates]
            effective = sum(p / total * tau for p, tau in zip(weights, steps, strict=True)) / largest
        shares = sum(p * (largest / a) for p, a in zip(weights, distances, strict=True)) / total
        model = mean.result(self.settings.server_lr * effective * shares)
        statistics = {name: tensor for name, tensor in self.current.items() if name not in self.parameters}
        each = [Contribution(update.tensors, None, p) for update, p in zip(updates, weights, strict=True)]
        return Merged(model | masked_mean(statistics, each, self.settings.server_lr))
