"""FedPart with momentum aggregation, client side; deviations from papers and code: ``strategies/fedpart.py``."""

import torch

from client_apps.base import Client
from fedsub_app.common.seeds import derive
from fedsub_app.common.tensors import Json, Tensors, brought, chosen, prefixed
from fedsub_app.models import layer_groups
from fedsub_app.training.client import Training
from strategies.fedpart import FIRST, SECOND, STEPS
from strategies.settings import FedPartSettings


class FedPartClient(Client):
    """Keeps a model of its own, replaces in it the groups that it is sent, and trains one group."""

    options: FedPartSettings
    irreplaceable = "it may be sent only a part of the model"

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the round's group, or the full network; return it, with its moments if they are shared."""
        every = self.network.tensors
        names = tuple(every) if config["group"] is None else layer_groups(self.network.module)[config["group"]]
        model = self.own | chosen(sent, every)
        if self.options.stale == "faithful":
            # As published, each client starts from a random network of its own.
            model = self.place.initial(derive(self.settings.seed, self.id, "own network")) | model
        self.load(model)
        training = Training(self, names)
        optimizer = training.optimizer
        if STEPS in sent:
            there = brought(sent, self.network.device)
            for k, name in enumerate(optimizer.parameters):
                optimizer.first[name].copy_(there[f"{FIRST}{name}"])
                optimizer.second[name].copy_(there[f"{SECOND}{name}"])
                optimizer.steps[name].copy_(there[STEPS][k])
        training.run(self.batches())
        answer = chosen(self.keep_own(), names)
        if self.options.momentum == "none" or not optimizer.parameters:
            return answer
        steps = torch.stack(list(optimizer.steps.values())).to(torch.int64)
        return answer | prefixed(FIRST, optimizer.first) | prefixed(SECOND, optimizer.second) | {STEPS: steps}
