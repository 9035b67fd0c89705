"""Means of blocks of clients that nodes take: the same bits whatever the nodes and messages."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rounds
from safetensors.torch import load_file

from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.blocks import BLOCK, MANY, block_parts, blocks_of
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.roll import Node
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS, Method
from fedsub_app.settings import MethodSettings
from fedsub_app.training.workplace import workplace
from strategies.base import Mean, Merged, SubnetStrategy
from strategies.blocks import blocks

Run = Callable[..., tuple[Json, Path]]
START = {"w": torch.zeros(3), "b": torch.zeros(())}
HOW: Json = {"factor": 100.0, "model": 1.0, "examples": True}
CROWD: dict[str, Value] = {"num_clients": MANY + 3, "num_rounds": 2, "local_epochs": 1, "partition": "iid"}


def updated(values: dict[int, float]) -> Callable[[Json, Tensors], Update]:
    """A client's update has its value everywhere, and it has as many samples as its id says, and one more."""

    def run(task: Json, sent: Tensors) -> Update:
        client, value = task["client"], values[task["client"]]
        if value < 0:
            return Update(client, error="ValueError: no data", lost=True)
        return Update(client, {"w": sent["w"] + value, "b": sent["b"] + value}, {"flops": 1.0}, client + 1)

    return run


def asked(values: dict[int, float], how: Json = HOW) -> tuple[list[Json], Tensors]:
    parts = block_parts(updated(values), [({"client": client}, START) for client in values], how)
    assert not any(tensors for _, tensors in parts[:-1])
    return [config for config, _ in parts], dict(parts[-1][1])


def test_a_block_by_hand() -> None:
    configs, mean = asked({0: 1.0, 1: 2.0, 4: 7.0})
    assert torch.equal(mean["w"], torch.full((3,), (1 * 1 + 2 * 2 + 5 * 7) / 8))
    assert mean["b"] == 5.0
    assert [config["norm"] for config in configs] == pytest.approx([2.0, 4.0, 14.0])  # of four numbers
    assert [config["num-examples"] for config in configs] == [1, 2, 5]
    assert asked({0: 1.0, 1: 2.0, 4: 6.0}, HOW | {"examples": False})[1]["b"] == 3.0


def test_clients_that_fail_diverge_or_are_far_too_long_are_left_out() -> None:
    values = {0: 1.0, 1: -1.0, 2: float("nan"), 3: 2.0, 4: 1e9, 5: 3.0}
    configs, mean = asked(values, HOW | {"examples": False})
    assert mean["b"] == 2.0
    assert [config.get("error", "")[:40] for config in configs] == [
        *("", "ValueError: no data", "tensor 'w': NaN or infinite values", ""),
        *("update of norm 2e+09: more than max-upda", ""),
    ]
    assert [config.get("lost", config.get("diverged")) for config in configs] == [None, True, True, None, None, None]
    assert asked({0: -1.0, 1: -1.0})[1] == {}


def test_real_nodes_take_no_means() -> None:
    """Their updates are compared, wherever the clients are placed."""
    keys = {name.replace("_", "-"): value for name, value in CROWD.items()}
    found = resolve(keys | {"model": "feature-mlp", "placement": "balanced", "robust": "off"})
    strategy = METHODS["fedavg"].strategy(found, workplace(found).network.module)
    strategy.connect(Federation(found, {}))
    for simulated in (True, False):
        strategy.federation.roll.nodes = {2: Node(2, 0, 1, simulated)}
        assert bool(blocks(strategy, range(MANY + 3))) == simulated


@pytest.mark.timeout(60)  # taken up again it would be left out again, for ever
def test_a_client_that_is_left_out_stays_out_when_the_others_run_again() -> None:
    """Without client 4 the median is 2 instead of 100, for which client 3 is too long."""
    configs, mean = asked({0: 1.0, 1: 1.0, 2: 50.0, 3: 4e3, 4: 1e9}, HOW | {"examples": False})
    assert [bool(config.get("error")) for config in configs] == [False, False, False, True, True]
    assert mean["b"] == pytest.approx(52 / 3)


def test_blocks_are_of_clients_by_id_in_rounds_of_many() -> None:
    assert blocks_of(range(MANY)) == {}
    clients = [3 * k for k in reversed(range(MANY + 1))]
    blocks = blocks_of(clients)
    assert [blocks[3 * k] for k in (0, BLOCK - 1, BLOCK, MANY)] == [0, 0, 1, MANY // BLOCK]


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(method, marks=pytest.mark.slow) for method in ("fedrep", "fedadam"))]
)
def test_no_bit_depends_on_nodes_or_messages(method: str, run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(run: Any, tasks: Any, how: Json) -> Any:
        made.append(len(tasks))
        return block_parts(run, tasks, how)

    monkeypatch.setattr(node, "block_parts", counted)

    def run(name: str, grid: Callable[..., LocalGrid] = LocalGrid, **keys: Value) -> tuple[Tensors, list[Json]]:
        _, folder = run_local(name, grid=grid, method=method, weighting="examples", **CROWD | keys)
        return load_file(folder / "model.safetensors"), rounds(folder)[1:]

    model, lines = run("one")
    assert not any(line["dropped"] for line in lines)
    assert made == [*[BLOCK] * (MANY // BLOCK), 3] * 2
    for nodes, size in ((2, 128), (3, 1), (2, 7)):
        grid = lambda app, keys, nodes=nodes: LocalGrid(app, keys, nodes)  # noqa: E731
        same, others = run(f"{nodes} {size}", grid, message_clients=size)
        assert all(torch.equal(model[key], same[key]) for key in model)
        assert others == lines


def test_what_is_no_tensor_of_the_model_is_in_no_mean_of_a_block(run_local: Run) -> None:
    """FedPM's clients answer with masks, of which the server has to know each."""
    _, folder = run_local(method="fedpm", **CROWD | {"num_rounds": 1})
    assert [line["dropped"] for line in rounds(folder)[1:]] == [[]]


class KeepsAll(SubnetStrategy):
    holds_all = True

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Return the median of the answers."""
        each = {name: torch.stack([update.tensors[name] for update in updates]) for name in self.current}
        return Merged({name: x.median(0).values for name, x in each.items()})


def test_a_method_that_needs_all_answers_gets_each_of_them(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "keeps-all", Method("a test", MethodSettings, KeepsAll))
    _, folder = run_local(method="keeps-all", **CROWD | {"num_rounds": 1})
    assert [line["status"] for line in rounds(folder)] == ["ok", "ok"]


def refused_examples(parts: list[tuple[Json, Tensors]]) -> None:
    parts[1][0]["num-examples"] = 0


def infinite_mean(parts: list[tuple[Json, Tensors]]) -> None:
    parts[-1][1]["fc1.bias"][0] = float("inf")


def failed(parts: list[tuple[Json, Tensors]]) -> None:
    parts[1][0]["error"] = "ValueError: no data"


INVALID = "the mean of its block is not valid"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (refused_examples, dict.fromkeys(range(BLOCK), INVALID) | {1: r"num-examples = 0: must be [0-9]+"}),
        (infinite_mean, dict.fromkeys(range(BLOCK), INVALID)),
        (failed, {1: "client failed: ValueError: no data"}),
    ],
    ids=["refused", "infinite", "failed"],
)
def test_a_block_counts_as_a_whole_or_not_at_all(
    run_local: Run, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None], said: dict[int, str]
) -> None:
    """What the server refuses is in the mean already; a client that has failed at its node is not."""

    def spoilt(run: Any, tasks: Any, how: Json) -> Any:
        parts = block_parts(run, tasks, how)
        if tasks[0][0]["client"] == 0:
            spoil(parts)
        return parts

    monkeypatch.setattr(node, "block_parts", spoilt)
    _, folder = run_local("run", **CROWD | {"num_rounds": 1})
    (line,) = rounds(folder)[1:]
    dropped = {drop["client"]: drop["reason"] for drop in line["dropped"]}
    assert dropped.keys() == said.keys()
    assert all(re.match(said[client], reason) for client, reason in dropped.items()), dropped
    assert line["status"] == "ok"
