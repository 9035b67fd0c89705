"""One problem: made once of names, or of objects of one's own; its task's sums add up to its metrics."""

from dataclasses import replace

import pytest
import torch
from helpers import problem_of
from torch import Tensor, nn
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.common.tasks import Classification
from fedsub_app.models import tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.loop import prepare
from fedsub_app.training.costs import forward_flops
from fedsub_app.training.problem import Problem, output_of
from fedsub_app.training.workplace import workplace

KEYS = {"model": "feature-mlp", "method": "fedavg"}


def test_server_and_clients_of_a_process_have_one_problem() -> None:
    """Their settings are not equal ones: a node's come from a message."""
    server = Problem.of(resolve(KEYS | {"run-dir": "somewhere", "lr": 0.1}))
    assert workplace(resolve(KEYS)).problem is server
    assert Problem.of(resolve(KEYS | {"seed": 1})) is not server


def test_a_network_is_fresh_and_of_the_seed() -> None:
    problem = Problem.of(resolve(KEYS | {"seed": 3}))
    first, again, other = problem.network(), problem.network(), problem.network(4)
    assert first is not again
    for name, tensor in tensors_of(first).items():
        assert torch.equal(tensors_of(again)[name], tensor)
    assert not torch.equal(tensors_of(other)["fc1.weight"], tensors_of(first)["fc1.weight"])
    named = Problem.of(resolve(KEYS | {"seed": 4})).network()
    assert torch.equal(tensors_of(named)["fc1.weight"], tensors_of(other)["fc1.weight"])


def test_what_a_network_rules_out_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^fedselect\.layer = 'fc9': no layer with weights; '' is all layers$"):
        prepare(resolve(KEYS | {"method": "fedselect", "fedselect.layer": "fc9"}))
    recurrent = replace(problem_of((3, 4)), build=lambda _: nn.Sequential(nn.LSTM(3, 4)), width=0.5)
    with pytest.raises(UserError, match=r"^model-width = 0\.5: layer 0: no units are known for a LSTM$"):
        recurrent.network()


def test_a_problem_of_ones_own_objects() -> None:
    problem = problem_of((3, 4), classes=5)
    assert problem.data.in_shape == (3, 4)
    assert problem.network()(torch.zeros(2, 3, 4)).shape == (2, 5)
    assert torch.equal(problem.network().fc1.weight, problem.build(0).fc1.weight)  # type: ignore[arg-type, union-attr]
    assert forward_flops(problem, problem.network()) == 2 * (12 * 1000 + 1000 * 5)


def test_a_network_of_ones_own_may_look_at_values() -> None:
    """As the encoders of transformers do: their attention asks whether the mask is all ones."""

    class Encoder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.any() else super().forward(x + 1)

    assert output_of(Encoder(3, 2), Classification(), (3,)) == (2,)


def test_sums_of_batches_add_up() -> None:
    """By hand: logits (0, log 3) give probabilities 1/4 and 3/4."""
    task = Classification()
    output = torch.tensor([[0.0, 3.0]]).log().clamp(min=0).repeat(4, 1)
    y = torch.tensor([1, 1, 1, 0])
    parts = [task.sums(output[part], y[part]) for part in (slice(0, 1), slice(1, 4))]
    found = task.metrics({name: parts[0][name] + parts[1][name] for name in parts[0]})
    loss = (3 * torch.tensor(4 / 3).log() + torch.tensor(4.0).log()) / 4
    assert found[task.score] == 75.0
    assert torch.isclose(torch.tensor(found["loss"]), loss)


def test_the_loss_is_torchs_in_every_reduction() -> None:
    output, y = torch.randn(7, 3), torch.arange(7) % 3
    task = Classification()
    assert torch.equal(task.loss(output, y), F.cross_entropy(output, y))
    assert torch.equal(task.loss(output, y, "sum"), F.cross_entropy(output, y, reduction="sum"))
    assert torch.equal(task.loss(output, y, "none"), F.cross_entropy(output, y, reduction="none"))
