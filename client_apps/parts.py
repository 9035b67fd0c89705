"""Methods that share a part of the model, client side; which, and their papers: ``strategies/parts.py``."""

from functools import cached_property

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.models import part_names
from strategies.parts import FedBABUSettings, FedRepSettings, PartSettings, TuningSettings


class TunedClient(Client):
    """FedAvg; for its evaluation the client fine-tunes a copy of the global model."""

    options: TuningSettings

    def personal(self, sent: Tensors) -> Tensors:
        """Return the global model, fine-tuned on the client's training data."""
        self.load(sent)
        self.fit(epochs=self.options.tune_epochs, purpose="tuning")
        return self.trained()


class PartClient(Client):
    """FedPer: keeps its personal part, trains the whole model, returns what was shared. LG-FedAvg: the same."""

    options: PartSettings

    @cached_property
    def personal_names(self) -> tuple[str, ...]:
        """Names of the personal tensors."""
        return part_names(self.model, self.options.personal)

    def own(self, sent: Tensors) -> Tensors:
        """Return the client's model: what was sent, its own personal part, the common start where it has none."""
        return self.initial() | self.previous | sent

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train and keep the personal part."""
        self.load(self.own(sent))
        self.train_parts()
        self.remember(self.personal_names)
        kept = () if config["answer"] == "all" else self.personal_names
        return {name: tensor for name, tensor in self.trained().items() if name not in kept}

    def train_parts(self) -> None:
        """Train personal and shared part together."""
        self.fit()

    def personal(self, sent: Tensors) -> Tensors:
        """Return the shared part with the client's own."""
        return self.own({name: tensor for name, tensor in sent.items() if name not in self.personal_names})


class FedRepClient(PartClient):
    """Trains the personal part on the shared one, then the shared one on the personal one."""

    options: FedRepSettings

    def train_parts(self) -> None:
        """One after the other, the other one frozen."""
        shared = [name for name in self.place.tensors if name not in self.personal_names]
        self.fit(names=self.personal_names, epochs=self.options.personal_epochs, purpose="personal batches")
        self.fit(names=shared, epochs=self.options.shared_epochs)


class FedBABUClient(PartClient):
    """Trains the shared part under the common random head; fine-tunes a copy for its evaluation."""

    options: FedBABUSettings

    def train_parts(self) -> None:
        """Train the shared part alone."""
        self.fit(names=[name for name in self.place.tensors if name not in self.personal_names])

    def personal(self, sent: Tensors) -> Tensors:
        """Return the shared part with the common head, fine-tuned on the client's training data."""
        self.load(super().personal(sent))
        tuned = None if self.options.tune == "all" else part_names(self.model, self.options.tune)
        self.fit(names=tuned, epochs=self.options.tune_epochs, purpose="tuning")
        return self.trained()
