"""FedDST, server side: dynamic sparse training.

Bibikar, Vikalo, Wang, Chen: Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning Better,
AAAI 2022, https://arxiv.org/abs/2112.09824. The network is sparse from the start, at random positions. In every
``every``-th round each client, after its training, prunes a share of each layer's weights, the smallest ones. It grows
as many where the loss's gradient is largest. The share follows a cosine to 0 in round ``until``. A client sends the
values that it keeps, and in these rounds its mask. The server takes the mean at each position over the clients that
keep it, and keeps the largest means of each layer (strategies/sparse.py). Grown weights are 0; votes choose among them.

Checked against the authors' code (https://github.com/bibikar/feddst: dst.py, models.py). Deviations from it and from
the paper, and points that they leave open:
- the densities of the layers are those of the Erdős–Rényi kernel as published by its authors (RigL); FedDST's code has
  another formula, and begins with the largest initial weights in the place of random ones.
- clients adjust after their last epoch (the code's default; the paper has epochs after the adjustment as well).
  Grown weights are 0 when the server chooses: it takes the most voted positions, and random ones of equal votes (ours).
- weights grow at pruned positions (paper); the code may choose a position that is kept, and sets it to 0. The gradient
  is that of one mini-batch drawn for it; the code takes the last one of the training.
- a layer exchanges no more weights than it has pruned ones, so that a dense layer keeps its weights (ours).
- the share is ``share / 2 (1 + cos(pi t / until))`` (paper); the code multiplies it by ``share`` once more.
- masks are adjusted in rounds every, 2 every, ... (code: 2, 2 + every, ...).
- BatchNorm and biases are dense (code). Left out: the code's final sparsity, least votes, fp16, memory of old weights.
"""

from collections.abc import Mapping, Sequence

import torch

from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.secure.client import AT
from fedsub_app.subnets.sparsity import largest_of_layers
from strategies.base import Spec, Update
from strategies.sparse import MASK, Regrown

ZERO = 1e-7  # what is smaller is no mean of trained weights


class FedDST(Regrown):
    """Merges the clients' masks by the magnitude of the merged weights."""

    @property
    def chooses_positions(self) -> bool:
        return self.adjusts(self.round)

    def findings(self) -> Mapping[str, Spec]:
        return {f"{MASK}{name}": Spec(tuple(mask.shape), torch.bool) for name, mask in self.kept(0).items()}

    def adjusted(self, model: Tensors, updates: Sequence[Update]) -> Tensors:
        """Return where the merged weights are largest, of those that some client keeps."""
        sizes, mask, settings = {}, AT if self.settings.secure_aggregation else MASK, self.settings
        rounding = settings.secure_range * settings.sample_size / 2**31 if settings.secure_aggregation else 0.0
        for name in self.kept(0):
            votes = self.total(updates, f"{mask}{name}")
            # The mean of weights that have grown is 0, but for a secure sum's rounding: the most voted ones count, of
            # equally many votes random ones.
            numbers = torch.rand(votes.shape, generator=generator(self.settings.seed, self.round, name, "grown"))
            grown = (votes + numbers) / (len(updates) + 1) - 1
            size = torch.where(model[name].abs() < max(ZERO, rounding), grown, model[name].abs())
            sizes[name] = size.masked_fill(votes < self.settings.min_contributors, -1)
        return self.masks | largest_of_layers(sizes, {name: int(self.masks[name].sum()) for name in sizes})
