"""A node's files of a run: its settings, its initial model, the folder of its clients' states.

``header`` is a message's header (federation/wire.py); ``config`` is the node's own configuration, ``--node-config``.
"""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsub_app.common.code import settings_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.tensor_files import read_tensors
from fedsub_app.common.tensors import Json, Tensors

Config = Mapping[str, Any]
_texts: dict[Path, str] = {}  # settings as JSON, by their file
_state_folders: dict[str, str] = {}  # of simulated nodes, by run


def simulated() -> bool:
    """Say whether this process serves simulated nodes (Ray, in-process grid), which share one disk."""
    return Path(sys.argv[0]).stem != "flwr-clientapp"


def deployed() -> bool:
    """Say whether this process is the server of real nodes, which Flower starts for one run."""
    return Path(sys.argv[0]).stem == "flwr-serverapp"


def keep_settings(header: Json, folder: Path) -> None:
    """Keep a run's settings beside its clients' state; later messages to the node's processes have only the digest."""
    text = header["settings"]
    if header["digest"] != settings_digest(text):
        raise UserError(f"digest = {header['digest']!r}: not that of the settings")
    path = _settings_file(folder, header["digest"])
    if path not in _texts:
        _texts[path] = text
        with suppress(OSError):  # a process without the file asks for the settings
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, text.encode())


def kept_settings(folder: Path, digest: str) -> str:
    """Return a run's settings as JSON; "" where this node lacks them or their file is damaged."""
    path = _settings_file(folder, digest)
    if path not in _texts:
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_text("utf-8")
            if settings_digest(text) == digest:
                _texts[path] = text
    return _texts.get(path, "")


def _settings_file(folder: Path, digest: str) -> Path:
    return folder / f".settings-{digest}.json"


def state_folder(header: Json, config: Config) -> Path:
    """Return the folder of client states: in the run directory on one machine, else a folder of the node's own."""
    run, folder = str(header["run"]), str(config.get("state-dir", ""))
    if not re.fullmatch(r"\w[\w-]{0,63}", run, re.ASCII):
        raise UserError(f"run = {run!r}: must be the id of a run, letters and digits")
    if simulated() and not folder:
        if "state-dir" in header:
            _state_folders[run] = header["state-dir"]
        return Path(_state_folders.get(run, ""))  # a new Ray process does not know it, and asks for the settings
    return Path(folder or os.environ.get("FEDSUB_STATE", "") or Path.home() / ".local/state/fedsub") / run


def initial_model(folder: Path) -> Tensors:
    """Return the initial global model that the node was sent."""
    try:
        return read_tensors(initial_file(folder))[0]
    except ValueError as error:
        raise UserError(f"{initial_file(folder)}: {error}") from None


def initial_file(folder: Path) -> Path:
    """Return where the initial global model of a run lies, for clients that cannot rebuild it from the seed."""
    return folder / "initial.safetensors"
