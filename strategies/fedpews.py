"""FedPeWS and FedPeWS-Fixed, server side (Algorithm 1, lines 1 to 6 and 20).

Tastan, Horváth, Takáč, Nandakumar: FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning, 2024, https://arxiv.org/abs/2410.03042.

During the first W rounds a client trains a sub-network of its own; positions that no client covers keep their value,
the others take the mean over the clients that cover them (Eq. 4). Afterwards the method is FedAvg, or with
``objective = "prox"`` FedProx.

Readings of the paper where it is silent or contradicts itself:
- theta of the others (line 12), the "global mask probability" without the client, is the share of the other clients
  whose last drawn mask had the unit; at first it is 0.5 (``s_g^0 = 0``). Line 18 uploads masks alone.
  ``others = "mean"`` and ``"highest"`` take the mean and the highest of the probabilities, which then travel as well;
  with the highest a unit is left to the client that wants it most (docs/results/fedpews.md compares the three). With
  ``score-spread`` the clients start at different scores, against line 9.
- The gradient of Eq. 6 in the mask is that of f(x ∘ m), exactly; ``mask-gradient = "activations"`` is the common form
  for neuron masks, in which units that are off get a gradient too.
- A weight is masked by both its neurons ("and", the rule of IST, the function that is computed), a bias by one.
- The paper's local step is plain SGD (line 16), under which a weight that is masked in a step does not move in that
  step. With ``momentum`` the buffer of the round's earlier steps moves this weight on; weight decay and the proximal
  term reach it as well. Momentum 0.9 on the synthetic sets is our choice (docs/results/fedpews.md).
- Positions that no client covers keep ``x_g`` (0/0 in Eq. 4). Output biases are always covered.
- A client uploads the values that its mask covers, with the neuron mask; with fixed masks the server knows the mask and
  also sends the covered values alone. Evaluation is on the full model.
With secure-aggregation the server knows no mask, but the sum of the masks (or of the probabilities) of the last round's
clients. These clients are the others of the next round; a client that was one of them subtracts its own part.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.nodes import takes_part
from fedsub_app.models.groups import UnitGroup, split
from fedsub_app.secure.client import AT
from fedsub_app.subnets.masks import expand, fixed_masks
from strategies.base import Contribution, Mean, Merged, Range, Spec, SubnetStrategy, Task, Update
from strategies.defences import ALONE, WITHOUT_MASKS
from strategies.settings import FedPeWSSettings

NEURONS = "fedpews/mask"  # no parameter of a network has such a name
THETA = "fedpews/theta"
MASK = f"{THETA}/mask"  # with secure-aggregation: a neuron mask that is counted; its values are 0


class FedPeWS(SubnetStrategy):
    """Personalised warm-up, then FedAvg."""

    options: FedPeWSSettings
    secure = ""
    sums = THETA
    remembers = ("theta",)
    reports: ClassVar = {
        "units-covered-by": Reported(
            "hidden units covered by", "hidden units", curves=("no client", "one client", "several clients")
        )
    }

    def setup(self) -> None:
        settings = self.settings
        if settings.secure_aggregation and self.options.others == "mean" and settings.secure_range < 1:
            why = "with fedpews.others = 'mean', whose probabilities are summed"
            raise UserError(f"secure-range = {settings.secure_range:g}: at least 1 {why}")
        self.hidden = sum(group.size for group in self.units)
        starts = [first_scores(self.options, settings.seed, i, self.hidden) for i in range(settings.num_clients)]
        # Every client's last mask, or its probabilities, [N, h]; with secure-aggregation each row is, from the first
        # round on, the mean over the last round's clients.
        self.theta = torch.stack(starts).sigmoid()
        self.part = torch.tensor(takes_part(settings))  # bool [N]: the others never draw a mask
        self.fixed = torch.empty(0)  # every client's fixed mask, bool [N, h]
        if self.options.masks == "fixed" and self.options.warmup_rounds:
            shares = self.options.share_list(settings.num_clients)
            by_width = bool(self.devices) and not self.options.shares
            widths = [self.held_width(client) for client in range(settings.num_clients)]
            shares = [w * there for w, there in zip(widths if by_width else shares, self.part.tolist(), strict=True)]
            shares = [share / sum(shares) for share in shares]  # the others' units would never be trained
            if by_width and self.options.warmup_rounds >= settings.num_rounds:
                self.narrows = all(share <= w + 1e-6 for share, w in zip(shares, widths, strict=True))
            fixed = fixed_masks(self.units, shares)
            self.fixed = torch.stack([torch.cat([mask[group.name] for group in self.units]) for mask in fixed])

    def stage(self, server_round: int) -> str:
        return "warm-up" if server_round <= self.options.warmup_rounds else ""

    def task(self, client: int) -> Task:
        """Send the global model and, in the warm-up, the others' mask probabilities or the fixed mask (line 6)."""
        if not self.stage(self.round):
            return super().task(client)
        if self.options.masks == "fixed":
            covered = self.values_at(positions(self.units, self.fixed[client], self.current))
            return Task(client, covered | {NEURONS: self.fixed[client]}, {"warm-up": True})
        theta = self.theta * self.part[:, None]
        if self.options.others == "highest":
            others = theta.index_fill(0, torch.tensor(client), 0.0).amax(0)
        else:
            others = (theta.sum(0) - theta[client]) / max(1, int(self.part.sum()) - 1)
        last = self.state_rounds == self.state_rounds.max().clamp(min=1)
        counted = {"counted": int(last.sum())} if self.settings.secure_aggregation and last[client] else {}
        return Task(client, self.current | {THETA: others}, {"warm-up": True, **counted})

    @property
    def chooses_positions(self) -> bool:
        return bool(self.stage(self.round)) and self.options.masks == "learned"

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the covered values of every tensor and, where masks are learned, the mask and its probabilities."""
        if not self.stage(self.round):
            return super().expected(client)
        if self.settings.secure_aggregation:
            summed = [MASK, THETA] if self.options.others == "mean" else [MASK]
            return self.specs | dict.fromkeys(summed, Spec((self.hidden,)))
        specs = {name: spec.gathered() for name, spec in self.specs.items()}
        if self.options.masks == "learned":
            specs[NEURONS] = Spec((self.hidden,), torch.bool)
            if self.options.others != "masks":
                specs[THETA] = Spec((self.hidden,), low=0, high=1)
        return specs

    def metrics(self, client: int) -> Mapping[str, Range]:
        metrics = super().metrics(client)
        return {**metrics, "mask-density": Range(0, 1)} if self.stage(self.round) else metrics

    def mask_of(self, update: Update) -> torch.Tensor:
        """Return the neuron mask [h] under which a client trained in the warm-up."""
        return update.tensors[NEURONS] if self.options.masks == "learned" else self.fixed[update.client]

    def contribution(self, update: Update) -> Contribution:
        """Add the values that the client's mask covers (line 20, Eq. 4); after the warm-up all values."""
        if not self.stage(self.round):
            return super().contribution(update)
        return self.contribution_at(update, positions(self.units, self.mask_of(update), self.current))

    def origin(self, update: Update) -> Tensors:
        return {**super().origin(update), THETA: self.theta[update.client]}

    def refuses(self) -> Mapping[str, str]:
        """Refuse defences that compare whole updates: in the warm-up clients cover different positions."""
        refused = dict(WITHOUT_MASKS)
        if self.options.masks == "fixed":
            refused |= dict.fromkeys(("min-contributors", "secure-aggregation"), ALONE)
        elif self.options.others == "highest":
            refused["secure-aggregation"] = "the highest probability of a unit is a single client's"
        return refused if self.options.warmup_rounds else {}

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Keep the clients' probabilities; report the number of hidden units that 0, 1, 2, … clients cover."""
        merged, theta = super().merge(mean, updates), self.theta.clone()
        if not self.stage(self.round):
            return merged
        if self.settings.secure_aggregation:  # sums alone are known
            covered = self.total(updates, AT + MASK).clamp(min=0)  # a client lost since the count may have had any unit
            total = self.total(updates, THETA) if self.options.others == "mean" else covered
            theta[:] = total.float() / len(updates)
        else:
            masks = [self.mask_of(update) for update in updates]
            covered = torch.stack(masks).sum(0)
            for update, mask in zip(updates, masks, strict=True) if self.options.masks == "learned" else ():
                theta[update.client] = update.tensors.get(THETA, mask.float())
        times = torch.bincount(covered.long(), minlength=len(updates) + 1)
        return Merged(merged.model, {"theta": theta}, {"units-covered-by": times.tolist()})

    def unit_masks(self) -> torch.Tensor | None:
        """Return the fixed masks, or the units that each client takes with a probability above one half."""
        if self.options.masks == "fixed":
            return self.fixed if self.options.warmup_rounds else None
        return None if self.settings.secure_aggregation else self.theta > 0.5


def positions(units: Sequence[UnitGroup], mask: torch.Tensor, tensors: Tensors) -> Tensors:
    """Return the positions of every tensor that a neuron mask [h] covers: tensor name -> bool."""
    return expand(units, split(mask, units), {name: tensor.shape for name, tensor in tensors.items()})


def first_scores(options: FedPeWSSettings, seed: int, client: int, hidden: int) -> torch.Tensor:
    """Return the mask scores that a client starts from, float ``[hidden]``; server and client draw the same."""
    return options.score_spread * torch.randn(hidden, generator=generator(seed, 0, client, "first scores"))
