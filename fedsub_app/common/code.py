"""The code and the packages that this process runs, and a text's digest."""

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path


@cache
def code_digest() -> str:
    """Hash of the source of our packages as it lay on disk at the first call."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(p for n in ("fedsub", "fedsub_app", "strategies", "client_apps") for p in (root / n).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def versions(*more: str) -> dict[str, str]:
    """Return the versions on which numbers and messages depend: Python, flwr, torch and further packages."""
    return {"Python": platform.python_version(), **{name: version(name) for name in ("flwr", "torch", *more)}}


def settings_digest(text: str) -> str:
    """Hash of a run's settings and of the code that reads them, 12 hexadecimal digits."""
    return text_digest(code_digest() + text)[:12]


def text_digest(text: str) -> str:
    """Hash of a text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
