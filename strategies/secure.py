"""A round under secure aggregation (fedsub_app/secure/): the contributions of a method as one sum of vectors.

The clients keep their changes until all have trained. The method's merge gets the mean of the sum and updates without
tensors; the first update has the sums of :attr:`Hooks.sums`. A class says in ``secure`` that this is enough.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors, prefixed
from fedsub_app.federation.nodes import takes_part
from fedsub_app.federation.phase import Dropped
from fedsub_app.federation.protocol import Spec, Task, Update, formula_bytes
from fedsub_app.secure.client import AT, COUNTS, COVERED, OPEN, SUM
from fedsub_app.secure.secagg import COMPLETE
from fedsub_app.secure.server import Session, Unopened
from fedsub_app.secure.vectors import Layout, Scale, counted, counting
from fedsub_app.subnets.averaging import Contribution
from strategies.hooks import Hooks, Merged
from strategies.merging import Merging, Valid

LONE = "whose units fewer than min-contributors have: the counts would tell their masks"


def refusal(strategy: Hooks) -> str:
    """Return why a method's server cannot do with sums, "" if it can; a class with a merge of its own says so."""
    for of in type(strategy).__mro__:
        if "secure" in vars(of) or {"merge", "contribution", "weight"} & vars(of).keys():
            return str(vars(of).get("secure", Hooks.secure))
    return Hooks.secure


def check_secure(strategy: Hooks) -> None:
    """Refuse settings by which a client's values or positions can be read off the sums, or no run could be resumed."""
    settings, of = strategy.settings, type(strategy)
    if settings.checkpoint_every > 1 and settings.sample_size > COMPLETE + 1:
        why = f"with secure-aggregation = true and more than {COMPLETE + 1} clients a round, which is not opened twice"
        raise UserError(f"checkpoint-every = {settings.checkpoint_every}: must be 1 {why}")
    chosen = of.chooses_positions is not Hooks.chooses_positions
    if (chosen or of.known_positions is not Hooks.known_positions) and settings.min_contributors < 2:
        method = f"method = {settings.method!r}, whose clients have other positions"
        raise UserError(f"min-contributors = 1: at least 2 with secure-aggregation = true and {method}")
    if chosen and settings.secure_masks == "secret" and settings.by_examples:
        reason = "a position's sum of known numbers of samples tells whose they are"
        raise UserError(f"weighting = {settings.weighting!r}: must be 'uniform' with secure-masks = 'secret': {reason}")
    if strategy.chooses_positions and settings.secure_masks == "secret":
        there = [client for client, able in enumerate(takes_part(settings)) if able]
        if few := len(there) - len(hidden(strategy, there)):
            allowed = "allowed are equal widths, no masked loss, or 'public'"
            raise UserError(f"secure-masks = 'secret': not with {few} of {len(there)} clients, {LONE}; {allowed}")


def hidden(strategy: Hooks, clients: Collection[int]) -> list[int]:
    """Return the clients whose known positions enough of ``clients`` have.

    The counts of a round are those of each such group, because the server can tell the groups' positions apart.
    """
    known = {c: strategy.known_positions(c).items() for c in clients}
    group = {c: hash(tuple((name, mask.numpy().tobytes()) for name, mask in masks)) for c, masks in known.items()}
    sizes = Counter(group.values())
    return [client for client in clients if sizes[group[client]] >= strategy.settings.min_contributors]


class SecureMerging(Merging):
    """The contributions of a round's clients, which stay with them until their sum is to be merged."""

    def __init__(self, strategy: Hooks, clients: Sequence[int], grid: Grid) -> None:
        super().__init__(strategy)
        settings = strategy.settings
        self._session = Session(strategy.federation, grid, strategy.round, settings)
        self._masks = settings.secure_masks if strategy.chooses_positions else ""
        specs = {name: spec for client in clients for name, spec in strategy.expected(client).items()}
        shapes = {name: list(tensor.shape) for name, tensor in strategy.current.items() if name in specs}
        sums = {n: list(spec.shape) for n, spec in specs.items() if strategy.sums and n.startswith(strategy.sums)}
        lacking = {name for client in clients for name in shapes.keys() - strategy.task(client).tensors.keys()}
        self._layout = Layout(shapes | sums, [*sums, *sorted(lacking)])
        self._sums = sum(math.prod(shape) for shape in sums.values())
        size = sum(self._layout.sizes)
        counts = len(counting(torch.ones(size), len(clients))) if self._masks == "secret" else 0
        self.later = 4 * (size + 1 + counts)
        self._covered: dict[int, Tensor] = {}  # client -> the positions that it has told
        self._clipped = 0.0

    @property
    def header(self) -> Json:
        return {"secure": {**asdict(self._layout), "public": self._masks == "public"}}

    def task(self, asked: Callable[[int], Task], client: int) -> Task:
        """Return a client's training task with the positions of its values."""
        task = asked(client)
        return replace(task, tensors={**task.tensors, **prefixed(AT, self._strategy.known_positions(client))})

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {COVERED: Spec((sum(self._layout.sizes),), torch.bool)} if self._masks == "public" else {}

    def contribution(self, update: Update) -> Contribution:
        return Contribution({}, None, 0.0)

    def add(self, valid: Valid) -> None:
        """Record that a client has trained."""
        update = valid.update
        if update.tensors:
            self._covered[update.client] = update.tensors[COVERED].clone()
        self._record(replace(update, tensors={}), {}, formula_bytes(update.tensors))

    def result(self) -> Merged:
        """Sum the vectors and merge their mean; :class:`Unopened`: it stays closed, and the round is abandoned."""
        session, phase = self._session, self._strategy.phase
        try:
            merged = super().result()
        finally:
            phase.dropped += session.dropped
            phase.report |= {key: phase.report[key] + size for key, size in session.bytes.items()}
        return replace(merged, report={**merged.report, "clipped-values": self._clipped})

    def _positions(self, client: int) -> Tensor:
        """Return the positions that the server knows a client to contribute, bool ``[size]``; ``[1]`` where all are."""
        if client in self._covered:
            return self._covered[client]
        known = self._strategy.known_positions(client)
        return self._layout.flat(known) if known else torch.ones(1, dtype=torch.bool)

    def _weights(self, clients: Collection[int], weights: Mapping[int, float] | None = None) -> Tensor:
        """Return the sum of the clients' weights at each position, by default their number."""
        each = (self._positions(client).double() * (weights[client] if weights else 1) for client in clients)
        return sum(each, torch.zeros(1, dtype=torch.float64))

    def _counts(self, clients: Sequence[int]) -> tuple[list[int], Tensor | None]:
        """Return the clients whose masks are counted, and how many contribute to each position; None: no secret."""
        if self._masks != "secret":
            return [*clients], None
        size, session = sum(self._layout.sizes), self._session
        length, number = len(counting(torch.ones(size), len(clients))), {"clients": len(clients)}
        alive = clients
        while True:
            asked = hidden(self._strategy, alive)
            session.dropped += [Dropped(c, f"one of the clients {LONE}") for c in {*alive} - {*asked}]
            session.meet(asked)
            alive, total = session.masked(COUNTS, length, number, {}, dict.fromkeys(asked, 1.0))
            if hidden(self._strategy, alive) == alive:
                return alive, counted(session.opened(COUNTS, alive, total), size, len(clients))

    def _sum(self) -> None:
        strategy, layout, session = self._strategy, self._layout, self._session
        settings, size = strategy.settings, sum(layout.sizes)
        weights = {update.client: strategy.summed_weight(update) for update in self.updates}
        largest = max(weights.values())
        weights = {client: weight / largest for client, weight in weights.items()}
        clients, counts = self._counts([*weights])

        def contributors(of: Collection[int]) -> Tensor:  # of a client that is lost nobody knows the secret mask
            return self._weights(of) if counts is None else counts - (len(clients) - len(of))

        # Noise comes after clipping.
        norm = 0.0 if settings.dp_noise_multiplier else settings.clip_norm
        scale = Scale(len(weights), settings.secure_range, norm, self._sums)
        alive = clients
        while True:  # until nobody is lost whose positions are then too few clients'
            session.meet(alive)
            enough = contributors(session.clients) >= settings.min_contributors
            tensors: Tensors = {} if enough.all() else {OPEN: enough}
            alive, total = session.masked(SUM, size + 1, {"scale": asdict(scale)}, tensors, weights)
            if not (enough & (contributors(alive) < settings.min_contributors)).any():
                break
        if len(alive) < settings.least_replies:
            raise Unopened(f"{len(alive)} clients are left in secure-aggregation, of {settings.least_replies} needed")
        change, self._clipped = scale.change(session.opened(SUM, alive, total), len(alive))
        total_weights = (self._weights(alive, weights) if counts is None else counts) * enough
        values, covered, sums = layout.mean(change, total_weights, strategy.current)
        self._mean.add([Contribution(values, None if total_weights.all() else covered)])
        self.updates[:] = [update for update in self.updates if update.client in alive]
        if self._masks:
            sums |= prefixed(AT, layout.split(contributors(alive)))
        self.updates[0] = replace(self.updates[0], tensors=sums)
