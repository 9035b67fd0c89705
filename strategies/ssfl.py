"""SSFL, server side: a sparse network that is chosen before training.

Ohib, Thapaliya, Dziugaite, Liu, Calhoun, Plis: SSFL: Discovering Sparse Unified Subnetworks at Initialization for
Efficient Federated Learning, 2024, https://arxiv.org/abs/2405.09037. Each client computes the saliency
``|w * dL/dw|`` of all weights on one mini-batch, at the common initial model. The server keeps the weights of the
largest mean saliency, in one ranking of all layers; the mask is the same for all clients and stays. Clients train and
send the values that the mask keeps (strategies/sparse.py).

Checked against Flower's baseline by the paper's first author (baselines/ssfl, kp-forks/flower at 11a0eb9), also by
running its functions (docs/comparison.md); the authors' own repository holds a README alone. Deviations from both:
- round 1, or the first one that is not abandoned, is the round of the saliencies: its clients answer with saliencies
  and do not train. In the paper all clients do so before the first round; here, with ``participation`` below 1, the
  sampled clients alone.
- saliencies are weighed by the clients' samples, as the models are (paper; baseline: plain mean, or so by choice), and
  are those of one mini-batch of ``batch-size`` in training mode (baseline: evaluation mode, or a mean of several).
- among equal saliencies at the bound the first ones are kept, as many as ``density`` says (baseline: all of them, at
  worst the whole network). Each layer keeps at least its weight of the largest saliency.
- gradients are not clipped (baseline: to norm 10 in each step).
"""

from collections.abc import Mapping, Sequence

import torch

from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.subnets.norms import norm
from fedsub_app.subnets.sparsity import largest, largest_of_all
from strategies.base import Contribution, Mean, Merged, Spec, Task, Update
from strategies.sparse import Sparse


class SSFL(Sparse):
    """Chooses the mask in round 1 by the clients' saliencies."""

    secure = ""
    refused = "the answers of its first round are saliencies"

    def stage(self, server_round: int) -> str:
        return "saliency" if self.chooses(server_round) else ""

    @property
    def choosing(self) -> bool:
        return bool(self.stage(self.round))

    def task(self, client: int) -> Task:
        return Task(client, self.current, {"saliency": [*self.shapes]}) if self.choosing else super().task(client)

    def expected(self, client: int) -> Mapping[str, Spec]:
        saliencies = {name: Spec(tuple(shape), low=0) for name, shape in self.shapes.items()}
        return saliencies if self.choosing else super().expected(client)

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        return {"update": norm(contribution.tensors.values())} if self.choosing else super().norms(update, contribution)

    def origin(self, update: Update) -> Tensors:
        return {name: torch.zeros_like(x) for name, x in update.tensors.items()} if self.choosing else self.current

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Keep the weights of the largest mean saliency."""
        if not self.choosing:
            return super().merge(mean, updates)
        saliency = chosen(mean.result(), self.shapes)
        count = round(self.options.density * sum(values.numel() for values in saliency.values()))
        kept = largest_of_all(saliency, count)
        masks = {name: kept[name] | largest(values, 1) for name, values in saliency.items()}
        return self.under(self.current, masks)
