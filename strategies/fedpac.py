"""FedPAC, server side: aligned features, and for each client a head combined from the heads that help it.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023,
https://arxiv.org/abs/2306.11867; details are those of its authors' code. Deviations: Clients are weighed by the setting
``weighting`` (theirs: by examples). SciPy's SLSQP solves the quadratic program. Momentum and weight decay are the run's
settings (theirs 0.5 and 5e-4). BatchNorm in the frozen body uses its running statistics while the head is trained
(theirs those of the batch). The centroid of a class that no client of a round has stays (theirs does not).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.tasks import task_of
from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.models import head_layer, head_names, output_names
from fedsub_app.subnets.collaboration import combination
from fedsub_app.subnets.norms import norm
from strategies.base import BadReply, Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.defences import DEFENCES
from strategies.memory import Memory

CENTROIDS, KNOWN, MEANS, COUNTS, H, V = (f"fedpac/{n}" for n in ("centroids", "known", "means", "counts", "h", "v"))


class FedPAC(SubnetStrategy):
    """Merges models and class centroids; combines a head for each client."""

    secure = "its server combines the heads and centroids of single clients"
    refused: ClassVar = dict.fromkeys((*DEFENCES, "min-contributors"), secure)
    remembers = ("heads", "centroids", "known")

    def setup(self) -> None:
        settings = self.settings
        if not task_of(settings.task).classes:
            raise UserError(f"task = {settings.task!r}: has no classes, whose means fedpac aligns")
        self.head = head_names(self.model)
        if not self.head:
            raise UserError(f"trainable = {settings.trainable!r}: without the head, which fedpac combines")
        if not isinstance(self.model.get_submodule(head_layer(self.model)), nn.Linear):
            raise UserError(f"model = {settings.model!r}: its head is no Linear layer, which fedpac combines")
        try:
            output_names(self.model)
        except TypeError as error:
            raise UserError(f"model = {settings.model!r}: {error}") from None
        self.heads = {name: torch.stack([self.current[name]] * settings.num_clients) for name in self.head}  # [N, ...]
        self.centroids = torch.zeros(self.current[self.head[0]].shape)  # of the head's weight, [classes, d]
        self.known = torch.zeros(len(self.centroids), dtype=torch.bool)  # whether a class has a centroid

    def task(self, client: int) -> Task:
        return Task(client, self.personal_download(client) | {CENTROIDS: self.centroids, KNOWN: self.known})

    def personal_download(self, client: int) -> Tensors:
        return self.current | {name: heads[client] for name, heads in self.heads.items()}

    def expected(self, client: int) -> Mapping[str, Spec]:
        matrix, counts = Spec(tuple(self.centroids.shape)), Spec((len(self.centroids),), low=0)
        return {**self.specs, MEANS: matrix, COUNTS: counts, H: matrix, V: Spec((1,), low=0)}

    def contribution(self, update: Update) -> Contribution:
        """Add the model; the classes' counts must add up to the client's samples."""
        total = float(update.tensors[COUNTS].double().sum())
        if total != update.num_examples:
            raise BadReply(f"tensor {COUNTS!r}: counts of {total:g} samples, num-examples = {update.num_examples}")
        return super().contribution(update)

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        return {**super().norms(update, contribution), **{name: norm([update.tensors[name]]) for name in (MEANS, H, V)}}

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        """Keep the head as well, for every client's own combination."""
        return super().remembered(update, contribution) | chosen(update.tensors, self.head)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Merge the centroids by counts; combine a head for each client that answered."""
        every = {n: torch.stack([u.tensors[n] for u in updates]) for n in (COUNTS, MEANS, H, V, *self.head)}
        total = every[COUNTS].sum(0)
        merged = (every[COUNTS][:, :, None] * every[MEANS]).sum(0) / total.clamp(min=1e-12)[:, None]
        centroids = torch.where((total > 0)[:, None], merged, self.centroids)
        heads = {name: each.clone() for name, each in self.heads.items()}
        used = {}
        for k, update in enumerate(updates):
            weights = combination(every[H], every[V].flatten(), k)
            used[update.client] = [round(weight, 3) for weight in weights.tolist()]
            for name in self.head:
                heads[name][update.client] = torch.tensordot(weights, every[name], dims=1)
        state: dict[str, Memory] = {"heads": heads, "centroids": centroids, "known": self.known | (total > 0)}
        return Merged(super().merge(mean, updates).model, state, {"combination": used})
