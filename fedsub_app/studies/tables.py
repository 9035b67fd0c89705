"""A table's file, ``conf/<paper>/tables/<name>.toml``: the runs, and the paper's numbers beside them.

It lists settings (an experiment, keys set on top of it, what the paper reports) and methods (keys set on top of that);
the rows are all their pairs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from fedsub_app.common.conf_files import conf_name, is_file, read_toml, tables
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Count, CountOrZero, Entry, Value, fault, flatten
from fedsub_app.runs.config import applicable_keys

# Keys as an experiment has them: fedselect.alpha = 0.1, in quotes or not.
Keys = Annotated[dict[str, Value], BeforeValidator(lambda keys: flatten(keys) if isinstance(keys, dict) else keys)]


class Paper(Entry):
    """The paper's numbers of a row, as text: rounds to the target, final score, cost to accuracy."""

    rounds: str = ""
    final: str = ""
    gigabytes: str = ""
    gflops: str = ""


class TableSetting(Entry):
    """An experiment, keys set on top of it, and what the paper reports: method label -> numbers."""

    name: str
    experiment: str
    overrides: Keys = Field(alias="set", default={})
    paper: dict[str, Paper] = Field(default={})

    def beside(self, table: Path) -> "TableSetting":
        """Return the setting with its experiment, where that is a file of one's own, as found from the table's file."""
        if not is_file(self.experiment):
            return self
        return self.model_copy(update={"experiment": str((table.parent / self.experiment).resolve())})


class TableMethod(Entry):
    """A method: keys set on top of those of a setting."""

    label: str
    overrides: Keys = Field(alias="set", default={})


class Table(Entry):
    """The content of a table's file; the other methods are compared with ``reference``, "": the first method."""

    title: str
    about: str = ""
    seeds: Annotated[Count, Field(le=1000)]
    first_seed: CountOrZero = 0
    spread: Literal["deviation", "range"] = "deviation"
    cost_to_accuracy: bool = False
    reference: str = ""
    settings: list[TableSetting] = Field(alias="setting", min_length=1)
    methods: list[TableMethod] = Field(alias="method", min_length=1)

    @model_validator(mode="after")
    def _labels(self) -> "Table":
        labels = [method.label for method in self.methods]
        if self.reference not in ("", *labels):
            raise ValueError(f"reference = {self.reference!r}: no such method; allowed are {', '.join(labels)}")
        for number, setting in enumerate(self.settings, 1):
            if wrong := [label for label in setting.paper if label not in labels]:
                raise ValueError(f"setting {number}, paper.{wrong[0]}: no such method; allowed are {', '.join(labels)}")
        return self

    @property
    def rows(self) -> list["Row"]:
        rows = []
        for setting in self.settings:
            for method in self.methods:
                keys = applicable_keys({"experiment": setting.experiment} | setting.overrides | method.overrides)
                rows.append(Row(setting.name, method.label, keys, setting.paper.get(method.label, Paper())))
        return rows


@dataclass(frozen=True)
class Row:
    """A row of a table: what is run and what the paper says of it."""

    setting: str
    label: str
    overrides: Mapping[str, Value]
    paper: Paper

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.setting} {self.label}".lower()).strip("-")


def read_table(name: str) -> Table:
    """Return the content of a table of conf/, or of the file that ``name`` is the path of."""
    path = Path(name) if is_file(name) else tables().get(name)
    if path is None:
        raise UserError(f"table {name!r}: allowed are {', '.join(tables())}, or a file of your own, <name>.toml")
    if not path.is_file():
        raise UserError(f"table {name!r}: no such file")
    try:
        table = Table.model_validate(read_toml(path))
    except ValidationError as error:
        raise UserError(f"{conf_name(path)}: {fault(error)}") from None
    table = table.model_copy(update={"settings": [setting.beside(path) for setting in table.settings]})
    rows: dict[str, Row] = {}
    for row in table.rows:
        if not row.slug:
            named = f"{row.setting} {row.label}"
            raise UserError(f"{conf_name(path)}: row {named!r}: must have a letter a to z or a digit")
        if (other := rows.setdefault(row.slug, row)) is not row:
            both = " and ".join(repr(f"{each.setting} {each.label}") for each in (other, row))
            raise UserError(f"{conf_name(path)}: rows {both} would share the folder {row.slug!r}; name one otherwise")
    return table
