"""More clients are asked than a round needs: who counts, who is not waited for, and that a run can be repeated."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType
from helpers import METHOD_KEYS, ends_as_if_never_stopped, rounds

from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import draw, sample
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.wire import pack, unpack
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.console import round_line
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.norms import NormGuard
from strategies.merging import FirstValid, Valid

RunLocal = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Value] = {"num_clients": 6, "clients_per_round": 3, "oversample": 1.3, "num_rounds": 2}
SENT = ("clients", "not-waited-for", "bytes-down", "bytes-up", "formula-bytes-down")


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def asked(number: int, **keys: Value) -> list[int]:
    """The clients of a round, as they are drawn."""
    return draw(
        resolve({name.replace("_", "-"): value for name, value in (KEYS | {"num_rounds": 20} | keys).items()}), number
    )


# --- who is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oversample", "size"), [(1.0, 10), (1.01, 11), (1.1, 11), (1.3, 13), (1.5, 15), (2.0, 20), (9.0, 25)]
)
def test_how_many_are_asked(oversample: float, size: int) -> None:
    settings = resolve({"num-clients": 25, "clients-per-round": 10, "oversample": oversample})
    assert (settings.asked_size, settings.spares) == (size, size - 10)
    assert sample(settings, 1) == sorted(draw(settings, 1))
    assert resolve(settings.flat() | {"held-out-clients": 13}).asked_size == min(size, 12)
    few = resolve({"num-clients": 25, "clients-per-round": 10})
    assert draw(settings, 1)[:10] == draw(few, 1), "the first ones are those that take part without spares"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num-clients": 4}, "oversample = 1.3: must be 1 where all num-clients = 4 take part in a round"),
        ({"num-clients": 4, "held-out-clients": 1}, "where all num-clients = 4 without held-out-clients = 1 take part"),
        (
            {"num-clients": 9, "clients-per-round": 4, "clip-norm": 1.0, "dp-noise-multiplier": 1.0},
            "oversample = 1.3: must be 1 with dp-noise-multiplier above 0",
        ),
    ],
)
def test_where_it_is_refused(keys: dict[str, Value], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve({"oversample": 1.3} | keys)


def test_not_with_ist(run_local: RunLocal) -> None:
    with pytest.raises(
        UserError, match=r"^oversample = 1.3: not with method = 'ist': the units of a client that is not"
    ):
        run_local(method="ist", **KEYS)


# --- who counts -----------------------------------------------------------------------------------------------------


def decided(norms: dict[int, float], order: Sequence[int], draw: Sequence[int]) -> list[tuple[int, str]]:
    """Clients with updates of these norms come in this order; three are wanted."""
    judge = FirstValid(draw, 3, partial(NormGuard[Valid], 10.0, 1.0))
    for client in order:
        update = Update(client)
        assert judge.add(Valid(update, Contribution({}), {"update": norms[client]}), {}) == []
    return [(item.update.client, reason) for item, reason in judge.rest()]


def test_it_depends_on_who_came_and_not_on_the_order() -> None:
    drawn = [0, 7, 2, 9, 4]
    norms = {7: 1.0, 2: 1.1, 9: 0.9, 4: 1.2, 0: 99.0}
    found = [decided(norms, order, drawn) for order in permutations(drawn)]
    refused = (0, "update of norm 99: more than max-update-norm = 10 times the round's median 1.1")
    assert found == [[refused, (2, ""), (7, ""), (9, "")]] * 120, "in the order of the clients, those drawn first"
    assert decided(norms, [4, 0, 9], drawn)[1:] == [(4, ""), (9, "")]
    assert [client for client, _ in decided(norms, [4, 9, 2], drawn)] == [2, 4, 9], "a spare takes the place"


def test_enough_are_those_that_pass() -> None:
    judge = FirstValid([0, 1, 2, 3], 3, partial(NormGuard[Valid], 10.0, 1.0))
    seen = []
    for client, norm in ((0, 1.0), (1, 99.0), (2, 1.0), (3, 1.0)):
        judge.add(Valid(Update(client), Contribution({}), {"update": norm}), {})
        seen.append(judge.enough)
    assert seen == [False, False, False, True]


# --- where all nodes are simulated ----------------------------------------------------------------------------------


def test_where_all_answer_it_is_the_run_without_spares(run_local: RunLocal) -> None:
    """Whatever the number of nodes."""
    _, few = run_local("few", **KEYS | {"oversample": 1.0})
    for count in (1, 3):
        _, folder = run_local(f"{count}", grid=lambda app, keys, count=count: LocalGrid(app, keys, count), **KEYS)
        assert model(folder) == model(few)
        for line, theirs in zip(rounds(folder)[1:], rounds(few)[1:], strict=True):
            drawn = asked(line["round"])
            assert (line["clients"], line["not-waited-for"]) == (sorted(drawn), drawn[3:])
            assert "partial" not in line
            assert {key: line[key] for key in line if key not in SENT} == {
                k: theirs[k] for k in theirs if k not in SENT
            }


class Failing(LocalGrid):
    """Some clients fail in the first round."""

    failing: tuple[int, ...] = ()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message, number in zip(sent, ids, strict=True):
            about = message.metadata
            if (about.message_type, about.group_id) == (MessageType.TRAIN, "1"):
                header, parts = unpack(self._replies[number].content)
                lost = [(c | {"error": "no"} if c["client"] in self.failing else c, t) for c, t in parts]
                self._replies[number].content = pack(header, lost)
        return ids


def test_a_spare_stands_in_for_one_that_fails(run_local: RunLocal) -> None:
    def grid(overrides: Any, failing: Sequence[int]) -> LocalGrid:
        made = Failing(app, overrides)
        made.failing = tuple(failing)
        return made

    drawn = asked(1)
    _, folder = run_local("one", grid=lambda _, keys: grid(keys, drawn[:1]), **KEYS)
    line = rounds(folder)[1]
    assert line["dropped"] == [{"client": drawn[0], "reason": "client failed: no"}]
    assert (line["not-waited-for"], "partial" in line) == ([], False)
    _, folder = run_local("two", grid=lambda _, keys: grid(keys, drawn[:2]), **KEYS)
    line = rounds(folder)[1]
    assert (line["status"], line["partial"], line["not-waited-for"]) == ("ok", "2 of 3 replies", [])
    said = round_line(line | {"seconds": 1.0, "bytes-up": 0, "bytes-down": 0}, resolve({}), resolve({}).score, 0.0)
    assert "  clients 2/4  " in said
    assert "  partial: 2 of 3 replies  " in said


@pytest.mark.parametrize("method", ["fedpews", "fedpart"])
def test_resumed_in_the_middle_it_ends_as_if_never_stopped(method: str, run_local: RunLocal, tmp_path: Path) -> None:
    """Spares have trained, and kept their state, for nothing: that state is the same again."""
    keys = KEYS | METHOD_KEYS[method] | {"method": method, "num_rounds": 4, "keep_checkpoints": 0, "evaluate": "global"}
    ends_as_if_never_stopped(run_local, tmp_path, keys)


# --- nodes of their own ---------------------------------------------------------------------------------------------


class Paced(LocalGrid):
    """Six nodes; a look finds one more answer, in this order of their clients; those of ``slow`` come a round late."""

    def __init__(self, overrides: Any, order: Sequence[int], slow: int) -> None:
        super().__init__(app, overrides, 6)
        self.order, self.slow = order, slow
        self.late: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = {number: self._replies[number] for number in message_ids if number in self._replies}
        if any(reply.metadata.message_type == MessageType.QUERY for reply in there.values()):
            return super().pull_messages(there)
        newest = max((int(reply.metadata.group_id) for reply in self._replies.values()), default=0)
        ready = [
            (self.order.index(reply.metadata.src_node_id - 2), number)
            for number, reply in there.items()
            if reply.metadata.src_node_id - 2 != self.slow or int(reply.metadata.group_id) < newest
        ]
        found = list(super().pull_messages([number for _, number in sorted(ready)[:1]]))
        self.late += [reply for reply in found if reply.metadata.src_node_id - 2 == self.slow]
        return found


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nodes say that they are machines of their own."""
    monkeypatch.setattr(node, "simulated", lambda: False)


@pytest.mark.parametrize("method", ["fedavg", "fedpews"])
def test_nobody_waits_for_the_slow_one(
    method: str, run_local: RunLocal, real: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is named, its late answer is thrown away, it is asked again; who else was faster changes no bit."""
    keys = KEYS | METHOD_KEYS[method] | {"method": method, "seed": 2, "num_rounds": 3, "evaluate": "global"}
    assert [2 in asked(number, seed=2) for number in (1, 2, 3)] == [True] * 3
    found = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        name = "".join(map(str, order))
        monkeypatch.setenv("FEDSUB_STATE", str(tmp_path / "states" / name))
        grids: list[Paced] = []

        def grid(_: Any, overrides: Any, order: list[int] = order, grids: list[Paced] = grids) -> Paced:
            grids.append(Paced(overrides, order, slow=2))
            return grids[0]

        _, folder = run_local(name, grid=grid, **keys | {"round_timeout": 30.0})
        lines = rounds(folder)[1:]
        assert [(line["status"], line["not-waited-for"], line["dropped"]) for line in lines] == [("ok", [2], [])] * 3
        assert all(line["clients"] == sorted(asked(line["round"], seed=2)) for line in lines)
        assert [reply.metadata.group_id for reply in grids[0].late] == ["1"], "it came in round 3, and counted nowhere"
        found.append((model(folder), [line["train-loss"] for line in lines]))
    assert found[0] == found[1]
