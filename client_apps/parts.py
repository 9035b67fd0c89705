"""Methods that share a part of the model, client side; papers: ``strategies/parts.py``, ``fedbn.py``, ``lora.py``."""

from collections.abc import Collection

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, chosen
from fedsub_app.models import part_names
from fedsub_app.training.objectives import Objective
from strategies.settings import FedBABUSettings, FedRepSettings, LGFedAvgSettings, TuningSettings


class TunedClient(Client):
    """FedAvg; for its evaluation the client fine-tunes a copy of the global model, without the objective."""

    options: TuningSettings

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        self.load(sent)
        self.fit(epochs=self.options.tune_epochs, purpose="tuning", objective=Objective())
        return self.network.copy()


class PartClient(Client):
    """FedPer, FedBN, FedSA-LoRA: keeps its personal part, trains the whole model, returns the shared part."""

    def personal_names(self, sent: Tensors) -> Collection[str]:
        """Return the names of the personal part: what the server does not send."""
        return [name for name in self.network.tensors if name not in sent]

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train and keep the personal part; return the tensors that the server asks for: the shared part or all."""
        self.load(self.completed(sent))
        personal = self.personal_names(sent)
        shared = [name for name in self.network.tensors if name not in personal]
        self.train_parts(personal, shared)
        trained = self.keep_own(personal)
        return trained if config["answer"] == "all" else chosen(trained, shared)

    def train_parts(self, personal: Collection[str], shared: Collection[str]) -> None:
        """Train personal and shared part together."""
        self.fit()


class LGFedAvgClient(PartClient):
    """The server may send it its personal part as well."""

    options: LGFedAvgSettings

    @property
    def irreplaceable(self) -> str:  # type: ignore[override]
        warm_rounds = self.options.warm_rounds
        return "the body of its warm-up is nowhere else" if warm_rounds and self.round > warm_rounds else ""

    def personal_names(self, sent: Tensors) -> Collection[str]:
        return part_names(self.network.module, self.options.personal)


class FedRepClient(PartClient):
    """Trains the personal part with the shared one frozen, then the shared part with the personal one frozen."""

    options: FedRepSettings

    def train_parts(self, personal: Collection[str], shared: Collection[str]) -> None:
        self.fit(personal, epochs=self.options.personal_epochs, purpose="personal batches")
        self.fit(shared, epochs=self.options.shared_epochs)


class FrozenPartClient(PartClient):
    """FFA-LoRA: trains the shared part alone; the personal one stays at its common start."""

    def train_parts(self, personal: Collection[str], shared: Collection[str]) -> None:
        self.fit(shared if personal else None)


class FedBABUClient(FrozenPartClient):
    """Trains the shared part under the common random head; fine-tunes a copy for its evaluation."""

    options: FedBABUSettings

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the shared part with the common head, both fine-tuned on the client's data without the objective."""
        self.load(self.completed(sent))
        tuned = None if self.options.tune == "all" else part_names(self.network.module, self.options.tune)
        self.fit(tuned, epochs=self.options.tune_epochs, purpose="tuning", objective=Objective())
        return self.network.copy()
