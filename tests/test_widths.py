"""FjORD, Federated Dropout, FIARSE: numbers by hand, slow references of the papers, equality to FedAvg, slices."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, merge_round, read
from test_methods import made
from test_personal import Slow, moved
from torch import Tensor, nn
from torch.nn import functional as F

import fedsub_app
from client_apps.fiarse import thresholded
from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import UnitGroup
from strategies.base import SubnetStrategy

WIDTHS = ("heterofl", "fedrolex", "feddrop", "fjord", "fiarse")
WEIGHTS = ("fc1.weight", "fc2.weight")
BN = {"model": "lenet5-bn", "image_size": 32, "batch_size": 16}


def played(method: str, rounds: int = 2, **keys: Any) -> tuple[SubnetStrategy, Tensors, Any]:
    """Rounds of all three clients; returns the strategy, its first model and the settings."""
    strategy, client = made(method, **keys)
    start = dict(strategy.current)
    for strategy.round in range(1, rounds + 1):
        updates = []
        for c in range(3):
            task, worker = strategy.task(c), client(c, strategy.round, {})
            updates.append(read(strategy, worker.run_training(dict(task.tensors), task.config)))
        merge_round(strategy, updates)
    return strategy, start, strategy.settings


def covered(parts: list[tuple[Tensors, Tensors]], old: Tensors) -> Tensors:
    """The mean, position by position, over the clients whose mask is on."""
    new = {}
    for name, before in old.items():
        count = sum(masks[name].double() for _, masks in parts)
        total = sum(model[name] * masks[name] for model, masks in parts)
        new[name] = torch.where(count > 0, total / count.clamp(min=1), before)
    return new


# --- FjORD ------------------------------------------------------------------------------------------------------------


def narrow(model: Tensors, x: Tensor, k: int) -> Tensor:
    """The outputs of the first k hidden units, with BatchNorm on the statistics of the mini-batch."""
    h = x.flatten(1) @ model["fc1.weight"][:k].T + model["fc1.bias"][:k]
    h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt() * model["bn1.weight"][:k] + model["bn1.bias"][:k]
    return torch.relu(h) @ model["fc2.weight"][:, :k].T + model["fc2.bias"]


def fjord(r: Slow, rounds: int) -> Tensors:
    """Algorithm 1: p ~ U{p <= p_max} for each mini-batch; with distillation CE(F_pmax, y) + KL(F_p, F_pmax)."""
    x_g, units = dict(r.start), len(r.start["fc1.bias"])
    for t in range(1, rounds + 1):
        parts = []
        for i in r.clients:
            most = r.s.options.widths[i % len(r.s.options.widths)]
            below = sorted(p for p in r.s.options.widths if p <= most)
            draws, model = generator(r.s.seed, t, i, "widths"), dict(x_g)
            for batch in (batch for epoch in r.batches(i, t, epochs=1) for batch in epoch):
                p = below[int(torch.randint(len(below), (), generator=draws))]
                leaves = {name: x.clone().requires_grad_() for name, x in model.items()}
                x, y = r.data.train_x[batch].double(), r.data.train_y[batch]
                student = narrow(leaves, x, math.ceil(p * units))
                if r.s.options.distill:
                    teacher = narrow(leaves, x, math.ceil(most * units))
                    loss = F.cross_entropy(teacher, y)
                    loss = loss + F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")
                else:
                    loss = F.cross_entropy(student, y)
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                model = moved(model, r.s.lr, dict(zip(leaves, slopes, strict=True)))
            masks = {name: torch.ones_like(x, dtype=torch.bool) for name, x in model.items()}
            k = math.ceil(most * units)
            for name, mask in masks.items():
                (mask[:, k:] if name == "fc2.weight" else mask[k:] if name != "fc2.bias" else mask[:0]).fill_(False)
            parts.append((model, masks))
        x_g = covered(parts, x_g)
    return x_g


@pytest.mark.parametrize("distill", [False, True])
def test_fjord_follows_the_paper(distill: bool) -> None:
    keys = {"fjord__widths": "0.3, 0.65, 1", "fjord__distill": distill, "momentum": 0.0, "lr": 0.05, "batch_size": 8}
    strategy, start, settings = played("fjord", **keys)
    assert away(strategy.current, fjord(Slow(settings), 2), start) < SAME


def test_a_clients_fjord_network_is_evaluated_with_the_statistics_of_its_width() -> None:
    """As cumulative averages over its own samples: of the first layer, whose inputs no statistic changes, by hand."""
    strategy, client = made("fjord", **BN, fjord__widths="1, 0.5, 0.25", fjord__distill=False)
    strategy.round = 1
    assert strategy.task(1).config == {"widths": [0.25, 0.5]}
    sent, worker = dict(strategy.personal_download(1)), client(1, 1, {})
    own = worker.personal(sent, {})
    name = next(name for name in own if name.endswith("running_mean")).removesuffix("running_mean")
    layer = next(iter(own)).removesuffix("weight")
    means = [
        F.conv2d(worker.x[batch], sent[f"{layer}weight"], sent.get(f"{layer}bias")).mean((0, 2, 3))
        for batch in worker.batches(1, "statistics")
    ]
    torch.testing.assert_close(own[f"{name}running_mean"], torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    assert {n: x.shape for n, x in own.items()} == {n: x.shape for n, x in sent.items()}


def test_fjord_counts_the_narrow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of widths 1 and 0.5, with and without distillation: whole, half, or both."""
    costs, published = {}, {}
    for distill in (False, True):
        strategy, client = made("fjord", fjord__widths="1, 0.5", fjord__distill=distill)
        strategy.round = 1
        task, worker = strategy.task(0), client(0, 1, {})
        metrics = worker.run_training(dict(task.tensors), task.config).metrics
        costs[distill], published[distill] = metrics["flops"], metrics["published-flops"]
    place = worker.place
    whole = place.training_flops(place.network)
    half = place.training_flops(place.narrow_network((("fc1", 500),)))
    draws = generator(place.settings.seed, 1, 0, "widths")
    plain = 0
    samples = [len(batch) for batch in client(0, 1, {}).batches()]
    drawn = [int(torch.randint(2, (), generator=draws)) for _ in samples]
    plain = sum(n * (half, whole)[width] for n, width in zip(samples, drawn, strict=True))
    both = sum(n * (half + whole, whole)[width] for n, width in zip(samples, drawn, strict=True))
    assert costs == {False: plain, True: both}
    whole, half = (place.forward_flops(net) / 2 for net in (place.network, place.narrow_network((("fc1", 500),))))
    plain = sum(n * (half, whole)[width] for n, width in zip(samples, drawn, strict=True))
    both = sum(n * (half + whole, whole)[width] for n, width in zip(samples, drawn, strict=True))
    assert published == {False: plain, True: both}


# --- FIARSE -----------------------------------------------------------------------------------------------------------


def fiarse(r: Slow, rounds: int) -> Tensors:
    """The share of the largest weights of all layers; w <- w - lr g M (1 + 2 theta |w| / (|w| + theta)^2)."""
    x_g = dict(r.start)
    for t in range(1, rounds + 1):
        parts = []
        layers = {name: x_g[name].abs().flatten() for name in WEIGHTS}
        if r.s.options.threshold == "model":
            layers = dict.fromkeys(WEIGHTS, torch.cat([*layers.values()]))
        for i in r.clients:
            size = r.s.options.widths[i % len(r.s.options.widths)]
            theta = {
                name: ranking.sort(descending=True).values[int(size * len(ranking)) - 1] * (size < 1)
                for name, ranking in layers.items()
            }
            masks = {name: x.abs() >= theta[name] if name in WEIGHTS else x == x for name, x in x_g.items()}
            model = {name: x * masks[name] for name, x in x_g.items()}
            for batch in (batch for epoch in r.batches(i, t, epochs=1) for batch in epoch):
                on = {name: model[name].abs() >= theta[name] for name in WEIGHTS}
                slope = r.gradient({name: x * on.get(name, 1) for name, x in model.items()}, batch)
                for name in WEIGHTS:
                    w, bound = model[name].abs(), theta[name]
                    slope[name] *= on[name] * (1 + 2 * bound * w / (w + bound).square().clamp(min=1e-30))
                model = moved(model, r.s.lr, slope)
            parts.append((model, masks))
        x_g = covered(parts, x_g)
    return x_g


@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_fiarse_follows_the_paper(threshold: str) -> None:
    """Rounding may choose the other one of two nearly equal weights: one round."""
    strategy, start, settings = played(
        "fiarse", 1, fiarse__widths="1, 0.5, 0.25", fiarse__threshold=threshold, momentum=0.0, lr=0.1, batch_size=8
    )
    assert away(strategy.current, fiarse(Slow(settings), 1), start) < SAME


def test_the_gradient_of_a_threshold_by_hand() -> None:
    weight = torch.tensor([3.0, -1.0, 0.5, 0.0], requires_grad=True)
    found = thresholded(weight, 1.0)
    assert found.tolist() == [3, -1, 0, 0]
    (slope,) = torch.autograd.grad(found.sum(), weight)
    assert slope.tolist() == [1 + 6 / 16, 1 + 2 / 4, 0, 0]
    whole = thresholded(weight, 0.0)
    assert torch.equal(whole, weight)
    assert torch.autograd.grad(whole.sum(), weight)[0].tolist() == [1, 1, 1, 1]


def test_the_outputs_and_gradients_of_the_authors_masked_layer() -> None:
    """Numbers of FIARSE's code (commit 281519c, ``MaskedLinear``), whose gradient lacks the paper's factor."""
    weight = torch.tensor([[3.0, -1.0, 0.5, -2.0], [-0.25, 1.5, 4.0, 0.75]], requires_grad=True)
    out = F.linear(torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.0, -3.0, 1.0, 2.0]]), thresholded(weight, 1.0))
    assert (out + 9).tolist() == [[9, 8], [8, 8.5]]
    (slope,) = torch.autograd.grad((out * torch.tensor([[1.0, -2.0], [0.5, 3.0]])).sum(), weight)
    theirs = torch.tensor([[1, 0.5, 0, 1.5], [0, -13, 5, 0]])
    torch.testing.assert_close(slope, theirs * (1 + 2 * weight.abs() / (weight.abs() + 1) ** 2).detach())


def test_fiarse_sends_the_largest_weights_of_the_whole_model() -> None:
    strategy, _ = made("fiarse", fiarse__widths="1, 0.1")
    strategy.round = 1
    count = sum(strategy.current[name].numel() for name in WEIGHTS)
    kept = strategy.task(1).tensors
    assert sum(kept[name].numel() for name in WEIGHTS) == int(0.1 * count)
    assert len({*strategy.task(1).config["thresholds"].values()}) == 1
    theta = strategy.task(1).config["thresholds"]["fc1.weight"]
    for name in WEIGHTS:
        assert torch.equal(kept[f"mask/{name}"], strategy.current[name].abs() >= theta)
    assert strategy.task(0).tensors.keys() == strategy.current.keys()
    assert strategy.task(2).tensors["fc1.weight"] is strategy.task(0).tensors["fc1.weight"]


# --- Federated Dropout ------------------------------------------------------------------------------------------------


def test_random_units_are_other_ones_for_each_client_and_round() -> None:
    strategy, _ = made("feddrop", feddrop__widths="0.3")
    drawn = []
    for strategy.round in (1, 2):
        drawn += [strategy.units_of(client)["fc1"] for client in range(3)]
    assert all(int(units.sum()) == 300 for units in drawn)
    shared = [int((a & b).sum()) for k, a in enumerate(drawn) for b in drawn[:k]]
    assert all(50 < both < 130 for both in shared)  # 90 are expected
    assert torch.equal(strategy.units_of(2)["fc1"], drawn[-1])


def test_a_round_of_federated_dropout_by_hand() -> None:
    """A unit that one client has takes its values, one that several have their mean, the others stay."""
    strategy, _ = made("feddrop", feddrop__widths="0.5", feddrop__masked_loss=False)
    strategy.round, old = 1, dict(strategy.current)
    classes = {"classes": torch.ones(10, dtype=torch.bool)}
    updates = [
        Update(c, {n: x + 2.0**c for n, x in strategy.task(c).tensors.items()} | classes, {"train-loss": 0.0}, 20)
        for c in range(3)
    ]
    owners = torch.stack([strategy.units_of(c)["fc1"] for c in range(3)]).double()
    merge_round(strategy, updates)
    counts = owners.sum(0)
    change = (owners * torch.tensor([[1.0], [2.0], [4.0]])).sum(0) / counts.clamp(min=1)
    for name in ("fc1.bias", "bn1.weight"):
        torch.testing.assert_close((strategy.current[name] - old[name]).double(), change, rtol=1e-4, atol=1e-5)
    assert {0, 1, 2, 3} == set(counts.int().tolist())


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WIDTHS)
def test_with_width_1_it_is_fedavg_bit_for_bit(method: str) -> None:
    """On a network with BatchNorm, with momentum and weight decay, over two rounds."""
    keys = BN | {"momentum": 0.9, "weight_decay": 0.01, "weighting": "uniform"}
    own = {f"{method}__widths": "1"} | ({f"{method}__masked_loss": False} if method in WIDTHS[:3] else {})
    ours, start, _ = played(method, **keys, **own)
    fedavg, *_ = played("fedavg", **keys)
    assert all(torch.equal(ours.current[name], tensor) for name, tensor in fedavg.current.items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in fedavg.current.items())


@pytest.mark.parametrize("method", [name for name in WIDTHS if name != "fiarse"])
def test_replies_of_other_slices_are_refused(method: str) -> None:
    """A client of half the units answers with all, with rows that it was not given, with fewer."""
    strategy, client = made(method, **{f"{method}__widths": "1, 0.5", f"{method}__assignment": "fixed"})
    strategy.round = 1
    task = strategy.task(1)
    update = client(1, 1, {}).run_training(dict(task.tensors), task.config)
    read(strategy, update)
    for rows in (1000, 501, 499, 0):
        wrong = update.tensors | {"fc1.weight": torch.zeros(rows, 64)}
        with pytest.raises(BadReply, match=rf"tensor 'fc1.weight': shape \({rows}, 64\), expected \(500, 64\)"):
            read(strategy, Update(1, wrong, update.metrics, update.num_examples))


def test_replies_of_more_weights_than_fiarse_sent_are_refused() -> None:
    strategy, client = made("fiarse", fiarse__widths="1, 0.5")
    strategy.round = 1
    task = strategy.task(1)
    update = client(1, 1, {}).run_training(dict(task.tensors), task.config)
    count = len(task.tensors["fc1.weight"])
    wrong = update.tensors | {"fc1.weight": torch.zeros(count + 1)}
    with pytest.raises(BadReply, match=rf"tensor 'fc1.weight': shape \({count + 1},\), expected \({count},\)"):
        read(strategy, Update(1, wrong, update.metrics, update.num_examples))
    whole = update.tensors | {"fc1.weight": strategy.current["fc1.weight"]}
    with pytest.raises(BadReply, match=r"tensor 'fc1.weight': shape \(1000, 64\), expected"):
        read(strategy, Update(1, whole, update.metrics, update.num_examples))


def test_distillation_without_classes_is_refused() -> None:
    with pytest.raises(UserError, match=r"^fjord.distill = True: needs classes, task = 'regression' has none$"):
        made("fjord", task="regression", dataset="diabetes", train_per_class=0)


def test_fiarse_needs_no_units_that_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the devices' networks ended the run after its first round."""
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    keys = {"method": "fiarse", "devices": "heterofl", "num-clients": 5, "num-rounds": 1, "partition": "iid"}
    part = (torch.randn(50, 8), torch.arange(50) % 3)
    record = fedsub_app.run(keys | {"evaluate": "global"}, model=lambda: nn.Linear(8, 3), data=(part, part))
    assert len(record.lines[1]["served"]["global-accuracy"]) > 2


def test_a_device_sets_the_width() -> None:
    """The classes of a preset, in place of the setting ``widths``; FjORD draws from those up to the client's own."""
    for method in WIDTHS:
        strategy, _ = made(method, devices="heterofl", **{f"{method}__assignment": "fixed"})
        strategy.round = 1
        widths = [strategy.devices.of(client).width for client in range(3)]
        assert [strategy.width(client) for client in range(3)] == widths
        assert {*strategy.held_widths} >= {*widths}
        if method == "fjord":
            tasks = [strategy.task(client).config["widths"] for client in range(3)]
            assert [max(drawn) for drawn in tasks] == widths


def test_ranks_name_each_unit_once() -> None:
    group = UnitGroup("a", 7, (), ())
    for method in WIDTHS[:4]:
        strategy, _ = made(method)
        strategy.round = 5
        assert sorted(strategy.ranks(group, 0).tolist()) == list(range(7))
