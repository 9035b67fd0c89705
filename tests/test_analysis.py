"""Coverage and activations of a run's sub-networks."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsub_app import cli
from fedsub_app.analysis import unit_activations
from fedsub_app.models import unit_groups
from fedsub_app.protocol import Json
from fedsub_app.runs import read_rounds
from tests.test_fedpews import SETTINGS

Run = Callable[..., tuple[Json, Path]]


def test_activations_by_hand() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0], [-1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 1.0]))
    found = unit_activations(model, unit_groups(model), torch.tensor([[1.0], [-1.0], [3.0]]))
    assert found["0"].tolist() == [2 + 0 + 6, 0 + 2 + 0]


def test_a_channels_activation_is_the_sum_over_its_positions() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0]]).view(1, 1, 2, 2)
    assert unit_activations(model, unit_groups(model), x)["0"].tolist() == [7.0, 3.0]


@pytest.mark.parametrize("masks", ["learned", "fixed"])
def test_what_analyse_writes_agrees_with_the_run(
    run_local: Run, masks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = SETTINGS | {"keep-checkpoints": 0, "fedpews.masks": masks}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert cli.main(["analyse", str(folder), "--samples", "16"]) == 0
    for path in capsys.readouterr().out.split():
        assert Path(path).stat().st_size > 0
    header, *coverage = csv.reader((folder / "coverage.csv").open())
    assert header == ["round", "nobody", "one client", "several clients"]
    lines = read_rounds(folder)
    assert [[int(cell) for cell in row] for row in coverage] == [[t, *lines[t]["units-covered-by"]] for t in (1, 2)]
    header, *rows = csv.reader((folder / "activations.csv").open())
    assert header == ["round", "client", "layer", "all units", "own units", "other units"]
    assert len(rows) == 3 * 2 * 4  # rounds, clients, hidden layers
    halves = [row for row in rows if masks == "fixed"]
    for row in halves:  # both halves have the same number of units
        assert float(row[3]) == pytest.approx((float(row[4]) + float(row[5])) / 2, rel=1e-3)


def test_nothing_to_analyse_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyse", str(tmp_path)]) == 2
    assert "settings.json: not there" in capsys.readouterr().err
