"""The settings of a run as one frozen, typed, validated object. runs/config.py says where they come from."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from fedsub_app.common.errors import UserError
from fedsub_app.common.own_code import readable, section_of
from fedsub_app.common.score import CLASSES, SCORES, Score, further_metrics
from fedsub_app.common.section import (
    EPOCHS,
    AmountOrNone,
    Count,
    CountOrNone,
    CountOrZero,
    Epochs,
    Listed,
    Names,
    NonNegative,
    Positive,
    Section,
    TextOrNone,
    Value,
)
from fedsub_app.data import DataSettings, PartitionSettings
from fedsub_app.federation.settings import AttackSettings, DefenceSettings

Part = TypeVar("Part", bound=Section)
# Keys that say where and how far a run goes, not what it computes: they may differ when it is resumed.
LOCATION_KEYS = (
    *("experiment", "run-dir", "resume", "track", "device", "data-dir", "backbone-dir", "placement"),
    *("message-clients", "message-mb", "min-nodes", "node-timeout", "round-timeout"),
)
Evaluations = Annotated[
    tuple[Literal["global", "global-local", "personal"], ...],
    Field(min_length=1),
    Listed("allowed are global, global-local, personal, comma-separated"),
]
Rounds = Annotated[tuple[Count, ...], Listed("must be rounds from 1 on, such as '200, 400', or ''", read=int)]


def digest(flat: Mapping[str, Value]) -> str:
    """Hash of everything that decides the result of a run, from its settings in TOML spelling.

    Settings that an earlier version recorded keep their digest, also without keys that were added since.
    """
    deciding = {key: value for key, value in flat.items() if key not in LOCATION_KEYS}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


class MethodSettings(Section):
    """The keys of one method (``[tool.flwr.app.config.<method>]``); a method without keys uses this class itself.

    ``objectives``: values of the setting ``objective`` that the method can train with.
    ``moves_base``: the method changes the weights under LoRA's adapters: they are sent, and not in the frozen base.
    """

    objectives: ClassVar[tuple[str, ...]] = ("none", "prox", "moon")
    moves_base: ClassVar[bool] = False

    def check(self, settings: "Settings") -> None:
        """Raise ``ValueError("key = value: what is allowed")`` where a key contradicts the general settings."""

    @property
    def epochs(self) -> int:
        """Epochs of a client beside ``local-epochs``: the sum of the keys of type ``Epochs``."""
        return sum(getattr(self, name) for name, field in type(self).model_fields.items() if EPOCHS in field.metadata)

    def hidden_width(self, settings: "Settings") -> int | None:
        """Return the units of every hidden layer of the global network, ``None`` for the model's own."""
        return None


class RunSettings(Section):
    """The run: method, length, evaluation and files."""

    experiment: TextOrNone = None
    """Name of an experiment: conf/<experiment>.toml overrides these defaults, single keys override it; "": none."""
    method: str = "fedpews"
    """A name of `fedsub list methods`, or a method of yours, "my_method.py:Foo" (docs/adding-a-method.md)."""
    num_rounds: Count = 50
    """Rounds of the run."""
    max_flops: AmountOrNone = None
    """Stop after the round in which the clients' training FLOPs reach this; 0: no limit.

    That round is evaluated and the run is complete; the summary's ``ended-by`` names the key. Clients whose answers
    were refused do not count. Flower's own loop refuses the key.
    """
    max_bytes: AmountOrNone = None
    """Stop after the round in which the bytes of all messages, by the papers' formula, reach this; 0: no limit."""
    max_device_seconds: AmountOrNone = None
    """Stop after the round in which the devices' clock reaches this, with ``devices``; 0: no limit."""
    all_budgets: bool = False
    """Stop when the last of max-flops, max-bytes, max-device-seconds is used up, not the first.

    Measurements for evaluations, such as HeteroFL's statistics, then count for the last evaluation alone. Tables show
    the score at each budget.
    """
    evaluations: Annotated[Evaluations, Field(alias="evaluate")] = ("global",)
    """Scores to measure, any of global, global-local, personal: "global, personal".

    global: the global model on the whole test set; global-local: the global model on each client's test set; personal:
    each client's own model on its test set. ``target-score`` and ``stop-at-score`` refer to the first one.
    """
    eval_every: Count = 1
    """Rounds from one evaluation to the next; the last round ends with one."""
    target_score: AmountOrNone = None
    """Target of the task's score, an accuracy in percent; the summary names the first round that reaches it; 0: none.

    It is reached at this value or above; where a low score is good, at this value or below.
    """
    stop_at_score: AmountOrNone = None
    """Stop, as max-flops does, when the first score of ``evaluate`` reaches this; 0: no limit."""
    run_dir: TextOrNone = None
    """Run directory; "": a new folder under $FEDSUB_RUNS.

    `make setup` sets $FEDSUB_RUNS to the checkout's runs/ for every command of its .venv; the default is ./runs.
    """
    resume: bool = False
    """Continue the run in run-dir."""
    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next; the last round has one."""
    keep_checkpoints: CountOrNone = 2
    """Number of latest checkpoints that are kept; 0: all."""
    track: Literal["none", "tensorboard", "mlflow", "wandb"] = "none"
    """Tracker that also gets every round's numbers; it is a separate package (`pip install -e '.[mlflow]'`)."""


class TrainingSettings(Section):
    """The network and the local training of a client."""

    model: str = "fedpews-cnn"
    """A name of `fedsub list models`, or a network of your own or of a package: docs/own-network.md.

    "my_net.py:Net", "package.module:Net", "torchvision:NAME", "timm:NAME", "transformers:FOLDER or name on the hub",
    "package:NAME" (docs/fine-tuning.md).
    """
    model_options: Annotated[str, AfterValidator(readable)] = ""
    """Arguments of a network of your own or of a package: "width=32, norm='group'"."""
    start_from: TextOrNone = None
    """Initial global model: a .safetensors file, a checkpoint or a run's directory for its last model; "": by the seed.

    The server reads it. Its tensors must have the names, shapes and types of the network's; with trainable, those of
    the trained tensors.
    """
    head: str = ""
    """Layer that is the head, for FedPer, MOON, HeteroFL and others; "": the last Linear, else convolution."""
    trainable: str = ""
    """Part that is trained and sent: lora, head, bias, norm, last-2-blocks or names of layers; "": all.

    The rest is a frozen base. All values but names of layers train the head as well (docs/fine-tuning.md).
    """
    base_dtype: Literal["float32", "bf16"] = "float32"
    """Type of the frozen base's parameters; bf16: the network computes in bfloat16, trained parameters are float32."""
    gradient_checkpointing: bool = False
    """With trainable: compute blocks once more in the backward pass; this takes less memory and more FLOPs."""
    lora_rank: Count = 8
    """r of trainable = "lora"."""
    lora_alpha: Positive = 16.0
    """alpha of trainable = "lora": an adapter's output is multiplied by alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters."""
    lora_targets: Names = ()
    """Layers with adapters, by the ends of their names: "query, value"; "": all linear layers and convolutions."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""
    stack_clients: bool = False
    """Train clients of equal shape together: several times faster on small networks, same results up to rounding."""
    model_width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the units of each hidden layer of ``model`` that the global network has."""
    compile_steps: bool = False
    """Compile the steps that train the whole network on a full mini-batch; on a GPU replay them as CUDA graphs.

    Results are equal up to float rounding. Every process compiles at its first step. This takes up to minutes and needs
    a C++ compiler, or Triton on a GPU. Steps of parts of a network, steps under masks, and steps of MOON and FedPAC are
    not compiled.
    """
    gpu_exact: bool = True
    """On a GPU: deterministic kernels, no TF32; false: fastest kernels, not repeatable bit for bit."""
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = "sgd"
    """torch's optimizer with its defaults; its state is reset in every round unless a method says otherwise."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd and rmsprop."""
    weight_decay: NonNegative = 0.0
    """L2 penalty, added to the gradients of all weights; with adamw each step scales them by 1 - lr * weight-decay."""
    augment: Literal["none", "crop-flip"] = "none"
    """Training images: unchanged, or random crops with padding 4 and horizontal flips."""
    objective: Literal["none", "prox", "moon"] = "none"
    """Term added to any method's local loss: FedProx's or MOON's."""
    prox: Literal["squared", "authors"] = "squared"
    """Term of objective = "prox": FedProx's, or FedPart's published one.

    FedPart's term is a norm that is not squared. It acts in a client's first mini-batch alone, where its gradient is 0.
    """
    prox_mu: NonNegative = 0.01
    """Weight of objective = "prox"."""
    moon_mu: NonNegative = 1.0
    """Weight of objective = "moon"."""
    moon_temperature: Positive = 0.5
    """Temperature of objective = "moon"."""
    batch_size: Count = 32
    """Samples of a mini-batch."""
    local_epochs: Epochs = 1
    """Passes over a client's training samples in a round; 0: none, to time the machinery."""
    local_steps: CountOrNone = None
    """Mini-batches of a round instead of local-epochs; 0: by local-epochs.

    The mini-batches come from as many passes as needed, each in its own order. Keys of methods that count epochs, such
    as ``tune-epochs``, ``head-epochs`` and both keys of FedRep, still count epochs.
    """


class ScheduleSettings(Section):
    """The learning rate and how it falls."""

    lr: Positive = 0.05
    """Learning rate of the first round."""
    lr_schedule: Literal["step", "cosine", "plateau"] = "step"
    """How lr falls: at given rounds, along a cosine that reaches 0 after num-rounds, or when the score stops improving.

    cosine is torch's CosineAnnealingLR; such a run cannot be resumed with more rounds. plateau is torch's
    ReduceLROnPlateau on the first score of ``evaluate``; it multiplies lr by lr-decay.
    """
    lr_decay_at: Rounds = ()
    """Rounds from which on lr is multiplied by lr-decay: "200, 400"."""
    lr_decay_every: CountOrNone = None
    """Rounds from one multiplication of lr by lr-decay to the next; 0: only at the rounds of lr-decay-at."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of lr each time that it falls."""
    lr_patience: CountOrZero = 10
    """Evaluations in a row without a better score that lr-schedule = "plateau" tolerates."""

    @model_validator(mode="after")
    def _schedule_agrees(self) -> "ScheduleSettings":
        for key in ("lr_decay_at", "lr_decay_every") if self.lr_schedule != "step" else ():
            if getattr(self, key):
                raise ValueError(f"{key.replace('_', '-')}: does nothing with lr-schedule = {self.lr_schedule!r}")
        if self.lr_schedule == "plateau" and self.lr_decay == 1:
            raise ValueError("lr-decay = 1: must be below 1 with lr-schedule = 'plateau'")
        return self


# Methods whose papers weigh by samples.
BY_EXAMPLES = ("fedavg", "fedprox", "moon", "fedala", "ssfl", "feddst", "fedit", "flexlora", "flora")


# The bases stand in reverse: the keys of the last one come first, in TOML, in `fedsub list settings` and in errors.
class Settings(
    AttackSettings, ScheduleSettings, TrainingSettings, DefenceSettings, PartitionSettings, DataSettings, RunSettings
):
    """The general settings of one run, the same for all methods; ``options`` holds the chosen method's own."""

    options: MethodSettings = Field(default_factory=MethodSettings, exclude=True)  # has a table of its own in TOML

    @property
    def section(self) -> str:
        """The word before the method's own keys."""
        return section_of(self.method)

    def need_data(self) -> None:
        """Raise :class:`UserError` where the clients' data are not here, but their nodes' own."""
        if self.private_examples:
            raise UserError(f"private-examples = {self.private_examples}: the clients' data are with their nodes")

    @property
    def score(self) -> Score:
        """The score of the task; the code of a task of your own is run for it."""
        if self.task in SCORES:
            return SCORES[self.task]._replace(others=SCORES[self.task].others + further_metrics(self.metrics))
        from fedsub_app.common.tasks import task_of  # which loads torch

        return task_of(self.task).about

    @property
    def data(self) -> DataSettings:
        return self._part(DataSettings)

    @property
    def partitioning(self) -> PartitionSettings:
        return self._part(PartitionSettings)

    def _part(self, section: type[Part]) -> Part:
        return section(**{name: getattr(self, name) for name in section.model_fields})

    @property
    def by_examples(self) -> bool:
        """Whether a client's weight in a mean is its number of training samples (``weighting``)."""
        plain = self.mean == "average" and not self.dp_noise_multiplier
        return self.weighting == "examples" or (self.weighting == "auto" and plain and self.method in BY_EXAMPLES)

    @property
    def pull(self) -> float:
        """The proximal term's weight in a step; FedPart's published term acts on its anchor alone, with gradient 0."""
        return self.prox_mu if self.objective == "prox" and self.prox == "squared" else 0.0

    def lr_at(self, server_round: int) -> float:
        """Return the learning rate of a round; with ``plateau`` that of the first one, after it the scores decide."""
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * (server_round - 1) / self.num_rounds)) / 2
        falls = sum(server_round >= number for number in self.lr_decay_at)
        falls += (server_round - 1) // self.lr_decay_every if self.lr_decay_every else 0
        return float(self.lr * self.lr_decay**falls)

    def flat(self) -> dict[str, Value]:
        """Return all keys and values in TOML spelling, the chosen method's own as ``method.key``."""
        return self.toml() | {f"{self.section}.{key}": value for key, value in self.options.toml().items()}

    def digest(self) -> str:
        return digest(self.flat())

    @model_validator(mode="after")
    def _settings_agree(self) -> "Settings":
        if self.resume and not self.run_dir:
            raise ValueError("run-dir = '': resume = true needs the run directory to resume")
        if self.compile_steps and self.stack_clients:
            raise ValueError("compile-steps = true: not with stack-clients = true")
        if self.base_dtype != "float32" and not self.trainable:
            raise ValueError(f"base-dtype = {self.base_dtype!r}: needs trainable = 'lora', 'head' or another part")
        if self.gradient_checkpointing and not self.trainable:
            raise ValueError("gradient-checkpointing = true: needs trainable = 'lora', 'head' or another part")
        if self.momentum and self.optimizer.startswith("adam"):
            raise ValueError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' or 'rmsprop' only")
        if self.attack != "none" and self.attackers > self.num_clients:
            raise ValueError(f"attackers = {self.attackers}: at most num-clients = {self.num_clients}")
        for key in ("target-score", "stop-at-score") if self.task in SCORES else ():
            if (value := getattr(self, key.replace("-", "_")) or 0) > SCORES[self.task].high:
                raise ValueError(f"{key} = {value:g}: must be less than or equal to {SCORES[self.task].high:g}")
        if self.max_device_seconds and not self.devices:
            raise ValueError(f"max-device-seconds = {self.max_device_seconds:g}: does nothing without devices")
        if self.all_budgets and not (self.max_flops or self.max_bytes or self.max_device_seconds):
            raise ValueError("all-budgets = true: needs max-flops, max-bytes or max-device-seconds")
        if further_metrics(self.metrics) and self.task not in CLASSES:
            raise ValueError(f"metrics = {', '.join(self.metrics)!r}: task = {self.task!r} takes none but 'spread'")
        if self.client_test == "pooled" and "global" in self.evaluations:
            raise ValueError("client-test = 'pooled': leaves no global test set; evaluate must be without 'global'")
        allowed = self.options.objectives
        if self.objective not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ValueError(f"objective = {self.objective!r}: must be {names} with method = {self.method!r}")
        self.options.check(self)
        return self
