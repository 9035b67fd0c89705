"""The wheel's layout: strategies/ and client_apps/ of the repository lie in it as packages of fedsub_app.

Beside fedsub_app they would take two common names of everybody's environment. Their import statements, and those of the
other modules that name them, follow; nothing else of a file changes.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = ("strategies", "client_apps")
KEPT = ("fedsub", "fedsub_app")
IMPORT = re.compile(rf"^(\s*(?:from|import) )({'|'.join(MOVED)})\b", re.MULTILINE)
NAMED = re.compile(rf'(Late\()?"({"|".join(MOVED)})(?(1)(?=")|(?=\.))')  # "strategies.base", Late("strategies", …)


def moved(text: str) -> str:
    """Return a module's source with the imports of the wheel."""
    return NAMED.sub(r'\1"fedsub_app.\2', IMPORT.sub(r"\1fedsub_app.\2", text))


class Layout(BuildHookInterface):
    """Hands the files of the four packages to the wheel, those that it changes from a folder of copies."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fill ``force_include``: file -> path in the wheel."""
        if version == "editable":
            return
        root, self.copies = Path(self.root), TemporaryDirectory(prefix="fedsub-wheel-")  # until the build has ended
        copies = Path(self.copies.name)
        for package in (*KEPT, *MOVED):
            for path in sorted((root / package).rglob("*")):
                if path.is_dir() or "__pycache__" in path.parts:
                    continue
                name = path.relative_to(root).as_posix()
                target = f"fedsub_app/{name}" if package in MOVED else name
                if path.suffix == ".py" and (text := path.read_text()) != (new := moved(text)):
                    path = copies / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(new)
                build_data["force_include"][str(path)] = target
