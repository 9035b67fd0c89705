"""Coverage and activations of a run's sub-networks."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedsub_app.analysis.activations import unit_activations
from fedsub_app.cli import main as cli
from fedsub_app.common.reported import Reported
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.models import build_model, unit_groups
from fedsub_app.models.sources import adopted
from fedsub_app.reports.pictures import figure, legend_beside
from fedsub_app.runs.config import applicable_keys, resolve
from fedsub_app.runs.masks import overlap
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.masks import unpack_bits
from strategies.base import SubnetStrategy
from tests.test_fedpews import SETTINGS
from tests.test_fedselect import KEYS as FEDSELECT

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


def test_a_networks_own_batch_norm_is_before_the_activation() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 1)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0], [-1.0]]))
        model[0].bias.zero_()
        model[1].bias.copy_(torch.tensor([5.0, 5.0]))
    groups = unit_groups(adopted(model, (1,)))
    found = unit_activations(model, groups, torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(found["0"], torch.tensor([10.0, 10.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("masks", ["learned", "fixed"])
def test_what_analyse_writes_agrees_with_the_run(
    run_local: Run, masks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = SETTINGS | {"keep-checkpoints": 0, "fedpews.masks": masks}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert cli.main(["analyse", str(folder)]) == 0
    for path in capsys.readouterr().out.split():
        assert Path(path).stat().st_size > 0
    header, *rows = csv.reader((folder / "activations.csv").open())
    assert header == ["round", "client", "layer", "all units", "own units", "other units"]
    assert len(rows) == 3 * 2 * 4  # rounds, clients, hidden layers
    halves = [row for row in rows if masks == "fixed"]
    for row in halves:  # both halves have the same number of units
        assert float(row[3]) == pytest.approx((float(row[4]) + float(row[5])) / 2, rel=1e-3)


def strategy_of(**changes: Value) -> SubnetStrategy:
    settings = resolve(applicable_keys(SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}))
    model = build_model(settings.model, (5,), 4, settings.seed)
    return METHODS[settings.method].strategy(settings, model)


def test_learned_units_are_the_probable_ones() -> None:
    strategy = strategy_of()
    hidden = sum(group.size for group in strategy.units)
    strategy.theta = torch.tensor([0.25, 0.75]).view(2, 1).expand(2, hidden)
    found = strategy.unit_masks()
    assert found is not None
    assert found.tolist() == [[False] * hidden, [True] * hidden]
    assert strategy.position_masks() is None


def test_fixed_units_belong_to_one_client_each() -> None:
    strategy = strategy_of(fedpews__masks="fixed")
    strategy.load_state(strategy.state())
    found = strategy.unit_masks()
    assert found is not None
    assert found.sum(0).unique().tolist() == [1]


def test_methods_without_masks_say_so() -> None:
    strategy = strategy_of(method="fedavg")
    assert strategy.unit_masks() is None
    assert strategy.position_masks() is None


def test_a_list_has_a_curve_for_each_name_and_the_last_one_has_the_rest() -> None:
    about = Reported("title", "axis", curves=("none", "one", "several"))
    assert about.points([3, 0, 2, 5]) == [3, 0, 7]
    assert about.points([3, 1]) == [3, 1, 0]
    assert Reported("title", "axis").points(0.25) == [0.25]


def test_nothing_to_analyse_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyse", str(tmp_path)]) == 2
    assert "settings.json: not there" in capsys.readouterr().err


def test_overlap_by_hand() -> None:
    masks = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert overlap([masks]).tolist() == [[1, pytest.approx(1 / 3), 0], [pytest.approx(1 / 3), 1, 0], [0, 0, 1]]


def test_personal_masks_and_clients(run_local: Run) -> None:
    keys = FEDSELECT | {"keep-checkpoints": 0, "num-rounds": 3}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert cli.main(["analyse", str(folder)]) == 0
    rows = list(csv.reader((folder / "overlap.csv").open()))[1:]
    assert len(rows) == 3 * 5  # rounds, layers
    assert all(0 <= float(row[2]) <= 1 for row in rows)
    state = [load_file(folder / f"clients/client-{c:06d}/round-000003.safetensors") for c in range(3)]
    names = [max(n for n in client if n.startswith("mask/") and n.endswith("/fc3.weight")) for client in state]
    newest = [client[name] for client, name in zip(state, names, strict=True)]
    shapes = {"fc3.weight": torch.Size((128, 64))}
    masks = [unpack_bits({"fc3.weight": bits}, shapes)["fc3.weight"].flatten() for bits in newest]
    found = overlap([torch.stack(masks)])
    expected = float(found[~torch.eye(3, dtype=torch.bool)].mean())
    assert float(next(row[2] for row in rows if row[:2] == ["3", "fc3.weight"])) == pytest.approx(expected, abs=1e-4)
    for name in ("overlap", "overlap-rounds"):
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_masks_of_a_network_without_units(
    run_local: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch.nn import *\n"
        "def net(num_classes): return Sequential(Flatten(), Linear(5, 8), LayerNorm(8), Linear(8, num_classes))\n"
    )
    keys = FEDSELECT | {"num-rounds": 1, "model": f"{tmp_path / 'net.py'}:net"}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert cli.main(["analyse", str(folder)]) == 0
    assert "no units can be removed" in caplog.text
    assert "activations" not in capsys.readouterr().out
    assert (folder / "overlap.csv").exists()


def test_a_client_that_was_never_trained_is_in_no_mean_overlap(run_local: Run) -> None:
    keys = FEDSELECT | {"keep-checkpoints": 0, "num-rounds": 1, "clients-per-round": 2}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert cli.main(["analyse", str(folder)]) == 0
    state = load_file(folder / "checkpoints/round-000001.safetensors")
    one, other = (state[f"state/masks/{client}/fc3.weight"] for client in read_rounds(folder)[-1]["clients"])
    both, either = (sum(int(byte).bit_count() for byte in bits) for bits in (one & other, one | other))
    rows = list(csv.reader((folder / "overlap.csv").open()))[1:]
    assert next(row[2] for row in rows if row[1] == "fc3.weight") == f"{both / either:.4f}"


@pytest.mark.parametrize("kept", [{"keep-checkpoints": 2}, {"keep-checkpoints": 0, "checkpoint-every": 2}], ids=str)
def test_one_client_has_no_overlap(run_local: Run, caplog: pytest.LogCaptureFixture, kept: Json) -> None:
    """Nothing is said of checkpoints where none was deleted."""
    keys = FEDSELECT | {"num-clients": 1, "num-rounds": 2} | kept
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    with caplog.at_level("WARNING", "fedsub"):
        assert cli.main(["analyse", str(folder)]) == 0
    assert "checkpoints" not in caplog.text
    assert (folder / "mask-size.csv").exists()
    assert not list(folder.glob("overlap*"))


def test_a_run_whose_global_model_was_measured_first(run_local: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The line of round 0 names no clients. With two of three checkpoints left it says so, and draws whole rounds."""
    keys = FEDSELECT | {"num-rounds": 3, "evaluate": "global, personal"}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    assert read_rounds(folder)[0]["round"] == 0
    with caplog.at_level("WARNING", "fedsub"):
        assert cli.main(["analyse", str(folder)]) == 0
    assert "checkpoints: rounds 2, 3; a run with keep-checkpoints = 0 keeps all" in caplog.text
    rows = list(csv.reader((folder / "mask-size.csv").open()))[1:]
    assert {row[0] for row in rows} == {"2", "3"}


def test_a_legend_covers_no_curve() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawing = figure(8, 4)
    axes = drawing.subplots()
    axes.plot([0, 1], [0, 1], label="a label that takes much of the width")
    legend_beside(drawing)
    FigureCanvasAgg(drawing).draw()
    (legend,) = drawing.legends
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1
