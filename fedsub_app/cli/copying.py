"""``fedsub cp``: an experiment or a table as a file of the user's own."""

import re
from pathlib import Path
from typing import Annotated

from typer import Argument

from fedsub_app.cli.arguments import complete_experiments
from fedsub_app.common.conf_files import experiments, tables
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.spelling import near


def copy(
    name: Annotated[str, Argument(help="an experiment or a table", autocompletion=complete_experiments)],
    target: Annotated[Path, Argument(metavar="FILE", help="a new file, my.toml")],
) -> None:
    """Copy an experiment or a table to a file that you can change and run."""
    files = experiments() | tables()
    if name not in files:
        raise UserError(
            f"cp {name}: {near(name, files, '`fedsub list experiments` and `fedsub list tables` show the names')}"
        )
    if target.suffix != ".toml":
        raise UserError(f"cp {name} {target}: the file's name must end in .toml")
    if target.exists():
        raise UserError(f"{target}: there already")
    # An experiment that extends its neighbour names it in full, so that it is found from anywhere.
    paper = files[name].parent.name
    text = re.sub(r'(?m)^extends = "([^"/]+)"', rf'extends = "{paper}/\1"', files[name].read_text())
    write_atomic(target, text.encode())
    print(f"fedsub {'run' if name in experiments() else 'reproduce'} {target}")
