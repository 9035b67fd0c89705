"""Settings as keywords of a method's strategy: their names, and the keys that they set."""

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.own_code import OWN
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import near
from fedsub_app.common.tasks import registered
from fedsub_app.data import DataSettings, PartitionSettings
from fedsub_app.runs.config import defaults, register_installed, resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.settings import Settings

# A strategy has no keyword for these keys: the app brings its data and network, `start` takes the number of rounds.
WITHOUT = {
    *(DataSettings.model_fields.keys() | PartitionSettings.model_fields.keys())
    - {"seed", "validation_fraction", "task"},
    *("experiment", "method", "num_rounds", "run_dir", "resume", "model", "start_from", "stack_clients", "options"),
    *("model_options", "model_width"),  # of a network that the app makes itself
}
EVALUATE = "personal"  # the default of ``evaluate``; a method without personal models measures the global one
MANY = 100_000  # clients, before the roll call has told how many there are


def keywords(method: str) -> dict[str, str]:
    """Return keyword -> key, the method's own keys first; ``fedadam_lr``: an own key that has a general key's name."""
    aliases = [str(field.alias) for name, field in Settings.model_fields.items() if name not in WITHOUT]
    general = {_keyword(key): key for key in aliases}
    own = {key.partition(".")[2]: key for key in defaults() if key.startswith(f"{method}.")}
    return {_keyword(key if key not in general.values() else f"{method}-{key}"): own[key] for key in own} | general


def _keyword(key: str) -> str:
    return {"lambda": "lambda_"}.get(key, key.replace("-", "_"))


def signature(method: str) -> Signature:
    """Return the signature of a method's strategy, for ``help``."""
    both: dict[str, object] = {name: defaults()[key] for name, key in keywords(method).items()}
    both |= {"evaluate": EVALUATE, "model": None, "in_shape": (), "max_examples": 0, "clients_per_node": 1}
    return Signature([Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in both.items()])


def keys_of(method: str, given: Mapping[str, object]) -> dict[str, Value]:
    """Return keywords as keys in TOML spelling; :class:`UserError` for an unknown keyword."""
    known = keywords(method)
    keys: dict[str, Any] = {"evaluate": EVALUATE}
    for name, value in given.items():
        if name not in known:
            hint = near(name, known, f"allowed are {', '.join(known)}")
            raise UserError(f"{name} = {shown(value)}: no keyword of {method}; {hint}")
        if name == "task" and value is not None:
            value = registered(value)
        if value is not None:
            keys[known[name]] = ", ".join(map(str, value)) if isinstance(value, tuple | list) else value
    return keys


def whole_keys(method: str, keys: Mapping[str, Value], clients: int, num_rounds: int) -> dict[str, Value]:
    """Return all keys of a run with this number of clients and rounds."""
    own: dict[str, Value] = {"dataset": OWN, "model": OWN, "method": method}
    return {**keys, **own, "num-clients": clients, "num-rounds": num_rounds}


def check(method: str, keys: Mapping[str, Value]) -> None:
    """Raise :class:`UserError` for keys that are wrong whatever the number of clients is."""
    try:
        resolve(whole_keys(method, keys, MANY, 1))
    except UserError as error:
        if "num-clients" not in str(error):  # such errors depend on the roll call
            raise


def method_of(name: str) -> str:
    """Return the method whose strategy has this public name, "" for none."""
    if not (found := [method for method in METHODS if title(method) == name]):
        register_installed()
        found = [method for method in METHODS if title(method) == name]
    return (found or [""])[0]


def title(method: str) -> str:
    """Return the public name of a method's strategy: "FedPeWS" of "fedpews"."""
    about = METHODS[method]
    written = about.strategy.__name__
    if about.title or written.lower() == method.replace("-", ""):
        return about.title or written
    return "".join(word.capitalize() for word in method.split("-"))
