"""The files of a run's directory, written and read back."""

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsub_app.cli import federation
from fedsub_app.common import files
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import flush, read_json, write_atomic, write_json
from fedsub_app.common.section import Value
from fedsub_app.common.tensor_files import write_tensors
from fedsub_app.common.tensors import Json
from fedsub_app.runs import directory
from fedsub_app.runs.checkpoint import Checkpoint, checkpoints, read_checkpoint
from fedsub_app.runs.config import resolve
from fedsub_app.runs.directory import Run, open_run
from fedsub_app.runs.recorded import new_folder, runs_folder, settings_of
from fedsub_app.settings import digest
from fedsub_app.training.client_state import ClientState, flush_states


def opened(folder: Path, **keys: Value) -> Run:
    overrides = {key.replace("_", "-"): value for key, value in keys.items()}
    return open_run(resolve(overrides | {"run-dir": str(folder)}))


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where neither has written anything yet; and where none can be made it is said."""
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-120000")
    first, second = new_folder(resolve({})), new_folder(resolve({}))
    assert (first.name, second.name) == ("20260101-120000-fedpews-digits-seed0", f"{first.name}-2")
    several = new_folder(resolve({"dataset": "csv:ward-*.csv"}))
    assert several.name == "20260101-120000-fedpews-csv-ward--.csv-seed0"  # without what a shell or a mount takes apart
    opened(second).close()
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path / "runs" / second.name / "settings.json"))
    with pytest.raises(UserError, match=r"settings.json/20260101-.*: cannot be made \(Not a directory\)"):
        open_run(resolve({}))


def test_without_a_value_the_runs_are_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", "")
    assert (runs_folder(), federation._folder(None)) == (Path("runs"), Path("runs/federation"))


def test_the_folder_of_runs_may_be_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of variables keeps the "~", as a quoted value does; the runs were in a folder of that name."""
    monkeypatch.setenv("FEDSUB_RUNS", "~/runs")
    assert runs_folder() == Path.home() / "runs"


def test_a_closed_run_is_open_to_another(tmp_path: Path) -> None:
    """While the object that held it is still there."""
    (tmp_path / ".lock").touch()  # of a process that was killed before it wrote anything else
    first = opened(tmp_path)
    with pytest.raises(UserError, match="another process is running it"):
        opened(tmp_path, resume=True)
    first.close()
    opened(tmp_path, resume=True).close()


def test_a_run_that_recorded_a_key_that_is_gone_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "run", method="subfedavg", local_epochs=2, validation_fraction=0.1).close()
    path = tmp_path / "run/settings.json"
    content = read_json(path)
    earlier = content["settings"] | {"subfedavg.share-of": "remaining"}
    write_json(path, content | {"settings": earlier, "digest": digest(earlier)})
    with pytest.raises(UserError, match=r"settings.json: subfedavg.share-of = 'remaining': unknown key.*can resume it"):
        settings_of({"run-dir": str(path.parent), "resume": True})


def test_a_run_of_another_device_goes_on_where_this_one_is_named(tmp_path: Path) -> None:
    opened(tmp_path).close()
    write_json(tmp_path / "settings.json", read_json(tmp_path / "settings.json") | {"device": {"type": "cuda"}})
    with pytest.raises(UserError, match=r"^device = 'auto': the run .* on cuda, here it would be cpu, .* device = cpu"):
        opened(tmp_path, resume=True)
    opened(tmp_path, resume=True, device="cpu").close()


def test_an_extended_run_has_not_ended(tmp_path: Path) -> None:
    """Also before it waits for its nodes."""
    run = opened(tmp_path, num_rounds=2)
    run.finish("completed", {})
    run.close()
    for rounds in (2, 3):
        opened(tmp_path, resume=True, num_rounds=rounds).close()
        assert (tmp_path / "summary.json").exists() is (rounds == 2)
        recorded = read_json(tmp_path / "settings.json")
        assert recorded["settings"]["num-rounds"] == rounds
        assert recorded["digest"] == digest(recorded["settings"])


def same(one: Checkpoint, other: Checkpoint) -> bool:
    for mine, theirs in ((one.model, other.model), (one.state, other.state)):
        if mine.keys() != theirs.keys() or any(not torch.equal(mine[name], theirs[name]) for name in mine):
            return False
    return (one.round, one.abandoned, one.run) == (other.round, other.abandoned, other.run)


def test_a_checkpoint_comes_back_from_its_file(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3)
    state = {"theta": values.T, "state/seen": torch.tensor([True, False]), "model/rounds": torch.tensor(3)}
    written = Checkpoint(7, {"fc1.weight": values, "shared": values}, state, abandoned=2, run="0123")
    written.write(tmp_path / "round-000007.safetensors")
    assert same(read_checkpoint(tmp_path / "round-000007.safetensors"), written)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "round-000001.safetensors"
    header = {"round": "1", "abandoned": "0", "run": "0123", "state-rounds": "{}"}
    save_file({"model/w": torch.zeros(1)}, path, metadata=header)
    with pytest.raises(UserError, match=r"round-000001.safetensors: .* truncated or damaged \(no checksum"):
        read_checkpoint(path)
    write_tensors(path, {"model/w": torch.zeros(1)}, {key: header[key] for key in ("round", "run", "state-rounds")})
    with pytest.raises(UserError, match=r"round-000001.safetensors: .* truncated or damaged \('abandoned'\)"):
        read_checkpoint(path)
    write_tensors(path, {"model/w": torch.zeros(1)}, header)
    other = path.rename(tmp_path / "round-000002.safetensors")
    with pytest.raises(UserError, match=r"round-000002.safetensors: .* \(its checksum is of other content"):
        read_checkpoint(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_a_checkpoint_that_this_user_may_not_read_is_not_called_damaged() -> None:
    """As after one resume with sudo; the message advised to delete the sound checkpoint."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (path := Path(folder, "round-000001.safetensors")).touch(mode=0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=r"round-000001.safetensors: cannot be read \(Permission denied\)"):
                read_checkpoint(path)
        finally:
            os.seteuid(0)


def test_restore_returns_the_last_checkpoint_and_cuts_off_later_lines(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", keep_checkpoints=2)
    try:
        for number in range(4):
            run.log_round({"round": number})
            if number:
                run.checkpoint(number, {"w": torch.full((2,), float(number))}, {"s": torch.tensor(number)}, 0)
        run.log_round({"round": 4})
        assert [path.name for path in checkpoints(run.folder)] == [
            "round-000002.safetensors",
            "round-000003.safetensors",
        ]
        assert run.checkpoint_rounds == [2, 3]
        expected = Checkpoint(3, {"w": torch.full((2,), 3.0)}, {"s": torch.tensor(3)}, 0, run.run_id)
        assert same(run.restore(), expected)
        lines = [json.loads(line)["round"] for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
        assert lines == [line["round"] for line in run.lines] == [0, 1, 2, 3]
    finally:
        run.close()


@pytest.mark.parametrize(
    ("task", "best"), [("classification", [True, False, True]), ("regression", [True, True, False])]
)
def test_the_best_round_is_by_the_score_of_the_task(task: str, best: list[bool], tmp_path: Path) -> None:
    run = opened(tmp_path / "run", task=task, method="fedavg")
    found = []
    try:
        run.log_round({"round": 0, f"global-{run.settings.score.name}": float("nan")})  # of a score of one's own
        for number, value in enumerate((5.0, 4.0, 9.0), 1):
            line = {"round": number, f"global-{run.settings.score.name}": value}
            found.append(run.is_best(line))
            run.log_round(line)
            run.log_round({"round": number})  # without an evaluation
        assert found == best
        assert run.finish("finished", {})[f"best-global-{run.settings.score.name}"] == (9.0 if best[2] else 4.0)
    finally:
        run.close()


def test_without_a_checkpoint_everything_starts_again(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    try:
        run.log_round({"round": 0})
        run.log_round({"round": 1})
        assert same(run.restore(), Checkpoint())
        assert run.lines == []
        assert (run.folder / "rounds.jsonl").read_text() == ""
    finally:
        run.close()


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(file: object) -> None:
        file.write(b"ne")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomic(path, fail)
    assert path.read_bytes() == b"old"
    write_atomic(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its folder afterwards: a power cut leaves the old content or the new one."""
    path, waited = tmp_path / "file", []

    def fsync(descriptor: int) -> None:
        about = os.fstat(descriptor)
        waited.append(("folder" if stat.S_ISDIR(about.st_mode) else about.st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(path, b"new")
    assert waited == [(3, False), ("folder", True)]


def test_the_clients_states_reach_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ClientState(tmp_path / "deleted", 0).save(1, {"w": torch.ones(2)}, 0, [])
    shutil.rmtree(tmp_path / "deleted")
    flush_states()  # also what earlier tests left, as a run does that was killed
    waited: list[object] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    monkeypatch.setattr(files, "flush", waited.append)
    for client in range(3):
        ClientState(tmp_path, client).save(1, {"w": torch.ones(2)}, 0, [])
    assert not waited
    flush_states()
    flush_states()  # nothing was written since
    assert waited == [tmp_path]


@pytest.mark.parametrize(("method", "flushes"), [("fedselect", 2), ("fedavg", 0)])
def test_a_reply_leaves_when_its_clients_states_are_on_disk(
    run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch, method: str, flushes: int
) -> None:
    states: list[int] = []
    monkeypatch.setattr(files, "flush", lambda folder: states.append(len(list(folder.glob("*/round-*")))))
    run_local(method=method, num_rounds=2, num_clients=2)
    assert len(states) == flushes
    assert all(states)


def test_flushing_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    flush(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        flush(tmp_path / "gone")


@settings(deadline=None, max_examples=40)
@given(
    trained=st.dictionaries(st.integers(1, 30), st.booleans(), min_size=1),
    every=st.integers(1, 9),
    keep=st.integers(1, 4),
)
def test_a_client_keeps_the_states_that_a_task_can_name_and_few_others(
    trained: dict[int, bool], every: int, keep: int
) -> None:
    """``trained``: the rounds in which the client trains, and whether its reply was merged."""
    with TemporaryDirectory() as folder:
        state = ClientState(Path(folder), 0)
        newest = [max((n for n, merged in trained.items() if merged and n <= last), default=0) for last in range(31)]
        for number in range(1, 31):
            kept = list(range(every, number, every))[-keep:]  # the server's checkpoints, when this round begins
            if number in trained:
                state.save(number, {"w": torch.tensor(float(number))}, newest[number - 1], kept)
            for last in (*kept, number):
                assert state.load(newest[last]) == ({"w": torch.tensor(float(newest[last]))} if newest[last] else {})
            assert len(list(state.folder.glob("*"))) <= keep + 2


def test_the_commit_is_the_checkouts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment may lie in a repository of the user's, whose commit says nothing of this code."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(directory, "__file__", str(tmp_path / "site/fedsub_app/runs/directory.py"))
    (tmp_path / "site").mkdir()
    assert directory._commit.__wrapped__() == "not a git checkout"
