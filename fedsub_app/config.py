"""Settings: TOML and key=value in, frozen, typed, validated objects out. The only place that knows TOML spelling.

Order: the defaults of ``[tool.flwr.app.config]`` in pyproject.toml, then ``conf/<experiment>.toml``, then single keys.
Keys are kebab-case in TOML and on the command line, snake_case in Python; a method's own keys are ``method.key``.
"""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsub_app.data import DataSettings, PartitionSettings
from fedsub_app.errors import UserError

Value = str | int | float | bool
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
RULES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "minLength": "length >="}
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
    data_dir: str
    train_per_class: CountOrZero
    test_per_class: CountOrZero
    image_size: CountOrZero
    normalise: Literal["standard", "half", "none"]
    partition: Literal["iid", "dirichlet", "shards", "classes", "source", "lists"]
    dirichlet_alpha: Positive
    shards_per_client: Count
    classes_per_client: Count
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
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NonNegative
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

    @property
    def data(self) -> DataSettings:
        """What the data set depends on."""
        fields = ("dataset", "data_dir", "train_per_class", "test_per_class", "image_size", "normalise", "seed")
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
        if self.resume and not self.run_dir:
            raise ValueError("run-dir = '': resume = true needs the run directory to resume")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' only")
        self.options.check(self)
        return self


def _home(name: str) -> Path:
    """Return pyproject.toml or conf: beside the packages in a checkout or bundle, inside fedsub_app in a wheel."""
    here = Path(__file__).resolve().parent
    return here / name if (here / name).exists() else here.parent / name


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested TOML tables as one level of dotted keys."""
    flat: dict[str, Value] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@cache
def defaults() -> dict[str, Value]:
    """Every key with its default, from pyproject.toml."""
    project = tomllib.loads(_home("pyproject.toml").read_text())
    return flatten(project["tool"]["flwr"]["app"]["config"])


def conf_folder() -> Path:
    """Where the experiments (``<paper>/<experiment>.toml``) and tables (``tables/<name>.toml``) lie."""
    return _home("conf")


def experiments() -> dict[str, Path]:
    """Names of the experiments (paths below conf/ without ``.toml``) and their files."""
    root = conf_folder()
    found = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.toml"))}
    return {name: path for name, path in found.items() if not name.startswith("tables/")}


def describe() -> dict[str, str]:
    """Every key with its default and what is allowed, for people."""
    from fedsub_app.methods import METHODS

    sections: dict[str, type[Section]] = {"": Settings} | {f"{name}.": METHODS[name].settings for name in METHODS}
    said = {}
    for prefix, section in sections.items():
        for name, schema in section.model_json_schema(mode="validation").get("properties", {}).items():
            if prefix + name in defaults():
                rules = [f"{word} {schema[rule]}" for rule, word in RULES.items() if rule in schema]
                allowed = " | ".join(map(str, schema["enum"])) if "enum" in schema else ", ".join(rules)
                said[prefix + name] = f"{defaults()[prefix + name]!r:<14} {schema.get('type', '')} {allowed}".rstrip()
    return said


def parse_pairs(pairs: list[str]) -> dict[str, Value]:
    """Turn ``["lr=0.1", "method=fedavg"]`` into values: TOML where it parses, else the text itself."""
    values: dict[str, Value] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise UserError(f"{pair!r}: expected key=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        values[key.strip()] = value
    return values


def _read_experiment(name: str) -> dict[str, Value]:
    path = experiments().get(name)
    if path is None:
        near = difflib.get_close_matches(name, experiments(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"experiment = {name!r}: no conf/{name}.toml{hint}")
    try:
        return flatten(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"conf/{name}.toml: not valid TOML: {error}") from None


def _check_known(values: Mapping[str, Value], source: str) -> None:
    for key, value in values.items():
        if key not in defaults():
            near = difflib.get_close_matches(key, defaults(), n=1)
            hint = f"did you mean {near[0]}?" if near else "`fedsub list settings` shows the allowed keys"
            raise UserError(f"{key} = {value!r}{source}: unknown key; {hint}")


def _one_line(error: ValidationError, prefix: str = "") -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":  # our own cross-checks already name key and value
        return str(first["ctx"]["error"])
    text = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{prefix}{'.'.join(map(str, first['loc']))} = {first['input']!r}: must be {text}"


def resolve(overrides: Mapping[str, Value]) -> Settings:
    """Build the settings of a run from single keys on top of their experiment and the defaults.

    Raises
    ------
    UserError
        One line that names the key, the value and what is allowed.
    """
    from fedsub_app.methods import METHODS  # the register imports the methods, which import this module

    _check_known(overrides, "")
    name = overrides.get("experiment", defaults()["experiment"])
    chosen = _read_experiment(str(name)) if name else {}
    _check_known(chosen, f" in conf/{name}.toml")
    values = defaults() | chosen | dict(overrides)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} = {value}: must be a finite number")
    general = {key: value for key, value in values.items() if "." not in key}
    method = general["method"]
    if method not in METHODS:
        raise UserError(f"method = {method!r}: allowed are {', '.join(METHODS)}")
    options: dict[str, MethodSettings] = {}
    for section, entry in METHODS.items():  # all of them: a wrong value is wrong even where another method runs
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        try:
            options[section] = entry.settings.model_validate(own)
        except ValidationError as error:
            raise UserError(_one_line(error, f"{section}.")) from None
    try:
        return Settings.model_validate(general | {"options": options[str(method)]})
    except ValidationError as error:
        raise UserError(_one_line(error)) from None
