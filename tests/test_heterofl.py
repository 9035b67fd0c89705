"""HeteroFL and FedRolex: windows and means by hand, the papers' lines written out, what a narrow client costs."""

import math
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, ends_as_if_never_stopped, merge_round, read
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import fedsub_app
from client_apps.heterofl import HeteroFLClient, producers
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Form, Part
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import Network, adopted, load_tensors, narrowed
from fedsub_app.models.units import with_head
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.training.costs import training_flops
from fedsub_app.training.workplace import Workplace, workplace
from strategies.heterofl import CLASSES, HeteroFL

Run = Callable[..., tuple[Json, Path]]
BOTH = ("heterofl", "fedrolex")
# Four clients with three of the ten digits each.
KEYS: dict[str, Any] = {
    "dataset": "digits", "model": "fedpews-mlp", "num_clients": 4, "partition": "classes", "classes_per_client": 3,
    "train_per_class": 40, "num_rounds": 3, "batch_size": 16, "lr": 0.05, "momentum": 0.9, "device": "cpu",
}  # fmt: skip
BATCH_NORM = {"model": "lenet5-bn", "image_size": 32}


def settings(method: str = "heterofl", widths: Any = "1, 0.5", **more: Any) -> Any:
    keys = KEYS | {"method": method, f"{method}__widths": widths} | more
    return resolve({key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()})


def made(method: str = "heterofl", model: nn.Module | None = None, **more: Any) -> HeteroFL:
    chosen = settings(method, **more)
    strategy = METHODS[method].strategy(chosen, model or workplace(chosen).network.module)
    assert isinstance(strategy, HeteroFL)
    strategy.round = 1
    return strategy


def every(method: str, **keys: Any) -> dict[str, Any]:
    """Keys of a run, those of the method under its own name."""
    own = ("widths", "assignment", "scaler", "masked_loss")
    return KEYS | {"method": method} | {f"{method}__{k}" if k in own else k: value for k, value in keys.items()}


# --- by hand ----------------------------------------------------------------------------------------------------------


def four() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))


NUMBERS = {
    "0.weight": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
    "2.weight": torch.tensor([[5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]]),
    "2.bias": torch.tensor([9.0, 10.0]),
}


def answer(strategy: HeteroFL, client: int, factor: float, classes: list[bool]) -> Update:
    """A client that multiplies what it was sent."""
    tensors = {name: factor * tensor for name, tensor in strategy.task(client).tensors.items()}
    return Update(client, tensors | {CLASSES: torch.tensor(classes)}, {"train-loss": 0.0}, 1)


def test_a_round_of_heterofl_by_hand() -> None:
    """Client 0 has four units and both classes; client 1 the first two and class 1."""
    strategy = made(model=four(), num_clients=2)
    strategy.current = NUMBERS
    assert strategy.task(1).config == {"width": 0.5}
    assert strategy.task(1).tensors["2.weight"].tolist() == [[5, 6], [1, 2]]
    merge_round(strategy, [answer(strategy, 0, 2, [True, True]), answer(strategy, 1, 10, [False, True])])
    assert strategy.current["0.weight"].flatten().tolist() == [6, 12, 6, 8]  # (2 + 10) / 2 of the first two
    assert strategy.current["2.weight"].tolist() == [[10, 12, 14, 16], [6, 12, 6, 8]]
    assert strategy.current["2.bias"].tolist() == [18, 60]


def test_a_round_of_fedrolex_by_hand() -> None:
    """In the fourth round the window of two of four units begins at the last one and wraps around."""
    strategy = made("fedrolex", four(), num_clients=2)
    strategy.current, strategy.round = NUMBERS, 4
    assert strategy.task(1).tensors["0.weight"].flatten().tolist() == [1, 4]
    merge_round(strategy, [answer(strategy, 1, 10, [True, True])])
    assert strategy.current["0.weight"].flatten().tolist() == [10, 2, 3, 40]
    assert strategy.current["2.weight"].tolist() == [[50, 6, 7, 80], [10, 2, 3, 40]]


# The authors' code made these of a network of the numbers 0, 1, 2, ... after clients of widths 1, 0.5, 0.3 with these
# classes had multiplied it by 2, 3 and 4. FedRolex: its third round; its biases and output layer have other weights.
CLASSES_OF = ([True] * 3, [False, True, False], [True, False, True])
OF_AUTHORS: dict[str, dict[str, list[float]]] = {
    "heterofl": {  # commit cc40f3e, src/fed.py, model_name = conv
        "0.weight": [0, 3, 6, 9, 12, 15, 15, 17.5, 20, 18, 20, 22, 24, 26, 28],
        "0.bias": [45, 48, 42.5, 36, 38],
        "2.weight": [60, 63, 55, 46, 48, 75, 78, 67.5, 56, 58, 60, 62, 64, 66, 68, 70, 72, 74, 76, 78],
        "2.bias": [120, 123, 84, 86],
        "4.weight": [132, 135, 92, 94, 120, 122.5, 100, 102, 156, 159, 108, 110],
        "4.bias": [168, 142.5, 174],
    },
    "fedrolex": {  # commit 8135109, resnet_server.py, rolled towards higher units, as the paper has it
        "0.weight": [0, 2, 4, 6, 8, 10, 18, 21, 24, 27, 30, 33, 30, 32.5, 35],
        "2.weight": [40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 96, 99, 85, 70, 72, 111, 114, 97.5],
    },
}  # fmt: skip


@pytest.mark.parametrize("method", BOTH)
def test_a_round_of_the_authors_code(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    strategy, first = made(method, model, widths="1, 0.5, 0.3", num_clients=3), 0
    for name, tensor in strategy.current.items():
        strategy.current = strategy.current | {
            name: torch.arange(first, first + tensor.numel()).float().view_as(tensor)
        }
        first += tensor.numel()
    strategy.round = 3
    merge_round(strategy, [answer(strategy, client, client + 2, CLASSES_OF[client]) for client in range(3)])
    for name, expected in OF_AUTHORS[method].items():
        assert strategy.current[name].flatten().tolist() == pytest.approx(expected)


def test_the_window_moves_by_one_unit_a_round() -> None:
    strategy = made("fedrolex", nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 2)), widths="0.5")
    windows = []
    for strategy.round in range(1, 8):
        windows.append(strategy.units_of(0)["0"].nonzero().flatten().tolist())
    assert windows == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 3, 4], [0, 1, 4], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("width", "units"), [(1.0, 100), (0.07, 7), (0.5, 50), (0.0625, 7), (0.001, 1)])
def test_a_width_is_rounded_up(width: float, units: int) -> None:
    model = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 2))
    assert len(made(model=model, widths=width).task(0).tensors["0.bias"]) == units


def test_widths_are_dealt_by_number_or_drawn_in_each_round() -> None:
    fixed = made(model=four(), widths="1, 0.5, 0.25", num_clients=7)
    assert [fixed.width(client) for client in range(7)] == [1, 0.5, 0.25, 1, 0.5, 0.25, 1]
    drawn = made(model=four(), widths="1, 0.5, 0.25", num_clients=300, heterofl__assignment="dynamic")
    first = [drawn.width(client) for client in range(300)]
    assert first == [drawn.width(client) for client in range(300)]
    assert all(70 < first.count(width) < 130 for width in (1, 0.5, 0.25))
    drawn.round = 2
    assert sum(drawn.width(client) != first[client] for client in range(300)) > 150


def test_a_drawn_width_is_any_that_the_device_holds() -> None:
    drawn = made(model=four(), devices="heterofl", num_clients=300, heterofl__assignment="dynamic")
    found = {(drawn.held_width(client), drawn.width(client)) for client in range(300)}
    assert found == {(held, width) for held in drawn.held_widths for width in drawn.held_widths if width <= held}
    assert len(found) > 5
    half = made(model=four(), devices="heterofl", num_clients=300, model_width=0.5)
    assert {*half.held_widths} == {width / 0.5 for width in drawn.held_widths if width < 0.5} | {1.0}


def test_a_class_that_no_client_has_keeps_its_row() -> None:
    strategy = made(model=four(), num_clients=2)
    strategy.current = NUMBERS
    merge_round(strategy, [answer(strategy, client, 2, [True, False]) for client in range(2)])
    assert strategy.current["2.weight"].tolist() == [[10, 12, 14, 16], [1, 2, 3, 4]]
    merge_round(strategy, [answer(strategy, client, 2, [False, False]) for client in range(2)])
    assert strategy.current["2.bias"].tolist() == [18, 10]


# --- the papers' lines, written out -----------------------------------------------------------------------------------


def reference(s: Any, rolling: bool, scaler: bool, masked: bool) -> Tensors:
    """HeteroFL's or FedRolex's rounds on a multi-layer perceptron with all clients, matrix by matrix, float64."""
    place = workplace(s)
    w = {name: tensor.detach().double() for name, tensor in place.initial().items()}
    layers = sorted({name.partition(".")[0] for name in w})
    for j in range(s.num_rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
        count = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
        for client, samples in enumerate(place.partition.train):
            r = s.options.widths[client % len(s.options.widths)]
            x, y = place.train_x[samples].double().flatten(1), place.train_y[samples]
            has = torch.tensor([label in y for label in range(10)])
            index, before = {}, list(range(x.shape[1]))
            for layer in layers:
                size = len(w[f"{layer}.bias"])
                start, kept = (j % size if rolling else 0), math.ceil(r * size)
                after = list(range(10)) if layer == layers[-1] else [(start + k) % size for k in range(kept)]
                index[f"{layer}.weight"], index[f"{layer}.bias"] = torch.meshgrid(
                    torch.tensor(after), torch.tensor(before), indexing="ij"), (torch.tensor(after),)  # fmt: skip
                before = after
            local = {name: w[name][index[name]].clone().requires_grad_() for name in w}
            velocity = {name: torch.zeros_like(tensor) for name, tensor in local.items()}
            for batch in torch.randperm(len(y), generator=generator(s.seed, j + 1, client, "batches")).split(16):
                h = x[batch]
                for layer in layers[:-1]:
                    h = h @ local[f"{layer}.weight"].T + local[f"{layer}.bias"]
                    h = torch.relu(h / r if scaler else h)
                logits = h @ local[f"{layers[-1]}.weight"].T + local[f"{layers[-1]}.bias"]
                loss = F.cross_entropy(logits * has if masked else logits, y[batch])
                for (name, p), g in zip(local.items(), torch.autograd.grad(loss, [*local.values()]), strict=True):
                    velocity[name] = 0.9 * velocity[name] + g
                    p.data -= s.lr * velocity[name]
            for name, p in local.items():
                mine = torch.zeros_like(w[name], dtype=torch.bool)
                mine[index[name]] = True
                if masked and name.startswith(layers[-1]):
                    mine[~has] = False
                put = torch.zeros_like(w[name])
                put[index[name]] = p.detach()
                total[name] += torch.where(mine, put, 0)
                count[name] += mine
        w = {name: torch.where(count[name] > 0, total[name] / count[name].clamp(min=1), w[name]) for name in w}
    return w


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize(("scaler", "masked"), [(True, True), (False, True), (True, False)])
def test_it_follows_the_paper(method: str, scaler: bool, masked: bool, run_local: Run) -> None:
    own = {"scaler": scaler, "masked_loss": masked}
    _, folder = run_local(**every(method, widths="1, 0.5, 0.25", **own))
    s = settings(method, "1, 0.5, 0.25", **{f"{method}__{key}": value for key, value in own.items()})
    start = {name: tensor.detach() for name, tensor in workplace(s).initial().items()}
    expected = reference(s, method == "fedrolex", scaler, masked)
    assert away(load_file(folder / "model.safetensors"), expected, start) < SAME


def statistics(place: Workplace, model: Tensors, server_round: int) -> Tensors:
    """Mean and variance of what enters each BatchNorm: over mini-batches, then over clients by samples; float64."""
    network = place.problem.network().double()
    load_tensors(network, model)
    seen: dict[str, list[Tensor]] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, x, name=name: seen.setdefault(name, []).append(x[0].detach()))
    sums: Tensors = {}
    for client, samples in enumerate(place.partition.train):
        seen.clear()
        draws = generator(place.settings.seed, server_round, client, "statistics")
        for batch in torch.randperm(len(samples), generator=draws).split(place.settings.batch_size):
            if len(batch) > 1:  # as in training
                network.train()(place.train_x[samples[batch]].double())
        for name, inputs in seen.items():
            for kind, of in (
                ("mean", [x.mean((0, 2, 3)) for x in inputs]),
                ("var", [x.var((0, 2, 3)) for x in inputs]),
            ):
                key = f"{name}.running_{kind}"
                sums[key] = sums.get(key, 0) + len(samples) * torch.stack(of).mean(0)
    return {name: total / sum(map(len, place.partition.train)) for name, total in sums.items()}


@pytest.mark.parametrize("more", [{}, {"server_lr": 0.5}, {"clip_norm": 0.5}], ids=str)
def test_batch_norms_statistics_are_measured_where_a_round_is_evaluated(more: dict[str, float], run_local: Run) -> None:
    """And are what was measured, however far the server steps and however short changes of the model have to be."""
    keys = every("heterofl", widths="1, 0.5", **BATCH_NORM, partition="dirichlet", eval_every=2, local_epochs=2)
    _, folder = run_local(**keys | more | {"num_rounds": 2})
    model = load_file(folder / "model.safetensors")
    place = workplace(settings(**BATCH_NORM, partition="dirichlet", eval_every=2, local_epochs=2, num_rounds=2))
    expected = statistics(place, model, 2)
    assert expected.keys() == {name for name in model if "running" in name}
    for name, tensor in expected.items():
        torch.testing.assert_close(model[name].double(), tensor, rtol=1e-4, atol=1e-5)
    first, second = read_rounds(folder)[1:]
    assert "measurement" not in first
    assert second["measurement"]["clients"] == [0, 1, 2, 3]
    assert second["measurement"]["dropped"] == first["dropped"] == second["dropped"] == []


def test_the_statistics_of_a_frozen_base_stay(tmp_path: Path) -> None:
    """They could not be reset, and every measurement was abandoned."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for k, channels in enumerate((1, 4, 4)):
                self.add_module(f"c{k}", nn.Conv2d(channels, 4, 3, padding=1))
                self.add_module(f"b{k}", nn.BatchNorm2d(4))
            self.fc = nn.Linear(256, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in ("c0", "b0", "c1", "b1", "c2", "b2"):
                x = self.get_submodule(name)(x)
            return self.fc(x.flatten(1))  # type: ignore[no-any-return]

    part = (torch.randn(50, 1, 8, 8), torch.arange(50) % 3)
    keys = {"method": "heterofl", "heterofl.widths": "1, 0.5", "num-rounds": 1, "partition": "iid"}
    keys |= {"trainable": "c1, b1, c2, b2, fc", "run-dir": str(tmp_path / "run")}
    record = fedsub_app.run(keys, model=Net, data=(part, part))
    assert record.lines[1]["measurement"]["dropped"] == []
    measured = {name for name in load_file(record.folder / "model.safetensors") if "running" in name}
    assert measured == {f"b{k}.running_{kind}" for k in (1, 2) for kind in ("mean", "var")}


def test_robust_refuses_no_client_for_the_statistics_of_a_narrow_network(run_local: Run) -> None:
    """With Scaler they are of another size; no training reads them, and each tensor of them is bounded."""
    keys = every("heterofl", widths="1, 0.25", **BATCH_NORM, partition="iid", eval_every=9)
    _, folder = run_local(**keys | {"num_rounds": 4, "robust": "on"})
    assert [line["dropped"] for line in read_rounds(folder)[1:]] == [[]] * 4


def test_a_measurement_changes_no_training(run_local: Run) -> None:
    """Also where updates are clipped, by the change of what is trained."""
    models = []
    for number in (1, 2):
        keys = every("heterofl", widths="1, 0.5", **BATCH_NORM, partition="dirichlet", clip_norm=0.5, num_rounds=2)
        _, folder = run_local(str(number), **keys, eval_every=number)
        models.append(load_file(folder / "model.safetensors"))
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items() if "running" not in name)


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("keys", [{"masked_loss": False}, {"partition": "iid"}])
def test_with_all_units_it_is_fedavg_bit_for_bit(method: str, keys: dict[str, Any], run_local: Run) -> None:
    """Without the masked loss, or where all clients have all classes."""
    _, folder = run_local(**every(method, widths="1", **keys))
    _, fedavg = run_local("fedavg", **KEYS | {"method": "fedavg", "partition": keys.get("partition", "classes")})
    assert (folder / "model.safetensors").read_bytes() == (fedavg / "model.safetensors").read_bytes()
    for line, other in zip(read_rounds(folder), read_rounds(fedavg), strict=True):
        assert line["global-accuracy"] == other["global-accuracy"]
        assert line.get("flops") == other.get("flops")


@pytest.mark.parametrize("method", BOTH)
def test_a_narrow_client_costs_its_networks_bytes_and_flops(method: str, run_local: Run) -> None:
    _, folder = run_local(**every(method, widths="1, 0.5, 0.25, 0.125"))
    place = workplace(settings())
    numbers = flops = 0
    for client, width in enumerate((1, 0.5, 0.25, 0.125)):
        hidden = [math.ceil(width * units) for units in (32, 64, 128, 32)]
        sizes = [64, *hidden, 10]
        small = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        numbers += sum(p.numel() for p in small.parameters())
        small.insert(0, nn.Flatten())
        flops += training_flops(place.problem, small) * len(place.partition.train[client])
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-down"] == 4 * numbers
        assert line["formula-bytes-up"] == 4 * numbers + 4 * 2  # a bit a class, in whole bytes
        assert line["flops"] == flops


@pytest.mark.parametrize("method", BOTH)
def test_resumed_it_ends_as_if_never_stopped(method: str, run_local: Run, tmp_path: Path) -> None:
    keys = every(method, widths="1, 0.5", assignment="dynamic", **BATCH_NORM, num_rounds=4, keep_checkpoints=0)
    ends_as_if_never_stopped(run_local, tmp_path, keys | {"train_per_class": 10})


def test_the_next_client_finds_no_scaler_on_the_network() -> None:
    strategy = made()
    place = workplace(settings())
    task = strategy.task(1)
    client = HeteroFLClient(place, 1, 1, {})
    client.run_training(dict(task.tensors), task.config)
    assert not any(layer._forward_hooks for layer in client.network.module.modules())


def test_layers_of_one_unit_are_scaled(run_local: Run, tmp_path: Path) -> None:
    """In a network of one's own, whose units are traced; in the whole one, as none is found in the client's own."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def Net(in_shape, num_classes):\n"
        "    layers = nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, num_classes)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    _, folder = run_local(**every("heterofl", widths="1, 0.1", model=f"{tmp_path / 'net.py'}:Net", num_rounds=1))
    assert read_rounds(folder)[1]["dropped"] == []
    keys = every("fjord", widths="1, 0.1, 0.05", model=f"{tmp_path / 'net.py'}:Net", num_rounds=1)
    _, folder = run_local("fjord", **keys)
    assert read_rounds(folder)[1]["dropped"] == []
    place = workplace(settings(model=f"{tmp_path / 'net.py'}:Net"))
    small = place.narrow_network((("1", 1), ("3", 1)))
    assert producers(small, place.network) == {small.module[1], small.module[3]}


def test_a_convolution_of_each_channel_alone_makes_no_units() -> None:
    """Also with one channel left, where it looks like any other."""
    layers = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 4, 1), nn.Flatten(), nn.Linear(24, 2)
    whole = Network(adopted(nn.Sequential(*layers), (1, 8)))
    for width in (1, 3):
        small = Network(narrowed(whole.module, whole.units, {"0": width}))
        assert producers(small, whole) == {small.module[0], small.module[2]}


def test_all_layers_of_a_residual_stream_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm stands behind each of the sums: in training a Scaler of all their terms changes nothing."""
    monkeypatch.syspath_prepend(PROJECT / "examples/own-network")
    network = Network(adopted(import_module("preresnet").PreResNet18((3, 8, 8), 10, 8), (3, 8, 8)))
    network.training_mode()
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = network(x).logits
    layers = producers(network, network)
    assert len(layers) == 20  # all convolutions: the stem, two of each block, three shortcuts
    for layer in layers:
        layer.register_forward_hook(lambda _, __, y: 4 * y)
    assert (network(x).logits - plain).norm() < 1e-3 * plain.norm()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        return self.out((x + self.mix(x).relu()).mean(1))


def test_an_embedding_in_a_residual_stream_is_scaled() -> None:
    """As in the authors' Transformer."""
    network = Network(adopted(Tokens(), Form((Part((5,), torch.int64, 9),), single=True)))
    assert producers(network, network) == {network.module.words, network.module.mix}


# --- what is wrong ----------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """The last Linear is a gate, the classifier a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.out = nn.Conv2d(1, 6, 3), nn.Linear(6, 6), nn.Conv2d(6, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out(x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]).mean((2, 3))


def test_a_head_whose_rows_are_not_the_classes_is_refused() -> None:
    """Without a masked loss no head is asked for."""
    network = adopted(Gated(), (1, 8, 8))
    with pytest.raises(UserError, match=r"the 6 rows of its head 'gate' are not the 10 classes; .*masked-loss"):
        made(model=network, widths="1")
    assert CLASSES not in made(model=network, heterofl__masked_loss=False).expected(1)
    assert made(model=with_head(network, "out")).output == ("out.weight", "out.bias")


def test_a_tensor_of_the_network_may_be_called_classes() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    network.register_parameter("classes", nn.Parameter(torch.zeros(10)))
    strategy = made(model=network, widths="1")
    assert strategy.expected(1)["classes"] == strategy.specs["classes"]


@pytest.mark.parametrize("widths", ["0, 1", "1.5", "", "a", "-0.5", "nan"])
def test_widths_that_are_none_are_refused(widths: str) -> None:
    with pytest.raises(UserError) as error:
        settings(widths=widths)
    allowed = "must be numbers above 0, at most 1, such as '1, 0.5, 0.25'"
    assert str(error.value) == f"heterofl.widths = {widths!r}: {allowed}"


@pytest.mark.parametrize("method", BOTH)
def test_a_reply_wider_than_the_client_is_refused(method: str) -> None:
    strategy = made(method)
    update = answer(strategy, 0, 1, [True] * 10)
    with pytest.raises(BadReply, match=r"tensor 'fc1.weight': shape \(32, 64\), expected \(16, 64\)"):
        read(strategy, Update(1, update.tensors, update.metrics, 1))


def test_a_reply_without_classes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = made()
    update = answer(strategy, 0, 1, [True] * 10)
    del update.tensors[CLASSES]
    with pytest.raises(BadReply, match="tensor 'reply/classes' is missing"):
        read(strategy, update)


def test_a_lost_reply_leaves_the_others(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    contribution = HeteroFL.contribution

    def lose(self: HeteroFL, update: Update) -> Contribution:
        if update.client == 0:
            raise BadReply("lost on the way")
        return contribution(self, update)

    monkeypatch.setattr(HeteroFL, "contribution", lose)
    _, folder = run_local(**every("heterofl", widths="1, 0.5", scaler=True))
    assert [len(line["dropped"]) for line in read_rounds(folder)[1:]] == [1, 1, 1]
