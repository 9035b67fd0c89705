"""What a run's directory may suffer: a full disk, flipped bytes, stray and missing files. Refused, said or mended.

Whatever is done to it, a resumed run ends as it would have, or says in one line, or in its rounds, what is the matter.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import SMALL
from flwr.app import Message
from helpers import fedsub, result, rounds, tree
from hypothesis import HealthCheck, example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fedsub_app.cli import main as cli
from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json, write_json
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.reports.compare import summary_table
from fedsub_app.reports.curves import Group
from fedsub_app.reports.records import read_run
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import digest

Run = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Value] = SMALL | {
    "method": "local",  # every client keeps a model of its own
    "num-clients": 3,
    "clients-per-round": 2,  # a client's state may be some rounds old
    "train-per-class": 10,
    "num-rounds": 3,
    "evaluate": "global,personal",
}


class Copying(LocalGrid):
    """Copies the run directory when round 3 begins, as a kill would leave it."""

    copied: Path

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if [message.metadata.group_id for message in sent] == ["3"] and not self.copied.exists():
            shutil.copytree(self.copied.with_name("run"), self.copied)
        return super().push_messages(sent)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; beside it, in ``killed``, what it was when round 3 began."""
    folder = tmp_path_factory.mktemp("whole")
    Copying.copied = folder / "killed"
    overrides = KEYS | {"run-dir": str(folder / "run")}
    run_experiment(Copying(app, overrides), settings_of(overrides))
    return folder / "run"


@pytest.fixture
def killed(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.with_name("killed"), tmp_path / "run"))


def resume(folder: Path) -> Json:
    overrides: dict[str, Value] = {"run-dir": str(folder), "resume": True}
    return run_experiment(LocalGrid(app, overrides), settings_of(overrides))


def pairs(keys: dict[str, Any]) -> list[str]:
    return [part for key, value in keys.items() for part in ("-s", f"{key}={value}")]


def flip(path: Path, place: float = 0.5, change: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= change
    path.write_bytes(bytes(data))


# --- the run itself ---------------------------------------------------------------------------------------------------


def test_a_run_of_which_every_round_was_abandoned_has_failed(tmp_path: Path) -> None:
    keys = KEYS | {"method": "fedavg", "num-rounds": 2, "lr": 1e6, "local-epochs": 9, "run-dir": tmp_path / "run"}
    done = fedsub(tmp_path, "run", *pairs(keys))
    assert done.code == 1
    said = "failed: all 2 rounds were abandoned (max-abandoned = 3); last reason: fewer than min-replies = 1 "
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    again = fedsub(tmp_path, "run", "--resume", str(tmp_path / "run"))
    assert (again.code, again.err) == (1, done.err)
    (tmp_path / "run/rounds.jsonl").unlink()
    again = fedsub(tmp_path, "run", "--resume", str(tmp_path / "run"))
    assert again.err.endswith("last reason: its line is gone; checkpoint in " + str(tmp_path / "run") + "\n")


def test_an_abandoned_round_has_a_checkpoint_whatever_checkpoint_every_says(tmp_path: Path) -> None:
    """The run that ends after it says that its checkpoint is there."""
    keys = KEYS | {"method": "fedavg", "num-rounds": 9, "lr": 1e6, "local-epochs": 9, "run-dir": str(tmp_path / "run")}
    keys |= {"checkpoint-every": 9, "max-abandoned": 2}
    with pytest.raises(RunFailed, match=r"^2 rounds in a row were abandoned"):
        run_experiment(LocalGrid(app, keys), settings_of(keys))
    assert [read_checkpoint(path).abandoned for path in checkpoints(tmp_path / "run")] == [1, 2]


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(whole: Path, tmp_path: Path) -> None:
    keys = KEYS | {"run-dir": tmp_path / "run"}
    full = fedsub(tmp_path, "run", *pairs(keys), largest_file=100_000)  # a checkpoint has 300,000 bytes
    assert full.code == 1
    assert full.err == (
        f"failed: {tmp_path}/run/rounds.jsonl: cannot be written (File too large); "
        f"when it can, `fedsub run --resume {tmp_path}/run` goes on\n"
    ).replace("rounds.jsonl", "checkpoints")
    assert "client failed: OSError" in (tmp_path / "run/rounds.jsonl").read_text()
    hidden = {Path(name).name.partition("-")[0] for name in tree(tmp_path / "run") if Path(name).name.startswith(".")}
    assert hidden <= {".lock", ".settings"}, "a file that was not written whole"
    done = fedsub(tmp_path, "run", "--resume", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert result(tmp_path / "run") == result(whole)


def test_a_disk_that_is_full_at_the_start(tmp_path: Path) -> None:
    full = fedsub(tmp_path, "run", *pairs(KEYS | {"run-dir": tmp_path / "run"}), largest_file=1000)
    assert (full.code, full.err) == (2, f"error: run-dir = '{tmp_path}/run': cannot be written (File too large)\n")
    assert set(tree(tmp_path / "run")) <= {".lock"}
    assert fedsub(tmp_path, "run", *pairs(KEYS | {"run-dir": tmp_path / "run", "num-rounds": 1})).code == 0


def test_a_run_directory_deleted_while_it_runs(tmp_path: Path) -> None:
    done = fedsub(tmp_path, "run", *pairs(KEYS | {"run-dir": tmp_path / "run"}), die=("directory deleted", 2))
    said = f"failed: {tmp_path}/run: the run directory, or its settings.json, was deleted\n"
    assert (done.code, done.err) == (1, said)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_says_what_goes_on(whole: Path, tmp_path: Path) -> None:
    done = fedsub(tmp_path, "run", *pairs(KEYS | {"run-dir": tmp_path / "run"}), die=("interrupted", 2))
    assert (done.code, done.err) == (130, f"stopped: `fedsub run --resume {tmp_path}/run` goes on\n")
    assert fedsub(tmp_path, "run", "--resume", str(tmp_path / "run")).code == 0
    assert result(tmp_path / "run") == result(whole)


# --- its files --------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_a_checkpoint(killed: Path, whole: Path) -> None:
    path = killed / "checkpoints/round-000002.safetensors"
    flip(path)
    before = tree(killed)
    with pytest.raises(UserError) as caught:
        resume(killed)
    reason = "checkpoint is truncated or damaged (its checksum is of other content or another file)"
    assert str(caught.value) == f"{path}: {reason}; delete it to resume from the one before"
    assert tree(killed) | {"partition.json": b""} == before | {"partition.json": b""}
    path.unlink()
    assert resume(killed)["rounds"] == 3
    assert result(killed) == result(whole)


def test_a_flipped_byte_in_a_clients_state(killed: Path) -> None:
    asked = read_rounds(killed)[2]["clients"]
    for client in range(3):
        for path in (killed / f"clients/client-{client:06d}").iterdir():
            flip(path)
    resume(killed)
    line = read_rounds(killed)[3]
    assert {drop["client"] for drop in line["dropped"]} >= set(line["clients"]) & set(asked)
    for drop in line["dropped"] + line["not-evaluated"]:
        folder = f"{killed}/clients/client-{drop['client']:06d}"
        said = "client state is truncated or damaged (its checksum is of other content or another file); delete it"
        files = [f"client failed: UserError: {folder}/round-{number:06d}.safetensors: {said}" for number in range(4)]
        # A reason is cut to 200 characters, and the folder's name may be long.
        assert any(file.startswith(drop["reason"].removesuffix("…")[:199]) for file in files), drop


def test_a_clients_state_that_was_deleted_is_said(killed: Path) -> None:
    trained = {client for line in read_rounds(killed)[1:] for client in line["clients"]}
    shutil.rmtree(killed / "clients")
    resume(killed)
    line = read_rounds(killed)[3]
    assert line["lost-state"] == sorted(trained & set(line["clients"])) != []
    assert line.get("evaluated-without-state", []) == sorted(trained - set(line["clients"]))


def test_garbage_in_the_middle_of_the_rounds(killed: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = killed / "rounds.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    other = "ValueError: not a round's line, or its checksum is of another one"
    for bad, reason in [
        (b"garbage\n", "JSONDecodeError: Expecting value"),
        (b"\xff" * 9 + b"\n", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
        (good[0], "ValueError: round 0 after round 0"),
        (good[1].replace(b'"status": "ok"', b'"status": "OK"'), other),
        (b"{}\n", other),
        (b"[" * 9999 + b"\n", "RecursionError"),
    ]:
        path.write_bytes(b"".join((good[0], bad, *good[2:])))
        with pytest.raises(UserError) as caught:
            resume(killed)
        said = str(caught.value)
        assert said.startswith(f"{path}: line 2 is damaged ({reason}")
        assert said.endswith("; delete that line to go on without its round")
        assert path.read_bytes() == b"".join((good[0], bad, *good[2:]))
        assert cli.main(["report", str(killed)]) == 2
        assert capsys.readouterr().err == f"error: {said}\n"
    path.write_bytes(b"".join((good[0], *good[2:])))  # as it says
    assert resume(killed)["missing-rounds"] == [1]
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_stray_files_are_left_alone(killed: Path, whole: Path) -> None:
    strays = ["round-abc.safetensors", "round-000009.safetensors.bak", "round-3.safetensors", "notes", "\udcff"]
    for name in strays:
        (killed / "checkpoints" / name).write_bytes(b"\xff")
        (killed / "clients/client-000000" / name).write_bytes(b"\xff")
    (killed / "checkpoints/round-000008.safetensors").mkdir()
    killed_writer = killed / "checkpoints/.round-000003.safetensors.0123456789ab"
    killed_writer.write_bytes(b"half")
    resume(killed)
    assert not killed_writer.exists()
    assert {*strays, "round-000008.safetensors"} < {path.name for path in (killed / "checkpoints").iterdir()}
    shutil.rmtree(killed / "checkpoints/round-000008.safetensors")
    for name in strays:
        (killed / "checkpoints" / name).unlink()
        (killed / "clients/client-000000" / name).unlink()
    assert result(killed) == result(whole)


def test_a_damaged_partition_is_written_again(killed: Path, whole: Path) -> None:
    (killed / "partition.json").write_bytes(b"\xff")
    resume(killed)
    assert (killed / "partition.json").read_bytes() == (whole / "partition.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old-key": 1}, "old-key = 1: unknown key; `fedsub list settings` shows the allowed keys"),
        ({"lr": 1e9}, "lr = 1000000000.0: must be less than or equal to 1000000"),
    ],
)
def test_settings_of_another_version(killed: Path, change: Json, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = killed / "settings.json"
    content = read_json(path)
    settings = content["settings"] | change
    write_json(path, content | {"settings": settings, "digest": digest(settings), "commit": "0123456789ab"})
    assert cli.main(["run", "--resume", str(killed)]) == 2
    wrote = "it was written by commit 0123456789ab, which can resume it"
    assert capsys.readouterr().err == f"error: {path}: {said}; {wrote}\n"


def test_a_run_of_a_version_that_had_fewer_keys_is_resumed(killed: Path, whole: Path) -> None:
    path = killed / "settings.json"
    content = read_json(path)
    del content["settings"]["moon-mu"]
    content["digest"] = digest(content["settings"])
    write_json(path, content)
    for number in (1, 2):  # with checkpoints of that version's digest
        (killed / f"checkpoints/round-{number:06d}.safetensors").unlink()
    resume(killed)
    (killed / "checkpoints/round-000003.safetensors").unlink()
    resume(killed)  # from a checkpoint
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_an_experiment_beside_resume_must_be_the_runs(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "fedpews/digits", "--resume", str(killed)]) == 2
    said = f"experiment = 'fedpews/digits': the run to resume in {killed} has ''"
    assert capsys.readouterr().err == f"error: {said}\n"


def test_json_files_hold_no_nan(whole: Path, tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for path in whole.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    write_json(tmp_path / "file.json", {"a": [float("nan"), (1.5, float("-inf"))], "b": {"c": float("inf")}})
    assert read_json(tmp_path / "file.json") == {"a": [None, [1.5, None]], "b": {"c": None}}


# --- anything at all --------------------------------------------------------------------------------------------------

BYTES = st.sampled_from([b"", b"\xff" * 40, b"{}", b"[]", b"null", b"[" * 9999, b'{"round": 1}\n', b'{"settings": {}}'])
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 0.999), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 0.999), st.none()),
    st.tuples(st.just("delete"), st.none(), st.none()),
    st.tuples(st.just("fill"), BYTES, st.none()),
    st.tuples(st.just("folder"), st.none(), st.none()),
    st.tuples(st.just("copy"), st.integers(0, 99), st.none()),
)


def damage(folder: Path, which: int, how: tuple[str, Any, Any]) -> str:
    """Damage one of a run's files; returns its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    path = files[which % len(files)]
    what, where, change = how
    if what == "flip":
        flip(path, where, change)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])
    elif what == "delete":
        path.unlink()
    elif what == "fill":
        path.write_bytes(where)
    elif what == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(files[where % len(files)].read_bytes())
    return path.relative_to(folder).as_posix()


@given(st.integers(0, 99), DAMAGE)
@example(0, ("flip", 0.5, 1))
@effort(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_to_one_file_a_resumed_run_is_right_or_says_why_not(
    whole: Path, which: int, how: tuple[str, Any, Any]
) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(whole.with_name("killed"), Path(scratch) / "run"))
        name = damage(folder, which, how)
        refused = ""
        try:
            summary = resume(folder)
        except (UserError, RunFailed) as error:
            refused = str(error)
        if refused:
            assert "\n" not in refused
            assert str(folder) in refused
            return
        said = "missing-rounds" in summary
        for line in rounds(folder):
            said |= bool(line.get("dropped") or line.get("not-evaluated"))
            said |= "lost-state" in line or "evaluated-without-state" in line
        found, expected = result(folder), result(whole)
        del found["client states"], expected["client states"]  # one that nobody needs any more may be damaged
        assert said or found == expected, name


@given(st.integers(0, 99), DAMAGE)
@effort(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_to_one_file_a_report_is_right_or_says_why_not(
    whole: Path, which: int, how: tuple[str, Any, Any]
) -> None:
    expected = summary_table([Group("run", (read_run(whole),))])
    with TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(whole, Path(scratch) / "run"))
        name = damage(folder, which, how)
        with contextlib.suppress(UserError):
            said = summary_table([Group("run", (read_run(folder),))])
            assert said == expected, name


def test_a_finished_run_without_its_last_line_is_not_reported(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"rounds.jsonl: lacks round 3, which summary.json counts; `fedsub run"):
        read_run(folder)
    assert resume(folder)["missing-rounds"] == [3]
    assert [line["round"] for line in read_run(folder).lines] == [0, 1, 2]
