"""Clients of different widths: HeteroFL, FedRolex, Federated Dropout, FjORD; papers: ``strategies/<method>.py``."""

import copy
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors, brought, chosen, prefixed
from fedsub_app.models import Network, Output, head_names, kept_positions, tensors_of
from fedsub_app.secure.client import AT
from fedsub_app.subnets.slices import ALL, select
from fedsub_app.training.client import Training
from fedsub_app.training.costs import published_flops
from strategies.heterofl import CLASSES
from strategies.settings import FjORDSettings, HeteroFLSettings


class NarrowClient(Client):
    """Measures the statistics of BatchNorm."""

    @torch.no_grad()
    def measure(self, sent: Tensors, config: Json) -> Tensors:
        """Return BatchNorm's statistics, averaged over mini-batches of the client's data."""
        self.load(sent)
        network = copy.deepcopy(self.network.module).eval()
        for name, layer in network.named_modules():  # those of a frozen base stay
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and f"{name}.running_mean" in self.network.tensors:
                layer.train().reset_running_stats()
                layer.momentum = None  # a cumulative average
        for batch in self.batches(1, "statistics"):
            network(self.x[batch])
        self.flops += len(self.y) * self.place.forward_flops(self.network)
        return chosen(tensors_of(network), dict(network.named_buffers()))


class HeteroFLClient(NarrowClient):
    """Trains its narrow network with Scaler and masked loss."""

    options: HeteroFLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained network and, with a masked loss, the client's classes."""
        self.load(sent)
        width = config["width"] if self.options.scaler else 1
        classes = torch.full((self.place.problem.data.num_classes,), not self.options.masked_loss, device=self.y.device)
        if self.options.masked_loss:
            classes[self.y] = True

        def loss(output: Output, y: Tensor) -> Tensor:
            return self.loss(output._replace(logits=output.logits.masked_fill(~classes, 0)), y)

        with ExitStack() as hooks:  # the next client trains the same object without them
            for layer in producers(self.network, self.place.network) if width < 1 else ():
                hooks.enter_context(layer.register_forward_hook(lambda _, __, x: x / width))
            self.fit(loss=loss)
        answer = self.trained()
        if not self.options.masked_loss:
            return answer
        answer[CLASSES] = classes
        if not self.settings.secure_aggregation:
            return answer
        rows = {name: classes.view(-1, *[1] * (answer[name].dim() - 1)) for name in head_names(self.network.module)}
        return answer | prefixed(AT, brought(rows))


def producers(network: Network, whole: Network) -> set[nn.Module]:
    """Return the layers that produce the units: one for each group or, if outputs are added up, several.

    They are found in the ``whole`` network. In a narrow one a layer with one unit left has no group, and a depthwise
    convolution, which produces no units, looks like an ordinary one.
    """
    made = {(place.name, place.axis) for group in whole.units for place in group.places}
    layers = [
        (name, layer)
        for name, layer in whole.module.named_modules()
        if (f"{name}.weight", int(isinstance(layer, nn.Embedding))) in made  # an embedding makes units by its columns
    ]
    several = [name for name, layer in layers if layer.weight.dim() > 1 and getattr(layer, "groups", 1) == 1]
    return {network.module.get_submodule(name) for name in [*(group.name for group in whole.units), *several]}


class FjORDClient(NarrowClient):
    """Trains its network and the narrower ones inside it."""

    options: FjORDSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained network (Algorithm 1, lines 6 to 11)."""
        self.load(sent)
        widths = config["widths"]
        inner = [self.inner(width, widths[-1]) for width in widths[:-1]]
        draws, place, whole = self.generator("widths"), self.place, self.network

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            drawn = int(torch.randint(len(widths), (), generator=draws))
            training.loss = self.loss
            if drawn == len(inner):
                return training.descend(x, y)
            network, forward = inner[drawn]
            for each, times in ((network, 1), (whole, -(not self.options.distill))):
                self.flops += times * len(y) * place.training_flops(each)
                self.published_flops += times * len(y) * published_flops(place.forward_flops(each), False)
            if not self.options.distill:
                return training.descend(x, y, forward)
            training.loss = lambda output, y: self.loss(output, y) + imitation(forward(x), output)
            return training.descend(x, y, self.network)

        self.fit(step=step)
        return self.trained()

    def inner(self, width: float, most: float) -> tuple[Network, Callable[..., Output]]:
        """Return the network of a smaller width, and a function that runs it on the first units of the client's own."""
        groups = self.place.network.units  # in the client's own network a layer with one unit left has no group
        sizes = {group.name: group.kept(width) for group in groups}
        small, own = self.place.narrow_network(tuple(sizes.items())), self.network.parameters
        small.training_mode()
        first, held = ({g.name: torch.arange(g.size) < g.kept(each) for g in groups} for each in (width, most))
        whole = kept_positions(groups, held)
        within = {key: on[whole[key]].nonzero().flatten() for key, on in kept_positions(groups, first).items()}
        kept = {name: (within.get((name, 0)), within.get((name, 1))) for name, _ in within}
        return small, lambda x, _=None: small(x, {name: select(own[name], kept.get(name, ALL)) for name in own})

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the client's network with BatchNorm's statistics of its width."""
        return sent | (self.measure(sent, config) if sent.keys() - self.place.network.parameters.keys() else {})


def imitation(student: Output, teacher: Output) -> Tensor:
    """Return the cross-entropy to the teacher's probabilities, whose gradient in the student is that of the KL term."""
    return -(teacher.logits.detach().softmax(-1) * student.logits.log_softmax(-1)).sum(-1).mean()
