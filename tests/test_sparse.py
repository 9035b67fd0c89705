"""Sparse networks: densities of layers and exchanges by hand, slow references of FedDST and SSFL, what travels."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SAME, away, forgetful, merge_round
from test_methods import made
from test_parts import BODY, HEAD, KEYS, initial, model_of
from test_personal import Slow, moved
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.secure.client import AT
from fedsub_app.subnets.masks import gather, scatter
from fedsub_app.subnets.pruning import prunable
from fedsub_app.subnets.sparsity import exchanged, kept_counts, largest
from strategies.bounding import parts
from strategies.feddst import FedDST
from strategies.fedpm import signed_constants
from strategies.sparse import MASK

Run = Callable[..., tuple[Json, Path]]
WEIGHTS = ("fc1.weight", "fc2.weight")
SHAPES = {"a": torch.Size((10, 10)), "b": torch.Size((20, 5, 3, 3)), "c": torch.Size((2, 3))}


# --- pure functions ---------------------------------------------------------------------------------------------------


def test_layers_keep_the_same_share() -> None:
    assert kept_counts(SHAPES, 0.1, "uniform") == {"a": 10, "b": 90, "c": 1}
    assert kept_counts(SHAPES, 0.3, "uniform") == {"a": 30, "b": 270, "c": 2}  # 1.8, rounded


def test_layers_keep_what_the_kernel_says() -> None:
    """The sums of the sizes are 20, 31, 5; 0.05 of the 1,006 weights are 50.3."""
    assert kept_counts(SHAPES, 0.05, "erk") == {
        name: round(n * 50.3 / 56) for name, n in (("a", 20), ("b", 31), ("c", 5))
    }
    # 5 * 100.6 / 56 = 8.98 of 6: c is dense, the others share 94.6.
    assert kept_counts(SHAPES, 0.1, "erk") == {"a": round(20 * 94.6 / 51), "b": round(31 * 94.6 / 51), "c": 6}
    assert kept_counts(SHAPES, 1.0, "erk") == {"a": 100, "b": 900, "c": 6}
    assert kept_counts(SHAPES, 0.001, "erk") == {"a": 1, "b": 1, "c": 1}  # 0.36, 0.56 and 0.09: one at least


def test_the_first_of_equal_values_count() -> None:
    assert largest(torch.tensor([[1.0, 2.0], [2.0, 2.0]]), 2).tolist() == [[False, True], [True, False]]
    assert largest(torch.tensor([2.0, 3.0, 2.0, 2.0]), 2).tolist() == [True, True, False, False]


def test_an_exchange_by_hand() -> None:
    """Half of four: 0.1 and -0.2 go; the gradient is largest at two of the others, or at one that has just gone."""
    weights = {"w": torch.tensor([0.1, -0.2, 0.3, -0.4, 9.0, 0.0, 0.0])}  # a pruned one survives at no size
    masks = {"w": torch.tensor([1, 1, 1, 1, 0, 0, 0], dtype=torch.bool)}
    slopes = {"w": torch.tensor([9.0, 0.0, 9.0, 9.0, 0.5, -7.0, 0.1])}
    new, survived = exchanged(weights, slopes, masks, 0.5)
    assert survived["w"].tolist() == [False, False, True, True, False, False, False]
    assert new["w"].tolist() == [True, False, True, True, False, True, False]
    new, survived = exchanged(weights, slopes, {"w": torch.ones(7, dtype=torch.bool)}, 0.5)
    assert new["w"].all()
    assert survived["w"].all()


# --- slow references --------------------------------------------------------------------------------------------------


def trained(r: Slow, model: Tensors, masks: Tensors, i: int, t: int) -> Tensors:
    for batch in (batch for epoch in r.batches(i, t) for batch in epoch):
        slope = r.gradient(model, batch)
        model = moved(model, r.s.lr, {n: slope[n] * masks.get(n, torch.ones(())) for n in slope})
    return model


def top(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest values are, the first ones of equal values."""
    mask = np.zeros(values.numel(), dtype=bool)
    mask[np.argsort(-values.flatten().numpy(), kind="stable")[:count]] = True
    return torch.from_numpy(mask)


def feddst(r: Slow) -> Tensors:
    o, draws = r.s.options, generator(r.s.seed, "masks")
    counts = kept_counts({n: r.start[n].shape for n in WEIGHTS}, o.density, o.layers)
    masks = {n: top(torch.rand(r.start[n].shape, generator=draws), counts[n]).view(r.start[n].shape) for n in WEIGHTS}
    x_g = {n: x * masks.get(n, torch.ones(())) for n, x in r.start.items()}
    for t in (1, 2, 3):
        models, own = [], []
        for i in r.clients:
            model, mask = trained(r, x_g, masks, i, t), dict(masks)
            if t % o.every == 0:
                share = o.share / 2 * (1 + math.cos(math.pi * t / o.until))
                slope = r.gradient(model, next(r.batches(i, t, "slopes"))[0])
                for n in WEIGHTS:
                    grown = min(int(share * counts[n]), masks[n].numel() - counts[n])
                    kept = top(torch.where(masks[n], model[n].abs(), -1), counts[n] - grown).view(masks[n].shape)
                    mask[n] = kept | top(torch.where(kept, -1, slope[n].abs()), grown).view(kept.shape)
                    model[n] = model[n] * kept
            models.append(model)
            own.append(mask)
        for n in x_g:
            if n in WEIGHTS:
                votes = torch.stack([mask[n] for mask in own]).sum(0)
                x_g[n] = torch.stack([model[n] * mask[n] for model, mask in zip(models, own, strict=True)]).sum(0)
                x_g[n] = torch.where(votes > 0, x_g[n] / votes.clamp(min=1), 0.0)
                if t % o.every == 0:
                    numbers = torch.rand(votes.shape, generator=generator(r.s.seed, t, n, "grown"))
                    sizes = torch.where(x_g[n] == 0, (votes + numbers) / (len(own) + 1) - 1, x_g[n].abs())
                    masks[n] = top(torch.where(votes > 0, sizes, -1), counts[n]).view(votes.shape)
                x_g[n] = x_g[n] * masks[n]
            else:
                x_g[n] = torch.stack([model[n] for model in models]).mean(0)
    return x_g


def ssfl(r: Slow) -> Tensors:
    saliency = {n: torch.zeros_like(r.start[n]) for n in WEIGHTS}
    for i in r.clients:
        slope = r.gradient(r.start, next(r.batches(i, 1, "slopes"))[0])
        for n in WEIGHTS:
            saliency[n] += (slope[n] * r.start[n]).abs() / len(r.clients)
    ranking = torch.cat([saliency[n].flatten() for n in WEIGHTS])
    bound = ranking.sort(descending=True).values[round(r.s.options.density * len(ranking)) - 1]
    masks = {n: saliency[n] >= bound for n in WEIGHTS}
    x_g = {n: x * masks.get(n, torch.ones(())) for n, x in r.start.items()}
    for t in (2, 3):
        x_g = r.mean([trained(r, x_g, masks, i, t) for i in r.clients], HEAD + BODY)
    return x_g


SMALL = KEYS | {"evaluate": "global", "lr": 0.05, "batch_size": 64}
METHODS = [
    ("feddst", feddst, {"feddst__every": 2, "feddst__until": 20}),
    ("feddst", feddst, {"feddst__every": 1, "feddst__density": 0.6, "feddst__layers": "uniform"}),
    ("ssfl", ssfl, {"ssfl__density": 0.3}),
]


@pytest.mark.parametrize(("method", "reference", "keys"), METHODS)
def test_the_model_is_that_of_the_algorithm(
    method: str, reference: Callable[[Slow], Tensors], keys: dict[str, Any], run_local: Run
) -> None:
    """Of two weights or gradients that are nearly equal, rounding may choose the other one: a few in 10,000."""
    keys = SMALL | {"method": method} | keys
    _, folder = run_local(**keys)
    model = model_of(folder)
    expected = reference(Slow(resolve({k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()})))
    nearly_equal(model, expected)


def nearly_equal(model: Tensors, expected: Tensors) -> None:
    """Compare two models: where two sizes are nearly equal, rounding may choose the other weight, a few in 10,000."""
    differ = [float(((model[n] != 0) != (expected[n] != 0)).double().mean()) for n in WEIGHTS]
    assert max(differ) < 5e-4, differ
    assert away(model, expected, initial()) < SAME


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["feddst", "ssfl", "prunefl", "fedtiny", "fedrts"])
def test_with_all_weights_it_is_fedavg_bit_for_bit(method: str, run_local: Run) -> None:
    keys = KEYS | {"model": "lenet5-bn", "image_size": 32, "train_per_class": 20, "num_rounds": 2, "batch_size": 32}
    keys |= {"momentum": 0.9, "weight_decay": 0.01, "evaluate": "global", "weighting": "uniform"}
    _, fedavg = run_local("fedavg", **keys, method="fedavg")
    _, folder = run_local("sparse", **keys, method=method, **{f"{method}__density": 1.0})
    ours, theirs = model_of(folder), model_of(fedavg)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_rounds(folder)[1]["formula-bytes-down"] == read_rounds(fedavg)[1]["formula-bytes-down"]


@pytest.mark.parametrize("method", ["feddst", "ssfl"])
def test_what_is_kept_travels_and_a_mask_where_it_is_new(method: str, run_local: Run) -> None:
    _, folder = run_local(**SMALL, method=method, **{f"{method}__density": 0.25}, optimizer="adam", weight_decay=0.01)
    model = model_of(folder)
    dense = sum(tensor.numel() for name, tensor in model.items() if name not in WEIGHTS)
    all_weights, bits = sum(model[n].numel() for n in WEIGHTS), sum(-(-model[n].numel() // 8) for n in WEIGHTS)
    kept = 4 * (dense + sum(int((model[n] != 0).sum()) for n in WEIGHTS))
    assert abs(kept - 4 * (dense + all_weights / 4)) <= 4 * 2
    found = [(line["formula-bytes-down"] // 3, line["formula-bytes-up"] // 3) for line in read_rounds(folder)[1:]]
    if method == "ssfl":
        assert found == [(4 * (dense + all_weights), 4 * all_weights), (kept + bits, kept), (kept, kept)]
    else:
        assert found == [(kept + bits, kept), (kept, kept), (kept, kept)]


@pytest.mark.parametrize("method", ["ssfl", "fedtiny"])
def test_masks_are_chosen_in_the_first_round_that_counts(method: str, run_local: Run, tmp_path: Path) -> None:
    (tmp_path / "drop.toml").write_text('[[class]]\nname = "all"\nshare = 1.0\ndrop = 0.6\n')
    keys = {"num_clients": 3, "num_rounds": 3, "seed": 1, "devices": str(tmp_path / "drop.toml")}
    _, folder = run_local(**SMALL | keys, method=method)
    lines = read_rounds(folder)[1:]
    chosen = [line["round"] for line in lines if line.get("stage")]
    done = [line["round"] for line in lines if line["status"] == "ok"]
    assert chosen == list(range(1, done[0] + 1))
    assert chosen[1:], "the first round has to fail"
    model = model_of(folder)
    assert float(torch.cat([model[name].flatten() == 0 for name in WEIGHTS]).double().mean()) > 0.5


def test_a_new_mask_travels_once(run_local: Run) -> None:
    _, folder = run_local(**SMALL | {"num_rounds": 4}, method="feddst", feddst__every=2)
    down, up = ([line[f"formula-bytes-{way}"] for line in read_rounds(folder)[1:]] for way in ("down", "up"))
    assert down[0] == down[2] > down[1] == down[3]
    assert up[1] == up[3] == down[0]
    assert up[0] == up[2] == down[1]


def test_a_client_that_lost_its_mask_gets_it_again(run_local: Run, tmp_path: Path) -> None:
    keys = SMALL | {"num_rounds": 4, "method": "ssfl"}
    _, folder = run_local(grid=forgetful(tmp_path / "run", client=1, after=2), **keys)
    lost = {"client": 1, "reason": "client failed: StateGone: client 1 has lost its state: its mask is not there"}
    lines = read_rounds(folder)[1:]
    assert [line["dropped"] for line in lines] == [[], [], [lost], []]
    assert lines[3]["formula-bytes-down"] > lines[2]["formula-bytes-down"]


def test_a_mask_of_another_size_is_refused() -> None:
    strategy, client = made("feddst", feddst__every=1)
    strategy.round = 1
    task = strategy.task(0)
    update = client(0, 1, {}).run_training(dict(task.tensors), task.config)
    strategy.contribution(update)
    name = "mask/fc1.weight"
    wrong = Update(0, update.tensors | {name: torch.ones_like(update.tensors[name])}, update.metrics, 20)
    with pytest.raises(BadReply, match=r"tensor 'fc1.weight': \d+ values, its mask covers \d+"):
        strategy.contribution(wrong)


def test_a_position_that_no_client_keeps_is_pruned() -> None:
    """Although its old value is the largest of all."""
    strategy, client = made("feddst", feddst__every=1, feddst__share=1.0, feddst__until=1000)
    strategy.round, updates = 1, []
    row, column = strategy.masks["fc1.weight"].nonzero()[0].tolist()
    for c in range(3):
        task = strategy.task(c)
        update = client(c, 1, {}).run_training(dict(task.tensors), task.config)
        mask = update.tensors["mask/fc1.weight"]
        if mask[row, column]:
            mask[row, column] = False
            mask.view(-1)[int((~mask).flatten().nonzero()[-1])] = True
        updates.append(update)
    strategy.current["fc1.weight"][row, column] = 100.0
    merge_round(strategy, updates)
    assert not strategy.masks["fc1.weight"][row, column]
    assert strategy.current["fc1.weight"][row, column] == 0


def test_a_position_that_fewer_than_min_contributors_keep_is_pruned() -> None:
    """One client keeps the largest merged weight, two keep the others."""
    strategy, _ = made("feddst", min_contributors=2)
    model, (mask, one, two) = (torch.zeros(k, *strategy.shapes["fc1.weight"]) for k in (1, 3))
    model[0, 0, :3] = torch.tensor([5.0, 1.0, 0.5])
    mask[0, :2] = one[0, :3] = two[0, 1:3] = 1
    strategy.masks = {"fc1.weight": mask.bool()}
    updates = [Update(client, {f"{MASK}fc1.weight": own.bool()}, {}, 20) for client, own in enumerate((one, two))]
    assert strategy.adjusted({"fc1.weight": model[0]}, updates)["fc1.weight"].nonzero().tolist() == [[0, 1], [0, 2]]


def test_of_the_weights_that_have_grown_the_most_voted_ones_stay() -> None:
    """All of them are 0. Two clients grow the same ones, a third one has the first pruned position in place of one."""
    strategy, client = made("feddst", feddst__every=1, feddst__share=0.5, feddst__until=1000)
    strategy.round, name = 1, "fc1.weight"
    task = strategy.task(0)
    first = client(0, 1, {}).run_training(dict(task.tensors), task.config)
    mask = first.tensors[f"{MASK}{name}"]
    whole = scatter(first.tensors, {name: mask})[name]
    grown = int((mask & (whole == 0)).flatten().nonzero()[-1])
    lone = int((~mask).flatten().nonzero()[0])
    other = mask.clone()
    other.view(-1)[[grown, lone]] = torch.tensor([False, True])
    third = first.tensors | {f"{MASK}{name}": other} | gather({name: whole}, {name: other})
    answers = [first.tensors, first.tensors, third]
    merge_round(strategy, [Update(c, each, first.metrics, 20) for c, each in enumerate(answers)])
    assert lone < grown
    assert torch.equal(strategy.masks[name], mask)


def test_the_largest_merged_weights_stay_whatever_their_sign() -> None:
    """Of -2, 1, one that has grown and 0.5 three stay; rounds 2, 4 and 6 adjust."""
    strategy, _ = made("feddst", feddst__every=2, feddst__until=8)
    assert [number for number in range(1, 11) if strategy.adjusts(number)] == [2, 4, 6]
    model = torch.zeros(strategy.shapes["fc1.weight"])
    model[0, :4] = torch.tensor([-2.0, 1.0, 0.0, 0.5])
    mask, own = torch.zeros(2, *model.shape, dtype=torch.bool)
    mask[0, :3] = own[0, :4] = True
    strategy.masks = {"fc1.weight": mask}
    updates = [Update(client, {f"{MASK}fc1.weight": own}, {}, 20) for client in range(2)]
    adjusted = strategy.adjusted({"fc1.weight": model}, updates)
    assert adjusted["fc1.weight"].nonzero().tolist() == [[0, 0], [0, 1], [0, 3]]


def test_the_rounding_of_a_secure_sum_is_no_weight() -> None:
    """With a range of 1000: a grown weight of two votes, whose mean is rounded, stays behind one of three votes."""
    keys: dict[str, Any] = {"secure_aggregation": True, "secure_range": 1000.0, "min_contributors": 2}
    strategy, _ = made("feddst", **keys, weighting="uniform", num_clients=5)
    model, votes, mask = torch.zeros(3, *strategy.shapes["fc1.weight"])
    model[0, :3], votes[0, :3], mask[0, :2] = torch.tensor([1.0, 1e-6, 0.0]), torch.tensor([3.0, 2.0, 3.0]), 1
    strategy.masks = {"fc1.weight": mask.bool()}
    updates = [Update(0, {f"{AT}fc1.weight": votes}, {}, 20), *(Update(client, {}, {}, 20) for client in (1, 2))]
    adjusted = strategy.adjusted({"fc1.weight": model}, updates)["fc1.weight"]
    assert adjusted.nonzero().tolist() == [[0, 0], [0, 2]]


def test_robust_holds_saliencies_against_each_other() -> None:
    """And not against the weights, whose names they have."""
    strategy, client = made("ssfl")
    strategy.round = 1
    task = strategy.task(0)
    update = client(0, 1, {}).run_training(dict(task.tensors), task.config)
    changes = [*parts(strategy, update, strategy.contribution(update))]
    assert {name for name, *_ in changes} == {*strategy.shapes}
    assert not any(bool(start.any()) for _, _, start, _ in changes)
    length = sum(float(x.square().sum()) for x in update.tensors.values()) ** 0.5
    assert strategy.norms(update, strategy.contribution(update)) == {"update": pytest.approx(length)}
    strategy.round, strategy.made = 2, torch.tensor(1)
    assert strategy.origin(update) is strategy.current


def test_saliencies_are_those_of_a_mini_batch_in_training_mode() -> None:
    """Also after an evaluation."""
    strategy, client = made("ssfl", model="lenet5-bn", image_size=32)
    strategy.round, worker = 1, client(0, 1, {})
    worker.network.module.eval()
    answer = worker.run_training(dict(strategy.current), strategy.task(0).config)
    batch = next(worker.batches(1, "slopes"))
    network = worker.place.problem.network().train()
    logits = torch.func.functional_call(network, strategy.current, (worker.x[batch],))
    loss = nn.functional.cross_entropy(logits, worker.y[batch])
    assert answer.metrics["train-loss"] == pytest.approx(float(loss), rel=1e-4)


def test_each_layer_keeps_its_weight_of_the_largest_saliency() -> None:
    """Although a hundredth of all weights are in the first layer."""
    strategy, _ = made("ssfl", ssfl__density=0.01)
    strategy.round, (first, last) = 1, strategy.shapes.values()
    saliency = torch.zeros(last)
    saliency[3, 4] = 0.5
    merge_round(strategy, [Update(0, {"fc1.weight": torch.ones(first), "fc2.weight": saliency}, {}, 20)])
    assert strategy.masks["fc2.weight"].nonzero().tolist() == [[3, 4]]
    assert int(strategy.masks["fc1.weight"].sum()) == round(0.01 * (first.numel() + last.numel()))


def test_a_density_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match=r"^ssfl.density = 0.0: must be"):
        resolve({"method": "ssfl", "ssfl.density": 0.0})


def test_a_network_without_weights_is_refused() -> None:
    _, client = made("feddst")
    settings = client(0, 1, {}).place.settings
    with pytest.raises(UserError, match=r"^model = 'feature-mlp': has no convolution or linear layer for feddst$"):
        FedDST(settings, nn.BatchNorm1d(3))


def test_a_frozen_layer_keeps_its_weights() -> None:
    """And its biases: the random network of FedPM would replace them."""
    model = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.ReLU(), nn.Linear(3, 2))
    assert prunable(model, "unstructured").weights == ("2.weight",)
    assert signed_constants(model, tensors_of(model)).keys() == {"2.weight", "2.bias"}
