"""A run as known before torch is loaded: its settings, new or recorded, its folder, the user's code in it."""

import os
import re
import shlex
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from fedsub_app.common.conf_files import is_file
from fedsub_app.common.errors import UserError, escaped
from fedsub_app.common.files import read_json
from fedsub_app.common.own_code import OWN
from fedsub_app.common.section import Json, Value
from fedsub_app.data.settings import SOURCES
from fedsub_app.runs.config import canonical, check, resolve
from fedsub_app.settings import LOCATION_KEYS, Settings

OWN_CODE = "own-code"  # key of settings.json: digests of the user's files, by the setting that names one
# Keys that may allow more when a run is resumed.
EXTENDED = ("num-rounds", "max-flops", "max-bytes", "max-device-seconds", "stop-at-score")


class RunFailed(Exception):
    """The run could not continue (abandoned rounds, a full disk); ``folder`` may hold a checkpoint to resume from."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(escaped(message))
        self.folder = folder


def resume_command(folder: Path) -> str:
    return f"fedsub run --resume {shlex.quote(str(folder))}"


def settings_of(overrides: Mapping[str, Value]) -> Settings:
    """Resolve a run's settings; with ``resume`` the settings of its directory, which other keys must not contradict.

    The keys of ``EXTENDED`` may allow more.
    """
    if overrides.get("resume") is not True or not overrides.get("run-dir"):
        settings = resolve(overrides)
        if settings.resume:  # the run may have other keys than the experiment that says so
            how = resume_command(Path(str(settings.run_dir)))
            raise UserError(f"resume = true: not with resume or run-dir in an experiment; `{how}` continues the run")
        return settings
    check(overrides)
    folder = Path(os.path.expanduser(str(overrides["run-dir"])))
    content = read_recorded(folder)
    recorded = content["settings"]
    longer: dict[str, Value] = {}
    for key, value in overrides.items():
        if (key not in LOCATION_KEYS or key == "experiment") and recorded.get(key) != canonical(key, value):
            old = recorded.get(key)
            if key not in EXTENDED or not _allows_more(key, value, old, recorded):
                none = ", no limit" * (key in EXTENDED[1:] and not old)
                more = "; it can only go further" if key in EXTENDED else ""
                raise UserError(f"{key} = {value!r}: the run to resume in {folder} has {old!r}{none}{more}")
            if key == "num-rounds" and recorded.get("lr-schedule") == "cosine":
                raise UserError(f"{key} = {value!r}: the run to resume in {folder} has a cosine that ends at {old!r}")
            longer[key] = value
            if (states := folder / "clients").is_dir() and not any(states.iterdir()):
                gone = "has no states of its clients: reproduce and sweep keep none"
                raise UserError(f"{key} = {value!r}: the run to resume in {folder} {gone}; run it anew")
    before = {key: value for key, value in recorded.items() if key != "experiment"}
    try:
        resolve(before)
    except UserError as error:
        wrote = f"it was written by commit {content.get('commit', 'unknown')}, which can resume it"
        raise UserError(f"{folder / 'settings.json'}: {error}; {wrote}") from None
    location = {key: value for key, value in overrides.items() if key in LOCATION_KEYS and key != "experiment"}
    return resolve(before | location | longer).model_copy(update={"experiment": recorded.get("experiment") or None})


def _allows_more(key: str, value: Value, old: Value | None, recorded: Mapping[str, Value]) -> bool:
    """Say whether a run goes further with this value of a key of ``EXTENDED``; a limit of 0 is none."""
    if isinstance(value, str) or isinstance(old, str | None):
        return False
    if key == "num-rounds" or not (value and old):
        return value > old if key == "num-rounds" else not value
    score = resolve({"task": recorded.get("task", "classification")}).score
    return score.better(value, old) if key == "stop-at-score" else value > old


def read_recorded(folder: Path) -> Json:
    """Return the content of a run's settings.json, as ``open_run`` wrote it."""
    path = folder / "settings.json"
    if not path.is_file():
        raise UserError(f"{path}: not there; must be the directory of an earlier run")
    content = read_json(path)
    recorded, run_id = content.get("settings"), content.get("run-id")
    if not isinstance(recorded, dict) or not re.fullmatch(r"[0-9a-f]{12}", str(run_id)):
        raise UserError(f"{path}: not a run's settings (settings, run-id)")
    return content


def own_code(keys: Mapping[str, Value]) -> dict[str, str]:
    """Return the keys that name code of the user, ``FILE.py:NAME`` or ``module:NAME``, with it."""
    known: dict[str, Collection[str]] = {"model": (), "dataset": SOURCES, "task": (OWN,), "method": ()}
    texts = {key: str(keys[key]) for key in known if ":" in str(keys.get(key))}
    if "model" in texts:
        from fedsub_app.models.sources import PACKAGES  # which loads torch

        known["model"] = PACKAGES
    return {key: text for key, text in texts.items() if text.partition(":")[0] not in known[key]}


def runs_folder() -> Path:
    """Return the folder of all runs: $FEDSUB_RUNS (``make setup``: the checkout's runs/), else ./runs."""
    return Path(os.path.expanduser(os.environ.get("FEDSUB_RUNS") or "runs"))


def new_folder(settings: Settings) -> Path:
    """Make and return the empty directory of a run whose ``run-dir`` is empty; :class:`UserError` if it cannot."""
    name = settings.experiment or f"{settings.section}-{settings.dataset}"
    name = re.sub("[+:*]", "-", folder_name(Path(name).stem if is_file(name) else name))
    return new_path(runs_folder().resolve(), f"-{name}-seed{settings.seed}")


def folder_name(path: str) -> str:
    """Return a path as the name of one folder: its end, because a name has at most 255 bytes."""
    return path.strip("/").replace("/", "-").encode()[-200:].decode(errors="ignore")


def new_path(root: Path, name: str = "") -> Path:
    """Make and return an empty folder named by the time and ``name``; :class:`UserError` if it cannot."""
    stamp = time.strftime("%Y%m%d-%H%M%S") + name
    path = root / stamp
    for number in range(2, 1000):
        try:
            path.mkdir(mode=0o700, parents=True)
            return path
        except FileExistsError:  # another folder of this second
            path = root / f"{stamp}-{number}"
        except OSError as error:
            raise UserError(f"{path}: cannot be made ({error.strerror})") from None
    raise UserError(f"{path}: there already")
