"""FedPM, server side: a random network stays as it is, and the clients learn which of its weights count.

Isik, Pase, Gunduz, Weissman, Zorzi: Sparse Random Networks for Communication-Efficient Federated Learning, ICLR 2023,
https://arxiv.org/abs/2209.15328, Algorithms 1 and 2. Every weight is plus or minus a constant of its layer, for ever.
The server sends the probability theta of each weight's mask. A client trains scores, theta = sigmoid(score): each step
draws a mask and passes the loss's gradient straight through the drawing. It answers with one mask that it draws, a bit
for each weight. The server counts ones and zeros of the masks in a Beta distribution for each weight, and theta is its
mode ``(alpha - 1) / (alpha + beta - 2)``; every ``reset-every`` rounds the counts begin anew at alpha = beta = 1.

Checked against the authors' code (https://github.com/BerivanIsik/sparse-random-networks: server.py, client.py,
masked_layers.py). Deviations from it and from the paper, and points that they leave open:
- the constant is the standard deviation of Kaiming's normal initialisation, ``sqrt(2 / inputs)`` (paper; the code has
  ``e / sqrt(inputs)``); its sign is that of the initial weight, also of a trained one, and a notice says so. Biases
  have masks and constants of their layer (code).
- scores start at 0, theta at 1/2; the code draws normal scores.
- theta is kept within 0.01 and 0.99, so that scores are finite (code: the bits count as 0.01 and 0.99).
- the global model that is tested has one mask drawn from theta.
- layers other than convolutions and linear ones (BatchNorm) are trained and averaged as in FedAvg; the paper has none.
- ``reset-every = 1`` is the code's reset in every round; the paper resets less often with partial participation.
- the optimizer of the settings moves the scores. ``objective = "prox"`` pulls them to the received scores; "moon" is
  refused. All masks count alike.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.init import _calculate_fan_in_and_fan_out as fans

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.models import trainable, turned
from fedsub_app.subnets.pruning import prunable
from strategies.base import Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.sparse import MASK, weight_names
from strategies.sparse_settings import FedPMSettings

THETA = "theta/"
LIMIT = 0.01  # theta's distance from 0 and 1


class FedPM(SubnetStrategy):
    """Sends probabilities, counts masks."""

    options: FedPMSettings
    secure = ""
    sums = MASK
    refused = "its server counts the clients' masks"
    remembers = ("theta", "ones", "zeros")

    def setup(self) -> None:
        settings = self.settings
        if settings.by_examples:
            raise UserError("weighting = 'examples': must be 'uniform' with method = 'fedpm'")
        if settings.server_lr != 1:
            raise UserError(f"server-lr = {settings.server_lr:g}: must be 1 with fedpm, whose server counts masks")
        if settings.attack == "scale":
            raise UserError("attack = 'scale': must be sign-flip or label-flip with fedpm, whose clients send bits")
        if settings.trainable:
            why = "fedpm masks random weights that stay; allowed is '', the whole network"
            raise UserError(f"trainable = {settings.trainable!r}: {why}")
        if settings.secure_aggregation and settings.secure_range < 1:
            raise UserError(f"secure-range = {settings.secure_range:g}: at least 1 with fedpm, whose masks are summed")
        if settings.start_from or "pretrained" in settings.model_options or settings.model.startswith("package:"):
            self.warning = "fedpm takes only the signs of the initial weights that it masks, also of trained ones"
        weight_names(settings, self.model)
        self.signed = signed_constants(self.model, self.current)
        self.theta = {name: torch.full_like(tensor, 0.5) for name, tensor in self.signed.items()}  # of each weight
        self.ones = {name: torch.zeros_like(tensor) for name, tensor in self.signed.items()}  # alpha - 1
        self.zeros = dict(self.ones)  # beta - 1
        self.current = self.drawn(self.current, self.theta, 0)

    def drawn(self, model: Tensors, theta: Tensors, server_round: int) -> Tensors:
        """Return the model with the random network under a mask that is drawn."""
        draws = generator(self.settings.seed, server_round, "mask")
        return model | {name: w * torch.bernoulli(theta[name], generator=draws) for name, w in self.signed.items()}

    def task(self, client: int) -> Task:
        others = {name: tensor for name, tensor in self.current.items() if name not in self.signed}
        return Task(client, others | prefixed(THETA, self.theta))

    def expected(self, client: int) -> Mapping[str, Spec]:
        masks = {f"{MASK}{name}": Spec(tuple(w.shape), torch.bool) for name, w in self.signed.items()}
        return {name: spec for name, spec in self.specs.items() if name not in self.signed} | masks

    def compared(self, update: Update, contribution: Contribution) -> Contribution:
        """Return the masks as well, as steps of 1/2 up or down: their complements are the opposite direction."""
        steps = {n: self.current[n] + (mask.float() - 0.5) for n, mask in unprefixed(MASK, update.tensors).items()}
        return contribution._replace(tensors={**contribution.tensors, **steps})

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Count the masks and take the mode of each Beta distribution (Algorithm 2)."""
        state: dict[str, Tensors] = {"theta": {}, "ones": {}, "zeros": {}}
        fresh = (self.round - 1) % self.options.reset_every == 0
        for name in self.signed:
            count = self.total(updates, f"{MASK}{name}").float().round()
            ones = self.ones[name] * (not fresh) + count
            zeros = self.zeros[name] * (not fresh) + len(updates) - count
            state["ones"][name], state["zeros"][name] = ones, zeros
            state["theta"][name] = (ones / (ones + zeros)).clamp(LIMIT, 1 - LIMIT)
        return Merged(self.drawn(super().merge(mean, updates).model, state["theta"], self.round), state)


def signed_constants(model: nn.Module, initial: Mapping[str, Tensor]) -> Tensors:
    """Return the random network: trained weights and biases of convolutions and linear layers, by name."""
    signed, trained, others = {}, trainable(model), turned(model)
    for weight in prunable(model, "unstructured").weights:
        constant = (2 / fans(initial[weight])[weight in others]) ** 0.5
        for name in (weight, weight.removesuffix("weight") + "bias"):
            if name in trained:
                signed[name] = torch.where(initial[name] < 0, -constant, constant)
    return signed
