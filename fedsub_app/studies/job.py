"""One run of a table or sweep, and its files on disk."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json
from fedsub_app.common.section import Json, Value
from fedsub_app.config import resolve
from fedsub_app.runs.recorded import settings_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import Settings


@dataclass(frozen=True)
class Job:
    """One run: its name, its single keys (``run-dir`` among them), its directory."""

    name: str
    overrides: Mapping[str, Value]
    folder: Path

    @cached_property
    def settings(self) -> Settings:
        return resolve(self.overrides)

    def summary(self) -> Json | None:
        """Return the summary of a complete run of these settings."""
        with contextlib.suppress(UserError):
            summary = read_json(self.folder / "summary.json")
            if self._begun() and summary.get("status") == "completed":
                return summary
        return None

    def lines(self) -> list[Json]:
        """Return the lines of the rounds that are on disk; none where they are of a run of other settings."""
        return read_rounds(self.folder) if self._begun() else []

    def _begun(self) -> bool:
        """Say whether a run of these settings is on disk; a key that it did not know has its default."""
        with contextlib.suppress(UserError):
            recorded = settings_of({"run-dir": str(self.folder), "resume": True})
            return recorded.digest() == self.settings.digest()
        return False
