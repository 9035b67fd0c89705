"""Tasks: losses and metrics by hand, sums that add up, scores of which a low one is good, refusals in one line."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedsub
import fedsub_app
from fedsub_app.common.errors import UserError
from fedsub_app.common.score import Score
from fedsub_app.common.section import Value
from fedsub_app.common.tasks import IGNORED, TASKS, MultiLabel, NextToken, Regression, Task, registered, task_of
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset
from fedsub_app.federation.protocol import Update
from fedsub_app.library.client import with_loss, with_metrics
from fedsub_app.reports.compare import cost_text, summary_text
from fedsub_app.reports.cost_to_accuracy import costs_to_accuracy
from fedsub_app.reports.curves import Group
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import ended_by, from_line, summarise, to_line
from fedsub_app.training.local import added, evaluate
from fedsub_app.training.problem import Problem

RMSE = TASKS["regression"].about


def batch(name: str) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    output = torch.randn(12, 5, 4, generator=draws)
    labels = torch.randint(4, (12, 5), generator=draws)
    labels[::3, 2:] = -100
    return {
        "classification": (output[:, 0], torch.arange(12) % 4),
        "multi-label": (output[:, 0], (output[:, 1] > 0).float()),
        "regression": (output[:, 0], output[:, 1]),
        "next-token": (output, labels),
    }[name]


@pytest.mark.parametrize("name", TASKS)
def test_sums_of_parts_add_up_to_the_whole(name: str) -> None:
    task, (output, y) = TASKS[name], batch(name)
    parts = [task.sums(output[part], y[part]) for part in (slice(0, 3), slice(3, 4), slice(4, 12))]
    added = task.metrics({key: sum(part[key] for part in parts) for key in parts[0]})
    whole = task.metrics(task.sums(output, y))
    assert added == pytest.approx(whole)
    assert whole.keys() == {task.score, "loss", *task.others}
    assert task.low <= whole[task.score] <= task.high


@pytest.mark.parametrize("name", TASKS)
def test_the_mean_loss_is_that_of_the_metrics(name: str) -> None:
    task, (output, y) = TASKS[name], batch(name)
    mean, total, each = (task.loss(output, y, how) for how in ("mean", "sum", "none"))
    assert each.shape == (len(y),)
    assert float(total / task.count(y)) == pytest.approx(float(mean))
    assert task.metrics(task.sums(output, y))["loss"] == pytest.approx(float(mean))


def test_a_regression_by_hand() -> None:
    """Errors 1, 3 and 1, 1 of two samples: squares 10 / 2 and 2 / 2, sizes 4 / 2 and 2 / 2."""
    output, y = torch.tensor([[1.0, 3.0], [0.0, 2.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    task = Regression()
    assert task.loss(output, y, "none").tolist() == [5.0, 1.0]
    assert task.metrics(task.sums(output, y)) == {"rmse": math.sqrt(3), "mae": 1.5, "loss": 3.0}


def test_the_area_under_the_curve_is_scikit_learns() -> None:
    from sklearn.metrics import f1_score, roc_auc_score

    draws = torch.Generator().manual_seed(1)
    y = (torch.rand(300, 3, generator=draws) < 0.2).float()
    output = (torch.randn(300, 3, generator=draws) + y).mul(100).round() / 100 + 0.005  # amid the bins
    task = MultiLabel()
    found = task.metrics(task.sums(output, y))
    assert found["auroc"] == pytest.approx(100 * roc_auc_score(y, output), abs=1e-3)
    assert found["f1"] == pytest.approx(100 * f1_score(y, output > 0, average="micro"))
    assert task.metrics(task.sums(output[:2], torch.zeros(2, 3)))["auroc"] == 50.0


def test_tokens_that_do_not_count_are_left_out() -> None:
    output, y = torch.randn(2, 3, 4), torch.tensor([[1, -100, -100], [2, 0, 3]])
    task = NextToken()
    expected = F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=-100)
    assert torch.allclose(task.loss(output, y), expected)
    found = task.metrics(task.sums(output, y))
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)))
    assert task.count(y) == 4


@pytest.mark.parametrize(
    ("name", "y", "output", "message"),
    [
        ("classification", torch.tensor([0, 3]), (3,), "label 3: must be 0 to 2, the network has 3 outputs"),
        ("classification", torch.tensor([0.5]), (3,), r"y of shape \(1,\), torch.float32: must be \[n\], integers"),
        ("multi-label", torch.ones(2, 3), (2,), r"y of shape \(2, 3\): must be \[n, 2\], a column an output"),
        ("multi-label", torch.full((2, 2), 2.0), (2,), "y from 2 to 2: must be 0 or 1"),
        ("regression", torch.ones(2, 3), (2,), r"y of shape \(2, 3\): must be \[n, 2\] as the outputs"),
        ("regression", torch.tensor([math.nan]), (1,), "y: must be finite numbers"),
        ("next-token", torch.zeros(2, 3).long(), (4, 9), r"must be \[n, 4\], integers"),
        ("next-token", torch.full((2, 3), 9), (3, 9), "label 9: must be 0 to 8"),
    ],
)
def test_targets_of_another_form_are_refused(name: str, y: Tensor, output: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASKS[name].targets(y, output)


def test_a_loss_and_metrics_of_ones_own() -> None:
    output, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    task = with_metrics(
        with_loss(Regression(), lambda o, t: (o - t).abs().mean()), lambda o, t: {"top": float(o.max())}
    )
    assert task.metrics(task.sums(output, y)) == {"top": 3.0, "rmse": math.sqrt(5), "mae": 2.0, "loss": 2.0}
    words = with_loss(NextToken(), lambda o, t: torch.tensor(2.0))
    assert words.loss(output, torch.tensor([[1, 2, IGNORED]]), "sum") == 4  # of two tokens
    with pytest.raises(ValueError, match="loss=: gives the mean of a batch"):
        task.loss(output, y, "none")
    with pytest.raises(UserError, match=r"^metrics=: returned None; must be numbers by name$"):
        with_metrics(Regression(), lambda o, t: None).sums(output, y)
    task = with_metrics(Regression(), lambda o, t: {"mae": 0.0})
    with pytest.raises(UserError, match=r"^metrics=: returned 'mae', which the task has of its own; name it"):
        task.metrics(task.sums(output, y))
    task = with_metrics(Regression(), lambda o, t: {"most": float(t.max())} if bool(t.any()) else {})
    both = added([task.sums(output, y), task.sums(output, y + 4), task.sums(output[:1], y[:1] + 1)])
    assert task.metrics(both)["most"] == 3.0  # of 4, 4 and 1: the first batch has none


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"iou": torch.tensor(0.5), "loss": np.float32(1)}, ""),
        ({"loss": 1.0}, "^Shares.metrics: returned loss; must have 'iou'$"),
        ({"iou": 1.0}, "^Shares.metrics: returned iou; must have 'loss'$"),
        ({"iou": torch.ones(2), "loss": 1.0}, "^Shares.metrics: returned {'iou': .*; must be numbers by name$"),
        (None, "^Shares.metrics: returned None; must be numbers by name$"),
    ],
)
def test_metrics_of_a_task_of_ones_own_are_numbers_with_its_score(found: Any, said: str) -> None:
    class Shares(Regression):
        score = "iou"

        def metrics(self, sums: Any) -> Any:
            return found

    x = torch.ones(3, 2)
    if said:
        with pytest.raises(UserError, match=said):
            evaluate(Shares(), nn.Linear(2, 1), x, x[:, :1])
        return
    values = evaluate(Shares(), nn.Linear(2, 1), x, x[:, :1])
    assert {type(value) for value in values.values()} == {float}
    assert values == {"iou": 0.5, "loss": 1.0}


# --- the score in lines, summaries and comparisons --------------------------------------------------------------------


def test_a_low_score_can_be_the_better_one() -> None:
    assert (RMSE.best([3.0, 1.0]), RMSE.better(1.0, 3.0), RMSE.reached(2.0, 2.0)) == (1.0, True, True)
    assert Score().better(93.0, 90.0)
    assert not Score().better(90.0, 90.0)
    assert (Score().text(93.214), RMSE.text(0.123456), RMSE.titled("global")) == ("93.21 %", "0.1235", "global")


def test_a_run_stops_at_a_low_score_and_names_its_best() -> None:
    lines = [{"round": number, "global-rmse": value} for number, value in enumerate((9.0, 5.0, 4.0, 6.0))]
    keys = {"task": "regression", "method": "fedavg", "target-score": 5.0}
    summary = summarise(lines, resolve(keys))
    assert (summary["final-global-rmse"], summary["best-global-rmse"], summary["rounds-to-target"]) == (6.0, 4.0, 1)
    assert ended_by(lines, resolve(keys | {"stop-at-score": 4.0})) == "stop-at-score"
    assert ended_by(lines, resolve(keys | {"stop-at-score": 3.9})) is None


def test_a_last_score_that_is_no_number_is_not_an_earlier_rounds() -> None:
    """As a task of one's own may return it: a round's line then has the loss alone."""
    scores = enumerate((9.0, 5.0, math.nan))
    lines = [from_line(to_line({"round": k, "global-rmse": score, "global-loss": 1.0})) for k, score in scores]
    summary = summarise(lines, resolve({"task": "regression"}))
    assert "final-global-rmse" not in summary
    assert summary["best-global-rmse"] == 5.0


def test_the_cost_of_a_low_score() -> None:
    """The best mean is 4.5, its threshold 5; the other run never comes there."""
    runs = {
        name: [{"round": k, "global-rmse": value, "flops": 1e9} for k, value in enumerate([8.0] + [level] * 5)]
        for name, level in (("good", 4.5), ("bad", 6.0))
    }
    threshold, costs = costs_to_accuracy(runs, "global-rmse", RMSE)
    assert threshold == pytest.approx(5.0)
    assert (costs["good"].reached is not None, costs["bad"].reached) == (True, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "ranking"}, "task = 'ranking': allowed are classification, multi-label, regression, next-token, or"),
        ({"target-score": 101.0}, "target-score = 101: must be less than or equal to 100"),
    ],
)
def test_settings_that_no_task_takes(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve({"method": "fedavg"} | keys)  # type: ignore[operator]


# --- data sets -------------------------------------------------------------------------------------------------------

DIABETES = {"task": "regression", "dataset": "diabetes", "model": "feature-mlp", "partition": "iid", "lr": 0.001}


def test_diabetes_is_scikit_learns() -> None:
    from sklearn.datasets import load_diabetes

    data = load_dataset(resolve(DIABETES).data)
    assert (data.train_x.shape, data.train_y.shape, data.test_y.shape) == ((354, 10), (354, 1), (88, 1))
    assert data.num_classes == 1
    every = torch.cat((data.train_x[:], data.test_x[:]))
    theirs = load_diabetes(scaled=False)
    x = torch.tensor((theirs.data - theirs.data.mean(0)) / theirs.data.std(0))
    nearest = torch.cdist(every.double(), x).min(1)
    assert float(nearest.values.max()) < 1e-4
    assert nearest.indices.unique().tolist() == list(range(442))
    assert torch.cat((data.train_y, data.test_y))[:, 0].tolist() == theirs.target[nearest.indices].tolist()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "classification"}, "dataset = 'diabetes', train: y of shape"),
        ({"partition": "classes"}, "partition = 'classes': needs classes, diabetes has none; allowed are 'iid'"),
        ({"train-per-class": 5}, "train-per-class = 5: diabetes has no classes; must be 0"),
        ({"attack": "label-flip"}, "attack = 'label-flip': needs classes, task = 'regression' has none"),
        ({"method": "fedpac"}, "task = 'regression': has no classes, whose means fedpac aligns"),
        ({"method": "heterofl"}, "heterofl.masked-loss = True: needs classes, task = 'regression' has none"),
    ],
)
def test_what_needs_classes_says_so(
    keys: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        fedsub_app.run(DIABETES | {"method": "fedavg", "num-rounds": 1} | keys)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.run
def test_a_regression_end_to_end(tmp_path: Path) -> None:
    keys = DIABETES | {"method": "ditto", "evaluate": "global, personal", "num-rounds": 3, "validation-fraction": 0.2}
    runs = [fedsub_app.run(keys | {"run-dir": str(tmp_path / f"{s}"), "seed": s}) for s in range(2)]  # type: ignore
    lines = runs[0].lines
    measured = {"global-rmse", "global-mae", "personal-rmse", "personal-mae", "personal-validation-rmse"}
    assert measured <= lines[-1].keys()
    assert lines[-1]["global-rmse"] < lines[0]["global-rmse"]
    assert not any("accuracy" in key for key in [*lines[-1], *runs[0].summary])
    assert runs[0].score[:3] == RMSE[:3]
    folders = [run.folder for run in runs]
    groups = [Group(folder.name, (read_run(folder),)) for folder in folders]
    assert "global rmse  personal rmse" in summary_text(groups)
    assert "Cost to rmse. Best: the lowest mean rmse" in cost_text(groups)
    other = fedsub_app.run({"num-rounds": 2, "num-clients": 2, "method": "fedavg", "run-dir": str(tmp_path / "digits")})
    text = cost_text([*groups, Group("digits", (read_run(other.folder),))])
    assert text.startswith("Cost to rmse and accuracy. Best: the lowest mean rmse")
    assert "Best: the highest mean accuracy" in text
    assert re.search(r"\| run +\| threshold +\| score +\| best +\| rounds", text)
    assert re.search(r"\| digits +\| [\d.]+ +\| global accuracy +\|", text)
    assert (folders[0] / "curve.png").exists()


@pytest.fixture
def chest(tmp_path: Path) -> Path:
    import numpy as np

    draws = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 80), ("val", 8), ("test", 40)):
        labels = draws.integers(0, 2, (count, 14), dtype=np.uint8)
        images = draws.integers(0, 99, (count, 28, 28), dtype=np.uint8)
        images[:, :14] += 100 * labels[:, :1, None]  # bright above: the first label
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    np.savez(tmp_path / "chestmnist.npz", **arrays)
    return tmp_path


@pytest.mark.run
def test_several_labels_an_image_end_to_end(chest: Path) -> None:
    keys = {"task": "multi-label", "dataset": "chestmnist", "data-dir": str(chest), "model": "lenet5"}
    keys |= {"partition": "iid", "method": "fedavg", "num-rounds": 2, "evaluate": "global, global-local"}
    record = fedsub_app.run(keys | {"run-dir": str(chest / "run")})  # type: ignore[arg-type]
    assert {"global-auroc", "global-f1", "global-local-auroc"} <= record.lines[-1].keys()
    assert record.summary["best-global-auroc"] >= record.summary["final-global-auroc"]


def test_several_labels_an_image_are_those_of_the_file(chest: Path) -> None:
    keys = {"task": "multi-label", "dataset": "chestmnist", "data-dir": str(chest)}
    data, file = load_dataset(resolve(keys).data), np.load(chest / "chestmnist.npz")
    for y, split in ((data.train_y, "train"), (data.test_y, "test")):
        assert y.tolist() == file[f"{split}_labels"].tolist()


def test_labels_of_several_kinds_are_not_joined(chest: Path) -> None:
    said = r"dataset = 'chestmnist\+digits': labels of several kinds; sets joined by '\+' must have one"
    with pytest.raises(UserError, match=said):
        load_dataset(resolve({"dataset": "chestmnist+digits", "task": "multi-label", "data-dir": str(chest)}).data)


# --- tasks of one's own -----------------------------------------------------------------------------------------------

OWN = """
import torch
import fedsub

class Quantile(fedsub.Task):
    score, high_is_good, low = "pinball", False, 0.0

    def loss(self, output, y, reduction="mean"):
        error = y - output
        each = torch.maximum(0.9 * error, -0.1 * error).mean(1)
        return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()

    def sums(self, output, y):
        return {"loss": float(self.loss(output, y, "sum")), "count": len(y)}

    def metrics(self, sums):
        return {"pinball": sums["loss"] / sums["count"], "loss": sums["loss"] / sums["count"]}

    def targets(self, y, output):
        return y.view(-1, 1)

class Not: pass
"""


def test_the_task_of_the_page_pairs_each_label_with_its_output() -> None:
    page = (Path(__file__).parents[1] / "docs/own-data.md").read_text()
    names: dict[str, Any] = {"fedsub": fedsub, "torch": torch}
    exec(page.split("```python\n")[1].split("```")[0], names)
    output = torch.tensor([[1.0], [3.0], [5.0]])
    for y in (torch.tensor([2.0, 2.0, 5.0]), torch.tensor([[2.0], [2.0], [5.0]])):
        assert names["Quantile"]().loss(output, y, "none").tolist() == pytest.approx([0.9, 0.1, 0.0])


@pytest.mark.run
def test_a_task_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(OWN)
    keys = DIABETES | {"task": f"{tmp_path}/my_task.py:Quantile", "method": "fedavg", "num-rounds": 2}
    record = fedsub_app.run(keys | {"evaluate": "global, global-local", "run-dir": str(tmp_path / "run")})  # type: ignore
    assert record.lines[-1]["global-pinball"] < record.lines[0]["global-pinball"]
    assert json.loads((tmp_path / "run/settings.json").read_text())["score"]["high_is_good"] is False
    with pytest.raises(UserError, match=r"attack = 'label-flip': needs classes, task = '.*:Quantile' has none"):
        fedsub_app.run(keys | {"attack": "label-flip"})  # type: ignore[arg-type]
    (tmp_path / "my_task.py").unlink()
    assert read_run(tmp_path / "run").score.name == "pinball"  # pages need no code
    (tmp_path / "my_task.py").write_text(OWN + "#\n")
    with pytest.raises(UserError, match=r"must be a class derived from fedsub\.Task"):
        task_of(f"{tmp_path}/my_task.py:Not")
    (tmp_path / "my_task.py").write_text("import fedsub\nclass Half(fedsub.Task):\n    def loss(self, *given): ...\n")
    with pytest.raises(UserError, match="the class lacks metrics, sums"):
        task_of(f"{tmp_path}/my_task.py:Half")


PIXELS = """
import fedsub
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class Pixels(fedsub.Task):
    def outputs(self, y):
        return 2

    def output(self, y, outputs):
        return (outputs, *y.shape[1:])

    def loss(self, output, y, reduction="mean"):
        return cross_entropy(output, y) * (len(y) if reduction == "sum" else 1)

    def sums(self, output, y):
        return {"right": float((output.argmax(1) == y).float().mean((1, 2)).sum()), "count": len(y)}

    def metrics(self, sums):
        return {"score": sums["right"] / sums["count"], "loss": 0.0}

def net(in_shape, num_classes):
    return nn.Conv2d(in_shape[0], num_classes, 3, padding=1)

def load(seed):
    x = torch.randn(12, 1, 5, 6)
    return (x[:8], (x[:8, 0] > 0).long()), (x[8:], (x[8:, 0] > 0).long())
"""


@pytest.mark.run
def test_a_task_may_have_outputs_before_other_axes(tmp_path: Path) -> None:
    """As a segmentation's classes, [n, classes, height, width]; the network was asked for 6 classes, the width."""
    (tmp_path / "my.py").write_text(PIXELS)
    names = {"task": "Pixels", "model": "net", "dataset": "load"}
    keys = {"method": "fedavg", "partition": "iid", "num-rounds": 1, "run-dir": str(tmp_path / "run")}
    keys |= {key: f"{tmp_path}/my.py:{name}" for key, name in names.items()}
    assert fedsub_app.run(keys).model().weight.shape == (2, 1, 3, 3)  # type: ignore[arg-type]


@pytest.mark.run
def test_objects_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))

    class Halved(Regression):
        score = "half"

        def metrics(self, sums):  # type: ignore[no-untyped-def]
            return {"half": super().metrics(sums)["rmse"] / 2, "mae": 0.0, "loss": 1.0}

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    pair = (x, x.sum(1))
    net: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    record = fedsub_app.run(
        {"method": "fedavg", "num-rounds": 3, "partition": "iid"}, model=net, data=(pair, pair), task=Halved()
    )
    assert record.lines[-1]["global-half"] < record.lines[0]["global-half"]
    assert isinstance(task_of("own:Halved"), Task)


def test_a_task_that_another_of_its_name_replaces(tmp_path: Path) -> None:
    """Other numbers of the same class, or another text of the file: the next run of the process learns by these."""

    @dataclass  # whose objects have no hash
    class Scaled(Regression):
        factor: float

        def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
            return super().targets(y, output) * self.factor

    file, same = tmp_path / "my_task.py", []
    for factor in (0.5, 0.25):
        file.write_text(OWN.replace("y.view(-1, 1)", f"y.view(-1, 1) * {factor}"))
        of_file = f"{file}:Quantile"
        problems = [Problem.of(resolve(DIABETES | {"task": name})) for name in (registered(Scaled(factor)), of_file)]
        assert getattr(problems[0].task, "factor", 0) == factor
        same.append([problem.data.train_y / factor for problem in problems])
    assert all(torch.equal(before, now) for before, now in zip(*same, strict=True))


@pytest.mark.run
def test_a_task_is_named_from_python_as_by_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    assert "global-rmse" in line_learnt("regression", num_rounds=1)[-1]
    with pytest.raises(UserError, match=r"^task = 'regresion': allowed are .*, regression, "):
        line_learnt("regresion")


def line_learnt(task: Task | str, **keys: Value) -> list[Json]:
    """Learn the sum of three numbers with ``robust``; returns the lines of the run."""
    x = torch.randn(160, 3, generator=torch.Generator().manual_seed(0))
    pair = (x, x.sum(1))
    net: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    settings: Any = {"method": "fedavg", "num-rounds": 4, "partition": "iid", "num-clients": 5, "robust": "on"}
    settings |= {"lr": 0.1, "batch-size": 4} | {key.replace("_", "-"): value for key, value in keys.items()}
    return fedsub_app.run(settings, model=net, data=(pair, pair), task=task).lines


@pytest.mark.run
def test_a_loss_below_zero_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``robust`` compares with multiples of earlier losses, and 1.5 times -10 is a better loss."""
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))

    class Density(Regression):
        losses = (-1e12, 1e12)

        def loss(self, output: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
            loss: torch.Tensor = super().loss(output, y, reduction)
            return loss - 10 * (len(y) if reduction == "sum" else 1)

    lines = line_learnt(Density())
    assert not any("abandoned" in line or line.get("dropped") for line in lines)
    assert lines[-1]["global-rmse"] < 0.5 * lines[0]["global-rmse"]
    chosen = line_learnt(Density(), method="fedtiny")  # whose clients send losses
    assert not any("abandoned" in line or line.get("dropped") for line in chosen)


@pytest.mark.run
def test_no_client_moves_the_mean_of_a_score_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))

    class Boaster(METHODS["fedavg"].client):  # type: ignore[name-defined, misc]
        def run_evaluation(self, sent: Tensors, config: Json, wanted: list[str]) -> Update:
            update: Update = super().run_evaluation(sent, config, wanted)
            said = {name: 9e8 for name in update.metrics if name.endswith(("-rmse", "-mae")) and self.id == 3}
            return replace(update, metrics=update.metrics | said)

    monkeypatch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], client=Boaster))
    last = line_learnt(Regression(), evaluate="personal")[-1]
    assert max(said["personal-rmse"] for said in last["evaluated"].values()) == 9e8
    assert last["personal-rmse"] < 10
    assert last["personal-mae"] < 10


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("output.mean() * float('nan')", "the loss of the first 32 training samples is nan before round 1"),
        ("output @ y", "the first 32 training samples have no loss: RuntimeError"),
        ("output.mean(0)", r"samples have no loss: ValueError: it has shape \(1,\), must be one number, \(\)$"),
        ("output.mean().item()", "the loss of the first 32 training samples: must be a tensor with a gradient$"),
        ("output.detach().mean()", "the loss of the first 32 training samples: must be a tensor with a gradient$"),
    ],
)
def test_a_loss_that_cannot_be_computed_is_said_before_round_1(tmp_path: Path, loss: str, message: str) -> None:
    (tmp_path / "my_task.py").write_text(OWN.replace("        error = y - output\n", f"        return {loss}\n"))
    keys = DIABETES | {"task": f"{tmp_path}/my_task.py:Quantile", "method": "fedavg", "run-dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=message):
        fedsub_app.run(keys)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_metrics_without_the_score_are_said_before_round_1(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(OWN.replace('{"pinball": ', '{"pinbal": '))
    keys = DIABETES | {"task": f"{tmp_path}/my_task.py:Quantile", "method": "fedavg", "evaluate": "personal"}
    with pytest.raises(UserError, match=r"^Quantile.metrics: returned pinbal, loss; must have 'pinball'$"):
        fedsub_app.run(keys | {"run-dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scale", [0.01, 1, 20, 100])
def test_areas_are_scikit_learns_however_sure_a_network_is(scale: float) -> None:
    from sklearn.metrics import roc_auc_score

    draws = torch.Generator().manual_seed(0)
    y = torch.randint(2, (2000,), generator=draws)
    z = scale * (torch.randn(2000, generator=draws) + 2 * y - 1)
    exact = pytest.approx(100 * roc_auc_score(y, z), abs=0.1)
    multi, further = TASKS["multi-label"], task_of("classification", ("auc",))
    assert multi.metrics(multi.sums(z[:, None], y[:, None].float()))["auroc"] == exact
    assert further.metrics(further.sums(torch.stack((-z / 2, z / 2), 1), y))["auc"] == exact
