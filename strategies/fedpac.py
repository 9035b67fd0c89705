"""FedPAC, server side: aligned features, and for each client a head combined from those that help it.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023,
https://arxiv.org/abs/2306.11867; details as in its authors' code. Deviations: clients are weighed by the setting
``weighting`` (theirs: by examples), the quadratic program is SciPy's SLSQP, and momentum and weight decay are the run's
settings (theirs 0.5 and 5e-4).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedsub_app.common.section import CountOrZero, NonNegative, Positive
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import BadReply, Spec, Task, Update
from fedsub_app.models import head_names
from fedsub_app.settings import MethodSettings, Settings
from fedsub_app.subnets.averaging import masked_mean
from fedsub_app.subnets.collaboration import combination
from strategies.base import SubnetStrategy

CENTROIDS, KNOWN, MEANS, COUNTS, H, V = (f"fedpac/{n}" for n in ("centroids", "known", "means", "counts", "h", "v"))


class FedPACSettings(MethodSettings):
    """Keys of FedPAC."""

    lambda_: NonNegative = 1.0
    """Weight of the feature alignment."""
    head_lr: Positive = 0.1
    """Learning rate of the head's own training."""
    head_epochs: CountOrZero = 1
    """Epochs of the head's own training, before the body's."""


class FedPAC(SubnetStrategy):
    """Merges bodies and class centroids; combines a head for each client.

    Attributes
    ----------
    heads : each client's head, tensor name -> float [N, ...].
    centroids, known : class centroids [classes, d] and which of them there are, bool [classes].
    """

    options: FedPACSettings

    def __init__(self, settings: Settings, model: nn.Module, header: Json) -> None:
        super().__init__(settings, model, header)
        self.head = head_names(model)
        self.heads = {n: self.current[n].expand(settings.num_clients, *self.current[n].shape) for n in self.head}
        self.heads = {name: heads.clone() for name, heads in self.heads.items()}
        self.centroids = torch.zeros(self.current[self.head[0]].shape)  # the head's weight is [classes, d]
        self.known = torch.zeros(len(self.centroids), dtype=torch.bool)

    def task(self, client: int) -> Task:
        """Send the body, the client's head and the centroids."""
        return Task(client, self.evaluation_task(client).tensors | {CENTROIDS: self.centroids, KNOWN: self.known})

    def evaluation_task(self, client: int) -> Task:
        """Send the body with the client's head; where the global model's accuracy is asked for, the mean head."""
        if "global-local" in self.settings.evaluations:
            return super().evaluation_task(client)
        return Task(client, self.current | {name: heads[client] for name, heads in self.heads.items()})

    def expected(self, client: int) -> Mapping[str, Spec]:
        """The model and its features' statistics."""
        classes, width = self.centroids.shape
        return {
            **self._like_current,
            MEANS: Spec((classes, width)),
            COUNTS: Spec((classes,)),
            H: Spec((classes, width)),
            V: Spec((1,)),
        }

    def decode(self, update: Update) -> Update:
        """Counts and variances are not negative."""
        for name in (COUNTS, V):
            if bool((update.tensors[name] < 0).any()):
                raise BadReply(f"tensor {name!r}: negative values")
        return update

    def merge(self, updates: Sequence[Update]) -> Tensors:
        """Mean model; centroids by counts; a head for each client that answered."""
        counts = torch.stack([update.tensors[COUNTS] for update in updates])
        means = torch.stack([update.tensors[MEANS] for update in updates])
        total = counts.sum(0)
        merged = (counts[:, :, None] * means).sum(0) / total.clamp(min=1e-12)[:, None]
        self.known = self.known | (total > 0)
        self.centroids = torch.where((total > 0)[:, None], merged, self.centroids)
        h = torch.stack([update.tensors[H] for update in updates])
        variances = torch.cat([update.tensors[V] for update in updates])
        self.report["combination"] = {}
        for k, update in enumerate(updates):
            weights = combination(h, variances, k)
            self.report["combination"][update.client] = [round(w, 3) for w in weights.tolist()]
            for name in self.head:
                stacked = torch.stack([other.tensors[name] for other in updates])
                self.heads[name][update.client] = torch.tensordot(weights, stacked, dims=1)
        parts = [({n: u.tensors[n] for n in self.current}, None, self.weight(u)) for u in updates]
        return masked_mean(self.current, parts, server_lr=self.settings.server_lr)

    def state(self) -> Tensors:
        """Heads and centroids."""
        return {f"head/{name}": heads for name, heads in self.heads.items()} | {
            CENTROIDS: self.centroids,
            KNOWN: self.known,
        }

    def load_state(self, state: Tensors) -> None:
        """Restore them."""
        self.heads = {name: state[f"head/{name}"].clone() for name in self.head}
        self.centroids, self.known = state[CENTROIDS].clone(), state[KNOWN].clone()
