"""Server side of every method: Flower's four verbs on our federation and wire format.

A method overrides only what its paper changes: what a client is sent (:meth:`SubnetStrategy.task`), what it must answer
(:meth:`~SubnetStrategy.expected`), what its answer adds to the next model (:meth:`~SubnetStrategy.contribution`), and
what the server remembers between rounds (:meth:`~SubnetStrategy.accepted`, :meth:`~SubnetStrategy.state`). What is not
overridden is FedAvg.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from statistics import median

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors, prefixed
from fedsub_app.federation.nodes import Federation, draw
from fedsub_app.federation.phase import Dropped, Phase
from fedsub_app.federation.protocol import (
    GLOBAL,
    MAX_EXAMPLES,
    BadReply,
    Diverged,
    Range,
    Spec,
    Task,
    Update,
    finite,
    specs,
)
from fedsub_app.federation.wire import read_update, to_arrays, to_tensors
from fedsub_app.models import tensors_of, unit_groups
from fedsub_app.models.units import UnitGroup
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution, MaskedMean, masked_mean
from fedsub_app.subnets.norms import NormGuard, norm, square
from strategies.merging import DEFENCES, Facts, FirstValid, Merging, PrivacySpent, Valid

log = logging.getLogger("fedsub")
MOST_LOSS = 1e4  # a cross-entropy above it is that of a model that has diverged: guessing among 10^6 classes costs 14
MOST_PASSES = 4  # forward and backward passes of the whole network that a method makes on a sample at most, an epoch
COSTS = ("flops", "published-flops", "subnet-flops", "compute-seconds")


class SubnetStrategy(Strategy):
    """FedAvg, and the base of all methods.

    Attributes
    ----------
    settings, options : the run's settings and the method's own.
    model : the network, for its structure only (``unit_groups(model)``, shapes).
    current : the global model of the running round, named float32 CPU tensors; read-only.
    round : number of the running round, from 1.
    phase : the running or last phase: who was asked, who was dropped, what the round's line says of it.
    needs_all : the method merges a round's updates only when it has all of them, by :meth:`merge_all`: its server holds
        as many models as clients answer.
    state_rounds : of each client that keeps a state, the round of that state.
    """

    needs_all = False

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        if settings.batch_size == 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            raise UserError("batch-size = 1: BatchNorm needs at least 2 samples in a mini-batch")
        self.settings = settings
        self.options = settings.options
        self.model = model
        self.current: Tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        self.round = 0
        self.phase = Phase("", 0)
        self.facts: Facts | None = None
        self._specs: tuple[Tensors, dict[str, Spec]] = ({}, {})
        self.state_rounds: dict[int, int] = {}
        self._spent = PrivacySpent(settings)

    def connect(self, federation: Federation, facts: Facts | None = None) -> None:
        """Take the nodes that the verbs talk to, and what the server knows; without that, less can be checked."""
        self.federation = federation
        self.facts = facts

    # --- what a method overrides: these ask only, and change nothing -------------------------------------------------

    def task(self, client: int) -> Task:
        """Return what ``client`` is sent for training: the whole global model."""
        return Task(client, self.current)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Return the tensors that ``client`` must answer with: a model like the global one."""
        return self.specs

    def contribution(self, update: Update) -> Contribution:
        """Return what an update, checked against :meth:`expected`, adds to the mean: its tensors of the model.

        It also checks what only the method knows: :class:`BadReply` drops the update.
        """
        tensors = {name: tensor for name, tensor in update.tensors.items() if name in self.current}
        return Contribution(tensors, None, self.weight(update))

    def metrics(self, client: int) -> Mapping[str, Range]:
        """Return the numbers that ``client`` may say of its training; any other is refused.

        The round's line has the sum of the costs and the mean of the others, under the names given here.
        """
        flops = Range(0, self.most_flops(client))
        seconds = Range(0, 1e7)
        return {
            "train-loss": Range(0, MOST_LOSS, loss=True),
            "flops": flops,
            "subnet-flops": flops,
            "published-flops": flops,
            "compute-seconds": seconds,
        }

    def passes(self, client: int) -> float:
        """Return how many passes over its samples ``client`` makes in a round at most, besides ``local-epochs``.

        A client that reports more FLOPs than these passes can cost is dropped. A method whose own keys count epochs
        adds them to this one pass, which is for what no key counts, such as features or scores.
        """
        return 1

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        """Return what of an update must not be far larger than in the round's others: a name for it -> Euclidean norm.

        ``update``: how far it moves the model, at the positions that it contributes. A method whose server remembers
        other tensors of an update adds their norms.
        """
        return {"update": self.distance(update, contribution)}

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        """Return which tensors :meth:`merge` and :meth:`accepted` need of an update whose contribution is in the mean.

        By default those that the contribution does not hold. The others are forgotten, so that a round need not hold
        all answers.
        """
        return {name: tensor for name, tensor in update.tensors.items() if name not in contribution.tensors}

    def merge(self, mean: MaskedMean, updates: Sequence[Update]) -> Tensors:
        """Return the next global model from the mean of what the valid updates of a round contribute.

        ``x_g + server_lr * (weighted mean of x_i - x_g)`` (McMahan et al. 2017; Reddi et al. 2021), position by
        position over those who contribute to it. ``updates``, by client id, have the tensors of :meth:`remembered`.
        """
        return mean.result(self.settings.server_lr)

    def merge_all(self, updates: Sequence[Update], contributions: Sequence[Contribution]) -> Tensors:
        """Return the next global model of a method that :attr:`needs_all` updates of a round at once: their mean."""
        return masked_mean(self.current, contributions, self.settings.server_lr)

    def personal_download(self, client: int) -> Tensors:
        """Return what ``client`` is sent for the evaluation of its own model: the global one."""
        return self.current

    def refuses(self) -> Mapping[str, str]:
        """Return which of ``DEFENCES`` would not hold for the method, and why: they bound contributions, no more.

        A method whose server takes more of an update than its contribution, or whose clients contribute to different
        positions, must name them.
        """
        return dict.fromkeys(DEFENCES, "its server weighs a round's answers by one another") if self.needs_all else {}

    def stage(self, server_round: int) -> str:
        """Return the name of the part of the method that a round, from 1 on, belongs to: "warm-up"; "" for none."""
        return ""

    # --- what a method overrides: where its server's state changes ---------------------------------------------------

    def accepted(self, updates: Sequence[Update]) -> Json:
        """Take note of the updates that were merged, none where the round was abandoned; returns lines for the report.

        The only place where the method's state changes. ``current`` is still the model that was sent, and
        ``phase.asked`` holds the clients that it was sent to.
        """
        return {}

    def state(self) -> Tensors:
        """Return what the method's server remembers between rounds; goes into the checkpoint."""
        return {}

    def load_state(self, state: Tensors) -> None:
        """Restore what :meth:`state` returned."""

    def unit_masks(self) -> Tensor | None:
        """Return every client's sub-network after :meth:`load_state`, for ``fedsub analyse``.

        bool ``[num_clients, hidden units]``, units in the order of ``units``; None: the method has no such masks.
        """
        return None

    def position_masks(self) -> list[Tensors] | None:
        """Return every client's personal positions after :meth:`load_state`, for ``fedsub analyse``.

        One dict a client, tensor name -> bool of the tensor's shape, the same names for all; None: the method has none.
        """
        return None

    # --- what methods use ---------------------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitGroup, ...]:
        """The network's hidden units."""
        return unit_groups(self.model)

    @property
    def specs(self) -> dict[str, Spec]:
        """What a whole model must be that was trained from the global one."""
        if self._specs[0] is not self.current:
            self._specs = (self.current, specs(self.current))
        return self._specs[1]

    def most_examples(self, client: int) -> int:
        """Return how many training samples a client can have."""
        return self.facts.examples[client] if self.facts else MAX_EXAMPLES

    def most_samples(self, client: int) -> int:
        """Return how many samples a client computes on in a round at most, one after the other."""
        settings, count = self.settings, self.most_examples(client)
        steps = settings.local_steps
        fitted = steps * settings.batch_size if steps else count * settings.local_epochs
        return fitted + math.ceil(count * self.passes(client))

    def most_flops(self, client: int) -> float:
        """Return the FLOPs that a client can have spent in a round."""
        return MOST_PASSES * self.facts.sample_flops * self.most_samples(client) if self.facts else 1e24

    def weight(self, update: Update) -> float:
        """Return the update's weight in a mean (setting ``weighting``)."""
        return float(update.num_examples) if self.settings.weighting == "examples" else 1.0

    def distance(self, update: Update, contribution: Contribution) -> float:
        """Return how far a contribution is from the model, at the positions that it holds: a Euclidean norm."""
        masks, total = contribution.masks or {}, 0.0
        for name, x in contribution.tensors.items():
            known = update.squares.get(name) if x is update.tensors.get(name) and name not in masks else None
            total += square(x, self.current[name], masks.get(name)) if known is None else known
        return math.sqrt(total)

    # --- Flower's verbs ---------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
        """Sample the round's clients; returns the messages with their tasks, which are made when they are asked for.

        ``config["checkpoints"]`` are the rounds that a resume may start from.
        """
        self.federation.meet(grid)
        self.round, self.current = server_round, to_tensors(arrays)
        clients = self.federation.sample(server_round)
        self.phase = self.federation.ask(
            MessageType.TRAIN, server_round, clients, self.task, _checkpoints(config), self.expected
        )
        self.phase.report["clients"] = clients
        return self.phase

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid updates as they come; ``(None, metrics)``: the round is abandoned."""
        phase = self.phase
        # With privacy the answer of one client must not decide whether another one's counts: clip-norm bounds them all.
        most = math.inf if self.settings.dp_noise_multiplier else self.settings.max_update_norm
        guard = partial(NormGuard[Valid], most, norm(self.current.values()))
        settings, merging = self.settings, Merging(self)
        judge = FirstValid(draw(settings, server_round), settings.sample_size, guard) if settings.spares else guard()
        diverged = 0

        def take(decided: Iterable[tuple[Valid, str]]) -> None:
            for valid, reason in decided:
                if reason:
                    phase.dropped.append(Dropped(valid.update.client, reason))
                else:
                    merging.add(valid)

        for client, part, expected in self.federation.answers(phase, replies, self.expected, not settings.spares):
            try:
                update = read_update(part, expected, self.metrics(client), self.most_examples(client))
                contribution = self.contribution(update)
                norms = self.norms(update, contribution)
                take(judge.add(Valid(update, contribution, norms), norms))
            except BadReply as error:
                phase.dropped.append(Dropped(client, str(error)))
                diverged += isinstance(error, Diverged)
            if judge.enough and not self.federation.simulated:  # nobody waits for the others
                break
        take(judge.rest())
        # Only the answers that passed the checks are costed: what a refused one claims is not trusted either.
        updates = merging.updates
        names = {name: None for update in updates for name in update.metrics if name not in COSTS}
        metrics = _means(updates, names) | _sums(updates, COSTS)
        # What the server measures has the last word.
        phase.report = {**metrics, **phase.report, **_middle(merging.norms)}
        phase.report |= {"bytes-down": phase.bytes_down, "formula-bytes-down": phase.formula_down}
        phase.report |= {"bytes-up": phase.bytes_up, "formula-bytes-up": merging.formula_bytes}
        phase.report |= merging.said | self._spent.after(server_round, self.federation.sample)
        phase.report |= self._lost("lost-state", updates)
        self.state_rounds |= {u.client: min(u.state[1], server_round) for u in updates if u.state[1]}
        merged, reason = self._merged(merging, diverged)
        phase.report |= {"merge-seconds": merging.seconds} | self.accepted(updates if merged is not None else [])
        if settings.spares:
            decided = {update.client for update in updates} | {drop.client for drop in phase.dropped}
            phase.report["not-waited-for"] = sorted(set(phase.report["clients"]) - decided)
        if merged is not None and len(updates) < settings.sample_size:
            phase.report["partial"] = f"{len(updates)} of {settings.sample_size} replies"
        phase.report["dropped"] = _reasons(phase.dropped)
        if merged is None:
            phase.report |= {"abandoned": reason}
            return None, MetricRecord(dict(metrics))
        self.current = merged
        return to_arrays(merged), MetricRecord(dict(metrics))

    def _merged(self, merging: Merging, diverged: int) -> tuple[Tensors | None, str]:
        """Return the next global model; ``None`` and the reason where the round is abandoned: the old one stays."""
        count = len(merging.updates)
        if count < self.settings.min_replies:
            return None, f"fewer than min-replies = {self.settings.min_replies} valid replies"
        if count < (least := self.settings.least_replies):
            which = f"mean = {self.settings.mean!r} with byzantine-clients = {self.settings.byzantine_clients}"
            return None, f"{count} valid replies: {which} needs {least}"
        if diverged > count:  # the few that are left may be those that have brought it about
            return None, f"training diverged on {diverged} of {diverged + count} clients"
        merged = merging.result()
        broken = [name for name, tensor in merged.items() if not finite(tensor)]
        if broken:  # finite values of clients may add up to infinity
            return None, f"the mean of {broken[0]!r} is not finite"
        loss = self.facts.loss(merged) if self.facts else 0.0
        if not loss <= MOST_LOSS:
            return None, f"diverged: the merged model's loss is {loss:g}"
        return merged, ""

    def _lost(self, key: str, updates: Sequence[Update]) -> Json:
        """Return, for the report, the clients whose state is gone, or older than the last one that they kept."""
        lost = [update.client for update in updates if update.state[0] < self.state_rounds.get(update.client, 0)]
        return {key: lost} if lost else {}

    def evaluation_due(self, server_round: int, config: ConfigRecord) -> bool:
        """Say whether the round ends with an evaluation: every ``eval-every`` rounds and the last one.

        ``config["last"]`` says that a budget has made it the last one.
        """
        last = bool(config.get("last")) or server_round == self.settings.num_rounds
        return last or server_round % self.settings.eval_every == 0

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
        """Ask all clients for the accuracies on their own test sets; nobody where the settings name none."""
        wanted = [name for name in self.settings.evaluations if name != "global"]
        self.phase = Phase(MessageType.EVALUATE, server_round)
        if wanted and self.evaluation_due(server_round, config):
            self.federation.meet(grid)
            self.round, self.current = server_round, to_tensors(arrays)
            clients, extra = range(self.settings.num_clients), {"evaluate": wanted} | _checkpoints(config)
            self.phase = self.federation.ask(
                MessageType.EVALUATE, server_round, clients, partial(self._evaluation_task, wanted), extra
            )
        return self.phase

    def _evaluation_task(self, wanted: Sequence[str], client: int) -> Task:
        """Return what a client needs for its own model and, for the global one, the tensors that are not the same."""
        personal = self.personal_download(client) if "personal" in wanted else {}
        whole = {n: t for n, t in self.current.items() if personal.get(n) is not t} if "global-local" in wanted else {}
        return Task(client, personal | prefixed(GLOBAL, whole))

    def _evaluation_metrics(self, client: int) -> dict[str, Range]:
        """Return the numbers that a client may answer an evaluation with: those that were asked for, and its costs."""
        found = {"flops": Range(0, self.most_flops(client))}
        for name in self.settings.evaluations:
            if name != "global":
                found |= {f"{name}-accuracy": Range(0, 100, needed=True), f"{name}-loss": Range(0, 1e9, needed=True)}
                found[f"{name}-validation-accuracy"] = Range(0, 100)
        return found

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the unweighted client means; the clients' own values go into the round's line."""
        phase = self.phase
        updates = []
        for client, part, expected in self.federation.answers(phase, replies, lambda _: {}):
            try:
                updates.append(read_update(part, expected, self._evaluation_metrics(client)))
            except BadReply as error:
                phase.dropped.append(Dropped(client, str(error)))
        means = _means(updates, sorted({key for update in updates for key in update.metrics} - {"flops"}))
        spent = {f"evaluate-{key}": value for key, value in _sums(updates, ("flops",)).items() if value}
        phase.report |= means | spent
        phase.report |= self._lost("evaluated-without-state", updates)
        phase.report["evaluated"] = {update.client: update.metrics for update in updates}
        phase.report["not-evaluated"] = _reasons(phase.dropped)
        return MetricRecord(dict(means)) if updates else None

    def summary(self) -> None:
        """Log the strategy's settings, one line."""
        log.info("%s %s", self.settings.method, self.options.model_dump(by_alias=True))


def _checkpoints(config: ConfigRecord) -> Json:
    return {"checkpoints": config.get("checkpoints", [])}


def _reasons(dropped: Sequence[Dropped]) -> list[Json]:
    return [{"client": drop.client, "reason": drop.reason} for drop in sorted(dropped, key=lambda drop: drop.client)]


def _means(updates: Sequence[Update], keys: Iterable[str]) -> dict[str, float]:
    found = {key: [u.metrics[key] for u in updates if key in u.metrics] for key in keys}
    return {key: sum(values) / len(values) for key, values in found.items() if values}


def _sums(updates: Sequence[Update], keys: Iterable[str]) -> dict[str, float]:
    return {key: sum(u.metrics.get(key, 0.0) for u in updates) for key in keys}


def _middle(norms: Sequence[float]) -> dict[str, float]:
    """Return the median and the largest norm of the updates that count."""
    if not norms:
        return {}
    return {"update-norm": float(f"{median(norms):.3g}"), "largest-update-norm": float(f"{max(norms):.3g}")}
