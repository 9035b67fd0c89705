"""PruneFL, FedTiny, FedRTS, server side: sparse networks that regrow by what clients report of their gradients.

PruneFL: Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model Pruning Enables Efficient Federated Learning on Edge
Devices, IEEE Transactions on Neural Networks and Learning Systems 2022, https://arxiv.org/abs/1909.12326, Algorithm 2.
Clients send the root of the mean squared gradient of every weight. The smallest ``share`` of each layer's kept weights
may go, and the pruned ones may come back. The server keeps the weights that make the sum of squared gradients over a
round's time largest.
FedTiny: Huang, Zhang, Sun, Fang, Yuan, Wu: Distributed Pruning Towards Tiny Neural Networks in Federated Learning,
ICDCS 2023, https://arxiv.org/abs/2212.01977. The server prunes the initial network by magnitude into ``candidates``
whose layers have densities of their own. In round 1 clients answer with each candidate's loss, BatchNorm adapted to
their data; the candidate of the smallest mean loss is trained. Clients then send the largest gradients of pruned
weights in one block of layers. Weights with the largest mean grow, and as many of the smallest kept weights are pruned.
FedRTS: Huang, Yang, Chen, Ye, Wu: FedRTS: Federated Robust Pruning via Combinatorial Thompson Sampling, NeurIPS 2025,
https://arxiv.org/abs/2501.19122. Each weight has a Beta distribution of its worth. A kept weight's outcome in a round
says whether it would stay if the share were pruned: in the merged model, times ``1 - gamma``, and in the clients'
models, times ``gamma``. Clients name the pruned weights with the largest gradients. The outcome of a pruned weight is
``(1 - gamma) / 2`` plus ``gamma`` times the share of clients that name it. The largest draws of each layer are kept.

Checked against the authors' code, PruneFL: https://github.com/jiangyuang/PruneFL (control, bases/fl/simulation), the
others: https://github.com/FedPruning/FedPruning (api/distributed/fedtinyclean, without candidates and blocks, and
fedrts); of these two papers the abstracts were read. Deviations, and points that they leave open:
- the share is FedDST's cosine; PruneFL's authors halve 0.3 every 10,000 rounds. BatchNorm and biases are dense.
- gradients are taken after the training, on a mini-batch, with PruneFL on a pass; PruneFL's authors sum over all steps.
  Clients count by ``weighting``.
- PruneFL begins at random positions (authors: after a pruning at one client); FedRTS too (authors: with the largest
  weights).
- PruneFL's ``density`` is also the upper bound (the code's ``--max-density``) unless fewer weights may go. All weights
  take the same time; the authors measure it on their devices, layer by layer.
- FedTiny's BatchNorm has the statistics of a client's mini-batches; the paper's server averages them over clients.
  The first candidate has no noise, and the network is not pretrained. A pruned weight does not grow at once (library:
  may).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from fedsub_app.common.seeds import derive, generator
from fedsub_app.common.tensors import Tensors, unprefixed
from fedsub_app.subnets.masks import scatter
from fedsub_app.subnets.norms import norm
from fedsub_app.subnets.sparsity import kept_counts, largest, largest_of_layers, shared_out, worth_their_time
from strategies.base import BadReply, Contribution, Mean, Merged, Spec, Task, Update
from strategies.sparse import MASK, Regrown, Sparse
from strategies.sparse_settings import FedRTSSettings, FedTinySettings, PruneFLSettings, RegrownSettings

GROW = "grow/"
SLOPE = "slope/"
LOSSES = "losses"  # tensor of a reply, float [candidates]


class Asked(Regrown):
    """Asks clients for the pruned positions of each layer where their gradients are largest: bits ``grow/...``."""

    refused = "its server goes by the clients' gradients"
    secure = "its server takes what single clients say of their gradients"

    @property
    def counts(self) -> dict[str, int]:
        """The number of weights of each layer that an adjustment in the running round exchanges."""
        return exchange_counts(self.options, self.round, self.kept(0))

    def findings(self) -> Mapping[str, Spec]:
        return {f"{GROW}{name}": Spec(tuple(self.shapes[name]), torch.bool) for name in self.counts}

    def contribution(self, update: Update) -> Contribution:
        for name, named in unprefixed(GROW, update.tensors).items():
            if int(named.sum()) != self.counts[name] or bool((named & self.masks[name]).any()):
                raise BadReply(f"tensor {GROW + name!r}: must name {self.counts[name]} pruned positions")
        return super().contribution(update)

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        floats = [x for name, x in update.tensors.items() if name not in self.specs and x.is_floating_point()]
        return {**super().norms(update, contribution), **({"findings": norm(floats)} if floats else {})}


def exchange_counts(options: RegrownSettings, server_round: int, masks: Tensors) -> dict[str, int]:
    """Return the number of weights of each layer that a round exchanges: at most those that are pruned."""
    share, layers = options.share_at(server_round), options.block(server_round, [*masks])
    return {n: min(int(share * int(masks[n].sum())), int((~masks[n]).sum())) for n in layers}


class PruneFL(Asked):
    """Keeps the weights whose squared gradients are worth their time."""

    options: PruneFLSettings

    def findings(self) -> Mapping[str, Spec]:
        return {f"{SLOPE}{name}": Spec(tuple(shape), low=0) for name, shape in self.shapes.items()}

    def adjusted(self, model: Tensors, updates: Sequence[Update]) -> Tensors:
        """Return the weights that are too large to go, and those that are worth their time."""
        share, found = self.options.share_at(self.round), [unprefixed(SLOPE, update.tensors) for update in updates]
        squares = {name: self.weighted(updates, [each[name].square() for each in found]) for name in self.shapes}
        sizes = {name: model[name].abs().masked_fill(~mask, -1) for name, mask in self.masks.items()}
        counts = {name: int(mask.sum()) for name, mask in self.masks.items()}
        staying = largest_of_layers(sizes, {name: count - int(share * count) for name, count in counts.items()})
        return worth_their_time(squares, staying, self.options.constant, self.options.density)


class FedTiny(Asked):
    """Has the clients choose the first masks, and grows where the mean gradient is largest."""

    options: FedTinySettings
    secure = Asked.secure
    first_masks = Sparse.first_masks

    def stage(self, server_round: int) -> str:
        return "selection" if self.chooses(server_round) else ""

    @cached_property
    def candidates(self) -> list[Tensors]:
        """The candidates' masks: the largest initial weights of each layer."""
        counts, found = kept_counts(self.shapes, self.options.density, self.options.layers), []
        capacities = {name: self.shapes[name].numel() for name in counts}
        sizes, draws = {name: self.current[name].abs() for name in counts}, generator(self.settings.seed, "candidates")
        for number in range(self.options.candidates):
            noise = self.options.noise * (2 * torch.rand(len(counts), generator=draws, dtype=torch.float64) - 1)
            noisy = (torch.tensor([*counts.values()]) * (1 + noise * (number > 0))).tolist()
            scaled = shared_out(dict(zip(counts, noisy, strict=True)), capacities, sum(counts.values()))
            found.append(largest_of_layers(sizes, scaled))
        return found

    def task(self, client: int) -> Task:
        if not self.stage(self.round):
            return super().task(client)
        masks = {f"{MASK}{i}/{name}": mask for i, each in enumerate(self.candidates) for name, mask in each.items()}
        return Task(client, self.current | masks, {"candidates": len(self.candidates)})

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {LOSSES: Spec((self.options.candidates,))} if self.stage(self.round) else super().expected(client)

    def findings(self) -> Mapping[str, Spec]:
        return {**super().findings(), **{f"{SLOPE}{name}": Spec((count,)) for name, count in self.counts.items()}}

    def contribution(self, update: Update) -> Contribution:
        return Contribution({}, None, self.weight(update)) if self.stage(self.round) else super().contribution(update)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Choose by the losses, or merge and adjust as the family does."""
        if not self.stage(self.round):
            return super().merge(mean, updates)
        losses = torch.stack([update.tensors[LOSSES] for update in updates])
        centred = losses - losses.mean(1, keepdim=True)  # a client's level has no part in the median's choice
        usual = centred.median(0).values if self.robust else self.weighted(updates, [*losses])
        return self.under(self.current, self.candidates[int(usual.argmin())])

    def adjusted(self, model: Tensors, updates: Sequence[Update]) -> Tensors:
        """Exchange the smallest weights of the block for those of the largest mean gradient."""
        masks = dict(self.masks)
        slopes = [scatter(unprefixed(SLOPE, each.tensors), unprefixed(GROW, each.tensors)) for each in updates]
        for name, count in self.counts.items():
            mask, slope = masks[name], self.weighted(updates, [each[name] for each in slopes])
            grown = largest(slope.abs().masked_fill(mask, -1), count)
            masks[name] = grown | largest(model[name].abs().masked_fill(~mask, -1), int(mask.sum()) - count)
        return masks


class FedRTS(Asked):
    """Draws the masks from Beta distributions, a weight's with its ``ones`` and ``zeros`` as alpha and beta."""

    options: FedRTSSettings
    secure = Asked.secure
    holds_all = True
    remembers = (*Asked.remembers, "ones", "zeros")

    def setup(self) -> None:
        super().setup()
        self.ones = {name: torch.ones(mask.shape) for name, mask in self.kept(0).items()}
        self.zeros = dict(self.ones)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Count the outcomes of the round, and draw the masks from all outcomes so far where they are adjusted."""
        merged = Merged(self.merged(mean, updates))
        ones, zeros = self.counted(merged.model, updates)
        if self.adjusts(self.round):
            draws = np.random.default_rng(derive(self.settings.seed, self.round, "masks"))
            numbers = {name: torch.from_numpy(draws.beta(ones[name], zeros[name])) for name in ones}
            counts = {name: int(self.masks[name].sum()) for name in ones}
            merged = self.under(merged.model, self.masks | largest_of_layers(numbers, counts))
        return Merged(merged.model, {**merged.state, "ones": ones, "zeros": zeros})

    def counted(self, model: Tensors, updates: Sequence[Update]) -> tuple[Tensors, Tensors]:
        """Return the Beta distributions' parameters with the outcomes of a round."""
        gamma, ones, zeros = self.options.gamma, dict(self.ones), dict(self.zeros)
        for name, exchanged in self.counts.items():
            mask = self.masks[name]
            staying = int(mask.sum()) - exchanged
            votes = self.weighted(updates, [largest(update.tensors[name].abs(), staying) for update in updates])
            outcome, seen = torch.zeros(mask.shape), mask
            outcome[mask] = (1 - gamma) * largest(model[name][mask].abs(), staying) + gamma * votes
            if self.adjusts(self.round):
                named = self.weighted(updates, [update.tensors[f"{GROW}{name}"] for update in updates])
                outcome, seen = torch.where(mask, outcome, (1 - gamma) / 2 + gamma * named), torch.ones_like(mask)
            ones[name] = ones[name] + self.options.trust * outcome
            zeros[name] = zeros[name] + self.options.trust * (seen.float() - outcome)
        return ones, zeros
