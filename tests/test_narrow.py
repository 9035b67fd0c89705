"""Smaller networks: slices out and back, and real modules of other widths."""

import pytest
import torch
from helpers import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedsub_app.models import build_model, load_tensors, narrowed, tensors_of, unit_groups, widths_of
from fedsub_app.models.groups import UnitGroup
from fedsub_app.subnets.averaging import Contribution, masked_mean
from fedsub_app.subnets.masks import expand, fixed_masks
from fedsub_app.subnets.slices import indices, put, take
from fedsub_app.training.costs import subnet_flops, training_flops

INPUTS = {"lenet5": (3, 32, 32), "lenet5-bn": (3, 32, 32), "feature-mlp": (20,), "resnet18": (3, 16, 16)}


def network(name, seed=0):
    """In float64, so that the order of sums does not matter; with normalisations that do something."""
    model = build_model(name, INPUTS[name], 10, seed).double()
    noise = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in tensors_of(module).values():
                tensor.data = torch.rand(tensor.shape, generator=noise, dtype=torch.float64) + 0.5
    return model


def small_network():
    """Convolution, BatchNorm, flatten, linear: each kind of row and column, few numbers."""
    layers = {
        "conv1": nn.Conv2d(2, 3, 3), "bn1": nn.BatchNorm2d(3), "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(3, 2, 2), "pool2": nn.MaxPool2d(2), "flatten": nn.Flatten(),
        "fc1": nn.Linear(2 * 2 * 3, 4), "relu3": nn.ReLU(), "fc2": nn.Linear(4, 3),
    }  # fmt: skip
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def tensors_and_shapes(model):
    tensors = {name: t.detach() for name, t in tensors_of(model).items()}
    return tensors, {name: t.shape for name, t in tensors.items()}


def every_other(groups):
    return {group.name: torch.arange(group.size) % 2 == 0 for group in groups}


def test_put_by_hand():
    layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    groups = unit_groups(layers)
    _, shapes = tensors_and_shapes(layers)
    units = {"0": torch.tensor([True, False, True])}
    small = {
        "0.weight": torch.tensor([[1, 2], [3, 4]]),
        "0.bias": torch.tensor([5, 6]),
        "2.weight": torch.tensor([[7, 8]]),
        "2.bias": torch.tensor([9]),
    }
    assert {name: t.tolist() for name, t in put(small, groups, units, shapes).items()} == {
        "0.weight": [[1, 2], [0, 0], [3, 4]],
        "0.bias": [5, 0, 6],
        "2.weight": [[7, 0, 8]],
        "2.bias": [9],
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_put_and_take_are_inverse(data):
    model = small_network()
    groups = unit_groups(model)
    tensors, shapes = tensors_and_shapes(model)
    named = data.draw(st.sets(st.sampled_from([group.name for group in groups])))
    units = {
        group.name: torch.tensor(data.draw(st.lists(st.booleans(), min_size=group.size, max_size=group.size)))
        for group in groups
        if group.name in named
    }
    small = take(tensors, groups, units)
    whole, masks = put(small, groups, units, shapes), expand(groups, units, shapes)
    assert whole.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(whole[name], torch.where(masks[name], tensor, 0)), name
    again = take(whole, groups, units)
    assert all(torch.equal(again[name], tensor) for name, tensor in small.items())


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_partition_of_one_layers_units_covers_its_rows_and_columns_once(data):
    model = small_network()
    groups = unit_groups(model)
    tensors, shapes = tensors_and_shapes(model)
    group = data.draw(st.sampled_from(groups))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=group.size, max_size=group.size)))
    parts = [{group.name: owner == client} for client in range(3)]
    cut = set(group.rows) | {name for name, _ in group.cols}
    times = [expand(groups, units, shapes) for units in parts]
    back = [put(take(tensors, groups, units), groups, units, shapes) for units in parts]
    for name, tensor in tensors.items():
        count = sum(masks[name].int() for masks in times)
        assert bool((count == (1 if name in cut else 3)).all()), name
        if name in cut:  # each value comes from one client, so the sum is exact
            assert torch.equal(sum(whole[name] for whole in back), tensor), name


def test_the_mean_of_disjoint_slices_is_put_together_exactly():
    """IST: every client trains its own units; what several have, the output bias, is averaged."""
    model = small_network()
    groups = unit_groups(model)
    tensors, shapes = tensors_and_shapes(model)
    slices, whole = [], []
    for client, units in enumerate(fixed_masks(groups, [0.5, 0.5])):
        small = {name: torch.full_like(t, client + 1.0) for name, t in take(tensors, groups, units).items()}
        slices.append(Contribution(small, slices=indices(groups, units)))
        whole.append(Contribution(put(small, groups, units, shapes), expand(groups, units, shapes)))
    mean, other = masked_mean(tensors, slices), masked_mean(tensors, whole)
    assert all(torch.equal(mean[name], other[name]) for name in tensors)
    assert mean["conv1.bias"].tolist() == [1, 2, 2]
    assert mean["bn1.running_var"].tolist() == [1, 2, 2]
    assert mean["conv2.weight"][0, 0].eq(1).all()
    assert mean["conv2.weight"][1, 1:].eq(2).all()
    assert torch.equal(mean["conv2.weight"][1, 0], tensors["conv2.weight"][1, 0])  # nobody has both units
    assert mean["fc1.weight"][2:, 6:].eq(2).all()
    assert mean["fc2.bias"].tolist() == [1.5] * 3


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_a_narrow_network_computes_what_the_full_one_does_with_its_other_units_off(name, training):
    """Outputs, gradients and, in training, the running statistics that BatchNorm is left with."""
    model = network(name).train(training)
    groups = unit_groups(model)
    units = every_other(groups)
    tensors, shapes = tensors_and_shapes(model)
    kept, masks = take(tensors, groups, units), expand(groups, units, shapes)
    small = narrowed(model, groups, {group: int(mask.sum()) for group, mask in units.items()})
    load_tensors(small, kept)
    load_tensors(model, {name: tensor * masks[name] for name, tensor in tensors.items()})
    x = torch.randn(4, *INPUTS[name], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 3, 9, 3])
    output, whole = small(x), model(x)
    torch.testing.assert_close(output, whole, rtol=1e-9, atol=1e-9)
    F.cross_entropy(output, y).backward()
    F.cross_entropy(whole, y).backward()
    expected = take({n: p.grad for n, p in model.named_parameters()}, groups, units)
    for parameter, own in small.named_parameters():
        assert own.grad is not None
        assert bool(own.grad.any()), parameter
        torch.testing.assert_close(own.grad, expected[parameter], rtol=1e-7, atol=1e-9)
    left = take(tensors_and_shapes(model)[0], groups, units)
    for tensor, own in tensors_of(small).items():
        torch.testing.assert_close(own.detach(), left[tensor], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", INPUTS)
def test_a_narrow_network_is_a_network_of_its_own(name):
    model = network(name).eval()
    next(model.parameters()).requires_grad_(False)
    groups = unit_groups(model)
    tensors, _ = tensors_and_shapes(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    widths = {group.name: 1 + group.size // 3 for group in groups}
    small = narrowed(model, groups, widths)
    own = tensors_of(small)
    assert list(own) == list(tensors)
    first = {group.name: torch.arange(group.size) < widths[group.name] for group in groups}
    assert all(torch.equal(own[n], t) for n, t in take(tensors, groups, first).items())
    assert widths_of(groups, own) == widths
    assert widths_of(groups, tensors) == {group.name: group.size for group in groups}
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not any(module.training for module in small.modules())
    for module in small.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
        elif isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert len(module.weight) == module.num_features
    # a small network has the same units, which can be cut again
    again = unit_groups(small)
    assert {group.name: group.size for group in again} == widths
    assert [(group.rows, group.cols) for group in again] == [(group.rows, group.cols) for group in groups]
    with torch.no_grad():
        for tensor in small.state_dict().values():
            tensor.fill_(7)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", INPUTS)
def test_its_flops_are_those_that_are_reported_of_a_subnetwork(name):
    model = build_model(name, INPUTS[name], 10, 0)
    groups = unit_groups(model)
    units = every_other(groups)
    small = narrowed(model, groups, {group: int(mask.sum()) for group, mask in units.items()})
    problem = problem_of(INPUTS[name])
    assert training_flops(problem, small) == subnet_flops(problem, model, groups, units)


def test_networks_of_two_widths_live_side_by_side():
    model = network("lenet5-bn")
    groups = unit_groups(model)
    half, third = (narrowed(model, groups, {g.name: max(1, g.size // part) for g in groups}) for part in (2, 3))
    before = [tensor.detach().clone() for tensor in [*tensors_of(model).values(), *tensors_of(third).values()]]
    x = torch.randn(4, *INPUTS["lenet5-bn"], dtype=torch.float64)
    torch.optim.SGD(half.parameters(), lr=0.1).zero_grad()
    F.cross_entropy(half(x), torch.arange(4)).backward()
    torch.optim.SGD(half.parameters(), lr=0.1).step()
    after = [*tensors_of(model).values(), *tensors_of(third).values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert third(x).shape == half(x).shape == (4, 10)
    assert widths_of(groups, tensors_of(half))["fc1"] == 60
    assert widths_of(groups, tensors_of(third))["fc1"] == 40


def test_without_widths_it_is_a_copy_that_has_no_gradients():
    model = small_network()
    model(torch.zeros(2, 2, 7, 9)).sum().backward()
    copied = narrowed(model, unit_groups(model), {})
    assert all(torch.equal(tensor, copied.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in copied.parameters())


def test_a_width_is_rounded_up_as_it_is_written():
    """0.07 * 100 is 7.000000000000001. One unit is the least, as of 1e-300."""
    group = UnitGroup("fc", 100, ("fc.weight",), ())
    assert [group.kept(width) for width in (1e-300, 0.07, 0.071, 1.0)] == [1, 7, 8, 100]


@pytest.mark.parametrize("width", [0, -1, 4])
def test_a_width_out_of_range_is_named(width):
    model = small_network()
    with pytest.raises(ValueError, match=f"width of conv1 = {width}: allowed is 1 to 3"):
        narrowed(model, unit_groups(model), {"conv1": width})
