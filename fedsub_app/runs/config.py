"""Settings: TOML and key=value in, frozen, typed, validated objects out. The only place that knows TOML spelling.

Order: the defaults of the classes, then ``conf/<experiment>.toml`` on top of what it ``extends``, then what the method
presets, then single keys.
Keys are kebab-case in TOML and on the command line, snake_case in Python; a method's own keys are ``method.key``.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedsub_app.common.conf_files import conf_name, experiment_file, experiments, is_file, read_toml
from fedsub_app.common.errors import UserError, printable, shown
from fedsub_app.common.own_code import section_of
from fedsub_app.common.section import Listed, Section, Value, fault, flatten
from fedsub_app.common.spelling import near, one_of
from fedsub_app.runs.methods import METHODS, Method, check_name, installed, register_outside
from fedsub_app.settings import Settings

AnySection = TypeVar("AnySection", bound=Section)
TABLE = "tool.flwr.app.config"
RULES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {"boolean": "true | false", "string": "text", "array": "text"}


def _sections() -> dict[str, type[Section]]:
    """Return the class of the general keys and those of the methods' own, by what stands before the key."""
    return {"": Settings} | {f"{section_of(name)}.": method.settings for name, method in METHODS.items()}


@cache
def fields() -> dict[str, FieldInfo]:
    """Return every key with its field."""
    every = [(prefix, field) for prefix, of in _sections().items() for field in of.model_fields.values()]
    return {f"{prefix}{field.alias}": field for prefix, field in every if not field.exclude}


@cache
def defaults() -> dict[str, Value]:
    """Return every key with its default."""
    sections = {prefix: _validated(section, {}, prefix) for prefix, section in _sections().items()}
    return {f"{prefix}{key}": value for prefix, section in sections.items() for key, value in section.toml().items()}


def register(name: str, method: Method) -> None:
    """Add a method of the running program to the register, or replace it; its keys are known from then on."""
    check_name(name)
    METHODS[name] = method
    _forget()


def _forget() -> None:
    fields.cache_clear()
    defaults.cache_clear()


def register_installed() -> None:
    for name in sorted(installed().names):
        check({"method": name})


def check(values: Mapping[str, Value], source: str = "") -> None:
    """Register outside methods that keys name; :class:`UserError`: an unknown key, of ``source`` (`` in my.toml``)."""
    named = [key.partition(".")[0] for key in values if "." in key and ":" not in key]  # a key runs no code
    for name in [*named, values.get("method")]:
        if isinstance(name, str) and register_outside(name):
            _forget()
    known = fields()
    for key, value in values.items():
        if key not in known:
            hint = near(key, known, "`fedsub list settings` shows the allowed keys")
            raise UserError(f"{printable(key, 80)} = {shown(value)}{source}: unknown key; {hint}")


def describe(prefix: str = "") -> dict[str, tuple[str, str, str]]:
    """Return every key that begins with ``prefix``, with its default, its allowed values and its meaning, as text."""
    keys = {key: field for key, field in fields().items() if key.startswith(prefix)}
    return {k: (json.dumps(defaults()[k]), _allowed(f).strip(), " ".join(_about(k))) for k, f in keys.items()}


def _about(key: str) -> list[str]:
    """Return the lines of the docstring under a key; where a subclass only changes the default, that of its base."""
    section, _, own_key = key.rpartition(".")
    bases = [base for base in _sections()[section and f"{section}."].__mro__ if issubclass(base, Section)]
    same = (field for base in bases for field in base.model_fields.values() if field.alias == own_key)
    text = next((field.description for field in same if field.description), "")
    return [line for line in text.splitlines() if line]


def _allowed(field: FieldInfo) -> str:
    schema = _adapter(field).json_schema()
    schema = schema.get("anyOf", [schema])[0]  # the other one is None, in TOML "" or 0
    if "enum" in schema:
        return " | ".join(schema["enum"])
    rules = [f"{word} {schema[rule]}" for rule, word in RULES.items() if rule in schema]
    return f"{TYPES.get(schema['type'], schema['type'])} {', '.join(rules)}"


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    annotation: Any = Annotated[field.annotation, field.alias, *field.metadata]
    return TypeAdapter(annotation)


def as_toml() -> str:
    """Return ``[tool.flwr.app.config]`` of pyproject.toml, with all keys: Flower refuses one that is not there."""
    lines = ["# A copy of the defaults that stand in the classes; made by `make settings`."]
    for prefix, section in _sections().items():
        if section.model_fields:
            lines += ["", f"[{TABLE}.{prefix[:-1]}]"] if prefix else [f"[{TABLE}]"]
        about = ""
        for name, field in section.model_fields.items():
            if field.exclude:
                continue
            # The general keys come from several classes; each has a heading.
            home = next(base for base in reversed(section.__mro__) if name in getattr(base, "model_fields", ()))
            if not prefix and home.__doc__ != about:
                about = home.__doc__ or ""
                lines.append(f"# --- {about}")
            key = f"{prefix}{field.alias}"
            value = json.dumps(defaults()[key])  # written alike in TOML and JSON
            words = f"{allowed}: " if " | " in (allowed := _allowed(field)) else ""
            lines.append(f"{f'{field.alias} = {value}':<28} # {words}{_about(key)[0]}")
    return "\n".join(lines) + "\n"


def is_list(key: str) -> bool:
    """Say whether the value of a key is itself a list, in one text with commas."""
    return key in fields() and any(isinstance(about, Listed) for about in fields()[key].metadata)


def canonical(key: str, value: Value) -> Value:
    """Return a value as :meth:`Settings.flat` writes it, ``"a, b"`` for ``"a,b"``; invalid values are unchanged."""
    if key in fields():
        adapter = _adapter(fields()[key])
        with suppress(ValidationError):
            written: Value = adapter.dump_python(adapter.validate_python(value, strict=True))
            return written
    return value


def read_experiment(name: str, extending: tuple[str, ...] = ()) -> dict[str, Value]:
    """Return an experiment's keys on top of those of the one that it ``extends``; ``extending``: those before it."""
    source = f"{conf_name(experiment_file(extending[-1]))}: extends" if extending else "experiment"
    if name in extending:
        raise UserError(f"{source} = {name!r}: a circle ({' -> '.join((*extending, name))})")
    path = experiment_file(name)
    if not os.path.isfile(path):  # Path.is_file raises OSError where a name is longer than a file's can be
        hint = near(name, experiments())
        raise UserError(f"{source} = {shown(name)}: no {printable(conf_name(path))}{f'; {hint}' if hint else ''}")
    keys = flatten(read_toml(path))
    base = keys.pop("extends", None)
    check(keys, f" in {conf_name(path)}")
    if "experiment" in keys:
        raise UserError(f"{conf_name(path)}: experiment = {shown(keys['experiment'])}: the key is extends here")
    if base is None:
        return keys
    if not isinstance(base, str) or not base:
        raise UserError(f"{conf_name(path)}: extends = {base!r}: must be the name of an experiment")
    if is_file(base):
        base = str(path.parent / base)
    elif "/" not in base and not is_file(name):
        base = f"{path.parent.name}/{base}"
    return read_experiment(base, (*extending, name)) | keys


def _check_values(values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} = {value}: must be a finite number")
        if not isinstance(value, str | int | float):
            raise UserError(f"{key} = {shown(value)}: must be one text, number, true or false")
        if isinstance(value, str) and not value.isprintable():
            raise UserError(f"{key} = {shown(value)}: must be printable text")
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            raise UserError(f"{key} = {shown(value)}: '~' is the home of no user here")


def _check_method(method: object) -> None:
    if method not in METHODS:
        raise UserError(f"method = {shown(method)}: allowed are {one_of(str(method), METHODS)}")


def base_keys(experiment: str, method: str) -> dict[str, Value]:
    """Return the keys of a method before single keys are set: defaults, experiment, presets."""
    _check_method(method)
    chosen = read_experiment(experiment) if experiment else {}
    keys = defaults() | {key: canonical(key, value) for key, value in chosen.items()}
    return {key: value for key, value in keys.items() if _is_of(key, method)} | dict(METHODS[method].preset)


def _is_of(key: str, method: object) -> bool:
    """Say whether a key is a general one or the method's own."""
    return "." not in key or key.startswith(f"{section_of(str(method))}.")


def applicable_keys(overrides: Mapping[str, Value]) -> dict[str, Value]:
    """Return single keys without those of methods that they do not run; a table sets keys of several methods."""
    check(overrides)
    name = overrides.get("experiment", "")
    method = (defaults() | (read_experiment(str(name)) if name else {}) | dict(overrides))["method"]
    return {key: value for key, value in overrides.items() if _is_of(key, method)}


def resolve(overrides: Mapping[str, Value]) -> Settings:
    """Build the settings of a run from single keys on top of their method's, their experiment's and the defaults.

    Raises
    ------
    UserError
        One line that names the key, the value and what is allowed.
    """
    check(overrides)
    name = overrides.get("experiment", "")
    given = (read_experiment(str(name)) if name else {}) | dict(overrides)
    _check_values(given)
    values = defaults() | given
    method = values["method"]
    _check_method(method)
    # An experiment may set keys of several methods, of which one is run; a key given by hand is meant to do something.
    for key, value in overrides.items():
        if not _is_of(key, method):
            raise UserError(f"{key} = {shown(value)}: does nothing with method = {method!r}")
    # A method given by hand goes before the experiment that it is tried on; what stands beside it must agree with it.
    beside = overrides if "method" in overrides else given
    for key, preset in METHODS[str(method)].preset.items():
        if beside.get(key, preset) not in (preset, defaults()[key]):
            raise UserError(f"{key} = {beside[key]!r}: must be {preset!r} with method = {method!r}")
        values[key] = preset
    own_section = section_of(str(method))
    sections: dict[str, dict[str, Value]] = {own_section: {}}  # the running method's, and others that are given keys
    for key, value in given.items():
        section, dot, own_key = key.partition(".")
        if dot:
            sections.setdefault(section, {})[own_key] = value
    options = {name: _validated(_sections()[f"{name}."], own, f"{name}.") for name, own in sections.items()}
    _check_values({f"{own_section}.{key}": value for key, value in options[own_section].toml().items()})  # the defaults
    general = {key: value for key, value in values.items() if "." not in key}
    return _validated(Settings, general | {"options": options[own_section]})


def _validated(section: type[AnySection], values: Mapping[str, Any], prefix: str = "") -> AnySection:
    """Return a section of these values, or raise :class:`UserError` for the first wrong one: ``prefix`` + its key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:  # a check of several keys names them all
        raise UserError(prefix * bool(error.errors()[0]["loc"]) + fault(error)) from None
