"""FLOPs and bytes against numbers worked out by hand."""

import pytest
import torch
from helpers import problem_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedsub_app.common.errors import UserError
from fedsub_app.federation.protocol import formula_bytes
from fedsub_app.models import Network, build_model, mlp, model_names, narrowed, tensors_of, unit_groups
from fedsub_app.runs.config import resolve
from fedsub_app.studies.tables import read_table
from fedsub_app.training.costs import forward_flops, published_flops, subnet_flops, training_flops

IMAGES = problem_of((3, 32, 32))
SHAPES = {"fedpews-mlp": (5,), "feature-mlp": (20,), "mnist-cnn": (1, 28, 28)}


def test_mlp_by_hand():
    model = mlp(2, 4, [3])
    problem = problem_of((2,))
    assert forward_flops(problem, model) == 2 * (2 * 3 + 3 * 4)
    # backward: weight gradients of both layers, input gradient of the second only
    assert training_flops(problem, model) == 2 * (2 * (2 * 3) + 3 * (3 * 4))
    assert torch.backends.mha.get_fastpath_enabled()  # as before it was counted


def test_lenet_is_the_sub_fedavg_notes():
    model = build_model("lenet5", (3, 32, 32), 10, seed=0)
    assert forward_flops(IMAGES, model) == 2 * (592_800 + 400 * 120 + 120 * 84 + 84 * 10)
    # Table 2's 2.4 x: 3 of 6 and 8 of 16 channels kept
    pruned = forward_flops(IMAGES, narrowed(model, unit_groups(model), {"conv1": 3, "conv2": 8}))
    assert pruned == 2 * (236_400 + 200 * 120 + 120 * 84 + 84 * 10)


def test_a_kernel_counts_whole_where_it_is_trimmed():
    layer = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.Flatten(), nn.Linear(5, 4))
    problem, network = problem_of((2, 1, 1)), Network(layer).module  # at 1 x 1 it computes with one place of nine
    assert forward_flops(problem, network) == 2 * (2 * 5 * 9 + 5 * 4)
    assert training_flops(problem, network) == 2 * (2 * 2 * 5 * 9 + 3 * 5 * 4)


def test_fedpart_forward_is_the_notes():
    assert forward_flops(IMAGES, build_model("fedpart-cnn", (3, 32, 32), 10, seed=0)) == 2 * 743_720


def test_ist_one_mac_is_two_flops():
    """The authors' 32 * (3072 h + h C) multiply-adds of one local step, for Birds."""
    model = build_model("feature-mlp", (3072,), 200, seed=0)
    assert 32 * forward_flops(problem_of((3072,)), model) == 2 * 32 * (3072 * 1000 + 1000 * 200)


def test_ists_budget_is_100_tflop_by_the_papers_count():
    """Each layer of a ResNet costs the same share of an image of any size."""
    keys = {row.label: row.overrides for row in read_table("ist-table1-features").rows}
    for label, shape, classes in (("IST", (3072,), 47), ("FedAvg", (3072,), 200), ("FedFull", (3, 64, 64), 200)):
        settings, problem = resolve(keys[label]), problem_of(shape)
        model = build_model(settings.model, shape, classes, seed=0)
        counted = published_flops(forward_flops(problem, model), False) / training_flops(problem, model)
        assert settings.max_flops * counted == pytest.approx(1e14, rel=0.03)


@pytest.mark.parametrize("name", sorted(set(model_names()) - {"resnet18-imagenet"}))  # that one is resnet18, downloaded
def test_subnet_with_all_units_is_the_network(name):
    in_shape = SHAPES.get(name, (3, 32, 32))
    model = build_model(name, in_shape, 10, seed=0)
    groups = unit_groups(model)
    on = {g.name: torch.ones(g.size, dtype=torch.bool) for g in groups}
    problem = problem_of(in_shape)
    assert subnet_flops(problem, model, groups, on) == training_flops(problem, model)
    assert subnet_flops(problem, model, groups, {}) == training_flops(problem, model)


def test_subnet_is_the_physically_smaller_network():
    model = mlp(6, 4, [8, 10])
    masks = {"fc1": torch.arange(8) < 3, "fc2": torch.arange(10) < 7}
    small = mlp(6, 4, [3, 7])
    problem = problem_of((6,))
    assert subnet_flops(problem, model, unit_groups(model), masks) == training_flops(problem, small)
    nothing = {"fc1": torch.zeros(8).bool(), "fc2": torch.zeros(10).bool()}
    assert subnet_flops(problem, model, unit_groups(model), nothing) == training_flops(problem, mlp(6, 4, [1, 1]))


class Attention(nn.Module):
    """Attention, an encoder and a recurrent layer, each of which the CPU computes by one fused operation if it may."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.encoder(x)
        attended = nn.functional.scaled_dot_product_attention(query, query, query)
        return self.head(self.recurrent(attended)[0][:, -1])


def test_fused_operations_count_as_the_products_they_consist_of():
    """FlopCounterMode on the "meta" device, which has no fused operations, counts the same."""
    problem, model = problem_of((5, 8)), Attention()
    ghost = Attention().to("meta")
    x = torch.zeros(2, 5, 8, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ghost.eval()(x)
    assert 2 * forward_flops(problem, model) == counter.get_total_flops() > 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(ghost.train()(x).sum(), list(ghost.parameters()))
    assert 2 * training_flops(problem, model) == counter.get_total_flops()


def test_counting_leaves_the_model_as_it_is():
    model = build_model("lenet5-bn", (3, 32, 32), 10, seed=0).eval()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    training_flops(IMAGES, model)
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_without_a_gradient_is_one_line():
    class InPlace(nn.Linear):
        def forward(self, x):
            h = super().forward(x.flatten(1)).exp()
            return h.mul_(h.detach() + 1)

    with pytest.raises(UserError, match="has no gradient: RuntimeError: one of the variables needed for gradient"):
        training_flops(IMAGES, InPlace(3072, 2))


def test_bytes_by_hand():
    named = {
        "weight": torch.zeros(3, 2),
        "half": torch.zeros(5, dtype=torch.float16),
        "double": torch.zeros(1, dtype=torch.float64),
        "count": torch.zeros((), dtype=torch.int64),
        "mask": torch.zeros(3, 3, dtype=torch.bool),
        "short mask": torch.zeros(7, dtype=torch.bool),
        "none": torch.zeros(0, dtype=torch.bool),
    }
    assert formula_bytes(named) == 4 * (6 + 5 + 1 + 1) + 2 + 1
    assert formula_bytes({}) == 0


def test_bytes_of_sub_fedavg_and_fedpart():
    lenet = build_model("lenet5", (3, 32, 32), 10, seed=0)
    assert 500 * 10 * 2 * formula_bytes(tensors_of(lenet)) == 2_480_240_000  # 2.48 GB, Table 1
    assert formula_bytes(tensors_of(build_model("fedpart-cnn", (3, 32, 32), 10, seed=0))) == 617_944
