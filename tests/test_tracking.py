"""Trackers: what they were told, read back by their own libraries, also after a run was stopped and resumed."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsub_app.cli import main as cli
from fedsub_app.client_app import app
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.runs import tracking
from fedsub_app.runs.directory import Run
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.recorded import settings_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.runs.tracking import Tracking, numbers_of

RunLocal = Callable[..., tuple[Json, Path]]
Read = Callable[[Path], tuple[str, Mapping[str, str], Mapping[str, list[tuple[int, float]]]]]


def from_tensorboard(folder: Path) -> tuple[str, Mapping[str, str], Mapping[str, list[tuple[int, float]]]]:
    """Return name, parameters and points, read by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    params = HParamsPluginData.FromString(content).session_start_info.hparams
    words = {key: str(getattr(value, value.WhichOneof("kind"))) for key, value in params.items()}
    points = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    return folder.name, words, points


def from_mlflow(folder: Path) -> tuple[str, Mapping[str, str], Mapping[str, list[tuple[int, float]]]]:
    """Return name, parameters and points of the one run, read by MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedsub")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    points = {
        key: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    return str(run.info.run_name), run.data.params, points


@pytest.mark.parametrize(
    ("name", "read"), [("tensorboard", from_tensorboard), pytest.param("mlflow", from_mlflow, marks=pytest.mark.slow)]
)
def test_a_tracker_has_every_round_once_also_after_a_stop(
    name: str, read: Read, run_local: RunLocal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is stopped between a round's line and its checkpoint: that round is run, and told, again."""
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checkpoint = Run.checkpoint

    def stop(self: Run, server_round: int, *rest: Any) -> None:
        if server_round == 2:
            raise SystemExit
        checkpoint(self, server_round, *rest)

    monkeypatch.setattr(Run, "checkpoint", stop)
    with pytest.raises(SystemExit):
        run_local("tracked", track=name, momentum=0.5)
    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    folder = tmp_path / "tracked"
    keys = {"run-dir": str(folder), "resume": True, "track": name}
    run_experiment(LocalGrid(app, keys), settings_of(keys))
    called, params, points = read(folder)
    assert called == "tracked"
    assert float(params["momentum"]) == 0.5
    assert params["method"] == "fedavg"
    lines = read_rounds(folder)
    assert [step for step, _ in points["round"]] == [0, 1, 2, 3]
    for key in ("global-accuracy", "train-loss", "flops"):
        told = [(line["round"], pytest.approx(line[key], rel=1e-6)) for line in lines if key in line]
        assert points[key] == told


def test_what_is_told_of_a_line() -> None:
    line = {"round": 3, "status": "ok", "clients": [0, 1], "flops": 2, "train-loss": None, "dropped": [{}, {}]}
    line |= {"global-accuracy": 50.0, "evaluated": {"0": {}}}
    told = numbers_of(line)
    assert told == {"flops": 2.0, "dropped": 2.0, "global-accuracy": 50.0, "round": 3.0}
    assert list(told)[-1] == "round"


def test_a_run_without_a_tracker_is_the_same_run(run_local: RunLocal, tmp_path: Path) -> None:
    """The key says where a run is told, not what it computes: one that was begun without a tracker may get one."""
    pytest.importorskip("tensorboard")
    _, folder = run_local("plain", num_rounds=2)
    digest = json.loads((folder / "settings.json").read_text())["digest"]
    keys = {"run-dir": str(folder), "resume": True, "track": "tensorboard"}
    assert settings_of(keys).digest() == digest
    run_experiment(LocalGrid(app, keys), settings_of(keys))
    _, _, points = from_tensorboard(folder)
    assert [step for step, _ in points["round"]] == [0, 1, 2]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_without_the_package_it_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", "-s", f"track={name}", "-s", "model=feature-mlp", "--workers", "1"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: track = '{name}': needs its package; `pip install -e '.[{name}]'` in the checkout\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_cannot_be_opened_is_one_line(
    run_local: RunLocal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/not/there/mlflow.db")
    (tmp_path / "not").write_text("a file")
    with pytest.raises(tracking.UserError, match=r"^track = 'mlflow': .+$"):
        run_local(track="mlflow")


def test_a_tracker_that_fails_later_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    told = Tracking("tensorboard", tmp_path / "run", "0123456789ab", {"lr": 0.1})
    tracking.log.propagate = True
    told.follow([{"round": 0, "status": "ok"}])
    told._tracker._writer.close()  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("no folder any more")
    told.follow([{"round": 1, "status": "ok"}])
    told.follow([{"round": 2, "status": "ok"}])
    assert [record.getMessage() for record in caplog.records if "goes on without it" in record.getMessage()]
    assert len(caplog.records) == 1


def test_wandb_offline(run_local: RunLocal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, folder = run_local(track="wandb", num_rounds=2)
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while b"global-accuracy" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)  # wandb's own process writes it
    assert b"global-accuracy" in written.read_bytes()


def test_a_stopped_run_is_ended_in_wandb_and_goes_on_behind_what_wandb_has(
    run_local: RunLocal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was left open was the next run's of the process; of a killed one, offline files have nothing."""
    begun: list[Any] = []

    def begin(**about: Any) -> SimpleNamespace:
        assert about["settings"]["reinit"] == "create_new"
        run = SimpleNamespace(starting_step=2 if len(begun) == 2 else 0, steps=[], codes=[])
        run.log = lambda numbers, step, commit: run.steps.append(step)
        run.finish = lambda exit_code: run.codes.append(exit_code)
        begun.append(run)
        return run

    def stop(*_: Any) -> None:
        raise SystemExit

    package = SimpleNamespace(__spec__="found", Settings=lambda **keys: keys, init=begin)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", stop)
        with pytest.raises(SystemExit):
            run_local("tracked", track="wandb", num_rounds=2)
    keys = {"run-dir": str(tmp_path / "tracked"), "resume": True, "track": "wandb"}
    for _ in range(2):  # wandb has no round, then two
        run_experiment(LocalGrid(app, keys), settings_of(keys))
    assert [run.steps for run in begun] == [[0, 1], [0, 1, 2], [2]]
    assert [run.codes for run in begun] == [[1], [0], [0]]


def test_an_emptied_run_directory_has_a_tracker_without_rounds(run_local: RunLocal, tmp_path: Path) -> None:
    """``rm -r DIR/*`` leaves hidden files; the next run there was told from the last one's end on."""
    pytest.importorskip("tensorboard")
    _, folder = run_local("again", track="tensorboard", num_rounds=2)
    for path in folder.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_local("again", track="tensorboard", num_rounds=2, seed=1)
    assert [step for step, _ in from_tensorboard(folder)[2]["round"]] == [0, 1, 2]


def test_a_torn_number_of_the_last_round_does_not_stop_a_resume(run_local: RunLocal, tmp_path: Path) -> None:
    """A power cut may leave the file empty; the run could then no longer be resumed with its tracker."""
    pytest.importorskip("tensorboard")
    _, folder = run_local("torn", track="tensorboard", num_rounds=2)
    (folder / ".tensorboard-told").write_bytes(b"")
    keys = {"run-dir": str(folder), "resume": True, "num-rounds": 3}
    run_experiment(LocalGrid(app, keys), settings_of(keys))
    assert [step for step, _ in from_tensorboard(folder)[2]["round"]][-1] == 3
