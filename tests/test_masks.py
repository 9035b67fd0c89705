"""Neuron masks: expansion, gates, drawing, fixed slices."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.models import Network, UnitGroup, build_model, tensors_of, unit_groups
from fedsub_app.models.groups import split
from fedsub_app.subnets import masks
from fedsub_app.subnets.gates import gated


def tiny(kind: str) -> nn.Sequential:
    """Small networks of every structure that the masks know: MLP, and convolutions with BatchNorm and a flatten."""
    torch.manual_seed(0)
    if kind == "mlp":
        named = {"fc1": nn.Linear(2, 3), "relu1": nn.ReLU(), "fc2": nn.Linear(3, 4), "fc3": nn.Linear(4, 2)}
    else:
        named = {
            "conv1": nn.Conv2d(2, 3, 3, padding=1),
            "bn1": nn.BatchNorm2d(3),
            "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(3, 2, 3, padding=1),
            "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(2 * 2 * 3, 4),
            "relu3": nn.ReLU(),
            "fc2": nn.Linear(4, 3),
        }
    model = nn.Sequential()
    for name, layer in named.items():
        model.add_module(name, layer)
    for name, tensor in tensors_of(model).items():
        if name.startswith("bn"):  # defaults of 0 and 1 would hide mistakes
            tensor.data = torch.rand_like(tensor) + 0.5
    return model


INPUTS = {"mlp": (5, 2), "cnn": (5, 2, 4, 6)}


def owners(kind: str) -> dict[str, tuple[str | None, str | None, int]]:
    """Layer of each tensor's units, layer of its inputs' units, inputs per unit: written by hand, not found."""
    if kind == "mlp":
        return {
            "fc1.weight": ("fc1", None, 1),
            "fc1.bias": ("fc1", None, 1),
            "fc2.weight": ("fc2", "fc1", 1),
            "fc2.bias": ("fc2", None, 1),
            "fc3.weight": (None, "fc2", 1),
            "fc3.bias": (None, None, 1),
        }
    batch_norm = {f"bn1.{name}": ("conv1", None, 1) for name in ("weight", "bias", "running_mean", "running_var")}
    return batch_norm | {
        "conv1.weight": ("conv1", None, 1),
        "conv1.bias": ("conv1", None, 1),
        "conv2.weight": ("conv2", "conv1", 1),
        "conv2.bias": ("conv2", None, 1),
        "fc1.weight": ("fc1", "conv2", 6),
        "fc1.bias": ("fc1", None, 1),
        "fc2.weight": (None, "fc1", 1),
        "fc2.bias": (None, None, 1),
    }


def slow_expand(kind: str, unit_masks, shapes):
    """The rule "and", one entry at a time."""
    full = {}
    for name, shape in shapes.items():
        producer, consumer, per_unit = owners(kind)[name]
        full[name] = torch.zeros(shape, dtype=torch.bool)
        for index in itertools.product(*(range(n) for n in shape)):
            on = producer is None or bool(unit_masks[producer][index[0]])
            on = on and (consumer is None or bool(unit_masks[consumer][index[1] // per_unit]))
            full[name][index] = on
    return full


def shapes_of(model):
    return {name: tensor.shape for name, tensor in tensors_of(model).items()}


def draw_masks(groups, data):
    return {g.name: torch.tensor(data.draw(st.lists(st.booleans(), min_size=g.size, max_size=g.size))) for g in groups}


def test_expand_by_hand():
    groups = (UnitGroup("a", 2, ("a.weight", "a.bias"), (("b.weight", 2),)),)
    shapes = {name: torch.Size(s) for name, s in {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 4)}.items()}
    full = masks.expand(groups, {"a": torch.tensor([True, False])}, shapes | {"b.bias": torch.Size([1])})
    assert full["a.weight"].tolist() == [[True] * 3, [False] * 3]
    assert full["a.bias"].tolist() == [True, False]
    assert full["b.weight"].tolist() == [[True, True, False, False]]
    assert full["b.bias"].tolist() == [True]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_expand_is_the_slow_reference(kind, data):
    model = tiny(kind)
    groups = unit_groups(model)
    unit_masks = draw_masks(groups, data)
    full = masks.expand(groups, unit_masks, shapes_of(model))
    expected = slow_expand(kind, unit_masks, shapes_of(model))
    assert full.keys() == expected.keys()
    for name in full:
        assert torch.equal(full[name], expected[name]), name


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_permuting_units_permutes_the_expanded_mask(data):
    model = tiny("mlp")
    groups = unit_groups(model)
    unit_masks = draw_masks(groups, data)
    order = torch.tensor(data.draw(st.permutations(range(3))))
    before = masks.expand(groups, unit_masks, shapes_of(model))
    after = masks.expand(groups, unit_masks | {"fc1": unit_masks["fc1"][order]}, shapes_of(model))
    assert torch.equal(after["fc1.weight"], before["fc1.weight"][order])
    assert torch.equal(after["fc1.bias"], before["fc1.bias"][order])
    assert torch.equal(after["fc2.weight"], before["fc2.weight"][:, order])
    assert torch.equal(after["fc3.weight"], before["fc3.weight"])


@pytest.mark.parametrize(("kind", "narrow"), [("mlp", False), ("mlp", True), ("cnn", False)])
def test_masked_units_have_no_gradient_and_no_influence(kind, narrow):
    model = tiny(kind).double()
    groups = unit_groups(model)
    unit_masks = {g.name: torch.arange(g.size) % 2 == 0 for g in groups}
    full = slow_expand(kind, unit_masks, shapes_of(model))
    inputs = torch.randn(INPUTS[kind], generator=generator(0)).double()

    network = Network(model)
    mask = torch.cat([unit_masks[g.name] for g in groups]).double()

    def loss():
        return gated(network, mask, inputs, narrow=narrow).logits.square().sum()

    before = loss()
    before.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.grad[~full[name]].any(), name
    assert any(parameter.grad.any() for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter[~full[name]] = 77.0
    torch.testing.assert_close(loss(), before, rtol=1e-12, atol=0)


def test_group_without_mask_is_on():
    model = tiny("mlp")
    groups = unit_groups(model)
    assert all(bool(mask.all()) for mask in masks.expand(groups, {}, shapes_of(model)).values())


def test_score_gradient_by_hand():
    scores, others = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.25, 0.7310586, 0.0])
    got = masks.score_gradient(scores, torch.tensor([1.0, 10.0, -3.0]), others, 2.0)
    # (g - 2 lambda (theta - other)) theta (1 - theta), sigmoid from a table
    want = [(1 - 4 * 0.25) * 0.25, 10 * 0.7310586 * 0.2689414, (-3 - 4 * 0.1192029) * 0.1192029 * 0.8807971]
    assert torch.allclose(got, torch.tensor(want), rtol=1e-5)


@pytest.mark.parametrize(("num_clients", "covered", "uncovered"), [(2, 3860, 7168), (4, 1036, 10_752)])
def test_fixed_masks_cover_what_the_note_says(num_clients, covered, uncovered):
    model = build_model("fedpews-mlp", (5,), 4, seed=0)
    groups = unit_groups(model)
    full = [
        masks.expand(groups, m, shapes_of(model)) for m in masks.fixed_masks(groups, [1 / num_clients] * num_clients)
    ]
    assert [sum(int(mask.sum()) for mask in client.values()) for client in full] == [covered] * num_clients
    by_nobody = sum(int((~torch.stack([c[name] for c in full]).any(dim=0)).sum()) for name in full[0])
    assert by_nobody == uncovered


@given(width=st.integers(1, 300), num_clients=st.integers(1, 60))
def test_fixed_masks_are_the_papers_slices(width, num_clients):
    groups = (UnitGroup("a", width, ("a.weight",), ()),)
    if num_clients > width:
        with pytest.raises(UserError, match=f"num-clients = {num_clients}.*layer a"):
            masks.fixed_masks(groups, [1 / num_clients] * num_clients)
        return
    for i, mask in enumerate(masks.fixed_masks(groups, [1 / num_clients] * num_clients)):
        expected = set(range(width * i // num_clients, width * (i + 1) // num_clients))
        assert set(mask["a"].nonzero().flatten().tolist()) == expected


def test_fixed_masks_with_shares():
    groups = (UnitGroup("a", 10, ("a.weight",), ()),)
    assert [int(m["a"].sum()) for m in masks.fixed_masks(groups, [0.25, 0.75])] == [2, 8]
    assert [int(m["a"].sum()) for m in masks.fixed_masks(groups, [0.1, 0.2, 0.7])] == [1, 2, 7]


def test_units_are_dealt_by_the_generator() -> None:
    """Equal parts; of narrow clients one unit each, and the other eight by their widths."""
    groups = (UnitGroup("a", 10, ("a.weight",), ()),)
    dealt, again = (masks.deal(groups, [1.0] * 3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert [int(m["a"].sum()) for m in dealt] == [4, 3, 3]
    assert [m["a"].tolist() for m in dealt] == [m["a"].tolist() for m in again]
    groups = (UnitGroup("a", 11, ("a.weight",), ()),)
    for widths in ([0.5, 0.25, 0.25], [1.0, 0.5, 0.5]):
        assert [int(m["a"].sum()) for m in masks.deal(groups, widths, generator(0))] == [5, 3, 3]
    assert [int(m["a"].sum()) for m in masks.deal(groups, [0.25] * 2, generator(0))] == [
        3,
        3,
    ]  # of 4, which are not held
    for size, widths, held in ((10, [0.1, 0.1], [1, 1]), (20, [0.5, 0.05, 0.05, 0.05], [9, 1, 1, 1])):
        groups = (UnitGroup("a", size, ("a.weight",), ()),)
        assert [int(m["a"].sum()) for m in masks.deal(groups, widths, generator(0))] == held


def test_split_gather_scatter():
    model = tiny("mlp")
    groups = unit_groups(model)
    unit_masks = split(torch.tensor([1, 0, 1, 0, 0, 1, 1]).bool(), groups)
    assert [m.tolist() for m in unit_masks.values()] == [[True, False, True], [False, False, True, True]]
    full = masks.expand(groups, unit_masks, shapes_of(model))
    named = {name: t.detach() for name, t in tensors_of(model).items()}
    values = masks.gather(named, full)
    assert {name: len(v) for name, v in values.items()} == {name: int(m.sum()) for name, m in full.items()}
    assert all(torch.equal(t, named[name] * full[name]) for name, t in masks.scatter(values, full).items())
