"""Local training: the optimizer is torch's, bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from fedsub_app.config import resolve
from fedsub_app.models import build_model
from fedsub_app.settings import Value
from fedsub_app.training import Optimizer


@pytest.mark.parametrize("network", ["lenet5-bn", "fedpews-mlp"])
@pytest.mark.parametrize(
    "keys",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight-decay": 1e-2},
        {"lr": 1e-3, "optimizer": "adam", "weight-decay": 1e-2},
    ],
)
def test_the_optimizer_is_torchs_bit_for_bit(network: str, keys: dict[str, Value]) -> None:
    settings = resolve(keys)
    shape = (5,) if network == "fedpews-mlp" else (3, 32, 32)
    ours, theirs = (build_model(network, shape, 4, 0) for _ in range(2))
    x, y = torch.randn(5, 16, *shape), torch.randint(4, (5, 16))
    if len(shape) == 3:
        ours, theirs = (m.to(memory_format=torch.channels_last) for m in (ours, theirs))  # type: ignore[call-overload]
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (5, 16))
    optimizer = Optimizer(settings, ours.parameters())
    if settings.optimizer == "adam":
        reference: torch.optim.Optimizer = torch.optim.Adam(
            theirs.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=True
        )
    else:
        reference = torch.optim.SGD(
            theirs.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay, fused=True
        )
    for features, labels in zip(x, y, strict=True):
        optimizer.step(optimizer.gradients(F.cross_entropy(ours(features), labels)))
        reference.zero_grad()
        F.cross_entropy(theirs(features), labels).backward()
        reference.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(mine, torchs) for mine, torchs in pairs)


def test_the_learning_rate_falls_at_its_rounds() -> None:
    settings = resolve({"lr": 0.1, "lr-decay-at": "200 400", "lr-decay": 0.1})
    rates = [settings.lr_at(server_round) for server_round in (1, 199, 200, 399, 400)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    parameter = torch.nn.Parameter(torch.ones(1))
    Optimizer(settings, [parameter], server_round=200).step([torch.ones(1)])
    assert parameter.item() == pytest.approx(0.99)
