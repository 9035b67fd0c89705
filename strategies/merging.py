"""What becomes of a round's answers that count: clipped, summed or held, merged; and which methods that protects."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update, formula_bytes
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution, MaskedMean
from fedsub_app.subnets.norms import NormGuard
from fedsub_app.subnets.privacy import NoisyMean, epsilon, require_accountant
from fedsub_app.subnets.robust import RobustMean, clipped

# Of contributions that are summed at a time: one after the other costs three times the memory traffic.
WAITING_BYTES = 1 << 26
# Settings, and values of the setting ``mean``, that bound what one client's contribution does to the model.
DEFENCES = ("clip-norm", "median", "trimmed", "krum", "dp-noise-multiplier")
# Those that methods refuse whose clients contribute to different positions, which the server learns.
WITHOUT_MASKS = {
    "krum": "its clients cover different positions, so that whole updates cannot be compared",
    "dp-noise-multiplier": "its clients cover different positions, by masks to which no noise is added",
}


@dataclass(frozen=True)
class Facts:
    """What the server knows by itself, and holds against what clients say.

    Attributes
    ----------
    examples : training samples of each client, by the partition.
    sample_flops : of a forward and backward pass of the whole network on one sample.
    loss : returns the loss of a global model on some test samples.
    held_out : validation or test samples that a client has at most.
    """

    examples: Sequence[int]
    sample_flops: float
    loss: Callable[[Tensors], float]
    held_out: int = 0


class Valid(NamedTuple):
    """An update that is as it must be, what it adds to the mean, and its norms, which the others' may refuse."""

    update: Update
    contribution: Contribution
    norms: Mapping[str, float]


class FirstValid:
    """Decides on a round's updates as :class:`NormGuard` does, where more clients were asked than it needs.

    Nothing is decided before enough of them are in. What is decided depends on which have come, not on their order: all
    are held against each other in the order of the clients, and of those that pass, the clients that were drawn first
    count.

    Parameters
    ----------
    draw : the clients that were asked, in the order in which they were drawn.
    wanted : how many of them are enough.
    guard : makes the guard of a round.
    """

    def __init__(self, draw: Sequence[int], wanted: int, guard: Callable[[], NormGuard[Valid]]) -> None:
        self._place = {client: place for place, client in enumerate(draw)}
        self._wanted, self._guard = wanted, guard
        self._came: dict[int, Valid] = {}

    def add(self, item: Valid, norms: Mapping[str, float]) -> list[tuple[Valid, str]]:
        """Take the next update; none is decided yet."""
        self._came[item.update.client] = item
        return []

    @property
    def enough(self) -> bool:
        """Whether as many as are needed have passed."""
        return len(self._came) >= self._wanted and sum(not reason for _, reason in self._judged()) >= self._wanted

    def _judged(self) -> list[tuple[Valid, str]]:
        guard = self._guard()
        decided = [found for _, item in sorted(self._came.items()) for found in guard.add(item, item.norms)]
        return decided + guard.rest()

    def rest(self) -> list[tuple[Valid, str]]:
        """Return those that count, with the reason "", and those that are refused; in the order of the clients."""
        decided = self._judged()
        passed = sorted(self._place[item.update.client] for item, reason in decided if not reason)
        last = passed[: self._wanted][-1] if passed else -1
        return [(item, reason) for item, reason in decided if reason or self._place[item.update.client] <= last]


class Server(Protocol):
    """What :class:`Merging` and :func:`check_defences` need of a strategy."""

    settings: Settings
    model: nn.Module
    current: Tensors
    round: int
    needs_all: bool

    def refuses(self) -> Mapping[str, str]:
        """Return which defences would not hold, and why."""

    def distance(self, update: Update, contribution: Contribution) -> float:
        """Return how far a contribution is from the model."""

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        """Return the tensors that are needed after the sum."""

    def merge(self, mean: MaskedMean, updates: Sequence[Update]) -> Tensors:
        """Return the next model from the mean."""

    def merge_all(self, updates: Sequence[Update], contributions: Sequence[Contribution]) -> Tensors:
        """Return the next model from all contributions."""


def check_defences(strategy: Server) -> None:
    """Refuse the defences that would not hold for a method, before round 1.

    Raises
    ------
    UserError
        One line that names the key, the method and why; or the network, or the package that is missing, for privacy.
    """
    settings = strategy.settings
    chosen = {
        "clip-norm": f"clip-norm = {settings.clip_norm:g}" if settings.clip_norm else "",
        settings.mean: f"mean = {settings.mean!r}",
        "oversample": f"oversample = {settings.oversample:g}" if settings.oversample > 1 else "",
        "dp-noise-multiplier": f"dp-noise-multiplier = {settings.dp_noise_multiplier:g}"
        if settings.dp_noise_multiplier
        else "",
    }
    for name, why in strategy.refuses().items():
        if chosen.get(name):
            raise UserError(f"{chosen[name]}: not with method = {settings.method!r}: {why}")
    if settings.dp_noise_multiplier:
        buffers = [name for name, _ in strategy.model.named_buffers() if name in strategy.current]
        if buffers:
            said = f"{buffers[0]!r} is a statistic, which noise would make negative"
            raise UserError(f"model = {settings.model!r}: not with dp-noise-multiplier above 0: {said}")
        require_accountant()


class Merging:
    """The answers of a round that count: their sum, and of each what its method still needs.

    Attributes
    ----------
    updates : in the order of the sum, with the tensors that the method keeps.
    formula_bytes : of all tensors that were answered, by the papers' formula.
    seconds : spent on adding and merging.
    clipped : answers that were longer than ``clip-norm``.
    norms : of the answers that change anything.
    """

    def __init__(self, strategy: Server) -> None:
        self.updates: list[Update] = []
        self.formula_bytes, self.seconds, self.clipped = 0, 0.0, 0
        self.norms: list[float] = []
        self._strategy = strategy
        self._mean = _empty_mean(strategy)
        self._waiting: list[Contribution] = []
        self._bytes = 0

    def add(self, valid: Valid) -> None:
        """Add the next answer."""
        update, contribution, norms = valid
        if norms.get("update"):
            self.norms.append(norms["update"])
        self.formula_bytes += formula_bytes(update.tensors)
        strategy = self._strategy
        if strategy.needs_all:
            self.updates.append(update)
            self._waiting.append(contribution)
            return
        # A copy: what is received is a view of a whole message.
        kept = {name: tensor.clone() for name, tensor in strategy.remembered(update, contribution).items()}
        self.updates.append(replace(update, tensors=kept))
        if most := strategy.settings.clip_norm:
            way = strategy.distance(update, contribution)
            self.clipped += way > most
            contribution = clipped(contribution, strategy.current, way, most)
        self._waiting.append(contribution)
        self._bytes += sum(tensor.nbytes for tensor in contribution.tensors.values())
        if self._bytes > WAITING_BYTES:
            self._sum()

    @property
    def said(self) -> Json:
        """What the round's line says of it."""
        return {"clipped-updates": self.clipped} if self._strategy.settings.clip_norm else {}

    def result(self) -> Tensors:
        """Return the next global model; to be called once."""
        start = time.perf_counter()
        if self._strategy.needs_all:
            merged = self._strategy.merge_all(self.updates, self._waiting)
        else:
            self._sum()
            merged = self._strategy.merge(self._mean, self.updates)
        self.seconds += time.perf_counter() - start
        return merged

    def _sum(self) -> None:
        start = time.perf_counter()
        self._mean.add(self._waiting)
        self._waiting, self._bytes = [], 0
        self.seconds += time.perf_counter() - start


def _empty_mean(strategy: Server) -> MaskedMean:
    """Return the mean of the settings, to which nothing was added yet."""
    settings, old = strategy.settings, strategy.current
    if settings.dp_noise_multiplier:
        deviation = settings.dp_noise_multiplier * settings.clip_norm
        return NoisyMean(old, settings.sample_size, deviation, generator(settings.seed, strategy.round, "noise"))
    if settings.mean != "average":
        return RobustMean(old, settings.mean, settings.trim_fraction, settings.byzantine_clients)
    return MaskedMean(old)


class PrivacySpent:
    """The privacy that a run has spent, by the rounds in which each client was asked.

    Who is asked follows from the seed, which every node has, and not from any data. So nothing is gained by sampling:
    what counts is the client that was asked most often, and the other rounds tell nothing of it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: Counter[int] = Counter()
        self._round = 0

    def after(self, server_round: int, sample: Callable[[int], Sequence[int]]) -> Json:
        """Return ``epsilon`` and ``delta`` after a round, nothing without noise; ``sample``: the clients of a round."""
        settings = self._settings
        if not settings.dp_noise_multiplier:
            return {}
        for number in range(self._round + 1, server_round + 1):  # a resumed run begins at the first round again
            self._asked.update(sample(number))
        self._round = max(self._round, server_round)
        most = max(self._asked.values())
        return {
            "epsilon": epsilon(settings.dp_noise_multiplier, most, settings.dp_delta),
            "delta": settings.dp_delta,
        }
