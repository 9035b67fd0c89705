"""Server side of every method: Flower's four verbs on our federation and wire format.

A method overrides only what its paper changes: what a client is sent (:meth:`SubnetStrategy.task`), what it must answer
(:meth:`~SubnetStrategy.expected`, :meth:`~SubnetStrategy.decode`), how answers become the next global model
(:meth:`~SubnetStrategy.merge`), and what the server remembers between rounds (:meth:`~SubnetStrategy.state`).
What is not overridden is FedAvg.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Dropped, Federation
from fedsub_app.federation.protocol import (
    BadReply,
    Spec,
    Task,
    Update,
    finite,
    read_update,
    specs,
    to_arrays,
    to_tensors,
    wire_bytes,
)
from fedsub_app.models import tensors_of, unit_groups
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import masked_mean
from fedsub_app.training.costs import formula_bytes

log = logging.getLogger("fedsub")


class SubnetStrategy(Strategy):
    """FedAvg, and the base of all methods.

    Attributes
    ----------
    settings, options : the run's settings and the method's own.
    model : the network, for its structure only (``unit_groups(model)``, shapes).
    current : the global model of the running round, named float32 CPU tensors; read-only.
    round : number of the running round, from 1.
    report : what the round's line says of clients and costs (JSON-able), filled by the verbs.
    """

    def __init__(self, settings: Settings, model: nn.Module, header: Json) -> None:
        self.settings = settings
        self.options = settings.options
        self.model = model
        self.units = unit_groups(model)
        self.federation = Federation(settings, header)
        self.current: Tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        self.round = 0
        self.committed = 0  # oldest round that a resume may start from
        self.report: Json = {}
        self._dropped: list[Dropped] = []
        self._like_current = specs(self.current)

    # --- what a method overrides ------------------------------------------------------------------------------------

    def task(self, client: int) -> Task:
        """Return what ``client`` is sent for training: the whole global model."""
        return Task(client, self.current)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Return the tensors that ``client`` must answer with: a model like the one it was sent."""
        return self._like_current

    def decode(self, update: Update) -> Update:
        """Check what only the method knows and undo its encoding; raise :class:`BadReply` to drop the update."""
        return update

    def merge(self, updates: Sequence[Update]) -> Tensors:
        """Return the next global model from valid updates, sorted by client id.

        ``x_g + server_lr * (weighted mean of x_i - x_g)`` (McMahan et al. 2017; Reddi et al. 2021).
        """
        return masked_mean(
            self.current, [(u.tensors, None, self.weight(u)) for u in updates], server_lr=self.settings.server_lr
        )

    def evaluation_task(self, client: int) -> Task:
        """Return what ``client`` is sent for evaluation: the whole global model."""
        return Task(client, self.current)

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

    # --- Flower's verbs ---------------------------------------------------------------------------------------------

    def weight(self, update: Update) -> float:
        """Return the update's weight in a mean (setting ``weighting``)."""
        return float(update.num_examples) if self.settings.weighting == "examples" else 1.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample the round's clients and return one message a node with their tasks."""
        self.federation.meet(grid)
        self.round, self.current = server_round, to_tensors(arrays)
        self._like_current = specs(self.current)
        tasks = {client: self.task(client) for client in self.federation.sample(server_round)}
        messages, self._dropped = self.federation.messages(
            MessageType.TRAIN, server_round, tasks, {"committed": self.committed}
        )
        self.report = {
            "clients": sorted(tasks),
            "bytes-down": sum(wire_bytes(message.content) for message in messages),
            "formula-bytes-down": sum(formula_bytes(task.tensors) for task in tasks.values()),
        }
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid updates; ``(None, metrics)`` where they are fewer than the quorum."""
        updates, costs = self._updates(MessageType.TRAIN, server_round, replies)
        # Only the answers that passed the checks are costed: what a refused one claims is not trusted either.
        metrics = _means(updates, ("train-loss",)) | _sums(updates, ("flops", "subnet-flops", "compute-seconds"))
        extra = sorted({key for u in updates for key in u.metrics} - set(metrics))
        self.report |= metrics | _means(updates, extra)
        self.report |= costs
        self.report["dropped"] = [{"client": drop.client, "reason": drop.reason} for drop in self._dropped]
        record = MetricRecord(dict(metrics))
        if len(updates) < self.settings.min_replies:
            return None, record
        start = time.perf_counter()
        merged = self.merge(updates)
        self.report["merge-seconds"] = time.perf_counter() - start
        broken = [name for name, tensor in merged.items() if not finite(tensor)]
        if broken:  # finite values of clients may add up to infinity
            everybody = [{"client": u.client, "reason": f"the mean of {broken[0]!r} is not finite"} for u in updates]
            self.report["dropped"] += everybody
            return None, record
        self.current = merged
        return to_arrays(self.current), record

    def evaluation_due(self, server_round: int) -> bool:
        """Say whether the round ends with an evaluation: every ``eval-every`` rounds and the last one."""
        return server_round % self.settings.eval_every == 0 or server_round == self.settings.num_rounds

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask all clients for the accuracies on their own test sets, where the settings name any."""
        wanted = [name for name in self.settings.evaluations if name != "global"]
        if not wanted or not self.evaluation_due(server_round):
            return []
        self.federation.meet(grid)
        self.round, self.current = server_round, to_tensors(arrays)
        tasks = {client: self.evaluation_task(client) for client in range(self.settings.num_clients)}
        messages, self._dropped = self.federation.messages(
            MessageType.EVALUATE, server_round, tasks, {"evaluate": wanted, "committed": self.committed}
        )
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the unweighted client means; the clients' own values go into the round's line."""
        updates, _ = self._updates(MessageType.EVALUATE, server_round, replies)
        means = _means(updates, sorted({key for update in updates for key in update.metrics}))
        self.report |= means | {
            "evaluated": {update.client: update.metrics for update in updates},
            "not-evaluated": [{"client": drop.client, "reason": drop.reason} for drop in self._dropped],
        }
        return MetricRecord(dict(means)) if updates else None

    def summary(self) -> None:
        """Log the strategy's settings, one line."""
        log.info("%s %s", self.settings.method, self.options.model_dump(by_alias=True))

    def _updates(self, phase: str, server_round: int, replies: Iterable[Message]) -> tuple[list[Update], Json]:
        """Return the valid updates, decoded and sorted by client id, and what all answers together cost."""
        answers = self.federation.answers(phase, server_round, replies)
        self._dropped += answers.dropped
        training = phase == MessageType.TRAIN
        updates, formula_up = [], 0
        stacks: dict[int, bool] = {}
        for client, config, tensors in answers.parts:
            try:
                update = read_update(config, tensors, self.expected(client) if training else {}, stacks)
                updates.append(self.decode(update) if training else update)
                formula_up += formula_bytes(tensors)
            except BadReply as error:
                self._dropped.append(Dropped(client, str(error)))
        self._dropped.sort(key=lambda drop: drop.client)
        return updates, {"bytes-up": answers.bytes_up, "formula-bytes-up": formula_up}


def _means(updates: Sequence[Update], keys: Iterable[str]) -> dict[str, float]:
    found = {key: [u.metrics[key] for u in updates if key in u.metrics] for key in keys}
    return {key: sum(values) / len(values) for key, values in found.items() if values}


def _sums(updates: Sequence[Update], keys: Iterable[str]) -> dict[str, float]:
    return {key: sum(u.metrics.get(key, 0.0) for u in updates) for key in keys}
