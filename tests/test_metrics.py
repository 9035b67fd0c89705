"""The setting ``metrics``: scikit-learn's numbers, sums that add up, the spread over clients, and who gets none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.tasks import task_of
from fedsub_app.common.tensors import Json
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.training.local import added

ALL = ("auc", "f1", "balanced-accuracy")


def drawn(samples: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=random)
    output = torch.randn(samples, classes, generator=random)
    output[torch.arange(samples), y] += 1
    return output, y


@pytest.mark.parametrize("classes", [2, 5])
def test_they_are_scikit_learns(classes: int) -> None:
    """In percent; the area to the width of a bin. Sums of two batches are those of both."""
    from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

    task, (output, y) = task_of("classification", ALL), drawn(400, classes, 1)
    values = task.metrics(added(task.sums(output[part], y[part]) for part in (slice(0, 150), slice(150, 400))))
    said, p = output.argmax(1), output.softmax(1).numpy()
    area = roc_auc_score(y, p[:, 1]) if classes == 2 else roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert values["f1"] == pytest.approx(100 * f1_score(y, said, average="macro"))
    assert values["balanced_accuracy"] == pytest.approx(100 * balanced_accuracy_score(y, said))
    assert values["auc"] == pytest.approx(100 * area, abs=0.1)
    plain = task_of("classification")
    assert {name: values[name] for name in ("accuracy", "loss")} == pytest.approx(plain.metrics(plain.sums(output, y)))


@pytest.mark.parametrize("classes", [10, 100])
def test_the_area_of_a_network_that_is_hardly_trained(classes: int) -> None:
    """Whose probabilities are all near 1 / classes."""
    from sklearn.metrics import roc_auc_score

    task, (output, y) = task_of("classification", ("auc",)), drawn(20 * classes, classes, 1)
    y[:classes] = torch.arange(classes)
    found = task.metrics(task.sums(output / 100, y))["auc"]
    area = roc_auc_score(y, (output.double() / 100).softmax(1).numpy(), multi_class="ovr", average="macro")
    assert found == pytest.approx(100 * area, abs=0.1)


def test_a_client_without_some_classes() -> None:
    """By hand: labels 0 0 1 of three classes, predictions 0 1 1; no class 2, which counts nowhere."""
    task = task_of("classification", ALL)
    output = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 3, 0]])
    values = task.metrics(task.sums(output, torch.tensor([0, 0, 1])))
    assert values["f1"] == pytest.approx(100 * 2 / 3)  # 2/3 and 2/3
    assert values["balanced_accuracy"] == pytest.approx(75)  # 1/2 and 1
    assert values["auc"] == pytest.approx(75)  # of both classes: one pair right, one tied
    assert task.metrics(task.sums(output, torch.tensor([0, 0, 0])))["auc"] == 50


def test_a_run_reports_them(run_local: Callable[..., tuple[Json, Path]]) -> None:
    """On the server and of each client, with the members' spread; the other numbers are those of a run without."""
    keys: dict[str, Any] = {"evaluate": "global,personal", "num_rounds": 1, "num_clients": 4, "held_out_clients": 1}
    _, plain = run_local("plain", **keys)
    _, folder = run_local("all", **keys, metrics="auc, f1, balanced-accuracy, spread")
    line, before = read_rounds(folder)[-1], read_rounds(plain)[-1]
    for name in ("auc", "f1", "balanced_accuracy"):
        assert 0 < line[f"global-{name}"] <= 100
        each = [line["evaluated"][str(client)][f"personal-{name}"] for client in line["clients"]]
        assert line[f"personal-{name}"] == pytest.approx(np.mean(each))
        assert line[f"personal-{name}-sd"] == pytest.approx(np.std(each))
        assert line[f"personal-{name}-q10"] <= line[f"personal-{name}"] <= line[f"personal-{name}-q90"]
    assert line["personal-accuracy-sd"] >= 0
    same = [
        key for key in before if key in ("global-accuracy", "personal-accuracy", "train-loss", "flops", "norm-median")
    ]
    assert {key: line[key] for key in same} == {key: before[key] for key in same}


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="metrics = 'auc': task = 'regression' takes none but 'spread'"):
        resolve({"task": "regression", "metrics": "auc"})
    with pytest.raises(UserError, match="metrics = 'accuracy': allowed are auc, f1, balanced-accuracy, spread"):
        resolve({"metrics": "accuracy"})
    assert resolve({"task": "regression", "metrics": "spread"}).score.others == ("mae",)
