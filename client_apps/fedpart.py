"""FedPart with momentum aggregation, client side; what it deviates in: ``strategies/fedpart.py``."""

from collections.abc import Sequence

import torch
from torch import nn

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import layer_groups
from fedsub_app.training.optimizer import Optimizer
from strategies.fedpart import FIRST, SECOND, STEPS, FedPartSettings


class FedPartClient(Client):
    """Keeps a model of its own, brings the groups that it is sent up to date and trains one of them."""

    options: FedPartSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the round's group, or the full network; returns it, with its moments where they are shared."""
        names = list(self.place.tensors) if config["group"] is None else layer_groups(self.model)[config["group"]]
        model = self.previous | {name: tensor for name, tensor in sent.items() if name in self.place.tensors}
        if self.options.stale == "faithful":
            model = self.initial() | model
        if len(model) < len(self.place.tensors):
            raise UserError(f"client {self.id} has no model of an earlier round and was sent only a part of one")
        self.load(model)
        self.sent = sent
        self.fit(names=names)
        answer = {name: tensor for name, tensor in self.remember().items() if name in names}
        if self.options.momentum == "none" or not self.settings.local_epochs:
            return answer
        trained = [name for name, _ in self.model.named_parameters() if name in names]
        for kind, moments in ((FIRST, self.optimizer.first), (SECOND, self.optimizer.second)):
            answer |= {f"{kind}{name}": moment for name, moment in zip(trained, moments, strict=True)}
        return answer | {STEPS: torch.stack(self.optimizer.steps).to(torch.int64)}

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Return a fresh optimizer, or one that goes on from the merged moments."""
        optimizer = super().make_optimizer(parameters)
        if STEPS in self.sent:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            for k, parameter in enumerate(parameters):
                optimizer.first[k].copy_(self.sent[f"{FIRST}{names[id(parameter)]}"])
                optimizer.second[k].copy_(self.sent[f"{SECOND}{names[id(parameter)]}"])
                optimizer.steps[k].fill_(self.sent[STEPS][k])
        return optimizer
