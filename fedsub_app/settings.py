"""The settings of a run as frozen, typed, validated objects. Where they come from is :mod:`fedsub_app.config`'s."""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedsub_app.data import DataSettings, PartitionSettings

Value = str | int | float | bool
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
EVALUATIONS = ("global", "global-local", "personal")
# Keys that say where and how far a run goes, not what it computes: they may differ when it is resumed.
LOCATION_KEYS = (
    "experiment",
    "run-dir",
    "resume",
    "data-dir",
    "placement",
    "min-nodes",
    "node-timeout",
    "round-timeout",
)


def _kebab(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


class Section(BaseModel):
    """A frozen set of settings; values keep their TOML type (no ``"3"`` for 3)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=_kebab, populate_by_name=True)


class MethodSettings(Section):
    """The keys of one method (``[tool.flwr.app.config.<method>]``); a method without keys uses this class itself."""

    def check(self, settings: "Settings") -> None:
        """Raise ``ValueError("key = value: what is allowed")`` where a key contradicts the general settings."""


class Settings(Section):
    """The general settings of one run, the same for all methods; ``options`` holds the chosen method's own."""

    experiment: str
    method: str
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    dataset: Annotated[str, Field(min_length=1)]
    domains: str
    data_dir: str
    train_per_class: CountOrZero
    test_per_class: CountOrZero
    image_size: CountOrZero
    normalise: Literal["standard", "half", "none"]
    augment: Literal["none", "crop-flip"]
    partition: Literal["iid", "dirichlet", "shards", "classes", "source", "source-classes", "lists"]
    dirichlet_alpha: Positive
    shards_per_client: Count
    classes_per_client: Count
    repeat_classes: bool
    class_lists: str
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    client_test: Literal["labels", "holdout"]
    holdout_fraction: Annotated[float, Field(gt=0, lt=1)]
    num_clients: Count
    participation: Annotated[float, Field(gt=0, le=1)]
    clients_per_round: CountOrZero
    min_replies: Count
    max_abandoned: Count
    placement: Literal["auto", "balanced", "pinned"]
    min_nodes: CountOrZero
    node_timeout: Positive
    round_timeout: Positive
    model: str
    device: Literal["auto", "cpu", "cuda"]
    optimizer: Literal["sgd", "adam"]
    lr: Positive
    lr_decay_at: str
    lr_decay: Annotated[float, Field(gt=0, le=1)]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NonNegative
    objective: Literal["none", "prox", "moon"]
    prox_mu: NonNegative
    moon_mu: NonNegative
    moon_temperature: Positive
    batch_size: Count
    local_epochs: CountOrZero
    server_lr: Positive
    weighting: Literal["uniform", "examples"]
    num_rounds: Count
    evaluate: str
    eval_every: Count
    target_accuracy: Annotated[float, Field(ge=0, le=100)]
    run_dir: str
    resume: bool
    checkpoint_every: Count
    keep_checkpoints: CountOrZero
    options: MethodSettings

    @property
    def sample_size(self) -> int:
        """Clients that take part in a round."""
        return self.clients_per_round or max(1, round(self.participation * self.num_clients))

    @property
    def evaluations(self) -> tuple[str, ...]:
        """The accuracies that are measured, a subset of ``EVALUATIONS``."""
        return tuple(part.strip() for part in self.evaluate.split(",") if part.strip())

    def lr_at(self, server_round: int) -> float:
        """Return the learning rate of a round: ``lr`` times ``lr_decay`` for each round of ``lr_decay_at`` so far."""
        return self.lr * self.lr_decay ** sum(server_round >= number for number in self._decays)

    @property
    def _decays(self) -> list[int]:
        return [int(word) for word in self.lr_decay_at.split()]

    @property
    def data(self) -> DataSettings:
        """What the data set depends on."""
        fields = (
            "dataset",
            "domains",
            "data_dir",
            "train_per_class",
            "test_per_class",
            "image_size",
            "normalise",
            "seed",
        )
        return DataSettings(**{name: getattr(self, name) for name in fields})

    @property
    def partitioning(self) -> PartitionSettings:
        """What the clients' shares of it depend on."""
        names = PartitionSettings.__dataclass_fields__
        return PartitionSettings(**{name: getattr(self, name) for name in names})

    def flat(self) -> dict[str, Value]:
        """All keys and values in TOML spelling, the chosen method's own as ``method.key``."""
        general = self.model_dump(by_alias=True, exclude={"options"})
        own = self.options.model_dump(by_alias=True)
        return general | {f"{self.method}.{key}": value for key, value in own.items()}

    def digest(self) -> str:
        """Hash of everything that decides the result of a run."""
        deciding = {key: value for key, value in self.flat().items() if key not in LOCATION_KEYS}
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _contradictions(self) -> "Settings":
        if self.clients_per_round > self.num_clients:
            raise ValueError(f"clients-per-round = {self.clients_per_round}: at most num-clients = {self.num_clients}")
        if self.min_replies > self.sample_size:
            raise ValueError(
                f"min-replies = {self.min_replies}: at most the {self.sample_size} clients that take part in a round"
            )
        unknown = [part for part in self.evaluations if part not in EVALUATIONS]
        if unknown or not self.evaluations:
            raise ValueError(f"evaluate = {self.evaluate!r}: allowed are {', '.join(EVALUATIONS)}, comma-separated")
        if not all(word.isdecimal() and int(word) for word in self.lr_decay_at.split()):
            raise ValueError(f"lr-decay-at = {self.lr_decay_at!r}: must be rounds from 1 on, such as '200 400', or ''")
        if self.resume and not self.run_dir:
            raise ValueError("run-dir = '': resume = true needs the run directory to resume")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' only")
        self.options.check(self)
        return self
