"""A round's valid updates are judged, clipped, summed and merged."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, explained
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.nodes import sample
from fedsub_app.federation.protocol import Spec, Update, formula_bytes
from fedsub_app.subnets.averaging import WAITING_BYTES, Contribution, MaskedMean, Mean, check
from fedsub_app.subnets.norms import NormGuard
from fedsub_app.subnets.privacy import NoisyMean
from fedsub_app.subnets.robust import RobustMean, clipped
from strategies.hooks import Hooks, Merged
from strategies.server import returned


class Valid(NamedTuple):
    """A checked update, its contribution to the mean, and its norms, which :class:`NormGuard` compares."""

    update: Update
    contribution: Contribution
    norms: Mapping[str, float]


MakeGuard = Callable[[], NormGuard[Valid]]


class FirstValid:
    """Accepts or rejects updates like :class:`NormGuard` in an over-sampled round, once enough of them are in.

    The decision depends on the set of updates, not on their order: all are compared with each other in the order of the
    clients. Then ``wanted`` of the accepted updates count: those of the clients that were drawn first or, with devices,
    those that arrive first by the devices' clock (``arrivals``: client -> seconds).
    """

    def __init__(self, draw: Sequence[int], wanted: int, guard: MakeGuard, arrivals: Mapping[int, float] = {}) -> None:
        self._drawn = {client: place for place, client in enumerate(draw)}
        self._wanted, self._guard, self._arrivals = wanted, guard, arrivals
        self._received: dict[int, Valid] = {}

    def add(self, item: Valid, norms: Mapping[str, float]) -> list[tuple[Valid, str]]:
        """Take the next update; return no decision yet."""
        self._received[item.update.client] = item
        return []

    @property
    def enough(self) -> bool:
        return len(self._received) >= self._wanted and sum(not reason for _, reason in self._judged()) >= self._wanted

    def _judged(self) -> list[tuple[Valid, str]]:
        guard = self._guard()
        decided = [each for _, item in sorted(self._received.items()) for each in guard.add(item, item.norms)]
        return decided + guard.rest()

    def rest(self) -> list[tuple[Valid, str]]:
        """Return the updates that count, with the reason "", and the refused ones; in the order of the clients."""
        decided = self._judged()
        passed = [item.update.client for item, reason in decided if not reason]
        passed.sort(key=lambda client: (self._arrivals.get(client, 0.0), self._drawn[client]))
        counted = {*passed[: self._wanted]}
        return [(item, reason) for item, reason in decided if reason or item.update.client in counted]


class Merging:
    """A round's accepted updates: their sum, and the tensors of each that its method still needs."""

    def __init__(self, strategy: Hooks) -> None:
        self.updates: list[Update] = []  # in the order of the sum, with the tensors that the method keeps
        self.formula_bytes = 0  # of all their tensors, by the papers' formula
        self.later = 0  # bytes that a client uploads after its update
        self.seconds = 0.0  # spent on adding and merging
        self.clipped = 0  # updates that were longer than clip-norm
        self.norms: list[float] = []  # of the updates that change anything
        self.reach: Mapping[int, float] = {}  # client -> divisor of its norms in the comparison
        self._strategy = strategy
        self._mean = _empty_mean(strategy)
        self._waiting: list[Contribution] = []
        self._bytes = 0
        self._contributors: dict[str, Tensor] = {}  # int32 of each tensor's shape, with min-contributors

    def expected(self, client: int) -> Mapping[str, Spec]:
        return self._strategy.expected(client)

    def contribution(self, update: Update) -> Contribution:
        """Return the part of an update that is summed."""
        found = returned(self._strategy, "contribution", self._strategy.contribution(update), Contribution)
        with explained(f"{type(self._strategy).__name__}.contribution returned for client {update.client}:"):
            check(self._strategy.current, found)
        if self._strategy.settings.dp_noise_multiplier:
            _check_noise(self._strategy, update, found)
        return found

    def add(self, valid: Valid) -> None:
        update, contribution, norms = valid
        strategy = self._strategy
        if limit := strategy.settings.server_clip:
            distance = strategy.distance(update, contribution)
            self.clipped += distance > limit
            contribution = clipped(contribution, strategy.current, distance, limit)
        values = contribution.tensors if limit else {}
        # A copy: a received tensor is a view of a whole message.
        kept = {name: values.get(name, x).clone() for name, x in strategy.remembered(update, contribution).items()}
        self._record(replace(update, tensors=kept), norms, formula_bytes(update.tensors))
        for name in contribution.tensors if strategy.settings.min_contributors > 1 else ():
            old = strategy.current[name]
            mask = contribution.whole(name, old)[1]
            known = self._contributors.setdefault(name, torch.zeros(old.shape, dtype=torch.int32))
            known += 1 if mask is None else mask
        self._wait(contribution)

    def add_block(self, valid: Sequence[Valid], mean: Tensors) -> None:
        """Add a mean that a node has computed of several updates (federation/blocks.py)."""
        for update, _, norms in valid:
            self._record(update, norms, formula_bytes(mean))
        self._wait(Contribution(mean, None, sum(contribution.weight for _, contribution, _ in valid)))

    def _record(self, update: Update, norms: Mapping[str, float], formula: int) -> None:
        if norms.get("update"):
            self.norms.append(norms["update"] * self.reach.get(update.client, 1.0))
        self.formula_bytes += formula
        self.updates.append(update)

    def _wait(self, contribution: Contribution) -> None:
        """Keep this contribution, to sum it together with the next ones."""
        self._waiting.append(contribution)
        self._bytes += sum(tensor.nbytes for tensor in contribution.tensors.values())
        if self._bytes > WAITING_BYTES:
            self._sum()

    def result(self) -> Merged:
        """Return the outcome of the round; to be called once."""
        self._sum()
        start = time.perf_counter()
        least, old = self._strategy.settings.min_contributors, self._strategy.current
        kept = {name: (count < least, old[name]) for name, count in self._contributors.items()}
        merged = self._strategy.outcome(self._strategy.merge(_Kept(self._mean, kept), self.updates))
        self.seconds += time.perf_counter() - start
        return merged

    def _sum(self) -> None:
        start = time.perf_counter()
        self._mean.add(self._waiting)
        self._waiting, self._bytes = [], 0
        self.seconds += time.perf_counter() - start


class _Kept(NamedTuple):
    """A mean that keeps old values where too few clients contribute; ``kept``: tensor name -> where, old values."""

    mean: Mean
    kept: Mapping[str, tuple[Tensor, Tensor]]

    def result(self, server_lr: float = 1.0) -> dict[str, Tensor]:
        new = self.mean.result(server_lr)
        return new | {name: torch.where(few, old, new[name]) for name, (few, old) in self.kept.items()}


def _check_noise(strategy: Hooks, update: Update, contribution: Contribution) -> None:
    """Refuse a method by whose answers a client would tell or weigh more than epsilon says, which counts their sum."""
    noise, bare = strategy.settings.server_noise, sorted(update.tensors.keys() - contribution.tensors.keys())
    wrong = f"no noise is in its tensor {bare[0]!r}" if noise and bare else ""
    if contribution.masks or contribution.slices or contribution.weight != 1:
        wrong = "its clients contribute to different positions, or with different weights"
    if wrong:
        key = f"dp-noise-multiplier = {strategy.settings.dp_noise_multiplier:g}"
        raise UserError(f"{key}: not with method = {strategy.settings.method!r}: {wrong}")


def _empty_mean(strategy: Hooks) -> MaskedMean | RobustMean:
    settings, old = strategy.settings, strategy.current
    if settings.server_noise:
        deviation = settings.server_noise * settings.clip_norm
        # Every node has the seed: a simulation draws its noise from it, to be repeatable; real nodes must not know it.
        draws = generator(settings.seed, strategy.round, "noise") if strategy.simulated else None
        asked = sum(map(strategy.fits, sample(settings, strategy.round)))
        return NoisyMean(old, asked, deviation, draws)
    if settings.mean != "average":
        return RobustMean(old, settings.mean, settings.trim_fraction, settings.byzantine_clients)
    return MaskedMean(old)
