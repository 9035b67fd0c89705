"""``fedsub new-method``: the files of a method of one's own, as docs/adding-a-method.md has them, to be filled in.

The files are a complete method with one setting, which passes its test: FedAvg whose clients send a fraction of their
change.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic

STRATEGY = '''"""@NAME@, server side: FedAvg's.

Authors: Title, venue, year, link. Deviations from paper and authors' code: which, and why.
"""

from fedsub_app.common.section import Fraction
from fedsub_app.settings import MethodSettings
from strategies.base import SubnetStrategy


class @CLASS@Settings(MethodSettings):
    """Keys of @NAME@."""

    step: Fraction = 1.0
    """Fraction of its change that a client sends; 1: FedAvg."""


class @CLASS@(SubnetStrategy):
    """FedAvg; docs/adding-a-method.md lists what can be overridden."""
'''

CLIENT = '''"""@NAME@, client side."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from strategies.@MODULE@ import @CLASS@Settings


class @CLASS@Client(Client):
    """Trains as FedAvg does and goes a part of the way."""

    options: @CLASS@Settings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return ``w + step (w_i - w)``."""
        self.load(sent)
        start = self.trained()
        self.fit()
        step = self.options.step
        return {name: x if step == 1 else start[name] + step * (x - start[name]) for name, x in self.trained().items()}
'''

CONF = """# @NAME@ on digits: ten clients with three of the ten digits each
extends = "quickstart/digits"
method = "@NAME@"

[@NAME@]
step = 0.5
"""

TEST = '''"""@NAME@: by hand, and FedAvg where it is FedAvg."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.config import resolve

Run = Callable[..., tuple[Json, Path]]


def model_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def test_a_whole_step_is_fedavg(run_local: Run) -> None:
    _, fedavg = run_local("fedavg", num_rounds=2)
    _, own = run_local("own", num_rounds=2, method="@NAME@")
    expected = model_of(fedavg)
    assert all(torch.equal(x, expected[name]) for name, x in model_of(own).items())


def test_half_a_step_is_half_of_the_way(run_local: Run) -> None:
    _, fedavg = run_local("fedavg", num_rounds=1)
    _, own = run_local("own", num_rounds=1, method="@NAME@", **{"@NAME@__step": 0.5})
    _, none = run_local("none", num_rounds=1, method="@NAME@", **{"@NAME@__step": 0.0})
    start, whole = model_of(none), model_of(fedavg)
    for name, x in model_of(own).items():
        assert torch.allclose(x, (start[name] + whole[name]) / 2, atol=1e-6)
    assert any(not torch.equal(start[name], x) for name, x in whole.items())


def test_the_experiment_is_of_this_method() -> None:
    settings = resolve({"experiment": "@NAME@/digits"})
    assert (settings.method, settings.options.step) == ("@NAME@", 0.5)
'''


def write_method(name: Annotated[str, Argument(help="FedFoo: its classes; in lower case its `method`")]) -> None:
    """Write the files of a method of your own, to be filled in."""
    from fedsub_app.deployment.flower import PROJECT, is_checkout

    if not is_checkout():
        raise UserError("new-method: writes into a checkout of fedsub; an installed package takes fedsub.register")
    for path in new_method(name, PROJECT):
        print(path)
    print("left to you: the method, its paper in the heads, rows in docs/bad-input.md and CHANGELOG.md")


def new_method(spelled: str, project: Path) -> list[Path]:
    """Write the files of a method into the checkout ``project`` and register it.

    Parameters
    ----------
    spelled : the method's name, with capitals where its classes have them: ``FedFoo`` or ``Fed-Foo``.

    Returns
    -------
    The files that were written or changed.

    Raises
    ------
    UserError
        The name is none, there is a method or a file of that name, or this is no checkout.
    """
    from fedsub_app.methods import check_name

    name = spelled.lower()
    check_name(name)
    if not (project / "tests/helpers.py").is_file():
        raise UserError(f"{project}: not a checkout of fedsub, which a method is added to")
    module = name.replace("-", "_")
    class_name = "".join(word[0].upper() + word[1:] for word in spelled.split("-"))
    texts = {
        f"strategies/{module}.py": STRATEGY,
        f"client_apps/{module}.py": CLIENT,
        f"conf/{name}/digits.toml": CONF,
        f"tests/test_{module}.py": TEST,
    }
    for path in texts:
        if (project / path).exists():
            raise UserError(f"{project / path}: there already")
    changed = {
        "fedsub_app/methods.py": _registered(project / "fedsub_app/methods.py", name, module, class_name),
        "tests/helpers.py": _after(project / "tests/helpers.py", "METHOD_KEYS: .*= {\n", f'    "{name}": {{}},\n'),
    }
    for path, text in texts.items():
        text = text.replace("@NAME@", name).replace("@MODULE@", module).replace("@CLASS@", class_name)
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(project / path, text.encode())
    for path, text in changed.items():
        write_atomic(project / path, text.encode())
    write_defaults(project)
    return [project / path for path in (*texts, *changed, "pyproject.toml")]


def _registered(register: Path, name: str, module: str, class_name: str) -> str:
    """Return methods.py with a method's line: the places of its three classes, which are imported when it runs."""
    places = ", ".join(f'"{module}:{class_name}{kind}"' for kind in ("Settings", "", "Client"))
    lines = register.read_text().splitlines(keepends=True)
    end = len(lines) - 1 - lines[::-1].index("}\n")
    return "".join([*lines[:end], f'    "{name}": Method("authors and year", {places}),\n', *lines[end:]])


def _after(path: Path, pattern: str, line: str) -> str:
    text, count = re.subn(f"(?m)^{pattern}", lambda match: match.group() + line, path.read_text(), count=1)
    if not count:
        raise UserError(f"{path}: no line {pattern.strip()!r} to add {line.strip()!r} behind")
    return text


def write_defaults(project: Path) -> None:
    """Write the copy of the defaults that pyproject.toml has to hold; a fresh process knows the new ones."""
    from fedsub_app.config import TABLE

    path = project / "pyproject.toml"
    command = [sys.executable, "-m", "fedsub_app.cli", "list", "settings", "--toml"]
    toml = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    text = path.read_text()
    start = text.index(toml.partition("\n")[0])
    rest = text[start:]
    other = re.search(rf"(?m)^\[(?!{re.escape(TABLE)}\b)", rest)
    end = start + other.start() if other else len(text)
    write_atomic(path, f"{text[:start]}{toml}\n{text[end:]}".encode())
