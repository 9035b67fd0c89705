"""The client side of HeteroFL, FedRolex, Federated Dropout; papers and deviations: ``strategies/heterofl.py``."""

import copy
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import Output, tensors_of
from strategies.heterofl import CLASSES
from strategies.settings import HeteroFLSettings


class NarrowClient(Client):
    """Measures the statistics of BatchNorm."""

    @torch.no_grad()
    def measure(self, sent: Tensors, config: Json) -> Tensors:
        """Return BatchNorm's statistics, averaged over mini-batches of the client's data."""
        self.load(sent)
        network = copy.deepcopy(self.network.module).eval()
        for layer in network.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train().reset_running_stats()
                layer.momentum = None  # a cumulative average
        for batch in self.batches(1, "statistics"):
            network(self.x[batch])
        self.flops += len(self.y) * self.place.forward_flops(self.network)
        statistics = {name for name, _ in network.named_buffers()}
        return {name: tensor for name, tensor in tensors_of(network).items() if name in statistics}


class HeteroFLClient(NarrowClient):
    """Trains its narrow network with Scaler and masked loss."""

    options: HeteroFLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained network and the client's classes, all of them without a masked loss."""
        self.load(sent)
        width = config["width"] if self.options.scaler else 1
        classes = torch.full((self.place.problem.data.num_classes,), not self.options.masked_loss, device=self.y.device)
        if self.options.masked_loss:
            classes[self.y] = True

        def loss(output: Output, y: Tensor) -> Tensor:
            return self.loss(output._replace(logits=output.logits.masked_fill(~classes, 0)), y)

        with ExitStack() as hooks:  # the next client trains the same object without them
            for group in self.network.units if width < 1 else ():
                layer = self.network.module.get_submodule(group.name)
                hooks.enter_context(layer.register_forward_hook(lambda _, __, x: x / width))
            self.fit(loss=loss)
        return self.trained() | {CLASSES: classes}
