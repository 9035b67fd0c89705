"""A round commits all of its outcome or nothing: numbers by hand, no run."""

from dataclasses import replace

import pytest
import torch

from fedsub_app.common.tensors import Tensors
from fedsub_app.config import resolve
from fedsub_app.federation.protocol import Update
from fedsub_app.models import build_model
from strategies.base import SubnetStrategy
from strategies.hooks import Facts, Merged
from strategies.merging import Merging, Valid
from strategies.rounds import _merged


def strategy(**settings: object) -> SubnetStrategy:
    made = SubnetStrategy(resolve({"num-clients": 4, **settings}), build_model("fedpews-mlp", (5,), 4, 0))
    made.current, made.round = {"w": torch.ones(3)}, 2
    return made


def update(client: int, state: tuple[int, int] = (0, 0), value: float = 2.0) -> Update:
    return replace(Update(client, {"w": torch.full((3,), value)}, {}, 10), state=state)


def outcome(made: SubnetStrategy, count: int, diverged: int = 0) -> str:
    """Return why a round with ``count`` valid updates is abandoned; "": it is not."""
    merging = Merging(made)
    for client in range(count):
        valid = update(client)
        merging.add(Valid(valid, made.contribution(valid), {}))
    return _merged(made, merging, diverged)[1]


def test_a_client_counts_with_the_round_in_which_it_wrote_its_state() -> None:
    made = strategy()
    made.state_rounds[1] = made.state_rounds[2] = 1
    # 0 wrote its first state; 1 another one; 2 kept its old one; 3 has none
    made.commit(Merged({"w": torch.zeros(3)}), [update(0, (0, 2)), update(1, (1, 2)), update(2, (1, 1)), update(3)])
    assert made.state_rounds.tolist() == [2, 2, 1, 0]
    assert made.current["w"].tolist() == [0, 0, 0]


def test_what_a_method_does_not_remember_is_not_committed() -> None:
    made = strategy()
    with pytest.raises(ValueError, match=r"SubnetStrategy\.merge returned \['variate'\], which it does not remember"):
        made.commit(Merged({"w": torch.zeros(3)}, {"variate": {}}), [update(0, (0, 2))])
    assert made.current["w"].tolist() == [1, 1, 1]
    assert made.state_rounds.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("count", "reason"), [(2, ""), (1, "fewer than min-replies = 2 valid replies")])
def test_as_many_replies_as_min_replies_are_enough(count: int, reason: str) -> None:
    assert outcome(strategy(**{"min-replies": 2}), count) == reason


@pytest.mark.parametrize(("diverged", "reason"), [(2, ""), (3, "training diverged on 3 of 5 clients")])
def test_a_round_is_abandoned_when_more_than_half_of_its_clients_diverged(diverged: int, reason: str) -> None:
    assert outcome(strategy(), 2, diverged) == reason


@pytest.mark.parametrize(
    ("loss", "reason"), [(1e4, ""), (1.1e4, "diverged: the merged model's loss is 11000"), (float("nan"), "diverged")]
)
def test_a_merged_model_that_has_diverged_is_not_committed(loss: float, reason: str) -> None:
    made = strategy()

    def tested(_: Tensors) -> float:
        return loss

    made.facts = Facts([10] * 4, 1.0, tested)
    assert outcome(made, 2).startswith(reason)
    assert bool(outcome(made, 2)) == bool(reason)
