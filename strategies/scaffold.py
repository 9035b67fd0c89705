"""SCAFFOLD, server side: control variates against the drift of clients whose data differ.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, https://arxiv.org/abs/1910.06378, Algorithm 1 with option II. The variate c estimates the gradient of the mean
loss, and a client's c_i the gradient of its own loss; a local step goes along g - c_i + c. Model and variate travel
both ways: a round costs twice FedAvg's bytes (BatchNorm's running statistics, which are averaged as in FedAvg, have no
variate).

Deviations from the paper, and points that it leaves open:
- Option II reads a mean gradient off K plain SGD steps, and c is the mean of the c_i of all N clients, each counted
  once: momentum, Adam and ``weighting = "examples"`` are refused. Weight decay and ``objective`` are part of a client's
  loss, and so of its variate. lr is the round's; a variate is a gradient, so lr decay leaves it as it is.
- A client that has lost a c_i that c contains is dropped, by name, in all its rounds: starting again from 0 would leave
  the lost part in c for ever, and c would not be the mean of the c_i.
- Without a step (``local-epochs = 0``) the variates stay.
- With ``robust`` c is the sum of bounded changes, and no longer the mean of the c_i, which the clients do not bound.
- With secure-aggregation all clients make the same number of steps (``local-steps``).
"""

from collections.abc import Mapping, Sequence

import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.federation.nodes import takes_part
from fedsub_app.models import trainable
from fedsub_app.subnets.norms import norm
from strategies.base import BadReply, Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update

ROUNDING = 1e-3  # of two devices, relative
VARIATE = "variate/"  # prefix of c's names down, and of the names of c_i's change up


class Scaffold(SubnetStrategy):
    """FedAvg, and the variate c beside the model."""

    computes_with_sgd = True
    secure = ""
    sums = VARIATE
    remembers = ("variate",)
    refused = "its server also adds up the clients' variates"

    def setup(self) -> None:
        settings = self.settings
        for key, value, allowed in (
            ("optimizer", settings.optimizer, "sgd"),
            ("momentum", settings.momentum, 0),
            ("weighting", "examples" if settings.by_examples else "uniform", "uniform"),
        ):
            if value != allowed:
                raise UserError(f"{key} = {value!r}: must be {allowed!r} with method = 'scaffold'")
        # c, for every trainable parameter
        self.variate: Tensors = {name: torch.zeros_like(self.current[name]) for name in trainable(self.model)}

    def task(self, client: int) -> Task:
        return Task(client, self.current | prefixed(VARIATE, self.variate))

    def expected(self, client: int) -> Mapping[str, Spec]:
        return self.specs | {f"{VARIATE}{name}": Spec(tuple(c.shape)) for name, c in self.variate.items()}

    def contribution(self, update: Update) -> Contribution:
        """Add y_i; the change of c_i must be the one that follows from it, (x - y_i) / (K lr) - c (line 12)."""
        added = super().contribution(update)
        if not self.facts:
            return added
        distance = self.steps(update.num_examples) * self.lr
        for name, c in self.variate.items():
            sent = update.tensors[f"{VARIATE}{name}"]
            path = (self.current[name] - update.tensors[name]) / distance if distance else c
            if norm([sent - (path - c)]) > ROUNDING * (norm([path]) + norm([c])):
                raise BadReply(f"tensor {VARIATE + name!r}: not the change of a variate that its model implies")
        return added

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        return {**super().norms(update, contribution), "variate": norm(unprefixed(VARIATE, update.tensors).values())}

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Merge the model, and set c <- c + |S| / N * mean of the changes = c + their sum / N (line 17)."""
        changes = {name: self.total(updates, f"{VARIATE}{name}") for name in self.variate}
        count = sum(takes_part(self.settings))  # N: those that never take part have no variate
        variate = {name: (c + changes[name] / count).float() for name, c in self.variate.items()}
        return Merged(super().merge(mean, updates).model, {"variate": variate})

    def refuses(self) -> Mapping[str, str]:
        """Refuse secure sums of changes after known numbers of steps: one weighs them by 1, the other by 1 / K_i."""
        told = "with local-epochs the sums of changes and of variates, together, tell single clients: set local-steps"
        return {**super().refuses(), **({} if self.settings.local_steps else {"secure-aggregation": told})}

    def forget(self, client: int) -> None:
        """Leave the client out for good: c contains its lost c_i."""
