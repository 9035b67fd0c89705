"""FedPart with momentum aggregation, server side.

Wang, Liu, et al.: Why Go Full? Elevating Federated Learning Through Partial Network Updates (FedPart), NeurIPS 2024,
https://arxiv.org/abs/2410.11559. Virag, Lorenzen: Why go full, when you have momentum? Accelerating layerwise training
with momentum: momentum aggregation (FPAM, FPPM, FPMM).

After ``full_rounds`` rounds of the full network each layer group is trained for ``rounds_per_group`` rounds, all others
frozen; then the cycle starts again. The server sends only the group trained last, a client only the group that it
trains. With ``objective`` prox or moon the method is FedPartProx or FedPartMoon, with ``momentum`` FPAM, FPPM, FPMM.
With ``full_rounds`` = T and ``momentum = "mean"`` it is Local Adam with averaged moments (Algorithm 1, without
clipping).

Deviations from the paper or the published code:
- Adam is torch's (bias correction, eps outside the root), not Algorithm 1's. The moments of the trained group alone
  travel, as float32. Their step counts are merged by maximum, as published.
- The proximal term is squared and part of every step; MOON compares with the client's real previous model.
- A later cycle sends the groups by name; the published code would write the wrong layer there.
- A client that has no model of an earlier round gets the full one (``stale = "full-first"``); as published it would
  train a random network with one layer replaced (``faithful``). ``sync-all`` sends every group that is outdated.
- ``weighting = "examples"`` counts samples; the published code counts a client's mini-batches.
- ``momentum = "mean"`` weighs all clients alike (Section 3.2: "simply computing the mean"; Section 4: by their data).
- A negative similarity counts as 0. As published it is a negative weight, which can make a second moment negative: Adam
  then has no step, and with 0 in the moment's place its steps are so large that the model is lost
  (docs/results/fedpart.md). Where no similarity is positive the round takes the plain mean and says so
  (``similarity-fallback``).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors, chosen, unprefixed
from fedsub_app.federation.nodes import takes_part
from fedsub_app.models import layer_groups, trainable
from fedsub_app.subnets.averaging import masked_mean
from fedsub_app.subnets.norms import norm
from strategies.base import Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.defences import DEFENCES
from strategies.settings import FedPartSettings

FIRST, SECOND, STEPS = "first/", "second/", "steps"


class FedPart(SubnetStrategy):
    """Trains, sends and merges one layer group a round."""

    options: FedPartSettings
    secure = ""
    remembers = ("changed", "has", "moments")
    narrows = True

    def setup(self) -> None:
        self.holds_all = self.options.momentum == "similarity"
        self.groups = layer_groups(self.model)
        self.parameters = set(trainable(self.model))
        self.changed = torch.zeros(len(self.groups), dtype=torch.int64)  # round in which each group last changed
        # Round in which each group that a client was last sent was merged; 0: the initial group.
        self.has = torch.zeros(self.settings.num_clients, len(self.groups), dtype=torch.int64)
        self.moments: Tensors = {}  # merged, with step counts ``steps/<name>``, of the tensors trained so far
        if self.devices:
            self._check_held()

    def _check_held(self) -> None:
        """Refuse devices of which too few can hold what some round trains."""
        least = max(self.settings.least_replies, 3 * self.settings.secure_aggregation)
        clients = [client for client, there in enumerate(takes_part(self.settings)) if there]
        cycle = self.options.full_rounds + len(self.groups) * self.options.rounds_per_group
        for number in range(1, min(cycle, self.settings.num_rounds) + 1):
            self.round = number
            if (able := sum(map(self.fits, clients))) < least:
                what = "the whole network" if self.group is None else f"layer group {self.group}"
                who = f"{able} of {len(clients)} clients can" if able else "no class can"
                raise UserError(f"devices: {who} hold {what}, which round {number} trains; a round needs {least}")
        self.round = 0

    @property
    def group(self) -> int | None:
        """The layer group of the running round, ``None`` for the full network."""
        return scheduled_group(self.options, self.round, len(self.groups), self.settings.seed)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the tensors that are trained in the running round."""
        return tuple(self.current) if self.group is None else self.groups[self.group]

    @property
    def trained_parameters(self) -> list[str]:
        """Names of the parameters among them, which have moments."""
        return [name for name in self.trained if name in self.parameters]

    def fits(self, client: int) -> bool:
        """Say whether the trained parameters are at most the fraction of all that the client's device can hold."""
        trained = sum(self.current[name].numel() for name in self.trained_parameters)
        return trained <= self.held_width(client) * sum(self.current[name].numel() for name in self.parameters)

    def task(self, client: int) -> Task:
        """Send the groups that ``stale`` asks for, the number of the trained group and, with momentum, its moments."""
        due = self._due(client).nonzero().flatten().tolist()
        tensors = {name: self.current[name] for group in due for name in self.groups[group]}
        names = self.trained_parameters
        if names and all(f"{STEPS}/{name}" in self.moments for name in names):
            tensors |= {f"{kind}{name}": self.moments[f"{kind}{name}"] for kind in (FIRST, SECOND) for name in names}
            tensors[STEPS] = torch.stack([self.moments[f"{STEPS}/{name}"] for name in names])
        return Task(client, tensors, {"group": self.group})

    def _due(self, client: int) -> torch.Tensor:
        """Return which groups a client is sent, bool [groups]."""
        everything = torch.ones(len(self.groups), dtype=torch.bool)
        if self.options.stale != "faithful" and not self.state_rounds[client]:
            return everything
        if self.options.stale == "sync-all":
            return self.has[client] < self.changed
        return everything if self.group is None else self.changed == self.changed.max()

    def expected(self, client: int) -> Mapping[str, Spec]:
        specs = {name: self.specs[name] for name in self.trained}
        if self.options.momentum != "none" and (trained := self.trained_parameters):
            specs |= {f"{FIRST}{name}": Spec(specs[name].shape) for name in trained}
            specs |= {f"{SECOND}{name}": Spec(specs[name].shape, low=0) for name in trained}
            before = max((int(self.moments.get(f"{STEPS}/{name}", 0)) for name in trained), default=0)
            limit = before + self.steps(self.max_examples(client))
            specs[STEPS] = Spec((len(trained),), torch.int64, low=1, high=limit)
        return specs

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        """Add the norms of the first moments and of the second ones' roots, which are as large as gradients."""
        first, second = unprefixed(FIRST, update.tensors), unprefixed(SECOND, update.tensors)
        moments = {"first moments": norm(first.values()), "second moments": norm(t.sqrt() for t in second.values())}
        return {**super().norms(update, contribution), **(moments if first else {})}

    def refuses(self) -> Mapping[str, str]:
        refused = () if self.options.momentum == "none" else DEFENCES
        clip = ("clip-norm",) if self.settings.secure_aggregation else ()  # by the clients then
        clients = dict.fromkeys(("dp-noise-by", *clip), "its clients are not sent the group that they train")
        if self.holds_all:
            clients["min-contributors"] = "by similarity one client alone may have a weight"
        reason = "its server also averages Adam's moments"
        return clients | dict.fromkeys((*refused, "secure-aggregation") if refused else (), reason)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Merge the trained group and moments (by similarity: Algorithm 2); record the groups that clients have."""
        # A layer whose parameters are all frozen has no moments.
        momentum = self.options.momentum if self.trained_parameters else "none"
        weights = [1.0] * len(updates)
        report: Json = {}
        trained = slice(None) if self.group is None else self.group
        changed, has = self.changed.clone(), self.has.clone()
        for client in (update.client for update in updates):
            has[client] = torch.where(self._due(client), self.changed, self.has[client])
        changed[trained] = self.round
        if momentum == "similarity":
            similarities = self.similarities(updates)
            report["similarity"] = [round(value, 6) for value in similarities]
            if max(similarities) > 0:
                weights = [max(value, 0.0) for value in similarities]
            else:
                report["similarity-fallback"] = True
            model = self.averaged(self.current, updates, weights, self.settings.server_lr)
        else:
            model = super().merge(mean, updates).model
        moments = self.moments if momentum == "none" else self.moments | self.merged_moments(updates, weights)
        return Merged(model, {"changed": changed, "has": has, "moments": moments}, report)

    def averaged(self, old: Tensors, updates: Sequence[Update], weights: Sequence[float], lr: float = 1.0) -> Tensors:
        """Return the weighted mean of the updates' tensors that ``old`` has and the round trains."""
        each = [Contribution(chosen(u.tensors, old), None, w) for u, w in zip(updates, weights, strict=True)]
        return masked_mean(old, each, lr)

    def similarities(self, updates: Sequence[Update]) -> list[float]:
        """Return the cosine of each client's moments with their mean (Algorithm 2, lines 6 to 8)."""
        names = [f"{kind}{name}" for kind in (FIRST, SECOND) for name in self.trained_parameters]
        states = torch.stack([torch.cat([update.tensors[name].flatten() for name in names]) for update in updates])
        similarities: list[float] = F.cosine_similarity(states, states.mean(0, keepdim=True)).tolist()
        return similarities

    def merged_moments(self, updates: Sequence[Update], weights: Sequence[float]) -> Tensors:
        """Return the weighted means of the trained parameters' moments, and their largest step counts."""
        names = self.trained_parameters
        zeros = {f"{kind}{name}": torch.zeros_like(self.current[name]) for kind in (FIRST, SECOND) for name in names}
        steps = torch.stack([update.tensors[STEPS] for update in updates]).amax(0)
        counts = {f"{STEPS}/{name}": step for name, step in zip(names, steps, strict=True)}
        return self.averaged(zeros, updates, weights) | counts


def scheduled_group(options: FedPartSettings, server_round: int, groups: int, seed: int) -> int | None:
    """Return the layer group, from shallow (0) to deep, that a round from 1 on trains, ``None`` for the full network.

    A cycle is ``full_rounds`` rounds of the full network, then ``rounds_per_group`` rounds for each group; cycles
    follow each other for as long as there are rounds (Wang et al., FedPart, 2024, Section 3.1).
    """
    cycle, step = divmod(server_round - 1, options.full_rounds + groups * options.rounds_per_group)
    if step < options.full_rounds:
        return None
    place = (step - options.full_rounds) // options.rounds_per_group
    if options.order == "random":
        return int(torch.randperm(groups, generator=generator(seed, cycle, "layers"))[place])
    return place if options.order == "shallow" else groups - 1 - place
