"""Settings: TOML and key=value in, frozen, typed, validated objects out. The only place that knows TOML spelling.

Order: the defaults of ``[tool.flwr.app.config]`` in pyproject.toml, then ``conf/<experiment>.toml`` on top of what it
``extends``, then single keys.
Keys are kebab-case in TOML and on the command line, snake_case in Python; a method's own keys are ``method.key``.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsub_app.common.errors import UserError
from fedsub_app.methods import METHODS
from fedsub_app.settings import MethodSettings, Section, Settings, Value

RULES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "minLength": "length >="}


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
    """Where the experiments (``<paper>/<experiment>.toml``) and tables (``<paper>/tables/<name>.toml``) lie."""
    return _home("conf")


def experiments() -> dict[str, Path]:
    """Names of the experiments, ``<paper>/<experiment>``, and their files."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(conf_folder().glob("*/*.toml"))}


def tables() -> dict[str, Path]:
    """Names of the tables, ``<paper>-<name>``, and their files."""
    found = sorted(conf_folder().glob("*/tables/*.toml"))
    return {f"{path.parent.parent.name}-{path.stem}": path for path in found}


def read_toml(path: Path) -> dict[str, Any]:
    """Return a file of conf/ as TOML has it.

    Raises
    ------
    UserError
        It is not valid TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{conf_name(path)}: not valid TOML: {error}") from None


def conf_name(path: Path) -> str:
    """Return how a message names a file of conf/: ``conf/<paper>/<experiment>.toml``."""
    return f"conf/{path.relative_to(conf_folder()).as_posix()}"


def describe() -> dict[str, str]:
    """Every key with its default and what is allowed, for people."""
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


def _read_experiment(name: str, extending: tuple[str, ...] = ()) -> dict[str, Value]:
    """Return an experiment's keys on top of those of the experiment that it ``extends``.

    ``extending``: the experiments that led to this one, each of which extends the next.
    """
    source = f"conf/{extending[-1]}.toml: extends" if extending else "experiment"
    if name in extending:
        raise UserError(f"{source} = {name!r}: a circle ({' -> '.join((*extending, name))})")
    path = experiments().get(name)
    if path is None:
        near = difflib.get_close_matches(name, experiments(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{source} = {name!r}: no conf/{name}.toml{hint}")
    own = flatten(read_toml(path))
    base = own.pop("extends", None)
    _check_known(own, f" in conf/{name}.toml")
    if base is None:
        return own
    if not isinstance(base, str) or not base:
        raise UserError(f"conf/{name}.toml: extends = {base!r}: must be the name of an experiment")
    return _read_experiment(base if "/" in base else f"{path.parent.name}/{base}", (*extending, name)) | own


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
    _check_known(overrides, "")
    name = overrides.get("experiment", defaults()["experiment"])
    chosen = _read_experiment(str(name)) if name else {}
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
