"""The base of all methods: FedAvg's hooks (``hooks.py``) behind Flower's four verbs (``rounds.py``)."""

import logging
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsub_app.federation.phase import Phase
from strategies import evaluation, rounds
from strategies.hooks import Hooks
from strategies.measurement import Measurement

log = logging.getLogger("fedsub")


class SubnetStrategy(Hooks, Strategy):
    """FedAvg as a Flower strategy, and the base of all methods."""

    secure = ""
    measurement: Measurement | None = None

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
        """Sample the round's clients; returns the phase, which makes the messages with their tasks one at a time.

        ``config["checkpoints"]`` are the rounds that a resume may start from.
        """
        self.round = server_round
        clients = [client for client in self.federation.sample(server_round) if self.fits(client)]
        return rounds.ask(self, MessageType.TRAIN, clients, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid updates as they come; ``(None, metrics)``: the round is abandoned."""
        return rounds.merge_answers(self, server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
        """Ask all clients for the scores on their own test sets, if the settings name any."""
        return evaluation.ask_evaluation(self, server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the unweighted client means; the clients' own values go into the round's line."""
        return evaluation.read_evaluations(self, replies)

    def summary(self) -> None:
        """Log the method's own settings that differ from its defaults, one line, and its warning; if there are any."""
        usual = type(self.options)().toml()
        chosen = [f"{key} = {value!r}" for key, value in self.options.toml().items() if value != usual[key]]
        if chosen:
            log.info("%s: %s", self.settings.method, ", ".join(chosen))
        if self.warning:
            log.warning("%s", self.warning)
