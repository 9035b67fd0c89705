"""What a user sees of bad input: one line that names it, and a run that goes on with what is good.

docs/bad-input.md lists all cases.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType
from helpers import fedsub, rounds, tree
from safetensors.torch import load_file

from fedsub_app.cli import main as cli
from fedsub_app.client_app import app
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.protocol import Update
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed, settings_of

RunLocal = Callable[..., tuple[Json, Path]]


Spoil = Callable[[Update], Update]


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return lambda update: replace(update, tensors=update.tensors | {name: change(update.tensors[name])})


def fill(name: str, value: float) -> Spoil:
    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new.view(-1)[-1] = value
        return new

    return tensor(name, change)


def without(name: str) -> Spoil:
    return lambda update: replace(update, tensors={k: v for k, v in update.tensors.items() if k != name})


def boom(update: Update) -> Update:
    raise ValueError("boom")


BOOM = f"client failed: ValueError: boom (test_bad_input.py:{boom.__code__.co_firstlineno + 1})"


def spoil_client_1(monkeypatch: pytest.MonkeyPatch, method: str, spoil: Spoil, clients: Iterable[int] = (1,)) -> None:
    """Register a client of ``method`` that trains as it should and then sends something else."""

    class Spoiled(METHODS[method].client):  # type: ignore[name-defined, misc]
        def run_training(self, sent: Tensors, config: Json) -> Update:
            update = super().run_training(sent, config)
            return spoil(update) if self.id in clients else update

    monkeypatch.setitem(METHODS, method, replace(METHODS[method], client=Spoiled))


class WithoutClient1(LocalGrid):
    """Two nodes; that of client 1 is never there."""

    def __init__(self, app: Any, overrides: Any) -> None:
        super().__init__(app, overrides, 2)
        del self.contexts[3]


KEYS: dict[str, dict[str, Value]] = {
    "fedavg": {"num_rounds": 2},
    "fedpews": {"num_rounds": 2, "fedpews__warmup_rounds": 2, "fedpews__others": "mean"},
    "fedpews fixed": {"num_rounds": 2, "fedpews__warmup_rounds": 2, "fedpews__masks": "fixed"},
}


def outcome(folder: Path) -> Any:
    """What a client's bad answer must not change."""
    return (folder / "model.safetensors").read_bytes(), [
        {key: value for key, value in line.items() if key not in ("dropped", "formula-bytes-down")}
        for line in rounds(folder)
    ]


BAD_ANSWERS: list[tuple[str, Spoil, str]] = [
    ("fedavg", fill("fc1.weight", math.nan), "tensor 'fc1.weight': NaN or infinite values"),
    ("fedavg", fill("bn1.bias", math.inf), "tensor 'bn1.bias': NaN or infinite values"),
    ("fedavg", fill("fc2.bias", -math.inf), "tensor 'fc2.bias': NaN or infinite values"),
    ("fedavg", tensor("fc1.weight", torch.t), "tensor 'fc1.weight': shape (64, 1000), expected (1000, 64)"),
    ("fedavg", tensor("fc1.bias", lambda old: old[:1]), "tensor 'fc1.bias': shape (1,), expected (1000,)"),
    ("fedavg", tensor("fc1.bias", lambda old: old[0]), "tensor 'fc1.bias': shape (), expected (1000,)"),
    ("fedavg", tensor("fc1.bias", lambda old: old[None]), "tensor 'fc1.bias': shape (1, 1000), expected (1000,)"),
    ("fedavg", tensor("fc1.bias", torch.Tensor.double), "tensor 'fc1.bias': dtype float64, expected float32"),
    (
        "fedavg",
        lambda update: replace(update, tensors=update.tensors | {"fc9.bias": torch.zeros(3)}),
        "tensor 'fc9.bias' was not asked for",
    ),
    ("fedavg", without("fc2.weight"), "tensor 'fc2.weight' is missing"),
    ("fedavg", lambda update: replace(update, tensors={}), "tensor 'fc1.weight' is missing (and 5 more)"),
    (
        "fedavg",
        lambda update: replace(update, num_examples=0),
        "num-examples = 0: must be {want}",
    ),
    (
        "fedavg",
        lambda update: replace(update, num_examples=-1),
        "num-examples = -1: must be {want}",
    ),
    (
        "fedavg",
        lambda update: replace(update, num_examples=10**12),
        "num-examples = 1000000000000: must be {want}",
    ),
    (
        "fedavg",
        lambda update: replace(update, metrics=update.metrics | {"train-loss": math.nan}),
        "metric 'train-loss' = nan: must be a number from -10000 to 10000",
    ),
    ("fedavg", boom, BOOM),
    ("fedavg", lambda update: Update(1, error="out of memory"), "client failed: out of memory"),
    ("fedpews", tensor("fedpews/mask", torch.Tensor.float), "tensor 'fedpews/mask': dtype float32, expected bool"),
    ("fedpews", tensor("fedpews/mask", lambda old: old * 0.5), "tensor 'fedpews/mask': dtype float32, expected bool"),
    ("fedpews", tensor("fedpews/mask", lambda old: old[:-1]), "tensor 'fedpews/mask': shape (999,), expected (1000,)"),
    ("fedpews", tensor("fc1.bias", lambda old: old[:-1]), "tensor 'fc1.bias': {have} values, its mask covers {want}"),
    ("fedpews", tensor("fc1.weight", lambda old: old[:1]), "tensor 'fc1.weight': 1 values, its mask covers {want}"),
    ("fedpews", fill("fedpews/theta", 1.5), "tensor 'fedpews/theta': values {have} to 1.5, expected 0 to 1"),
    ("fedpews", fill("fedpews/theta", -0.5), "tensor 'fedpews/theta': values -0.5 to {have}, expected 0 to 1"),
    ("fedpews", fill("fedpews/theta", math.nan), "tensor 'fedpews/theta': NaN or infinite values"),
    ("fedpews", without("fedpews/mask"), "tensor 'fedpews/mask' is missing"),
    (
        "fedpews fixed",
        tensor("fc1.bias", lambda old: torch.cat([old, old])),
        "tensor 'fc1.bias': {have} values, its mask covers {want}",
    ),
    (
        "fedpews fixed",
        lambda update: replace(update, tensors=update.tensors | {"fedpews/mask": torch.ones(1000, dtype=torch.bool)}),
        "tensor 'fedpews/mask' was not asked for",
    ),
]


@pytest.fixture(scope="module")
def without_client_1(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The outcome of a run in which client 1's node is not there."""
    found: dict[str, Any] = {}

    def run(name: str, keys: dict[str, Value]) -> Any:
        if name not in found:
            folder = tmp_path_factory.mktemp("without")
            overrides = keys | {"run-dir": str(folder), "placement": "pinned", "min-nodes": 1}
            run_experiment(WithoutClient1(app, overrides), settings_of(overrides))
            assert all(line["dropped"] == [{"client": 1, "reason": "its node is away"}] for line in rounds(folder)[1:])
            found[name] = outcome(folder)
        return found[name]

    return run  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    BAD_ANSWERS,
    ids=[f"{name}: {reason[:40]}" for name, _, reason in BAD_ANSWERS],
)
def test_a_bad_answer_is_named_and_does_not_count(
    name: str,
    spoil: Spoil,
    reason: str,
    run_local: RunLocal,
    without_client_1: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run goes on with client 0, and is what it is where client 1 does not take part at all."""
    method = name.split()[0]
    keys = KEYS[name] | {"method": method}
    honest = METHODS[method]
    spoil_client_1(monkeypatch, method, spoil)
    summary, folder = run_local(**keys)
    assert (summary["status"], summary["abandoned-rounds"], summary["dropped-replies"]) == ("completed", 0, 2)
    for line in rounds(folder)[1:]:
        (dropped,) = line["dropped"]
        assert dropped["client"] == 1
        assert matches(dropped["reason"], reason)
    monkeypatch.setitem(METHODS, method, honest)
    recorded = json.loads((folder / "settings.json").read_text())["settings"]
    assert outcome(folder) == without_client_1(name, recorded)


def matches(said: str, expected: str) -> bool:
    """Whether a line is the expected one; ``{have}`` and ``{want}`` stand for two different numbers."""
    for word in ("{have}", "{want}"):
        if word in expected:
            at = expected.index(word)
            number = ""
            while said[at + len(number) : at + len(number) + 1] in set("0123456789."):
                number += said[at + len(number)]
            expected = expected.replace(word, number or word)
    return said == expected


def test_the_mean_of_the_others_by_hand(run_local: RunLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients, one sends infinities: the model is the mean of the other two."""
    kept: list[Tensors] = []

    def spoil(update: Update) -> Update:
        if update.client != 1:
            kept.append(update.tensors)
            return update
        return fill("fc1.weight", math.inf)(update)

    spoil_client_1(monkeypatch, "fedavg", spoil, clients=(0, 1, 2))
    _, folder = run_local(num_clients=3, num_rounds=1)
    model = load_file(folder / "model.safetensors")
    assert len(kept) == 2
    for name in model:
        torch.testing.assert_close(model[name], (kept[0][name] + kept[1][name]) / 2)


def test_a_node_whose_process_dies_of_its_client(run_local: RunLocal) -> None:
    """An error reply, as Flower sends it for a ClientApp that raised or was killed."""

    def run(message: Message, context: Context) -> Message:
        if context.node_id == 3 and message.metadata.message_type == MessageType.TRAIN:
            raise MemoryError("the process was killed")
        return app(message=message, context=context)

    summary, folder = run_local(grid=lambda _, keys: LocalGrid(run, keys, 2), placement="pinned")  # type: ignore[arg-type]
    assert summary["status"] == "completed"
    reason = "node failed: MemoryError: the process was killed"
    assert [line["dropped"] for line in rounds(folder)[1:]] == [[{"client": 1, "reason": reason}]] * 3


def test_a_bad_evaluation_is_named(run_local: RunLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoiled(METHODS["fedavg"].client):  # type: ignore[name-defined, misc]
        def run_evaluation(self, sent: Tensors, config: Json, wanted: list[str]) -> Update:
            update = super().run_evaluation(sent, config, wanted)
            return replace(update, metrics={"global-local-accuracy": math.nan}) if self.id == 1 else update

    monkeypatch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], client=Spoiled))
    _, folder = run_local(num_rounds=1, evaluate="global-local")
    line = rounds(folder)[-1]
    reason = "metric 'global-local-accuracy' = nan: must be a number from 0 to 100"
    assert line["not-evaluated"] == [{"client": 1, "reason": reason}]
    assert line["global-local-accuracy"] == line["evaluated"]["0"]["global-local-accuracy"]


def test_a_run_without_any_evaluation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model is trained and kept. With the server's test of the global model the run is complete."""

    def fails(*_: object) -> Update:
        raise ValueError("no score")

    monkeypatch.setattr(METHODS["fedavg"].client, "run_evaluation", fails)
    for number, (evaluate, code) in enumerate([("personal", 1), ("global, personal", 0)]):
        folder = tmp_path / str(number)
        assert cli.main(command(folder, evaluate=evaluate, num_rounds=2)) == code
        assert json.loads((folder / "summary.json").read_text())["status"] == ("failed" if code else "completed")
        assert (folder / "model.safetensors").exists()
        said = (
            "failed: no client was evaluated in any round; last reason: client failed: ValueError: no score (test_bad"
        )
        assert (said in capfd.readouterr().err) == bool(code)


def test_a_damaged_client_state_is_named(run_local: RunLocal, tmp_path: Path) -> None:
    state = tmp_path / "run/clients/client-000001/round-000001.safetensors"

    class Truncating(LocalGrid):
        """Before round 2, the state that client 1 wrote in round 1 is cut."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            if [message.metadata.group_id for message in sent] == ["2"]:
                state.write_bytes(state.read_bytes()[:-1])
            return super().push_messages(sent)

    _, folder = run_local(grid=Truncating, method="fedpews", num_rounds=2, fedpews__warmup_rounds=2)
    (dropped,) = rounds(folder)[2]["dropped"]
    assert dropped["client"] == 1
    assert dropped["reason"].startswith(f"client failed: UserError: {state}: client state is truncated or damaged (")


# --- nobody answers well --------------------------------------------------------------------------------------------


def command(folder: Path, **more: Value) -> list[str]:
    keys = {"model": "feature-mlp", "method": "fedavg", "num-rounds": 5, "run-dir": str(folder)}
    keys |= {name.replace("_", "-"): value for name, value in more.items()}
    return ["run", *(part for key, value in keys.items() for part in ("-s", f"{key}={value}"))]


def test_all_bad_stops_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    honest = METHODS["fedavg"]
    spoil_client_1(monkeypatch, "fedavg", boom, clients=(0, 1))
    assert cli.main(command(folder, max_abandoned=2)) == 1
    assert capfd.readouterr().err == (
        "failed: 2 rounds in a row were abandoned (max-abandoned = 2); last reason: "
        f"fewer than min-replies = 1 valid replies; {BOOM}; checkpoint in {folder}\n"
    )
    dropped = [{"client": client, "reason": BOOM} for client in (0, 1)]
    start, *lines = rounds(folder)
    assert [(line["status"], line["dropped"]) for line in lines] == [("abandoned", dropped)] * 2
    assert lines[-1]["global-accuracy"] == start["global-accuracy"]  # the model did not change
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["abandoned-rounds"]) == ("failed", 2, 2)
    assert (folder / "checkpoints" / "round-000002.safetensors").exists()
    monkeypatch.setitem(METHODS, "fedavg", honest)  # the clients are repaired
    assert cli.main(["run", "--resume", str(folder)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["abandoned-rounds"]) == ("completed", 5, 2)


def test_abandoned_rounds_that_are_not_in_a_row(run_local: RunLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the quorum the old model stays; a good round in between starts the count anew."""
    number = iter(range(1, 9))

    def every_second_round(update: Update) -> Update:
        return update if next(number) % 2 else boom(update)

    spoil_client_1(monkeypatch, "fedavg", every_second_round)
    summary, folder = run_local(num_rounds=5, min_replies=2, max_abandoned=2)
    lines = rounds(folder)
    assert [line["status"] for line in lines[1:]] == ["ok", "abandoned", "ok", "abandoned", "ok"]
    assert lines[2]["global-loss"] == lines[1]["global-loss"]
    assert lines[3]["global-loss"] != lines[2]["global-loss"]
    assert (summary["status"], summary["abandoned-rounds"]) == ("completed", 2)


def test_nobody_there(run_local: RunLocal) -> None:
    class Leaving(LocalGrid):
        """All nodes go after round 1."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            pushed = super().push_messages(sent)
            if any(message.metadata.message_type == MessageType.TRAIN for message in sent):
                self.contexts.clear()
            return pushed

    with pytest.raises(RunFailed, match=r"^3 rounds in a row .*; last reason: .*; its node is away; checkpoint in "):
        run_local(grid=Leaving, num_rounds=9, node_timeout=0.1)


# --- settings and files ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of damaged data files."""
    folder = tmp_path_factory.mktemp("data")
    good = {
        "train_images": np.zeros((20, 8, 8), np.uint8),
        "train_labels": np.arange(20) % 10,
        "test_images": np.zeros((20, 8, 8), np.uint8),
        "test_labels": np.arange(20) % 10,
    }
    np.savez(folder / "good.npz", **good)
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:500])
    np.savez(folder / "floats.npz", **good | {"train_images": np.zeros((20, 8, 8), np.float32)})
    np.savez(folder / "short.npz", **good | {"train_labels": np.arange(19) % 10})
    np.savez(folder / "keyless.npz", **{key: value for key, value in good.items() if key != "test_labels"})
    (folder / "breastmnist.npz").write_bytes((folder / "good.npz").read_bytes()[:-100])
    return folder


WRONG_COMMANDS: list[tuple[list[str], str]] = [
    (["-s", "num-round=3"], "num-round = 3: unknown key; did you mean num-rounds?"),
    (["-s", "lr=-1"], "lr = -1: must be greater than 0"),
    (["-s", "lr=fast"], "lr = 'fast': must be a number"),
    (["-s", "lr"], "'lr': expected key=value"),
    (["-s", "method=fedavgg"], "method = 'fedavgg': allowed are {methods}"),
    (["fedpews/digit"], "experiment = 'fedpews/digit': no conf/fedpews/digit.toml; did you mean fedpews/digits?"),
    ([""], "experiment = '': must be a name of `fedsub list`, a TOML file or left out"),
    (["-s", "model=lenet"], "model = 'lenet' is not known; allowed: "),
    (["-s", "dataset=synthetic", "-s", "classes-per-client=2", "-s", "model=lenet5"], "model = 'lenet5' cannot take "),
    (["-s", "classes-per-client=11"], "classes-per-client = 11: expected 1 to 10, the number of classes"),
    (["-s", "min-replies=3"], "min-replies = 3: at most the 2 clients that take part in a round"),
    (["-s", "dataset=nowhere"], "dataset = 'nowhere': no such name, and no nowhere.npz, "),
    (["-s", "dataset=cut"], "{data}/cut.npz: not a readable npz file ("),
    (["-s", "dataset=floats"], "{data}/floats.npz: train images are float32 [20, 8, 8], expected uint8 "),
    (["-s", "dataset=short"], "{data}/short.npz: train has 19 labels for 20 images"),
    (["-s", "dataset=keyless"], "{data}/keyless.npz: missing key test_labels (found "),
    (["-s", "dataset=breastmnist"], "{data}/breastmnist.npz: not a readable MedMNIST file ("),
    (["-s", "train-per-class=500"], "train-per-class = 500: class 0 of digits has "),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG_COMMANDS, ids=[said[:40] for _, said in WRONG_COMMANDS])
def test_a_wrong_command_says_one_line_and_writes_nothing(
    arguments: list[str], said: str, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = fedsub(tmp_path, "run", *arguments, "-s", f"run-dir={folder}", "-s", f"data-dir={data}")
    assert done.code == 2, done.err
    (line,) = done.err.splitlines()
    assert line.startswith("error: " + said.format(data=data, methods=", ".join(METHODS)))
    assert not folder.exists()


WRONG_ARGUMENTS: list[tuple[str, str]] = [
    (
        "run fedpews/digits -s experiment=fedpews/cifar-mnist",
        "-s experiment=fedpews/cifar-mnist: not beside fedpews/digits, which sets experiment",
    ),
    ("run --resume x -s run-dir=y", "-s run-dir=y: not beside --resume x, which sets run-dir"),
    ("run --resume x -s resume=false", "-s resume=False: not beside --resume x, which sets resume"),
    ("run -s method=fedselect -s fedpews.lambda=1", "fedpews.lambda = 1: does nothing with method = 'fedselect'"),
    ("reproduce fedpews-table2 --seeds -1", "Invalid value for '--seeds': -1 is not in the range 1<=x<=1000."),
    (
        "reproduce fedpews-table2 --seeds 9999999",
        "Invalid value for '--seeds': 9999999 is not in the range 1<=x<=1000.",
    ),
    ("reproduce fedpews-table2 --workers -1", "Invalid value for '--workers': -1 is not in the range 1<=x<=1000."),
    (
        "reproduce fedpews-table2 --only FedAvg -s fedpews.lambda=1",
        "fedpews.lambda = 1: does nothing: no row of the table runs that method",
    ),
    *(
        (
            f"reproduce fedpews-table2 -s {key}=1",
            f"-s {key}: the table sets it; allowed are the other keys, and --seeds",
        )
        for key in ("seed", "run-dir", "resume", "experiment", "method")
    ),
    ("analyse x --starts y", "--starts y: only with --approximation ROUNDS"),
    ("report {run} --out /no-such-folder/x.png", "/no-such-folder/x.png: No such file or directory"),
    ("report {run} --out x.xyz", "x.xyz: Format 'xyz' is not supported (supported formats: "),
    ("report {run}/rounds.jsonl", "{run}/rounds.jsonl: not the directory of a run (no readable settings.json)"),
    (f"run -s run-dir=/{'a' * 300}", f"run-dir = '/{'a' * 300}': cannot be made (File name too long)"),
    (f"run -s dataset={'a' * 300}", f"dataset = '{'a' * 99}…: must be the name of a data set, or names joined by +"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG_ARGUMENTS, ids=[said[:40] for _, said in WRONG_ARGUMENTS])
def test_a_wrong_argument_is_one_line(
    arguments: str, said: str, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.format(run=a_run).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said.format(run=a_run)}")
    assert not tree(tmp_path)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a") / "run"
    overrides: dict[str, Value] = {"model": "feature-mlp", "method": "fedavg", "num-rounds": 1, "run-dir": str(folder)}
    run_experiment(LocalGrid(app, overrides), settings_of(overrides))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test needs to be missing")
def test_no_cuda(tmp_path: Path) -> None:
    done = fedsub(tmp_path, *command(tmp_path / "run", device="cuda"))
    said = "error: device = 'cuda': this machine has no CUDA device; allowed here are auto, cpu\n"
    assert (done.code, done.err) == (2, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_run_directory_that_is_a_file(below: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert cli.main(command(Path(f"{tmp_path}/file{below}"))) == 2
    reason = "Not a directory" if below else "File exists"
    assert capfd.readouterr().err == f"error: run-dir = '{tmp_path}/file{below}': cannot be made ({reason})\n"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON (Expecting property name"),
        ("{}", "not a run's settings (settings, run-id)"),
        ("[1]", "not a JSON object"),
        ('{"settings": {}}', "not a run's settings (settings, run-id)"),
        ("\x00", "not valid JSON (Expecting value"),
    ],
)
def test_a_damaged_settings_file_is_refused(
    content: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(content)
    assert cli.main(["run", "--resume", str(tmp_path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'settings.json'}: {said}")
    assert tree(tmp_path) == {"settings.json": content.encode()}
