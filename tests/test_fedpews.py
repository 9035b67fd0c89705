"""FedPeWS against a second, slow implementation of Algorithm 1 written from the paper, and its invariants."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import SAME, away, merge_round, read
from safetensors.torch import load_file
from test_methods import made
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import Network, build_model, tensors_of, unit_groups
from fedsub_app.models.groups import split
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.gates import gated
from fedsub_app.subnets.masks import gather
from strategies.fedpews import FedPeWS, positions

Run = Callable[..., tuple[Json, Path]]
SETTINGS: dict[str, Value] = {
    "method": "fedpews",
    "dataset": "synthetic-3k",
    "model": "fedpews-mlp",
    "partition": "lists",
    "class-lists": "0 2, 1 3",
    "num-rounds": 3,
    "batch-size": 128,
    "seed": 6,  # no draw of a mask here is closer to its probability than 2e-5: rounding (1e-7) decides none
    "lr": 0.05,
    "momentum": 0.9,
    "server-lr": 0.5,
    "fedpews.warmup-rounds": 2,
    "fedpews.lambda": 0.7,
    "fedpews.mask-lr": 0.5,
}
START = tensors_of(build_model("fedpews-mlp", (5,), 4, 6))


def drawn_from(scores: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A mask: one where a uniform number is below the probability, both in the app's precision."""
    return (torch.rand(len(scores), generator=draw) < torch.sigmoid(scores).float()).double()


def masked_weights(model: nn.Module, mask: torch.Tensor) -> Tensors:
    """x ∘ m written out for an MLP: W[b, a] m[b] m[a], bias m[b]; inputs and outputs are on."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    widths = [model.get_submodule(name).out_features for name in layers[:-1]]
    parts = [torch.ones(5).to(mask), *mask.split(widths), torch.ones(4).to(mask)]
    weights = {}
    for layer, (before, after) in zip(layers, pairwise(parts), strict=True):
        weights[f"{layer}.weight"] = model.get_parameter(f"{layer}.weight") * after[:, None] * before[None, :]
        weights[f"{layer}.bias"] = model.get_parameter(f"{layer}.bias") * after
    return weights


def masked_outputs(model: nn.Module, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Logits of an MLP whose hidden units put out relu(z_j) m_j."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer, part in zip(layers, mask.split([layer.out_features for layer in layers[:-1]]), strict=False):
        x = torch.relu(layer(x)) * part
    return layers[-1](x)


def reference(settings_keys: dict[str, Value], fixed: list[torch.Tensor] | None = None) -> Tensors:
    """Algorithm 1 as a loop over tensors, with the app's random numbers, in float64; returns the global model."""
    s = resolve(settings_keys)
    options = s.options
    data = load_dataset(s.data)
    partition = make_partition(data, s.partitioning)
    model = build_model("fedpews-mlp", (5,), 4, s.seed).double()
    x_g = {k: v.detach().clone() for k, v in tensors_of(model).items()}
    draws = [torch.randn(256, generator=generator(s.seed, 0, i, "first scores")).double() for i in range(2)]
    scores = [options.score_spread * draw for draw in draws]
    theta = [torch.sigmoid(score) for score in scores]
    for t in range(1, s.num_rounds + 1):
        warm = t <= options.warmup_rounds
        answers, drawn = [], []
        for i in range(2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(x_g[name])
            x, y = data.train_x[partition.train[i]].double(), data.train_y[partition.train[i]]
            order = torch.randperm(len(y), generator=generator(s.seed, t, i, "batches"))
            draw = generator(s.seed, t, i, "masks")
            velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for batch in order.split(s.batch_size):
                if warm and not fixed:
                    leaf = scores[i].clone().requires_grad_()
                    sigma = torch.sigmoid(leaf)
                    m = (drawn_from(scores[i], draw) - sigma).detach() + sigma
                    if options.mask_gradient == "activations":
                        logits = masked_outputs(model, m, x[batch])
                    else:
                        logits = functional_call(model, masked_weights(model, m), (x[batch],))
                    loss = F.cross_entropy(logits, y[batch])
                    loss = loss - options.lambda_ * ((sigma - theta[1 - i]) ** 2).sum()
                    scores[i] = scores[i] - options.mask_lr * torch.autograd.grad(loss, leaf)[0]
                m = torch.ones(256, dtype=torch.float64)
                if warm:
                    m = fixed[i] if fixed else drawn_from(scores[i], draw)
                model.zero_grad()
                F.cross_entropy(functional_call(model, masked_weights(model, m), (x[batch],)), y[batch]).backward()
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        gradient = p.grad + (s.objective == "prox") * s.prox_mu * (p - x_g[name])
                        velocity[name] = s.momentum * velocity[name] + gradient
                        p -= s.lr * velocity[name]
            m = torch.ones(256, dtype=torch.float64)
            if warm:
                m = fixed[i] if fixed else drawn_from(scores[i], draw)
            drawn.append(m)
            trained = {k: v.detach().clone() for k, v in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
                cover = {k: v.detach() for k, v in masked_weights(model, m).items()}
            answers.append((trained, cover))
        if warm and not fixed:
            theta = drawn if options.others == "masks" else [torch.sigmoid(score) for score in scores]
        for name, old in x_g.items():
            total = sum(trained[name] * cover[name] for trained, cover in answers)
            count = sum(cover[name] for _, cover in answers)
            mean = torch.where(count > 0, total / count.clamp(min=1), old)
            x_g[name] = old - s.server_lr * (old - mean)
    return x_g


@pytest.mark.parametrize(
    "reading",
    [
        {},
        {"objective": "prox", "prox-mu": 0.3},
        {"momentum": 0.0},  # the paper's step
        {"fedpews.others": "mean"},
        {"fedpews.score-spread": 0.5},
        {"fedpews.mask-gradient": "activations"},
    ],
)
def test_learned_masks_follow_algorithm_1(run_local: Run, reading: dict[str, Value]) -> None:
    keys = SETTINGS | reading
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    ours, expected = load_file(folder / "model.safetensors"), reference(keys)
    assert away(ours, expected, START) < SAME


def test_fixed_masks_follow_algorithm_1(run_local: Run) -> None:
    keys = SETTINGS | {"fedpews.masks": "fixed"}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    first = torch.cat([(torch.arange(width) < width // 2).double() for width in (32, 64, 128, 32)])
    ours, expected = load_file(folder / "model.safetensors"), reference(keys, [first, 1 - first])
    assert away(ours, expected, START) < SAME


def test_shares_of_fixed_masks(run_local: Run) -> None:
    keys = SETTINGS | {"fedpews.masks": "fixed", "fedpews.shares": "0.25, 0.75"}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    first = torch.cat([(torch.arange(width) < width // 4).double() for width in (32, 64, 128, 32)])
    ours, expected = load_file(folder / "model.safetensors"), reference(keys, [first, 1 - first])
    assert away(ours, expected, START) < SAME


@pytest.mark.parametrize(
    ("shares", "masks", "said"),
    [
        ("0.5, 0.4", "fixed", "fedpews.shares = '0.5, 0.4': must be num-clients = 2 positive numbers that add up to 1"),
        ("0.5", "fixed", "fedpews.shares = '0.5': must be"),
        ("half, half", "fixed", "fedpews.shares = 'half, half': must be"),
        ("-0.5, 1.5", "fixed", "fedpews.shares = '-0.5, 1.5': must be"),
        ("0.5, 0.5", "learned", "fedpews.shares = '0.5, 0.5': allowed with fedpews.masks = 'fixed' only"),
    ],
)
def test_wrong_shares_are_named(shares: str, masks: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(SETTINGS | {"fedpews.shares": shares, "fedpews.masks": masks})


def test_without_warm_up_it_is_fedavg_bit_for_bit(run_local: Run) -> None:
    _, fedavg = run_local("fedavg")
    _, fedpews = run_local("fedpews", method="fedpews", fedpews__warmup_rounds=0)
    left, right = load_file(fedavg / "model.safetensors"), load_file(fedpews / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_only_covered_values_travel(run_local: Run) -> None:
    """Fixed masks, two clients: 3,860 of 14,884 parameters each, both ways; the mask's 256 bits on the way down."""
    keys = SETTINGS | {"fedpews.masks": "fixed", "num-rounds": 2}
    _, folder = run_local(**{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})
    line = read_rounds(folder)[1]
    assert line["formula-bytes-up"] == 2 * 4 * 3860
    assert line["formula-bytes-down"] == 2 * (4 * 3860 + 256 // 8)
    assert line["subnet-flops"] < line["flops"] / 2


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("off", [None, 0, 1], ids=["some", "first-layer-off", "second-layer-off"])
def test_gates_are_masked_weights_also_in_the_gradients(narrow: bool, off: int | None) -> None:
    """Conv, flatten and linear layers: value, weight gradient and mask gradient as if the weights were multiplied."""
    model = build_model("fedpews-cnn", (1, 8, 8), 3, 0).double()
    groups = unit_groups(model)
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    mask = (torch.rand(sum(group.size for group in groups)) > 0.4).double()
    if off is not None:  # so few units that a draw may have none of a layer
        list(split(mask, groups).values())[off].zero_()
    mask.requires_grad_()
    network = Network(model)
    output = gated(network, mask, x, narrow=narrow).logits
    weights = [p for _, p in model.named_parameters()]
    got = torch.autograd.grad(F.cross_entropy(output, y), [*weights, mask])
    parameters = dict(model.named_parameters())
    for group, part in zip(groups, split(mask, groups).values(), strict=True):
        for name in group.rows:
            parameters[name] = parameters[name] * part.view(-1, *[1] * (parameters[name].dim() - 1))
        for name, repeat in group.cols:
            columns = part.repeat_interleave(repeat)
            parameters[name] = parameters[name] * columns.view(1, -1, *[1] * (parameters[name].dim() - 2))
    literal = functional_call(model, parameters, (x,))
    want = torch.autograd.grad(F.cross_entropy(literal, y), [*weights, mask])
    torch.testing.assert_close(output, literal, rtol=1e-9, atol=1e-12)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    assert torch.equal(model(x), functional_call(model, dict(model.named_parameters()), (x,)))


def test_a_frozen_layer_is_cut_too() -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    layers[0].requires_grad_(False)
    network, x, found = Network(layers), torch.randn(7, 4), []
    for narrow in (False, True):
        mask = (torch.arange(11) % 3 > 0).float().requires_grad_()
        logits = gated(network, mask, x, narrow=narrow).logits
        found.append((logits, *torch.autograd.grad(logits.square().sum(), [mask])))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("network", "shape"), [("fedpews-cnn", (1, 8, 8)), ("lenet5-bn", (1, 16, 16))])
def test_the_gradient_of_activations_is_each_units_output_times_its_gradient(
    network: str, shape: tuple[int, ...]
) -> None:
    """dL/dm_j = sum over the batch of (dL/dh_j) relu(z_j), also for units that are off; m² gives those none."""
    model = build_model(network, shape, 3, 0).double()
    built = Network(model)
    x, y = torch.randn(5, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    mask = (torch.rand(sum(group.size for group in built.units)) > 0.4).double().requires_grad_()
    plain, masked = (gated(built, mask, x, outputs=outputs).logits for outputs in (False, True))
    torch.testing.assert_close(masked, plain, rtol=1e-9, atol=1e-12)
    (got,) = torch.autograd.grad(F.cross_entropy(masked, y), [mask])
    want, hidden, parts = [], x, iter(split(mask.detach(), built.units).values())
    names = {group.name for group in built.units}
    gates: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, module in model.named_children():  # the network once more, with h = relu(z) m as leaves of the graph
        hidden = module(hidden)
        if name in names:
            part = next(parts)
        elif isinstance(module, nn.ReLU):
            relu, gate = hidden, part.view(-1, *[1] * (hidden.dim() - 2))
            hidden = relu * gate
            hidden.retain_grad()
            gates.append((relu, hidden))
    F.cross_entropy(hidden, y).backward()
    for relu, h in gates:
        assert h.grad is not None
        want.append((h.grad * relu).transpose(0, 1).flatten(1).sum(1).detach())
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-9, atol=1e-12)
    off = mask.detach() == 0
    assert bool((got[off] != 0).any())
    (exact,) = torch.autograd.grad(F.cross_entropy(plain, y), [mask])
    assert not bool(exact[off].any())


def test_theta_of_the_others_by_hand() -> None:
    settings = resolve(SETTINGS | {"num-clients": 3, "class-lists": "0, 1, 2 3"})
    strategy = FedPeWS(settings, build_model("fedpews-mlp", (5,), 4, 0))
    strategy.round = 1
    strategy.theta = torch.tensor([0.2, 0.4, 0.9])[:, None].repeat(1, 256)
    for others, expected in {"masks": [0.65, 0.55, 0.3], "mean": [0.65, 0.55, 0.3], "highest": [0.9, 0.9, 0.4]}.items():
        strategy.options = strategy.options.model_copy(update={"others": others})
        found = [strategy.task(client).tensors["fedpews/theta"][0].item() for client in range(3)]
        assert found == pytest.approx(expected)


def test_a_client_takes_itself_away_from_the_mean_of_all() -> None:
    """Of three with 1, 0 and 0.5: 1.5 less 1, halved; one that has lost its state, or is not counted, takes all."""
    _, client = made("fedpews")
    theta, own = torch.tensor([0.5]), {"counted": torch.tensor([1.0])}
    found = [client(0, 1, state).others(theta, counted) for state, counted in ((own, 3), ({}, 3), (own, 0))]  # type: ignore[attr-defined]
    assert [float(x) for x in found] == [0.25, 0.5, 0.5]


def test_the_drawn_mask_is_the_theta_of_the_next_round() -> None:
    """The share of the others that drew the unit last, whatever their probabilities; nothing but masks tells of it."""
    settings = resolve(SETTINGS | {"num-clients": 3, "class-lists": "0, 1, 2 3"})
    strategy = FedPeWS(settings, build_model("fedpews-mlp", (5,), 4, 0))
    strategy.round = 1
    assert "fedpews/theta" not in strategy.expected(0)
    masks = [torch.arange(256) % 4 == client for client in range(3)]
    updates = [
        Update(
            client,
            gather(strategy.current, positions(strategy.units, mask, strategy.current)) | {"fedpews/mask": mask},
            {},
            1,
        )
        for client, mask in enumerate(masks)
    ]
    assert merge_round(strategy, updates)["units-covered-by"] == [64, 192, 0, 0]
    strategy.round = 2
    assert torch.equal(strategy.task(0).tensors["fedpews/theta"], (masks[1].float() + masks[2].float()) / 2)


@pytest.mark.parametrize(("rounds", "units"), [(0, None), (1, [128, 128])])
def test_without_a_warm_up_no_client_has_a_fixed_mask(rounds: int, units: list[int] | None) -> None:
    keys = {"num-clients": 2, "class-lists": "0 1, 2 3", "fedpews.masks": "fixed", "fedpews.warmup-rounds": rounds}
    masks = FedPeWS(resolve(SETTINGS | keys), build_model("fedpews-mlp", (5,), 4, 0)).unit_masks()
    assert (None if masks is None else masks.sum(1).tolist()) == units


@pytest.mark.parametrize("others", ["masks", "mean", "highest"])
def test_many_clients_do_not_empty_each_others_masks(others: str, run_local: Run) -> None:
    """Ten clients, one class each: the diversity term leaves hardly a unit to nobody."""
    _, folder = run_local(
        dataset="digits",
        model="fedpews-mlp",
        partition="classes",
        classes_per_client=1,
        num_clients=10,
        num_rounds=8,
        method="fedpews",
        lr=0.05,
        fedpews__warmup_rounds=8,
        fedpews__lambda=2.0,
        fedpews__others=others,
    )
    last = read_rounds(folder)[-1]
    assert last["units-covered-by"][0] <= 256 // 20


def test_a_mask_and_values_that_do_not_fit_are_refused() -> None:
    strategy = FedPeWS(resolve(SETTINGS), build_model("fedpews-mlp", (5,), 4, 0))
    strategy.round = 1
    mask = torch.ones(256, dtype=torch.bool)
    values = {name: tensor.flatten() for name, tensor in strategy.current.items()}
    strategy.options = strategy.options.model_copy(update={"others": "mean"})
    good: Tensors = values | {"fedpews/mask": mask, "fedpews/theta": torch.rand(256)}
    strategy.contribution(Update(0, good, {}, 1))
    with pytest.raises(BadReply, match=r"'fc1\.bias': 32 values, its mask covers 0"):
        strategy.contribution(Update(0, good | {"fedpews/mask": ~mask, "fc1.weight": torch.empty(0)}, {}, 1))
    with pytest.raises(BadReply, match=r"'fedpews/theta': values 1.5 to 1.5, expected 0 to 1"):
        read(strategy, Update(0, good | {"fedpews/theta": torch.full((256,), 1.5)}, {}, 1))
