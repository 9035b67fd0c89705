"""``fedsub new-method``: the files of a method of one's own, as docs/adding-a-method.md has them, to be filled in.

They are those of examples/new-method with its name in the place of Fed-Foo: a complete method with one setting, which
passes its test.
"""

import os
import re
import subprocess
import sys
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

from typer import Argument

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic


def new_method(
    name: Annotated[str, Argument(help="name of the classes, such as FedFoo; in lower case the `method`")],
) -> None:
    """Write the files of a method of your own, to be filled in."""
    from fedsub_app.deployment.flower import PROJECT
    from fedsub_app.runs.methods import check_name

    method = name.lower()
    check_name(method)
    if not (PROJECT / "tests/helpers.py").is_file():
        other = "method = 'FILE.py:NAME' takes a file of yours"
        raise UserError(f"{PROJECT}: not a checkout of fedsub, which a method is added to; {other}")
    module = method.replace("-", "_")
    class_name = "".join(word[0].upper() + word[1:] for word in name.split("-"))
    if word := next(filter(iskeyword, (module, class_name)), ""):
        raise UserError(f"method {method!r}: {word} is a word of Python; no module or class can have this name")
    words = {"fed_foo": module, "fed-foo": method, "FedFoo": class_name}
    templates, texts = PROJECT / "examples" / "new-method", {}
    for template in sorted(path for path in templates.rglob("*.*") if path.suffix in (".py", ".toml")):
        place, text = template.relative_to(templates).as_posix(), template.read_text("utf-8")
        for word, own in words.items():
            place, text = place.replace(word, own), text.replace(word, own)
        texts[place] = text
    for path in texts:
        if (PROJECT / path).exists():
            raise UserError(f"{PROJECT / path}: there already")
    given = ['"authors and year"', *(f'"{module}:{class_name}{kind}"' for kind in ("Settings", "", "Client"))]
    row = ", ".join(given)
    forms = row, f"\n        {row}\n    ", "".join(f"\n        {argument}," for argument in given) + "\n    "
    lines = [f'    "{method}": Method({form}),\n' for form in forms]  # as the formatter breaks them
    line = next((line for line in lines if max(map(len, line.split("\n"))) <= 120), lines[-1])
    # The register's last line, and the first one of the tests' keys of each method.
    register = "fedsub_app/runs/methods.py"
    texts[register] = _with(PROJECT / register, r"(?ms)(.*^)(}\n)", rf"\1{line}\2")
    keys = rf'\1    "{method}": {{}},\n'
    texts["tests/helpers.py"] = _with(PROJECT / "tests/helpers.py", r"(?m)(^METHOD_KEYS: .*= {\n)", keys)
    for path, text in texts.items():
        (PROJECT / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(PROJECT / path, text.encode())
    write_defaults(PROJECT)
    for path in (*texts, "pyproject.toml"):
        print(PROJECT / path)
    print("left to you: the method, its paper in the heads, rows in docs/bad-input.md and CHANGELOG.md")


def _with(path: Path, pattern: str, new: str) -> str:
    text, count = re.subn(pattern, new, path.read_text("utf-8"), count=1)
    if not count:
        raise UserError(f"{path}: no place for the method, which {pattern!r} finds")
    return text


def write_defaults(project: Path) -> None:
    """Write the copy of the defaults that pyproject.toml has to hold; a fresh process knows the new ones."""
    from fedsub_app.runs.config import TABLE

    path = project / "pyproject.toml"
    command = [sys.executable, "-Xutf8", "-c", "from fedsub_app.runs.config import as_toml; print(as_toml(), end='')"]
    toml = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8", check=True).stdout
    text = path.read_text("utf-8")
    start = text.index(toml.partition("\n")[0])
    other = re.search(rf"(?m)^\[(?!{re.escape(TABLE)}\b)", text[start:])
    end = start + other.start() if other else len(text)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    write_atomic(path, f"{text[:start]}{toml}\n{text[end:]}".encode())
    os.utime(path, ns=times)  # no dependency has changed: make need not install anew
