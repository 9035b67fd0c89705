"""FIARSE, server side: a client trains the largest weights of the global model.

Wu, Wang, Wang, Liu, Su, Gao: FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction,
NeurIPS 2024, https://arxiv.org/abs/2407.19389. A client of size gamma gets the share gamma of the weights whose
magnitudes are largest in the whole model; the smallest of these is its threshold theta. It trains
``f(w * M(w))``, where M is 1 for ``|w| >= theta`` and 0 elsewhere, also as w moves, and its gradient goes through M
(threshold-controlled biased gradient): ``g * M * (1 + 2 theta |w| / (|w| + theta)^2)``. The server averages each
position over the clients that train it.

Checked against the authors' code (https://github.com/HarliWu/FIARSE, fiarse/: server.py, worker.py, ``Bern`` of
model_utils.py, ``generate_mask`` of resnet_masked.py). Deviations from it and from the paper:

- The gradient has the paper's factor. In the code the factor is 1: the mask is boolean, and torch (2.15) passes no
  gradient through booleans.
- A client of size 1 has threshold 0 and is FedAvg's; the code's threshold is the smallest magnitude.
- Biases and BatchNorm belong to all clients (code: the biases of linear layers are ranked with the weights), and
  BatchNorm's statistics are averaged as in FedAvg (code: static BatchNorm is one of its networks).
- ``threshold = "layer"`` (code: fiarse_layerwise/) ranks each tensor alone, the code each stage of a ResNet. This helps
  where layers start with weights of different sizes, as torch's do: otherwise a narrow client may get no weight of the
  output layer.
- A weight that a client has not moved counts in the mean (code: positions whose change is not 0).
- The network has its whole shape on the client; values and masks travel. With ``devices`` gamma is the device's width,
  although a network of half the units has about a quarter of the weights.
- ``objective = "moon"`` is refused.
"""

from functools import partial

from fedsub_app.common.tensors import Tensors, prefixed
from fedsub_app.subnets.sparsity import largest_of_all
from strategies.base import Task
from strategies.settings import FIARSESettings
from strategies.sliced import WidthBased
from strategies.sparse import MASK, Masked, weight_names


class FIARSE(WidthBased, Masked):
    """Sends each client the largest weights, as many as its width says."""

    options: FIARSESettings

    def setup(self) -> None:
        self.names = weight_names(self.settings, self.model)

    def submodel(self, width: float) -> tuple[Tensors, dict[str, float]]:
        """Return the masks of the largest weights and the threshold of each tensor; none at width 1."""
        return self.once(("submodel", width), partial(self._submodel, width)) if width < 1 else ({}, {})

    def _submodel(self, width: float) -> tuple[Tensors, dict[str, float]]:
        masks: Tensors = {}
        thetas: dict[str, float] = {}
        for names in [[name] for name in self.names] if self.options.threshold == "layer" else [self.names]:
            sizes = {name: self.current[name].abs() for name in names}
            masks |= largest_of_all(sizes, max(1, int(width * sum(size.numel() for size in sizes.values()))))
            theta = min(float(sizes[name][masks[name]].min()) for name in names if masks[name].any())
            thetas |= dict.fromkeys(names, theta)
        return masks, thetas

    def kept(self, client: int) -> Tensors:
        return self.submodel(self.width(client))[0]

    def network_at(self, width: float) -> Tensors:
        return self.current | {name: self.current[name] * mask for name, mask in self.submodel(width)[0].items()}

    def task(self, client: int) -> Task:
        masks, thetas = self.submodel(self.width(client))
        return Task(client, self.values(client) | prefixed(MASK, masks), {"thresholds": thetas})

    def personal_download(self, client: int) -> Tensors:
        return self.task(client).tensors
