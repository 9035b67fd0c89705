"""IST: the units are dealt to a round's clients, each trains its slice as the small network that it is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, merge_round, problem_of, rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import sample
from fedsub_app.federation.protocol import Update, formula_bytes
from fedsub_app.models import UnitGroup, adopted, build_model, mlp, narrowed, tensors_of, unit_groups
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.masks import deal, expand
from fedsub_app.subnets.slices import select
from fedsub_app.training.costs import training_flops
from fedsub_app.training.workplace import Workplace, workplace
from strategies.ist import IST

Run = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Any] = {
    "method": "ist", "model": "feature-mlp", "num-clients": 6, "clients-per-round": 3, "partition": "iid",
    "train-per-class": 12, "batch-size": 8, "lr": 0.05, "momentum": 0.9, "device": "cpu", "num-rounds": 2,
}  # fmt: skip


def made(**changes: Any) -> tuple[IST, Workplace]:
    keys = KEYS | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    place = workplace(resolve(keys))
    strategy = IST(place.settings, place.network.module)
    strategy.round = 1
    return strategy, place


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), parts=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_every_unit_is_dealt_once(sizes: list[int], parts: int, seed: int) -> None:
    groups = [UnitGroup(f"fc{k}", size, (), ()) for k, size in enumerate(sizes)]
    masks = deal(groups, [1.0] * parts, generator(seed))
    assert len(masks) == parts
    for group in groups:
        held = torch.stack([mask[group.name] for mask in masks]).int()
        assert held.sum(0).tolist() == [1] * group.size
        assert held.sum(1).max() - held.sum(1).min() <= 1


def test_the_deal_is_the_rounds_alone() -> None:
    strategy, _ = made()
    dealt = []
    for number in (1, 1, 2):
        strategy.round = number
        dealt.append([strategy.units_of(client)["fc1"] for client in sample(strategy.settings, number)])
    assert all(torch.equal(a, b) for a, b in zip(dealt[0], dealt[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(dealt[0], dealt[2], strict=True))


@pytest.mark.parametrize("keys", [{}, {"model": "lenet5-bn", "image_size": 32}])
def test_with_one_participant_it_is_fedavg(keys: dict[str, Any], run_local: Run) -> None:
    """Bit for bit."""
    keys = {"num_clients": 3, "clients_per_round": 1, "partition": "iid", "momentum": 0.9} | keys
    _, one = run_local("ist", method="ist", **keys)
    _, other = run_local("fedavg", method="fedavg", **keys)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert [line.get("flops") for line in read_rounds(one)] == [line.get("flops") for line in read_rounds(other)]


@pytest.mark.parametrize("model", ["feature-mlp", "feature-mlp2", "fedpews-mlp"])
@pytest.mark.parametrize("clients", [3, 5])
def test_the_global_width_grows_with_the_participants(model: str, clients: int) -> None:
    strategy, place = made(model=model, clients_per_round=clients, ist__width=20)
    assert {group.size for group in strategy.units} == {20 * clients}
    for client in sample(strategy.settings, 1):
        assert {int(mask.sum()) for mask in strategy.units_of(client).values()} == {20}
    assert place.initial()["fc1.weight"].shape == (20 * clients, 64)


@pytest.mark.parametrize("model", ["feature-mlp", "feature-mlp2"])
def test_bytes_and_flops_are_those_of_the_slices(model: str, run_local: Run) -> None:
    """The slices together are 1/s of what s copies of the wide model are, where the hidden layers are all there is."""
    s, h, classes = 3, 20, 10
    keys = {"num_clients": 6, "clients_per_round": s, "partition": "iid", "num_rounds": 2, "train_per_class": 12}
    _, folder = run_local("ist", method="ist", model=model, ist__width=h, **keys)
    wide = build_model(model, (1, 8, 8), classes, 0, s * h)
    # The paper: 2 (n1 n2 + n2 n3) numbers a round, both ways; biases, BatchNorm and further layers beside it.
    numbers = h * 64 + 3 * h + h * classes + classes
    if model == "feature-mlp2":
        numbers += h * h + 3 * h
    layer = 4 * classes  # the output bias goes to everybody
    if model == "feature-mlp":
        assert s * 4 * numbers == formula_bytes(tensors_of(wide)) + (s - 1) * layer
    _, fedavg = run_local("fedavg", method="fedavg", model="feature-mlp", **keys)
    ours, theirs = read_rounds(folder)[1:], read_rounds(fedavg)[1:]
    small = build_model(model, (1, 8, 8), classes, 0, h)
    for line, other in zip(ours, theirs, strict=True):
        assert line["dropped"] == []
        assert line["formula-bytes-down"] == line["formula-bytes-up"] == s * 4 * numbers
        sent = s * 4 * (numbers - classes) + layer  # a tensor that all are sent travels once
        assert sent < line["bytes-down"] < sent + 8000
        assert s * 4 * numbers < line["bytes-up"] < s * 4 * numbers + 8000
        assert line["flops"] == s * 20 * training_flops(problem_of((1, 8, 8)), small) < other["flops"]


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_two_hidden_layers_by_hand(server_lr: float) -> None:
    """Units 0 and 1 of both layers, one for each client; the cross entries 2 and 3 of the middle matrix stay."""
    strategy, _ = made(num_clients=2, clients_per_round=2, server_lr=server_lr)
    net = mlp(1, 1, [2, 2])
    strategy.model = net
    strategy.__dict__["units"] = unit_groups(net)
    strategy.current = {
        "fc1.weight": torch.tensor([[1.0], [2.0]]),
        "fc1.bias": torch.tensor([0.0, 0.5]),
        "fc2.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "fc2.bias": torch.tensor([0.0, 0.5]),
        "fc3.weight": torch.tensor([[1.0, 2.0]]),
        "fc3.bias": torch.tensor([8.0]),
    }
    first = torch.tensor([True, False])
    units = [{"fc1": first, "fc2": first}, {"fc1": ~first, "fc2": ~first}]
    strategy.units_of = lambda client: units[client]  # type: ignore[method-assign]
    sent = [strategy.task(client).tensors for client in (0, 1)]
    assert [t["fc2.weight"].tolist() for t in sent] == [[[1.0]], [[4.0]]]
    answers = [{name: tensor * 10 for name, tensor in sent[0].items()}, {n: t * 20 for n, t in sent[1].items()}]
    merge_round(strategy, [Update(client, answer, {}, 1) for client, answer in enumerate(answers)])
    expected = {
        "fc1.weight": [10.0, 40.0],
        "fc1.bias": [0.0, 10.0],
        "fc2.weight": [10.0, 2.0, 3.0, 80.0],
        "fc2.bias": [0.0, 10.0],
        "fc3.weight": [10.0, 40.0],
        "fc3.bias": [120.0],  # the mean of 80 and 160
    }
    old = {"fc1.weight": [1, 2], "fc1.bias": [0, 0.5], "fc2.weight": [1, 2, 3, 4], "fc2.bias": [0, 0.5]}
    old |= {"fc3.weight": [1, 2], "fc3.bias": [8]}
    for name, values in expected.items():
        moved = [o + server_lr * (v - o) for o, v in zip(old[name], values, strict=True)]
        assert strategy.current[name].flatten().tolist() == moved


def test_a_units_values_are_its_clients_bit_for_bit_whatever_the_clients_weights() -> None:
    strategy, _ = made(num_clients=2, clients_per_round=2, weighting="examples")
    slices = [strategy.slices_of(client) for client in (0, 1)]
    updates = []
    for client, examples in ((0, 3), (1, 7)):
        answer = {name: torch.randn_like(tensor) for name, tensor in strategy.task(client).tensors.items()}
        updates.append(Update(client, answer, {}, examples))
    merge_round(strategy, updates)
    for update, of in zip(updates, slices, strict=True):
        for name, index in of.items():
            assert torch.equal(select(strategy.current[name], index), update.tensors[name])


class Beside(nn.Module):
    """The output layer reads the hidden units and the input, whose columns belong to no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 6), nn.Linear(70, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.hidden(x.flatten(1)).relu(), x.flatten(1)], 1))  # type: ignore[no-any-return]


def test_columns_of_no_unit_are_averaged_with_the_clients_weights() -> None:
    """Ones of 3 samples and fives of 1: 2; a unit's column is its client's."""
    settings = resolve(KEYS | {"num-clients": 2, "clients-per-round": 2, "weighting": "examples"})
    strategy = IST(settings, adopted(Beside(), (1, 8, 8)))
    strategy.round = 1
    first = strategy.units_of(0)["hidden"]
    updates = []
    for client, (value, count) in enumerate([(1.0, 3), (5.0, 1)]):
        sent = strategy.task(client).tensors
        updates.append(Update(client, {name: torch.full_like(x, value) for name, x in sent.items()}, {}, count))
    merge_round(strategy, updates)
    row = strategy.current["head.weight"][0]
    assert row[:6].tolist() == [1.0 if on else 5.0 for on in first]
    assert row[6:].tolist() == [2.0] * 64


@pytest.mark.parametrize("model", ["feature-mlp2", "lenet5", "lenet5-bn", "resnet18"])
def test_what_nobody_holds_keeps_its_value(model: str, run_local: Run) -> None:
    """Cross blocks, on networks that declare their units; the units of a client that does not answer."""
    strategy, place = made(model=model, image_size=32, num_clients=3, train_per_class=3)
    start = {name: tensor.clone() for name, tensor in strategy.current.items()}
    updates = []
    for client in (0, 2):
        task = strategy.task(client)
        updates.append(Client(place, client, 1, {}).run_training(dict(task.tensors), task.config))
        assert {name: spec.shape for name, spec in strategy.expected(client).items()} == {
            name: tuple(tensor.shape) for name, tensor in updates[-1].tensors.items()
        }
    merge_round(strategy, updates, asked=range(3))
    shapes = {name: tensor.shape for name, tensor in start.items()}
    held = [expand(strategy.units, strategy.units_of(client), shapes) for client in (0, 2)]
    for name, tensor in start.items():
        anybody = held[0][name] | held[1][name]
        assert torch.equal(strategy.current[name][~anybody], tensor[~anybody])
        if name in strategy.slices_of(0):
            assert not anybody.all()
            assert not (held[0][name] & held[1][name]).any()
        if name.endswith("weight"):
            assert not torch.equal(strategy.current[name][anybody], tensor[anybody])


class Slow:
    """A round of IST in float64 from the text: loops over units, autograd on a network built narrow."""

    def __init__(self, place: Workplace, model: str, clients: list[int]) -> None:
        self.place, self.model, self.clients = place, model, clients

    def round(self, start: dict[str, Tensor], owner: dict[str, list[int]]) -> dict[str, Tensor]:
        """``owner[layer][unit]`` is the client that has it."""
        end = {name: tensor.double().clone() for name, tensor in start.items()}
        trained = {client: self.train(client, start, owner) for client in self.clients}
        last = f"fc{len(owner) + 1}"
        for k in range(1, len(owner) + 1):
            for unit, client in enumerate(owner[f"fc{k}"]):
                own = [u for u, other in enumerate(owner[f"fc{k}"]) if other == client]
                mine = own.index(unit)
                for name in (f"fc{k}.bias", f"bn{k}.weight", f"bn{k}.bias"):
                    end[name][unit] = trained[client][name][mine]
                if k == 1:
                    end["fc1.weight"][unit] = trained[client]["fc1.weight"][mine]
                else:
                    inputs = [u for u, other in enumerate(owner[f"fc{k - 1}"]) if other == client]
                    for place, u in enumerate(inputs):
                        end[f"fc{k}.weight"][unit, u] = trained[client][f"fc{k}.weight"][mine, place]
                if f"fc{k + 1}" == last:
                    end[f"{last}.weight"][:, unit] = trained[client][f"{last}.weight"][:, mine]
        end[f"{last}.bias"] = sum(t[f"{last}.bias"] for t in trained.values()) / len(trained)  # type: ignore[assignment]
        return end

    def train(self, client: int, start: dict[str, Tensor], owner: dict[str, list[int]]) -> dict[str, Tensor]:
        own = {layer: [u for u, other in enumerate(units) if other == client] for layer, units in owner.items()}
        layers = len(owner) + 1
        w: dict[str, Tensor] = {}
        for k in range(1, layers + 1):
            weight = start[f"fc{k}.weight"].double()
            if k < layers:
                weight = weight[own[f"fc{k}"]]
            if k > 1:
                weight = weight[:, own[f"fc{k - 1}"]]
            w[f"fc{k}.weight"] = weight.clone()
            for name in (f"fc{k}.bias",) + ((f"bn{k}.weight", f"bn{k}.bias") if k < layers else ()):
                value = start[name].double()
                w[name] = (value[own[f"fc{k}"]] if k < layers else value).clone()
        momentum = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
        worker = Client(self.place, client, 1, {})
        for batch in worker.batches():
            for tensor in w.values():
                tensor.requires_grad_()
            h = worker.x[batch].double().flatten(1)
            for k in range(1, layers):
                h = h @ w[f"fc{k}.weight"].T + w[f"fc{k}.bias"]
                h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
                h = torch.relu(h * w[f"bn{k}.weight"] + w[f"bn{k}.bias"])
            loss = F.cross_entropy(h @ w[f"fc{layers}.weight"].T + w[f"fc{layers}.bias"], worker.y[batch])
            gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
            with torch.no_grad():
                momentum = {name: 0.9 * momentum[name] + gradients[name] for name in w}
                w = {name: tensor - 0.05 * momentum[name] for name, tensor in w.items()}
        return {name: tensor.detach() for name, tensor in w.items()}


@pytest.mark.parametrize("model", ["feature-mlp", "feature-mlp2"])
def test_a_round_against_a_slow_reference(model: str, run_local: Run) -> None:
    strategy, place = made(model=model, ist__width=15, local_epochs=2)
    clients = sample(strategy.settings, 1)
    owner = {group.name: [-1] * group.size for group in strategy.units}
    for client in clients:
        for layer, mask in strategy.units_of(client).items():
            for unit in mask.nonzero().flatten().tolist():
                owner[layer][unit] = client
    start = {name: tensor.clone() for name, tensor in strategy.current.items()}
    expected = Slow(place, model, clients).round(start, owner)
    keys = {key.replace("-", "_"): value for key, value in KEYS.items()}
    _, folder = run_local(**keys | {"model": model, "num_rounds": 1, "ist__width": 15, "local_epochs": 2})
    assert away(load_file(folder / "model.safetensors"), expected, start) < SAME


def test_a_wide_run_on_two_nodes_and_resumed_is_the_same(run_local: Run, tmp_path: Path) -> None:
    keys = {"num_clients": 5, "clients_per_round": 3, "partition": "iid", "num_rounds": 3, "keep_checkpoints": 0}
    keys |= {"method": "ist", "model": "feature-mlp2", "ist__width": 15, "evaluate": "global,global-local,personal"}
    _, whole = run_local("whole", **keys)
    part = Path(shutil.copytree(whole, tmp_path / "part"))
    (part / "summary.json").unlink()
    for number in (2, 3):
        (part / f"checkpoints/round-00000{number}.safetensors").unlink()
    run_local("part", **keys, resume=True, grid=lambda app, overrides: LocalGrid(app, overrides, 2))
    assert rounds(part) == rounds(whole)
    assert all(line["personal-accuracy"] == line["global-local-accuracy"] for line in rounds(whole)[1:])
    assert (part / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_istprox_is_ist_with_the_term(run_local: Run) -> None:
    keys = {"num_clients": 2, "partition": "iid", "prox_mu": 0.5}
    _, prox = run_local("prox", method="istprox", **keys)
    _, same = run_local("same", method="ist", objective="prox", **keys)
    _, plain = run_local("plain", method="ist", **keys)
    models = [(folder / "model.safetensors").read_bytes() for folder in (prox, same, plain)]
    assert models[0] == models[1] != models[2]


@pytest.mark.parametrize(("with_term", "without"), [("istprox", "ist"), ("fedprox", "fedavg")])
def test_in_one_step_the_proximal_term_is_nothing(with_term: str, without: str, run_local: Run) -> None:
    """w is w_global when its gradient is taken: with the paper's one local step these are the same methods."""
    models = []
    for method in (with_term, without):
        _, folder = run_local(method, method=method, partition="iid", momentum=0.9, prox_mu=0.5, local_steps=1)
        models.append((folder / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model = 'lenet5': its layers' width is its own; with a width set, allowed"):
        made(model="lenet5", image_size=32, ist__width=10)
    with pytest.raises(UserError, match=r"layer conv1 has 6 units for the 7 clients of a round; allowed is at least"):
        made(model="lenet5", image_size=32, num_clients=7, clients_per_round=7)
    strategy, _ = made(model="lenet5", image_size=32, clients_per_round=6)
    assert [int(strategy.units_of(client)["conv1"].sum()) for client in range(6)] == [1] * 6


def test_a_small_network_of_a_width_is_the_narrowed_one() -> None:
    """``width`` sets hidden layers alone: the shapes are those of a wide network narrowed."""
    wide = build_model("feature-mlp2", (64,), 10, 0, 60)
    small = narrowed(wide, unit_groups(wide), {"fc1": 20, "fc2": 20})
    built: nn.Module = build_model("feature-mlp2", (64,), 10, 0, 20)
    assert {n: t.shape for n, t in tensors_of(small).items()} == {n: t.shape for n, t in tensors_of(built).items()}
