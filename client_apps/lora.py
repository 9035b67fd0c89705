"""LoRA in a federation, client side; papers and deviations: ``strategies/lora.py``."""

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import Output, adapters
from strategies.lora import PRUNES
from strategies.settings import HetLoRASettings


class MovedBaseClient(Client):
    """FedEx-LoRA and FLoRA: receives the weights under the adapters, and does not return them."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        fixed = {adapter.weight for adapter in adapters(self.network.tensors)}
        return {name: tensor for name, tensor in super().train(sent, config).items() if name not in fixed}


class HetLoRAClient(Client):
    """Trains with a penalty on the last ranks, and prunes them if training has made them smaller."""

    options: HetLoRASettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained network, its last ranks 0 if they are pruned, and whether they are pruned."""
        self.load(sent)
        every = adapters(self.network.tensors)
        kept = self.options.pruned(config["rank"])

        def size() -> Tensor:
            """Return the sum over the layers of ‖B[:, kept:]‖ ‖A[kept:]‖."""
            tensors = self.network.parameters
            parts = [tensors[a.b][:, kept:].norm() * tensors[a.a][kept:].norm() for a in every]
            return torch.stack(parts).sum() if parts else torch.zeros(())

        def loss(output: Output, y: Tensor) -> Tensor:
            return self.loss(output, y) + self.options.lambda_ * size()

        before = size().detach()
        self.fit(loss=loss if every and self.options.lambda_ else None)
        trained = self.trained()
        prunes = bool(size() < before)  # no ranks to prune have the size 0, before and after
        if prunes:
            for adapter in every:
                trained[adapter.a][kept:] = 0
                trained[adapter.b][:, kept:] = 0
        return trained | {PRUNES: torch.tensor([prunes])}
