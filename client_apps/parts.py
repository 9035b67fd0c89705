"""Methods that share a part of the model, client side; papers and deviations: ``strategies/parts.py``, ``fedbn.py``."""

from functools import cached_property

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, chosen
from fedsub_app.models import part_names
from fedsub_app.training.objectives import Objective
from strategies.fedbn import normalisation_names
from strategies.settings import FedBABUSettings, FedRepSettings, PartSettings, TuningSettings


class TunedClient(Client):
    """FedAvg; for its evaluation the client fine-tunes a copy of the global model, without the objective."""

    options: TuningSettings

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        self.load(sent)
        self.fit(epochs=self.options.tune_epochs, purpose="tuning", objective=Objective())
        return self.trained()


class PartClient(Client):
    """FedPer and LG-FedAvg: keeps its personal part, trains the whole model, returns the shared part."""

    options: PartSettings

    @cached_property
    def personal_names(self) -> tuple[str, ...]:
        return part_names(self.network.module, self.options.personal)

    @cached_property
    def shared_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.network.tensors if name not in self.personal_names)

    def completed(self, sent: Tensors) -> Tensors:
        """Return the sent part with the client's own personal part, or with the initial one at first."""
        known = self.own | sent
        return known if known.keys() == self.network.tensors.keys() else self.initial() | known

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        return self.completed(sent)

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train and keep the personal part; return the tensors that the server asks for: the shared part or all."""
        self.load(self.completed(sent))
        self.train_parts()
        self.keep_own(self.personal_names)
        trained = self.trained()
        return trained if config["answer"] == "all" else chosen(trained, self.shared_names)

    def train_parts(self) -> None:
        """Train personal and shared part together."""
        self.fit()


class FedRepClient(PartClient):
    """Trains the personal part with the shared one frozen, then the shared part with the personal one frozen."""

    options: FedRepSettings

    def train_parts(self) -> None:
        self.fit(self.personal_names, epochs=self.options.personal_epochs, purpose="personal batches")
        self.fit(self.shared_names, epochs=self.options.shared_epochs)


class FedBABUClient(PartClient):
    """Trains the shared part under the common random head; fine-tunes a copy for its evaluation."""

    options: FedBABUSettings

    def train_parts(self) -> None:
        self.fit(self.shared_names)

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the shared part with the common head, both fine-tuned on the client's data without the objective."""
        self.load(self.completed(sent))
        tuned = None if self.options.tune == "all" else part_names(self.network.module, self.options.tune)
        self.fit(tuned, epochs=self.options.tune_epochs, purpose="tuning", objective=Objective())
        return self.trained()


class FedBNClient(PartClient):
    """Keeps its normalisation layers, trains the whole model, returns the other layers."""

    @cached_property
    def personal_names(self) -> tuple[str, ...]:
        return normalisation_names(self.network.module)
