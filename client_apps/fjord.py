"""FjORD, client side; the paper and deviations from it: ``strategies/fjord.py``."""

from collections.abc import Callable

import torch
from torch import Tensor

from client_apps.heterofl import NarrowClient
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import Network, Output
from fedsub_app.subnets.slices import ALL, indices, select
from fedsub_app.training.client import Training
from strategies.settings import FjORDSettings


class FjORDClient(NarrowClient):
    """Trains its network and the narrower ones inside it."""

    options: FjORDSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained network (Algorithm 1, lines 6 to 11)."""
        self.load(sent)
        widths = config["widths"]
        inner = [self.inner(width) for width in widths[:-1]]
        draws, whole = self.generator("widths"), self.place.training_flops(self.network)

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            drawn = int(torch.randint(len(widths), (), generator=draws))
            training.loss = self.loss
            if drawn == len(inner):
                return training.descend(x, y)
            network, forward = inner[drawn]
            self.flops += len(y) * (self.place.training_flops(network) - whole * (not self.options.distill))
            if not self.options.distill:
                return training.descend(x, y, forward)
            training.loss = lambda output, y: self.loss(output, y) + imitation(forward(x), output)
            return training.descend(x, y, self.network)

        self.fit(step=step)
        return self.trained()

    def inner(self, width: float) -> tuple[Network, Callable[..., Output]]:
        """Return the network of a smaller width, and how it runs on the first units of the client's own one."""
        sizes = {group.name: group.kept(width) for group in self.place.network.units}
        small, own = self.place.narrow_network(tuple(sizes.values())), self.network.parameters
        small.training_mode()
        first = {group.name: torch.arange(group.size) < sizes[group.name] for group in self.network.units}
        kept = indices(self.network.units, first)
        return small, lambda x, _=None: small(x, {name: select(own[name], kept.get(name, ALL)) for name in own})

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the client's network with BatchNorm's statistics of its width."""
        return sent | (self.measure(sent, config) if sent.keys() - self.place.network.parameters.keys() else {})


def imitation(student: Output, teacher: Output) -> Tensor:
    """Return the cross-entropy to the teacher's probabilities, whose gradient in the student is that of the KL term."""
    return -(teacher.logits.detach().softmax(-1) * student.logits.log_softmax(-1)).sum(-1).mean()
