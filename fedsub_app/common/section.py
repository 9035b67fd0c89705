"""Settings as frozen, typed, validated sections. Each stands beside the code that it is for, and is built without TOML.

A key has one type, one range, one default, as its field has, and one description, the docstring under the field. In
TOML a key is kebab-case, and its value one word, number or text: None is ``""`` or 0, a tuple is a text with commas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from fedsub_app.common.errors import shown
from fedsub_app.common.files import Json as Json
from fedsub_app.common.spelling import Value as Value


class Section(BaseModel):
    """A frozen, hashable set of settings; values keep their TOML type (no ``"3"`` for 3)."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        validate_default=True,  # those of methods of other authors
        extra="forbid",
        alias_generator=lambda name: name.rstrip("_").replace("_", "-"),
        populate_by_name=True,
        defer_build=True,  # a command needs few of the sections
        use_attribute_docstrings=True,
    )

    def toml(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)


class Entry(Section):
    """A part of a file that is all tables; a key that it does not have is refused with those that it has."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: Any) -> Any:
        allowed = [str(field.alias) for field in cls.model_fields.values()]
        if not isinstance(content, dict):
            raise ValueError(f"must be a table of {', '.join(allowed)}")
        for key in content:
            if key not in allowed and key not in cls.model_fields:  # the latter from Python
                raise ValueError(f"{key!r}: unknown key; allowed are {', '.join(allowed)}")
        return content


class SeedSettings(Section):
    """The seed of everything random."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random, together with round, client and purpose."""


class ClientsSettings(Section):
    """Number of clients, and the nodes' private data."""

    num_clients: Annotated[int, Field(ge=1, le=100_000)] = 2
    """Clients of the federation."""
    private_examples: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Upper bound of a client's training samples where each node has private data; 0: all clients share one data set.

    A node with private data is one client: its ``--node-config`` has ``private-data="/path"``, an .npz file, image
    folder or table with the classes of the server's ``dataset``. The server tests the global model on its own data set.
    """


@dataclass(frozen=True)
class Listed:
    """Annotation of a tuple that is one text in TOML, its elements separated by commas; ``""`` is the empty tuple.

    A single number, as the command line reads ``key=2``, is a tuple of one element. ``allowed``: end of the error line,
    ``"must be …"``; ``read``: text of one element -> the element; ``write``: element -> its text.
    """

    allowed: str
    read: Callable[[str], object] = str
    write: Callable[[Any], str] = str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: object, check: Callable[[object], object]) -> object:
            try:
                if type(value) in (int, float):
                    value = str(value)
                if isinstance(value, str):
                    value = tuple(self.read(word.strip()) for word in value.split(",")) if value.strip() else ()
                return check(value)
            except ValueError:  # also pydantic's own error, which names one element only
                raise ValueError(self.allowed) from None

        text = core_schema.plain_serializer_function_ser_schema(lambda elements: ", ".join(map(self.write, elements)))
        return core_schema.no_info_wrap_validator_function(parse, handler(source), serialization=text)


MILLION = 1_000_000  # no number has a use beyond it; without a bound 10**30 epochs hang and 10**30 clients crash
Positive = Annotated[float, Field(gt=0, le=MILLION)]
NonNegative = Annotated[float, Field(ge=0, le=MILLION)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=MILLION)]
CountOrZero = Annotated[int, Field(ge=0, le=MILLION)]
EPOCHS = "epochs"  # mark of a key that counts a client's passes over its samples
Epochs = Annotated[int, Field(ge=0, le=10_000), EPOCHS]
ZERO_IS_NONE, NONE_IS_ZERO = AfterValidator(lambda number: number or None), PlainSerializer(lambda number: number or 0)
CountOrNone = Annotated[int | None, Field(ge=0, le=MILLION), ZERO_IS_NONE, NONE_IS_ZERO]
Finite = Annotated[float, Field(ge=-MILLION, le=MILLION)]
AmountOrNone = Annotated[float | None, Field(ge=0), ZERO_IS_NONE, PlainSerializer(lambda x: x or 0.0)]
TextOrNone = Annotated[str | None, AfterValidator(lambda text: text or None), PlainSerializer(lambda text: text or "")]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Listed("must be names, separated by commas, or ''")]
_KINDS = {
    "a valid number": "a number",
    "a valid integer": "an integer",
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
}


def wanted(message: str) -> str:
    """Return pydantic's ``Input should be …`` in our words, ``must be …``; its other messages stay as they are."""
    kind = message.removeprefix("Input should be ")
    return message if kind == message else f"must be {_KINDS.get(kind, kind)}"


def fault(error: ValidationError) -> str:
    """Return the first fault: ``setting 2, paper, FedAvg: 'finall': unknown key; allowed are …``."""
    first = error.errors()[0]
    places = (f" {place + 1}" if isinstance(place, int) else f", {place}" for place in first["loc"])
    where = "".join(places).removeprefix(", ")
    if first["type"] == "missing":
        return f"{where}: missing"
    value = "" if isinstance(first["input"], dict) else f" = {shown(first['input'])}"
    own = first["type"] == "value_error"  # a check of our own says what is allowed
    return f"{where}{value}: {first['ctx']['error'] if own else wanted(first['msg'])}".removeprefix(": ")


def flatten(table: Mapping[str, Any], prefix: str = "", deep: bool = False) -> dict[str, Value]:
    """Return TOML tables as one level of dotted keys; unless ``deep``, a table in a method's table stays a table."""
    flat: dict[str, Value] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and (deep or not prefix):
            flat |= flatten(value, f"{prefix}{key}.", deep)
        else:
            flat[f"{prefix}{key}"] = value
    return flat
