"""kill -9 at any moment, resume, and the result is bit-identical to that of a run that was never killed."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import PATIENCE, fedsub, result, tree

KEYS = {
    "model": "feature-mlp",
    "lr": "0.05",
    "batch-size": "32",
    "train-per-class": "40",
    "num-clients": "3",
    "clients-per-round": "2",  # a client's state may be some rounds old
    "num-rounds": "4",
    "evaluate": "global,personal",
}
METHODS = ("fedpews", "local")  # one keeps mask scores in its clients' state, the other whole models
OWN: dict[str, dict[str, str]] = {
    "fedpews": {"fedpews.warmup-rounds": "3"},
    "heterofl": {"devices": "phones", "deadline": "5.0", "held-out-clients": "1", "num-clients": "8"},  # a clock
}


def keys(method: str, folder: Path, **more: str) -> list[str]:
    values = KEYS | OWN.get(method, {})
    values |= {"method": method, "run-dir": str(folder)} | {k.replace("_", "-"): v for k, v in more.items()}
    return [part for key, value in values.items() for part in ("-s", f"{key}={value}")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of a method that nobody killed."""
    made: dict[str, Path] = {}

    def run(method: str, **more: str) -> Path:
        name = "-".join((method, *more, *more.values()))
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / name
            done = fedsub(made[name].parent, "run", *keys(method, made[name], **more))
            assert done.code == 0, done.err
        return made[name]

    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FedPeWS run that was killed in round 4 after its first client wrote its state; copy it before changing it."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    done = fedsub(folder.parent, "run", *keys("fedpews", folder), die=("client state written", 4))
    assert done.code == -signal.SIGKILL, done.err
    return folder


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "run"))


def checkpoint(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"round-{number:06d}.safetensors"


CRASHES = [
    ("settings written", 0),
    ("line written", 1),  # no checkpoint yet
    ("before training", 2),
    ("while a client trains", 2),
    ("client state half written", 2),
    ("client state written", 2),
    ("line written", 2),
    ("checkpoint half written", 2),
    ("checkpoint written", 2),
    ("before the summary", 4),
    ("summary half written", 4),
]


@pytest.mark.parametrize(
    ("method", "moment", "server_round"),
    [
        *(pytest.param("fedpews", *crash) for crash in CRASHES),
        pytest.param("heterofl", "checkpoint half written", 2),
        pytest.param("heterofl", "line written", 2),
        *(pytest.param("local", *crash, marks=() if crash in CRASHES[5:7] else pytest.mark.slow) for crash in CRASHES),
    ],
)
def test_killed_and_resumed_is_as_never_killed(
    method: str, moment: str, server_round: int, uninterrupted: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    died = fedsub(tmp_path, "run", *keys(method, folder), die=(moment, server_round))
    assert died.code == -signal.SIGKILL, died.err
    assert not (folder / "summary.json").exists()
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert resumed.code == 0, resumed.err
    assert result(folder) == result(uninterrupted(method))


def test_a_command_killed_from_outside(uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    """The real command, killed at whatever it was doing when it had told of round 2."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedsub_app.cli", "run"]
    process = subprocess.Popen([*command, *keys("fedpews", folder)], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        assert any(line.startswith("round 2/4") for line in process.stdout or ())
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    subprocess.run([*command, "--resume", str(folder)], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    assert result(folder) == result(uninterrupted("fedpews"))


@pytest.mark.parametrize("method", METHODS)
def test_rounds_after_the_last_checkpoint_are_computed_again(
    method: str, uninterrupted: Callable[..., Path], tmp_path: Path
) -> None:
    """Client states of rounds 3 and 4 lie there when round 3 starts once more from the checkpoint of round 2."""
    folder = tmp_path / "run"
    more = {"checkpoint_every": "2"}
    assert fedsub(tmp_path, "run", *keys(method, folder, **more), die=("client state written", 4)).code < 0
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round-000002.safetensors"]
    assert fedsub(tmp_path, "run", "--resume", str(folder)).code == 0
    assert result(folder) == result(uninterrupted(method, **more))


def test_a_run_may_be_killed_twice(uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fedsub(tmp_path, "run", *keys("fedpews", folder), die=("client state written", 2)).code < 0
    assert fedsub(tmp_path, "run", "--resume", str(folder), die=("line written", 3)).code < 0
    assert fedsub(tmp_path, "run", "--resume", str(folder)).code == 0
    assert result(folder) == result(uninterrupted("fedpews"))


@pytest.mark.parametrize("kept", [0, 7, 0.5, -1], ids=["empty", "in the header", "half", "last byte missing"])
def test_a_truncated_checkpoint_is_refused(kept: float, killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    path = checkpoint(folder, 3)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if kept == 0.5 else int(kept)])
    before = tree(folder)
    refused = fedsub(tmp_path, "run", "--resume", str(folder))
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert line.startswith(f"error: {path}: checkpoint is truncated or damaged")
    assert line.endswith("delete it to resume from the one before")
    assert tree(folder) == before


def test_without_the_damaged_checkpoint_the_one_before_is_used(
    killed: Path, uninterrupted: Callable[..., Path], tmp_path: Path
) -> None:
    """The client states that belong to it must still be there, although a later checkpoint was written."""
    folder = copy(killed, tmp_path)
    checkpoint(folder, 3).unlink()
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert "resumed after round 2 of 4" in resumed.out
    assert result(folder) == result(uninterrupted("fedpews"))


def test_changed_settings_and_a_checkpoint_of_another_run_are_refused(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    settings = json.loads((folder / "settings.json").read_text())
    settings["settings"]["lr"] = 0.5
    (folder / "settings.json").write_text(json.dumps(settings))
    refused = fedsub(tmp_path, "run", "--resume", str(folder))
    assert refused.code == 2
    changed = f"error: {folder / 'settings.json'}: damaged, or changed by hand: its checksum is of other content\n"
    assert refused.err == changed
    del settings["crc32"]
    settings["run-id"] = "0123456789ab"  # the settings.json of another run
    (folder / "settings.json").write_text(json.dumps(settings))
    refused = fedsub(tmp_path, "run", "--resume", str(folder))
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert line.startswith(f"error: {checkpoint(folder, 3)}: checkpoint of another run (")


def test_a_contradicting_key_is_refused(killed: Path, tmp_path: Path) -> None:
    before = tree(killed)
    refused = fedsub(tmp_path, "run", "--resume", str(killed), "-s", "lr=0.1")
    assert refused.code == 2
    assert refused.err == f"error: lr = 0.1: the run to resume in {killed} has 0.05\n"
    assert tree(killed) == before


def test_a_key_that_says_the_same_is_not(killed: Path, uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    # settings.json has "global, personal"
    same = ("-s", "lr=0.05", "-s", "evaluate=global,personal", "-s", "node-timeout=5")
    assert fedsub(tmp_path, "run", "--resume", str(folder), *same).code == 0
    assert result(folder) == result(uninterrupted("fedpews"))


@pytest.mark.parametrize("inside", ["resume = true", "resume = false"])
def test_an_experiment_does_not_resume_a_run(inside: str, killed: Path, tmp_path: Path) -> None:
    """The run went on with the experiment's keys, and settings.json kept its own."""
    (tmp_path / "my.toml").write_text(f"lr = 0.5\nrun-dir = '{killed}'\n{inside}\n")
    given = () if inside.endswith("true") else ("-s", "resume=true")
    before = tree(killed)
    refused = fedsub(tmp_path / "scratch", "run", str(tmp_path / "my.toml"), *given)
    assert refused.code == 2
    said = f"not with resume or run-dir in an experiment; `fedsub run --resume {killed}` continues the run"
    assert refused.err == f"error: resume = true: {said}\n"
    assert tree(killed) == before


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused = fedsub(tmp_path, "run", "--resume", str(tmp_path / "empty"))
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert line == (
        f"error: {tmp_path / 'empty' / 'settings.json'}: not there; must be the directory of an earlier run"
    )


def test_a_run_directory_in_use_is_left_alone(uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = uninterrupted("fedpews")
    before = tree(folder)
    refused = fedsub(tmp_path, "run", *keys("fedpews", folder))
    assert refused.code == 2
    assert refused.err == f"error: run-dir = '{folder}': exists and is not empty; resume = true continues it\n"
    assert tree(folder) == before


def test_a_torn_last_line_is_left_out(killed: Path, uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    """The machine died while the line of round 4 was written."""
    folder = copy(killed, tmp_path)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "status": "ok", "seco')
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert resumed.code == 0, resumed.err
    assert result(folder) == result(uninterrupted("fedpews"))


def test_a_finished_run_resumed_stays_as_it_is(uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy(uninterrupted("local"), tmp_path)
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert resumed.code == 0, resumed.err
    assert result(folder) == result(uninterrupted("local"))


def test_two_processes_cannot_run_one_directory(uninterrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy(uninterrupted("local"), tmp_path)
    (folder / "summary.json").unlink()
    before = tree(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = fedsub(tmp_path, "run", "--resume", str(folder))
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"error: run-dir = '{folder}': another process is running it"
    assert tree(folder) == before


@pytest.mark.parametrize("method", METHODS)
def test_an_extended_run_is_as_one_that_was_longer_from_the_start(
    method: str, uninterrupted: Callable[..., Path], tmp_path: Path
) -> None:
    """From 2 rounds to 3 to 4, killed after the first extension: its checkpoints are of three sets of settings."""
    folder = tmp_path / "run"
    short = keys(method, folder, num_rounds="2")
    assert fedsub(tmp_path, "run", *short).code == 0
    extended = ("run", "--resume", str(folder), "-s", "num-rounds=3")
    assert fedsub(tmp_path, *extended, die=("while a client trains", 3)).code == -signal.SIGKILL
    assert not (folder / "summary.json").exists()  # nobody takes it for a run that has ended
    assert fedsub(tmp_path, "run", "--resume", str(folder)).code == 0
    done = fedsub(tmp_path, "run", "--resume", str(folder), "-s", "num-rounds=4")
    assert done.code == 0, done.err
    assert "resumed after round 3 of 4" in done.out
    assert result(folder) == result(uninterrupted(method))
    about, whole = (json.loads((run / "settings.json").read_text()) for run in (folder, uninterrupted(method)))
    assert about["digest"] == whole["digest"]
    assert fedsub(tmp_path, "run", "--resume", str(folder)).code == 0
    assert result(folder) == result(uninterrupted(method))


def test_a_run_is_not_made_shorter(killed: Path, tmp_path: Path) -> None:
    before = tree(killed)
    for rounds in ("3", "many"):
        refused = fedsub(tmp_path, "run", "--resume", str(killed), "-s", f"num-rounds={rounds}")
        assert refused.code == 2
        value = rounds if rounds.isdigit() else repr(rounds)
        said = f"error: num-rounds = {value}: the run to resume in {killed} has 4; it can only go further\n"
        assert refused.err == said
    assert tree(killed) == before
