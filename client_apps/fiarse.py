"""FIARSE, client side; the paper and deviations from it: ``strategies/fiarse.py``."""

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors, brought, unprefixed
from fedsub_app.models import Output
from fedsub_app.subnets.masks import gather, scatter
from strategies.sparse import MASK


class FIARSEClient(Client):
    """Trains the weights that are not below its threshold."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained values of the weights that were sent."""
        self.load(self.personal(sent, config))
        masks, live = unprefixed(MASK, sent), self.network.tensors
        there = brought(masks, self.network.device)

        def forward(x: Batch, _: Tensors | None) -> Output:
            # A threshold of 0 keeps every weight, but the client has only the weights of its mask.
            kept = {name: thresholded(live[name], config["thresholds"][name]) * there[name] for name in masks}
            return self.network(x, {**live, **kept})

        self.fit(step=(lambda training, x, y: training.descend(x, y, forward)) if masks else None)
        model = self.trained()
        return model | gather(model, masks)

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        return {name: sent[name] for name in self.network.tensors} | scatter(sent, unprefixed(MASK, sent))


def thresholded(weight: Tensor, threshold: float) -> Tensor:
    """Return the weights with |w| >= t, else 0; a kept one's gradient is times ``1 + 2 t |w| / (|w| + t)^2``."""
    size = weight.detach().abs()
    kept = size >= threshold
    slope = kept * (1 + 2 * threshold * size / (size + threshold).square().clamp(min=torch.finfo(size.dtype).tiny))
    path = weight * slope
    return weight.detach() * kept + (path - path.detach())
