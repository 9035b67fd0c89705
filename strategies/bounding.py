"""The setting ``robust``: what one client's update can do to the model and to what the server remembers.

An update that is far longer than the others of its round is refused (:class:`~fedsub_app.subnets.norms.NormGuard` over
the whole round). In the others the change of every tensor, of the model and of what the method's server remembers, is
brought within the bounds of :mod:`fedsub_app.subnets.bounds`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import torch
from torch import Tensor

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.bounds import Size, Sizes, fits, remembered, size, usual, within
from fedsub_app.subnets.slices import ALL, select
from strategies.hooks import Hooks
from strategies.merging import Valid

Part = tuple[str, Tensor, Tensor, Tensor | None]  # tensor name, values, the values they started from, mask
MAX_NORM = 5.0  # an update of more times the round's median norm is refused


def parts(strategy: Hooks, update: Update, contribution: Contribution) -> Iterator[Part]:
    """Yield the floating-point tensors of an update: its contribution to the mean, then what else it holds."""
    masks, slices, origin = contribution.masks or {}, contribution.slices or {}, strategy.origin(update)
    for name, x in contribution.tensors.items():
        yield name, x, select(origin[name], slices.get(name, ALL)), masks.get(name)
    for name, x in update.tensors.items():
        if name not in contribution.tensors and x.is_floating_point():
            start = origin.get(name)
            yield name, x, torch.zeros_like(x) if start is None or start.shape != x.shape else start, None


def reach(strategy: Hooks, clients: Sequence[int]) -> dict[int, float]:
    """Return how much farther than the median client each one may go, from 1: as many times as it has more samples."""
    if not strategy.facts or not strategy.facts.exact or not clients:
        return dict.fromkeys(clients, 1.0)
    middle = median_low([strategy.facts.examples[client] for client in clients])
    return {client: max(1.0, strategy.facts.examples[client] / max(1, middle)) for client in clients}


def counted(strategy: Hooks, accepted: Sequence[Valid]) -> Sequence[Valid]:
    """Return the updates with at most the median client's samples where the server has only the clients' word.

    Where fewer samples would weigh more, as with FedNova, a client counts with the median's.
    """
    if strategy.facts and strategy.facts.exact:
        return accepted
    most, found = median_low([valid.update.num_examples for valid in accepted]), list[Valid]()
    for update, contribution, norms in accepted:
        allowed = (replace(update, num_examples=count) for count in (min(update.num_examples, most), most))
        taken = min(allowed, key=strategy.summed_weight)
        share = strategy.summed_weight(taken) / (strategy.summed_weight(update) or 1.0)
        found.append(Valid(taken, contribution._replace(weight=contribution.weight * share), norms))
    return found


class Bounds:
    """The bounds of one round.

    ``reached``: client -> :func:`reach`. ``usual``: tensor name -> usual sizes of its change in the last rounds and,
    after :meth:`bounded`, in this one. ``report``: entries for the round's line.
    """

    def __init__(self, strategy: Hooks, reached: Mapping[int, float]) -> None:
        self._strategy, self.reach = strategy, reached
        self._sizes: dict[int, dict[str, Size]] = {}  # of each client's changes
        self.usual: Tensors = {}
        self.report: Json = {}

    def measure(self, update: Update, contribution: Contribution) -> None:
        """Measure an update that has come, while the processor has it at hand."""
        changes = ((name, size(x, start, mask)) for name, x, start, mask in parts(self._strategy, update, contribution))
        self._sizes[update.client] = {name: have for name, have in changes if have}

    def bounded(self, accepted: Sequence[Valid]) -> list[Valid]:
        """Return a round's accepted updates, all of them measured, within its bounds; to be called once."""
        accepted = counted(self._strategy, accepted)
        sizes = [self._sizes[valid.update.client] for valid in accepted]
        starts: dict[str, Size] = {}
        for valid, found in zip(accepted, sizes, strict=True):
            if not found.keys() <= starts.keys():
                for name, _, start, _ in parts(self._strategy, valid.update, valid.contribution):
                    if name in found and name not in starts:
                        starts[name] = size(start, torch.zeros_like(start)) or Size(0, 0)
        bounds = self._bounds(accepted, sizes, starts)
        return [self._within(valid, have, bounds) for valid, have in zip(accepted, sizes, strict=True)]

    def _bounds(self, accepted: Sequence[Valid], sizes: Sequence[Sizes], starts: Sizes) -> dict[str, Size]:
        """Return each tensor's bound. Clients that did not train, whose whole change is 0, do not count."""
        trained = [
            {name: have * (1 / self.reach[valid.update.client]) for name, have in of_client.items()}
            for valid, of_client in zip(accepted, sizes, strict=True)
            if any(have.peak for have in of_client.values())
        ]
        bounds = {}
        for name, start in starts.items():
            values = [of_client[name] for of_client in trained if name in of_client]
            if values:
                past = self._strategy.usual.get(name)
                bounds[name] = usual(values, past, start)
                self.usual[name] = remembered(past, values, bounds[name])
        return bounds

    def _within(self, valid: Valid, sizes: Sizes, bounds: Sizes) -> Valid:
        update, contribution, norms = valid
        farther = self.reach[update.client]
        if all(fits(have, bounds[name] * farther) for name, have in sizes.items() if name in bounds):
            return valid
        changed = {}
        for name, x, start, mask in parts(self._strategy, update, contribution):
            if name in sizes and name in bounds:
                bounded = within(x, start, sizes[name], bounds[name] * farther)
                if bounded is not x:
                    changed[name] = bounded if mask is None else torch.where(mask, bounded, x)
        self.report.setdefault("bounded-updates", []).append(update.client)
        tensors = {name: changed.get(name, x) for name, x in contribution.tensors.items()}
        same = {n: x for n, x in changed.items() if n in update.tensors and update.tensors[n].shape == x.shape}
        # HetLoRA weighs an update by its tensors, which are the bounded ones from here on.
        before, now = (self._strategy.weight(replace(update, tensors=update.tensors | x)) for x in ({}, tensors))
        weight = contribution.weight * (now / before if before else 1.0)
        update = replace(update, tensors=update.tensors | same, squares={})
        return Valid(update, contribution._replace(tensors=tensors, weight=weight), norms)
