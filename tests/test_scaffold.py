"""SCAFFOLD: three numbers by hand, a slow reference of Algorithm 1, what travels, lost replies and states."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SAME, away, forgetful, merge_round
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from client_apps.scaffold import ScaffoldClient
from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import Network, build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import Value
from fedsub_app.subnets.averaging import Contribution
from strategies.scaffold import VARIATE, Scaffold

Run = Callable[..., tuple[Json, Path]]
SETTINGS: dict[str, Any] = {
    "method": "scaffold",
    "dataset": "synthetic-3k",
    "model": "fedpews-mlp",
    "partition": "dirichlet",
    "num_clients": 4,
    "num_rounds": 5,
    "batch_size": 100,
    "lr": 0.1,
    "lr_decay_at": "3",
    "lr_decay": 0.5,
    "weight_decay": 0.01,
    "server_lr": 0.8,
}


def settings(**changes: Value) -> Any:
    return resolve({key.replace("_", "-"): value for key, value in (SETTINGS | changes).items()})


def client_state(folder: Path, client: int, number: int) -> Tensors:
    return load_file(folder / f"clients/client-{client:06d}/round-{number:06d}.safetensors")


def server_state(folder: Path) -> Tensors:
    return unprefixed("state/", load_file(max((folder / "checkpoints").glob("round-*"))))


# --- three numbers by hand --------------------------------------------------------------------------------------------


class TwoSteps(ScaffoldClient):
    """Makes two steps of 1/2 on 1/2 ||y - target||², whose gradient is y - target: K lr = 1."""

    target: Tensors

    def fit(self, *_: Any, shift: Tensors, **__: Any) -> Any:
        for _ in range(2):
            gradients = {name: p.detach() - self.target[name] for name, p in self.network.parameters.items()}
            for name, p in self.network.parameters.items():
                p.data -= (gradients[name] + shift[name]) / 2
        return SimpleNamespace(steps=2, optimizer=SimpleNamespace(lr=0.5))


def three(*values: float) -> Tensors:
    numbers = torch.tensor(values, dtype=torch.float32)
    return {"weight": numbers[None, :2], "bias": numbers[2:]}


def test_three_numbers_by_hand() -> None:
    """x = 0; targets (4, 0, 8) and (0, -4, 8). Both take part, then the first one alone."""
    model = nn.Linear(2, 1)
    made = Scaffold(settings(num_clients=2, server_lr=1.0), model)
    made.current = three(0, 0, 0)
    network = Network(model)
    place: Any = SimpleNamespace(settings=made.settings, network=network, network_for=lambda tensors: network)
    states: list[Tensors] = [{}, {}]

    def play(number: int, clients: Sequence[int]) -> None:
        made.round, updates = number, []
        for k in clients:
            client, task = TwoSteps(place, k, number, states[k]), made.task(k)
            client.target = (three(4, 0, 8), three(0, -4, 8))[k]
            updates.append(Update(k, client.train(task.tensors, task.config), {}, 1))
            states[k] = client.state
        merge_round(made, updates)

    def check(x: Tensors, c: Tensors, *own: Tensors) -> None:
        found = [unprefixed(VARIATE, state) for state in states]
        for tensors, expected in zip((made.current, made.variate, *found), (x, c, *own), strict=True):
            assert {name: t.tolist() for name, t in tensors.items()} == {n: t.tolist() for n, t in expected.items()}

    # No variates yet: y = 3/4 target, c_i+ = x - y.
    play(1, [0, 1])
    check(three(1.5, -1.5, 6), three(-1.5, 1.5, -6), three(-3, 0, -6), three(0, 3, -6))
    # c - c_0 = (1.5, 1.5, 0): y = (2.25, -1.5, 7.5), c_0+ = c_0 - c + (x - y), c moves by half of c_0's change.
    play(2, [0])
    check(three(2.25, -1.5, 7.5), three(-1.125, 0.75, -3.75), three(-2.25, -1.5, -1.5), three(0, 3, -6))


# --- Algorithm 1, written out -----------------------------------------------------------------------------------------


def reference(s: Any, rounds: Sequence[Sequence[int]]) -> tuple[Tensors, Tensors, list[Tensors]]:
    """Algorithm 1 with option II, clients one after the other, float64; ``rounds``: S of each. Returns x, c, c_i."""
    data = load_dataset(s.data)
    partition = make_partition(data, s.partitioning)
    model = build_model(s.model, (5,), 4, s.seed).double()
    weights = dict(model.named_parameters())
    x = {n: p.detach().clone() for n, p in weights.items()}
    c = {n: torch.zeros_like(p) for n, p in x.items()}
    c_i = [{n: torch.zeros_like(p) for n, p in x.items()} for _ in range(s.num_clients)]
    for t, sampled in enumerate(rounds, 1):
        lr, delta_y, delta_c = s.lr_at(t), [], []
        for i in sampled:
            model.load_state_dict(x)
            samples, labels = data.train_x[partition.train[i]].double(), data.train_y[partition.train[i]]
            steps = 0
            for batch in torch.randperm(len(labels), generator=generator(s.seed, t, i, "batches")).split(s.batch_size):
                loss = F.cross_entropy(model(samples[batch]), labels[batch])
                loss = loss + s.weight_decay / 2 * sum((p**2).sum() for p in weights.values())
                for (n, y), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values())), strict=True):
                    y.data -= lr * (g - c_i[i][n] + c[n])
                steps += 1
            new = {n: c_i[i][n] - c[n] + (x[n] - y.detach()) / (steps * lr) for n, y in weights.items()}
            delta_y.append({n: y.detach() - x[n] for n, y in weights.items()})
            delta_c.append({n: new[n] - c_i[i][n] for n in new})
            c_i[i] = new
        for n in x:
            x[n] = x[n] + s.server_lr * torch.stack([d[n] for d in delta_y]).mean(0)
            c[n] = c[n] + len(sampled) / s.num_clients * torch.stack([d[n] for d in delta_c]).mean(0)
    return x, c, c_i


def check_run(folder: Path, s: Any, rounds: Sequence[Sequence[int]]) -> None:
    """A run's model, c and c_i are the reference's."""
    x, c, c_i = reference(s, rounds)
    start = {n: t.detach() for n, t in tensors_of(build_model("fedpews-mlp", (5,), 4, 0)).items()}
    zeros = {n: torch.zeros_like(t) for n, t in start.items()}
    assert away(load_file(folder / "model.safetensors"), x, start) < SAME
    server = server_state(folder)
    assert away(unprefixed(VARIATE, server), c, zeros) < SAME
    for k, merged in enumerate(server["state_rounds"].tolist()):
        if merged:
            assert away(unprefixed(VARIATE, client_state(folder, k, merged)), c_i[k], zeros) < SAME


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_it_follows_the_algorithm(run_local: Run, participation: float) -> None:
    _, folder = run_local(**SETTINGS, participation=participation)
    check_run(folder, settings(participation=participation), [line["clients"] for line in read_rounds(folder)[1:]])


def test_a_lost_reply_is_as_if_the_client_had_not_taken_part(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 loses its first reply, client 1 two in a row."""
    contribution, lost = Scaffold.contribution, {(1, 0), (2, 1), (3, 1)}

    def lose(self: Scaffold, update: Update) -> Contribution:
        if (self.round, update.client) in lost:
            raise BadReply("lost on the way")
        return contribution(self, update)

    monkeypatch.setattr(Scaffold, "contribution", lose)
    _, folder = run_local(**SETTINGS)
    assert [len(line["dropped"]) for line in read_rounds(folder)[1:]] == [1, 1, 1, 0, 0]
    check_run(folder, settings(), [[k for k in range(4) if (t, k) not in lost] for t in range(1, 6)])


def test_an_abandoned_round_counts_for_nobody() -> None:
    made = Scaffold(settings(), build_model("fedpews-mlp", (5,), 4, 0))
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    made.round = 1
    merge_round(made, [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state().items())


# --- invariants -------------------------------------------------------------------------------------------------------

BATCH_NORM = {"dataset": "digits", "model": "lenet5-bn", "image_size": 32, "train_per_class": 20, "batch_size": 50}


@pytest.mark.parametrize("changes", [{}, BATCH_NORM])
def test_the_first_round_is_fedavg_bit_for_bit(run_local: Run, changes: dict[str, Any]) -> None:
    """All variates are 0. BatchNorm's weights have variates then, its running statistics have none."""
    _, folder = run_local("scaffold", **SETTINGS | changes | {"num_rounds": 1})
    _, fedavg = run_local("fedavg", **SETTINGS | changes | {"num_rounds": 1, "method": "fedavg"})
    left, right = load_file(folder / "model.safetensors"), load_file(fedavg / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    variate = unprefixed(VARIATE, server_state(folder))
    assert variate.keys() == {name for name in left if "running" not in name}
    assert all(bool(tensor.any()) for tensor in variate.values())


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_servers_variate_is_the_mean_of_all_clients(run_local: Run, participation: float) -> None:
    _, folder = run_local(**SETTINGS | BATCH_NORM, participation=participation)
    server = server_state(folder)
    assert bool(server["variate/fc1.weight"].any())
    for name, c in unprefixed(VARIATE, server).items():
        own = [client_state(folder, k, t)[f"{VARIATE}{name}"] for k, t in enumerate(server["state_rounds"]) if t]
        torch.testing.assert_close(c, torch.stack(own).sum(0) / 4, rtol=1e-4, atol=1e-6)


def test_clients_that_never_take_part_are_not_in_the_servers_variate(run_local: Run, tmp_path: Path) -> None:
    """With as many zeros for them, c would be too short, and the model would go that much less far each round."""
    classes = tmp_path / "classes.toml"
    big, small = '[[class]]\nname = "big"\nshare = 0.5\n', '[[class]]\nname = "small"\nshare = 0.5\nwidth = 0.5\n'
    classes.write_text(big + small)
    _, folder = run_local(**SETTINGS | {"num_clients": 8, "devices": str(classes), "min_width": 1.0})
    server = server_state(folder)
    assert sum(map(bool, server["state_rounds"])) == 4
    for name, c in unprefixed(VARIATE, server).items():
        own = [client_state(folder, k, t)[f"{VARIATE}{name}"] for k, t in enumerate(server["state_rounds"]) if t]
        torch.testing.assert_close(c, torch.stack(own).mean(0), rtol=1e-4, atol=1e-6)


def test_model_and_variate_travel_both_ways(run_local: Run) -> None:
    _, folder = run_local(**SETTINGS | BATCH_NORM | {"num_rounds": 2, "participation": 0.5})
    model = build_model("lenet5-bn", (1, 32, 32), 10, 0)
    numbers = sum(t.numel() for t in tensors_of(model).values()) + sum(p.numel() for p in model.parameters())
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-down"] == line["formula-bytes-up"] == 2 * 4 * numbers


def test_without_a_step_nothing_changes(run_local: Run) -> None:
    _, folder = run_local(**SETTINGS | {"local_epochs": 0, "num_rounds": 2})
    assert {float(tensor.abs().max()) for tensor in unprefixed(VARIATE, server_state(folder)).values()} == {0.0}


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_client_that_lost_its_state_is_dropped(run_local: Run, tmp_path: Path) -> None:
    """From then on; the others go on with a c that is the mean of all c_i."""
    _, folder = run_local(grid=forgetful(tmp_path / "run", client=1, after=2), **SETTINGS)
    said = {"client": 1, "reason": "client failed: StateGone: client 1 has lost its state: its variate is nowhere else"}
    assert [line["dropped"] for line in read_rounds(folder)[1:]] == [[], [], [said], [said], [said]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"momentum": 0.9}, "momentum = 0.9: must be 0 with method = 'scaffold'"),
        ({"optimizer": "adam"}, "optimizer = 'adam': must be 'sgd' with method = 'scaffold'"),
        ({"weighting": "examples"}, "weighting = 'examples': must be 'uniform' with method = 'scaffold'"),
    ],
)
def test_wrong_settings_are_named(run_local: Run, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        run_local(**SETTINGS | changes)
    assert str(error.value) == said
    assert not (tmp_path / "run").exists()
