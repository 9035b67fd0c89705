"""``start-from``: the initial global model of a file or of another run."""

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import pairs
from helpers import ends_as_if_never_stopped, fedsub, rounds
from safetensors.torch import load_file, save_file

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensor_files import read_tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.models import tensors_of
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import resolve
from fedsub_app.runs.directory import open_run
from fedsub_app.runs.loop import prepare
from fedsub_app.runs.plan import plan
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.subnets.norms import norm
from fedsub_app.training.problem import Problem

Run = Callable[..., tuple[Any, Path]]
BATCH_NORM: dict[str, Any] = {"model": "lenet5-bn", "image-size": 16, "method": "fedavg", "partition": "iid"}


def settings_in(folder: Path) -> Any:
    return json.loads((folder / "settings.json").read_text())


@pytest.mark.parametrize("of", ["model.safetensors", "", "checkpoint"])
def test_a_run_begins_with_another_ones_model(run_local: Run, of: str) -> None:
    """Of its file or its directory, finished or not; the scores of round 0 are those of its last round."""
    _, first = run_local("first", num_rounds=2)
    if of == "checkpoint":
        (first / "model.safetensors").unlink()
    named = first / of if of != "checkpoint" else first
    _, second = run_local("second", num_rounds=1, start_from=str(named))
    last, start = rounds(first)[-1], rounds(second)[0]
    assert {key: last[key] for key in start if key.startswith("global")} == {
        key: start[key] for key in start if key.startswith("global")
    }
    file = first / "checkpoints/round-000002.safetensors" if of == "checkpoint" else first / "model.safetensors"
    assert settings_in(second)["own-code"]["start-from"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("how", ["extended", "failed"])
def test_a_run_that_has_gone_on_is_no_longer_what_it_was(
    how: str, run_local: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first end, it gives the model of its last checkpoint and has no summary."""
    answers = Federation.answers
    with monkeypatch.context() as patch:
        if how == "failed":
            patch.setattr(
                Federation, "answers", lambda *of: (a for a in answers(*of) if of[1].outbox.header["round"] < 2)
            )
            with pytest.raises(RunFailed):
                run_local("first", num_rounds=4, max_abandoned=1)
        else:
            run_local("first", num_rounds=2)
    first = tmp_path / "first"
    more = ["num-rounds=4"] if how == "extended" else []
    assert fedsub(tmp_path, "run", "--resume", str(first), *more, die=("before training", 4)).code == -signal.SIGKILL
    assert read_run(first).status == "in round 3"
    _, second = run_local("second", num_rounds=1, start_from=str(first))
    assert rounds(second)[0]["global-loss"] == rounds(first)[3]["global-loss"]


def test_a_start_at_the_seeds_model_is_the_run_without_it(run_local: Run, tmp_path: Path) -> None:
    """Bit for bit, of a method whose clients begin with the initial model; and in two processes, and resumed."""
    keys: dict[str, Any] = {"method": "ditto", "num_rounds": 4, "keep_checkpoints": 0}
    _, plain = run_local("plain", **keys)
    network = Problem.of(resolve({"model": "feature-mlp"})).network()
    save_file({name: x.detach() for name, x in tensors_of(network).items()}, tmp_path / "seeds.safetensors")
    keys["start_from"] = str(tmp_path / "seeds.safetensors")
    ends_as_if_never_stopped(run_local, tmp_path, keys)
    whole = tmp_path / "whole"
    assert (whole / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    given = settings_in(whole)["settings"] | {"run-dir": str(tmp_path / "two")}
    done = fedsub(tmp_path, "run", *pairs(given), "--workers", "2")
    assert done.code == 0, done.err
    assert (tmp_path / "two/model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    of_clients = [sorted((folder / "clients").rglob("round-000004.safetensors")) for folder in (plain, whole)]
    states = [[load_file(path) for path in paths] for paths in of_clients]
    assert len(states[0]) == 2
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_clients_begin_with_the_files_model(run_local: Run, tmp_path: Path) -> None:
    """A client of Ditto that trains little keeps its own model near it."""
    _, first = run_local("first", num_rounds=1)
    _, second = run_local("second", num_rounds=1, method="ditto", start_from=str(first), lr=1e-6)
    start = load_file(first / "model.safetensors")
    for path in (second / "clients").rglob("round-*.safetensors"):
        own = {name.removeprefix("own/"): x for name, x in read_tensors(path)[0].items() if name.startswith("own/")}
        assert norm([own[name] - x for name, x in start.items()]) < 1e-3 * norm(start.values())


def test_lora_begins_with_the_adapters_of_a_run(run_local: Run) -> None:
    keys: dict[str, Any] = {"trainable": "lora", "method": "fedit", "model": "fedpews-cnn"}
    _, first = run_local("first", num_rounds=1, **keys)
    _, second = run_local("second", num_rounds=1, start_from=str(first), **keys)
    assert rounds(second)[0]["global-loss"] == rounds(first)[-1]["global-loss"]
    for file in (first, first / "model.safetensors", first / "checkpoints/round-000001.safetensors"):
        with pytest.raises(UserError, match=rf"^lora-alpha = 32: must be 16, as in start-from = '{file}'$"):
            run_local("third", start_from=str(file), lora_alpha=32.0, **keys)
    _, fourth = run_local("fourth", num_rounds=1, start_from=str(file), **keys)
    assert rounds(fourth)[0]["global-loss"] == rounds(first)[-1]["global-loss"]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {n: x.detach().clone() for n, x in tensors_of(Problem.of(resolve(BATCH_NORM)).network()).items()}


def test_what_a_file_may_hold_besides(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The counts of a BatchNorm, which torch's state_dict has; tensors in any order."""
    counts = {"bn.num_batches_tracked": torch.tensor(3)}
    save_file(dict(reversed(tensors.items())) | counts, tmp_path / "x.safetensors")
    keys = BATCH_NORM | {"start-from": str(tmp_path / "x.safetensors")}
    _, _, strategy = prepare(resolve(keys))
    assert list(strategy.current) == list(tensors)
    assert "start-from = " in plan(resolve(keys))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"conv1.weight": None},
            r"tensor 'conv1.weight' is none, must be torch.float32 \(.*\) with model = 'lenet5",
        ),
        ({"other": torch.zeros(3)}, r"tensor 'other' is torch.float32 \(3,\), must be none with model = 'lenet5-bn'$"),
        ({"conv1.bias": torch.zeros(7)}, r"tensor 'conv1.bias' is torch.float32 \(7,\), must be torch.float32 \(6,\)"),
        ({"conv1.bias": torch.zeros(6).half()}, r"tensor 'conv1.bias' is torch.float16 \(6,\), must be torch.float32"),
        ({"conv1.bias": torch.full((6,), torch.nan)}, "tensor 'conv1.bias' has NaN or infinite values$"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(
    tensors: dict[str, torch.Tensor], change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    save_file({n: x for n, x in (tensors | change).items() if x is not None}, tmp_path / "x.safetensors")
    keys = BATCH_NORM | {"start-from": str(tmp_path / "x.safetensors")}
    with pytest.raises(UserError, match=rf"^start-from = '.*x.safetensors': {line}"):
        prepare(resolve(keys))


def test_files_that_are_none_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_text("no tensors")
    for name, line in (
        ("gone.safetensors", "start-from = '.*gone.safetensors': FileNotFoundError: "),
        ("bad.safetensors", "start-from = '.*bad.safetensors': SafetensorError: "),
        ("", ".*: no model.safetensors and no checkpoint"),
    ):
        with pytest.raises(UserError, match=f"^{line}"):
            prepare(resolve({"method": "fedavg", "start-from": str(tmp_path / name)}))


def test_a_run_over_another_base_is_no_start(run_local: Run) -> None:
    """The base is of the seed here; with pretrained weights it may be of another file."""
    keys: dict[str, Any] = {"model": "fedpews-cnn", "trainable": "head", "train_per_class": 4, "num_rounds": 1}
    _, first = run_local("first", **keys)
    run_local("second", **keys, start_from=str(first))
    for file in (first, first / "model.safetensors"):
        with pytest.raises(UserError, match=rf"^model = .*: the frozen base .* is that of start-from = '{file}'$"):
            run_local("third", **keys, start_from=str(file), seed=1)


def test_a_run_whose_start_has_changed_is_not_resumed(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(tensors, file)
    settings = resolve({"start-from": str(file), "run-dir": str(tmp_path / "run")})
    open_run(settings).close()
    again = settings.model_copy(update={"resume": True})
    open_run(again).close()
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"^start-from = '.*x.safetensors': the file has changed since the run in"):
        open_run(again)
