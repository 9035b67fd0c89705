"""The base of all methods: FedAvg's hooks (``hooks.py``) behind Flower's four verbs (``rounds.py``), and its types."""

import logging

from flwr.app import ArrayRecord, ConfigRecord, MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import BadReply, Range, Spec, Task, Update
from fedsub_app.subnets.averaging import Contribution, Mean
from strategies import evaluation, rounds
from strategies.hooks import Hooks, Merged
from strategies.measurement import Measurement

__all__ = ["BadReply", "Contribution", "Mean", "Merged", "Range", "Spec", "SubnetStrategy", "Task", "Update"]
log = logging.getLogger("fedsub")


class SubnetStrategy(Hooks, Strategy):
    """FedAvg as a Flower strategy, and the base of all methods."""

    secure = ""
    measurement: Measurement | None = None

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
        """Sample the round's clients; returns the phase, which makes the messages with their tasks one at a time.

        ``config["checkpoints"]``: rounds that a resume may start from; ``config["lr"]``: given if scores decide it.
        """
        self.round, self.plateau_lr = server_round, config.get("lr")
        clients = [client for client in self.federation.sample(server_round) if self.fits(client)]
        return rounds.ask(self, MessageType.TRAIN, clients, server_round, arrays, config, grid)

    aggregate_train = rounds.merge_answers
    configure_evaluate = evaluation.ask_evaluation
    aggregate_evaluate = evaluation.read_evaluations

    def summary(self) -> None:
        """Log the method's own settings that differ from their defaults, in one line, and the method's warning."""
        usual, own = type(self.options)().toml(), self.options.toml()
        if self.devices:  # whose widths count
            own.pop("widths", None)
        chosen = [f"{key} = {value!r}" for key, value in own.items() if value != usual[key]]
        if chosen:
            log.info("%s: %s", self.settings.method, ", ".join(chosen))
        if self.warning:
            log.warning("%s", self.warning)
