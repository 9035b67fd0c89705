"""Nodes and clients: who hosts whom, who takes part, and what happens when a node is late, away, wrong or broken."""

import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import DEFAULT_TTL, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from helpers import rounds

import fedsub_app.common.code
import fedsub_app.common.run_files
import fedsub_app.federation.roll
import fedsub_app.runs.node
from fedsub_app.client_app import app
from fedsub_app.common.code import code_digest, settings_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.run_files import initial_file, initial_model, kept_settings
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.local_grid import LocalGrid, named
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.phase import Dropped, Phase
from fedsub_app.federation.protocol import Spec, Task, specs
from fedsub_app.federation.roll import Node
from fedsub_app.federation.wire import (
    HEADER,
    INITIAL,
    NONCE,
    TENSORS,
    UNKNOWN_SETTINGS,
    pack,
    unpack,
    wire_bytes,
)
from fedsub_app.runs.config import resolve

RunLocal = Callable[..., tuple[Json, Path]]


@pytest.fixture(autouse=True, scope="module")
def _sender() -> None:
    """A message asks who sends it, which a grid says."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def federation(**keys: Value) -> Federation:
    settings = resolve({name.replace("_", "-"): value for name, value in keys.items()})
    return Federation(settings, {"run": "this"})


def nodes(count: int, simulated: bool = True) -> dict[int, Node]:
    return {number + 2: Node(number + 2, number, count, simulated) for number in range(count)}


class Comings(LocalGrid):
    """A grid of three nodes whose ``away(round)`` names the partition ids that are not there before that round."""

    def __init__(self, app: Any, overrides: Any, away: Callable[[int], set[int]]) -> None:
        super().__init__(app, overrides, 3)
        self.away = away
        self.round = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        training = [m.metadata.group_id for m in sent if m.metadata.message_type == MessageType.TRAIN]
        self.round = max([self.round, *map(int, training)])
        return super().push_messages(sent)

    def get_node_ids(self) -> Iterable[int]:
        away = self.away(self.round + 1)
        return [node for node, context in self.contexts.items() if context.node_config["partition-id"] not in away]


class Restarting(Comings):
    """The node of partition 1 is away in round 2 and back in round 3 with another id, as after a restart."""

    def __init__(self, app: Any, overrides: Any) -> None:
        super().__init__(app, overrides, lambda number: {1} if number == 2 else set())

    def get_node_ids(self) -> Iterable[int]:
        if self.round == 2 and 3 in self.contexts:
            self.contexts[77] = self.contexts.pop(3)
        return super().get_node_ids()


# --- who takes part -------------------------------------------------------------------------------------------------


def test_the_sample_depends_on_seed_and_round_only() -> None:
    drawn = []
    for count in (1, 2, 5):
        fed = federation(num_clients=50, clients_per_round=7, seed=3)
        fed.meet(LocalGrid(app, {}, count))
        drawn.append([fed.sample(number) for number in range(1, 80)])
    assert drawn[0] == drawn[1] == drawn[2]
    for clients in drawn[0]:
        assert clients == sorted(set(clients))
        assert len(clients) == 7
        assert set(clients) <= set(range(50))
    assert drawn[0][0] != drawn[0][1]
    assert len({client for clients in drawn[0] for client in clients}) == 50  # everybody has a turn
    assert federation(num_clients=50, clients_per_round=7, seed=4).sample(1) != drawn[0][0]


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, 10),
        ({"participation": 0.3}, 3),
        ({"participation": 0.01}, 1),  # never nobody
        ({"clients-per-round": 4}, 4),
        ({"clients-per-round": 4, "participation": 0.9}, 4),
        ({"participation": 0.26}, 3),
        ({"participation": 0.5, "held-out-clients": 4}, 3),  # of those that are not held out
    ],
)
def test_fraction_and_number_of_participants(keys: dict[str, Value], size: int) -> None:
    settings = resolve({"num-clients": 10} | keys)
    assert len(Federation(settings, {}).sample(1)) == settings.sample_size == size


# --- who hosts whom -------------------------------------------------------------------------------------------------


def test_pinned_and_balanced() -> None:
    clients = [0, 3, 4, 6, 9]
    pinned = federation(num_clients=10, placement="pinned")
    pinned.roll.nodes = nodes(3)
    assert pinned.hosts(clients) == ({2: deque([0, 3, 6, 9]), 3: deque([4])}, [])
    balanced = federation(num_clients=10, placement="balanced")
    balanced.roll.nodes = nodes(3)
    queues, dropped = balanced.hosts(clients)
    assert (set(queues), dropped) == ({2, 3, 4}, [])
    assert queues[2] is queues[3] is queues[4]
    assert list(queues[2]) == clients


def test_auto_is_balanced_only_where_all_nodes_share_a_disk() -> None:
    fed = federation(num_clients=4)
    fed.roll.nodes = nodes(2)
    assert set(fed.hosts([0, 2])[0]) == {2, 3}
    fed.roll.nodes = nodes(2, simulated=False)
    assert fed.hosts([0, 2]) == ({2: deque([0, 2])}, [])


@pytest.mark.parametrize("placement", ["pinned", "balanced"])
def test_more_nodes_than_clients(placement: str) -> None:
    fed = federation(num_clients=2, placement=placement)
    fed.roll.nodes = nodes(5)
    phase = ask(fed, [0, 1])
    assert len(list(phase)) == 2
    assert sorted(phase.asked) == [0, 1]
    assert phase.dropped == []


@pytest.mark.parametrize(
    ("simulated", "message_mb", "asked"),
    [
        # Of 16 units of work a message takes at least 4, so the long client goes alone; of the other 6 at least 1.5.
        (True, 192.0, [[2], [0], [1]]),
        (True, 1e-9, [[0], [1], [2]]),  # replies to be merged in order would wait beside the long client's
        (False, 192.0, [[0, 1], [2]]),
    ],
)
def test_long_clients_begin(simulated: bool, message_mb: float, asked: list[list[int]]) -> None:
    fed = federation(num_clients=3, placement="balanced", message_mb=message_mb)
    fed.roll.nodes = nodes(2, simulated=simulated)
    expected = specs({"w": torch.zeros(4)})
    phase = fed.ask("train", 1, [0, 1, 2], Task, {}, lambda _: expected, {0: 3, 1: 3, 2: 10}.__getitem__)
    while any(phase.outbox.queues.values()):
        for node_id in (2, 3):
            phase.outbox.next_message(node_id, phase.outbox.limit)
    assert [clients for _, clients in phase.outbox.sent] == asked
    assert phase.clients == [0, 1, 2], "replies are merged in this order"


def test_clients_of_an_absent_node_are_dropped() -> None:
    fed = federation(num_clients=6, placement="pinned")
    fed.roll.nodes = {node_id: node for node_id, node in nodes(3).items() if node.partition_id != 1}
    assert fed.hosts([0, 1, 4, 5]) == (
        {2: deque([0]), 4: deque([5])},
        [Dropped(1, "its node is away"), Dropped(4, "its node is away")],
    )
    for placement in ("pinned", "balanced"):
        alone = federation(num_clients=6, placement=placement)
        assert alone.hosts([2]) == ({}, [Dropped(2, "its node is away")])


# --- messages -------------------------------------------------------------------------------------------------------


def ask(fed: Federation, clients: Iterable[int], server_round: int = 1, **how: Any) -> Phase:
    """Ask clients for a task without tensors."""
    return fed.ask("train", server_round, clients, how.pop("task", Task), {}, **how)


def sizes(phase: Phase) -> list[int]:
    """How many clients each message holds."""
    found = [len(unpack(message.content)[1]) for message in phase]
    assert sorted(phase.asked) == phase.clients
    return found


def test_messages_hold_no_more_clients_and_bytes_than_the_settings_say() -> None:
    pinned = federation(num_clients=1000, placement="pinned", message_clients=128)
    pinned.roll.nodes = nodes(1)
    weights = torch.zeros(1 << 18)  # 1 MiB
    assert sizes(ask(pinned, range(1000))) == [128] * 7 + [104]
    pinned = federation(num_clients=8, placement="pinned", message_mb=4.5)
    pinned.roll.nodes = nodes(1)
    assert sizes(ask(pinned, range(8))) == [8]
    assert sizes(ask(pinned, range(8), task=lambda c: Task(c, {"w": weights}))) == [8], "shared: it travels once"
    assert sizes(ask(pinned, range(8), task=lambda c: Task(c, {"w": weights + c}))) == [4, 4]
    answers = {"w": Spec((1 << 18,))}
    assert sizes(ask(pinned, range(8), task=lambda c: Task(c, {"w": weights}), expected=lambda _: answers)) == [3, 3, 2]
    blocks = {c: c // 4 for c in range(16)}  # one message and one answer each
    how: Any = {"task": lambda c: Task(c, {"w": weights}), "expected": lambda _: answers, "blocks": blocks}
    assert sizes(ask(pinned, range(16), **how)) == [12, 4]
    pinned.settings = pinned.settings.model_copy(update={"message_mb": 0.5})
    assert sizes(ask(pinned, range(8), task=lambda c: Task(c, {"w": weights + c}))) == [1] * 8
    assert sizes(ask(pinned, range(16), **how)) == [4] * 4


def test_nodes_that_share_a_queue_get_smaller_messages_towards_its_end() -> None:
    fed = federation(num_clients=16)
    fed.roll.nodes = nodes(2)
    assert sizes(ask(fed, range(16))) == [4, 4, 2, 2, 1, 1, 1, 1], "the same for nodes that are free at the same time"


@pytest.mark.parametrize(
    ("client_s", "expected"),
    [(0.0, [32, 32, 16, 16, 32]), (1.0, [32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1])],
    ids=["idle clients", "clients that train for a second"],
)
def test_a_message_through_flower_is_worth_the_time_that_flower_takes_for_it(
    client_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of single clients at the end of the queue took a tenth of a second each, whatever they computed."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    class Flower(LocalGrid):
        """Two nodes get a message and answer it in turns of a tenth of a second and the time that it computes."""

        wait = None  # type: ignore[assignment]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(list(message_ids)[:2]))
            now[0] += 0.1 + client_s * max(len(unpack(reply.content)[1]) for reply in replies)
            return replies

    fed = federation(num_clients=128, message_clients=32)
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(128))
    assert len(list(fed.answers(phase, fed.exchange(Flower(answering, {}, 2), phase), nothing))) == 128  # type: ignore[arg-type]
    assert [len(clients) for _, clients in phase.outbox.sent] == expected


def test_messages_live_as_long_as_the_round() -> None:
    """Flower throws a message away after its ttl, and with it what is answered later."""
    LocalGrid(app, {})  # says who sends messages
    for timeout, seconds in ((60.0, DEFAULT_TTL), (100_000.0, 100_000.0)):
        fed = federation(round_timeout=timeout)
        fed.roll.nodes = nodes(1)
        phase = ask(fed, [0])
        (message,) = phase
        assert message.metadata.ttl == phase.outbox.again(message.metadata).metadata.ttl == seconds


def answering(message: Message, context: Context) -> Message:
    """A ClientApp whose clients answer without tensors."""
    header, parts = unpack(message.content)
    stamp = {NONCE: header[NONCE]}
    return Message(pack(stamp, [({"client": config["client"]}, {}) for config, _ in parts]), reply_to=message)


def test_a_node_has_two_messages_at_a_time() -> None:
    """And the one that is faster takes more of them."""
    waiting: dict[int, list[Message]] = {2: [], 3: []}
    most = {2: 0, 3: 0}
    answered = {2: 0, 3: 0}

    class Slow(LocalGrid):
        """Node 2 answers one message a look, node 3 one in three looks."""

        looks = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = list(super().push_messages(messages))
            for message in messages:
                node = message.metadata.dst_node_id
                waiting[node].append(message)
                most[node] = max(most[node], len(waiting[node]))
            return ids

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            self.looks += 1
            ready = [node for node in (2, 3) if waiting[node] and (node == 2 or self.looks % 3 == 0)]
            for node in ready:
                answered[node] += 1
            return list(super().pull_messages([waiting[node].pop(0).metadata.message_id for node in ready]))

    fed = federation(num_clients=40, message_clients=1)
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(40))
    found = [client for client, _, _ in fed.answers(phase, fed.exchange(Slow(answering, {}, 2), phase), nothing)]  # type: ignore[arg-type]
    assert found == list(range(40)), "in the order of the clients, whoever was first"
    assert most == {2: 2, 3: 2}
    assert sum(answered.values()) == 40
    assert answered[2] >= 2 * answered[3]


def test_a_node_that_leaves_is_asked_no_more() -> None:
    class Dying(LocalGrid):
        """Node 3 fails its first message and is gone."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            if all(message.metadata.dst_node_id == 3 for message in messages):
                self.contexts.pop(3, None)
                failed = [Message(Error(1, "no answer"), reply_to=message) for message in messages]
                ids = [named(message) for message in messages]
                for reply, message_id in zip(failed, ids, strict=True):
                    reply.metadata.__dict__["_reply_to_message_id"] = message_id
                    self._replies[message_id] = reply
                return ids
            return super().push_messages(messages)

    for placement, lost in (("pinned", [1, 3, 5, 7, 9]), ("balanced", [1, 3])):
        fed = federation(num_clients=10, message_clients=1, placement=placement)
        fed.roll.nodes = nodes(2)
        phase = ask(fed, range(10))
        found = [client for client, _, _ in fed.answers(phase, fed.exchange(Dying(answering, {}, 2), phase), nothing)]  # type: ignore[arg-type]
        assert sorted(drop.client for drop in phase.dropped) == lost
        assert found == [client for client in range(10) if client not in lost]
        assert phase.waiting_bytes == 0, "no answer waits for a client that nobody will ask"


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([""], "its node is away"), ([], "the SuperLink, or a proxy before it, refuses its message as too large")],
)
def test_a_node_whose_message_is_not_taken_gets_no_other(ids: list[str], reason: str) -> None:
    """Flower says by an empty id that the node has left, by no id that the message is too large (HTTP 413)."""

    class Without(LocalGrid):
        pushed = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            if [message.metadata.dst_node_id for message in messages] == [3]:
                self.pushed += 1
                return ids
            return super().push_messages(messages)

    fed = federation(num_clients=6, message_clients=1, placement="pinned")
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(6))
    grid = Without(answering, {}, 2)  # type: ignore[arg-type]
    assert [client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)] == [0, 2, 4]
    assert [drop.client for drop in phase.dropped] == [1, 3, 5]
    assert all(drop.reason.startswith(reason) for drop in phase.dropped)
    assert grid.pushed == 1


# --- the roll call --------------------------------------------------------------------------------------------------


def test_the_roll_call_finds_all_nodes() -> None:
    fed = federation()
    fed.meet(LocalGrid(app, {}, 3))
    assert fed.nodes == nodes(3)


def test_a_node_that_leaves_during_the_roll_call_is_waited_for() -> None:
    """Flower answers for it; it comes back, and the run begins."""

    class Cut(LocalGrid):
        calls = 0

        def get_node_ids(self) -> Iterable[int]:
            return [node for node in self.contexts if node != 3 or self.calls != 1]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.calls += 1
            sent = list(messages)
            ids = list(super().push_messages(sent))
            for message, message_id in zip(sent, ids, strict=True):
                if message.metadata.dst_node_id == 3 and self.calls == 1:
                    self._replies[message_id] = failed = Message(Error(1, "Node Unavailable"), reply_to=message)
                    failed.metadata.__dict__["_reply_to_message_id"] = message_id
            return ids

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = super().pull_messages(message_ids)
            threading.Timer(0.2, setattr, (self, "calls", 2)).start()
            return found

    fed = federation(node_timeout=20.0)
    fed.meet(Cut(app, {}, 3))
    assert fed.nodes == nodes(3)


@pytest.mark.parametrize(
    ("away", "min_nodes", "missing"),
    [
        ({1}, 0, "2 nodes there, missing: nodes with partition-id 1 of 3"),
        ({0, 2}, 0, "1 nodes there, missing: nodes with partition-id 0, 2 of 3"),
        ({0, 1, 2}, 0, "0 nodes there, missing: nodes with partition-id 0 of 1"),
        ({1}, 3, "2 nodes there, missing: 1 of min-nodes = 3"),
    ],
)
def test_after_the_deadline_it_says_who_is_missing(away: set[int], min_nodes: int, missing: str) -> None:
    fed = federation(node_timeout=0.05, min_nodes=min_nodes)
    with pytest.raises(UserError) as caught:
        fed.meet(Comings(app, {}, lambda _: away))
    assert str(caught.value) == f"node-timeout = 0.05: {missing}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"partition-id": 0, "num-partitions": 5_000_000},
            "partition-id, num-partitions = 0, 5000000: must be integers, ",
        ),
        ({"partition-id": 1, "num-partitions": 10**15}, "partition-id, num-partitions = 1, 1000000000000000: must be "),
        ({"partition-id": 1, "num-partitions": 2}, "num-partitions = 2: the other nodes say 3"),
        ({"partition-id": 1, "num-partitions": 100_000}, "num-partitions = 100000: the other nodes say 3"),
    ],
)
@pytest.mark.parametrize("odd", [2, 3, 4])
def test_a_node_that_says_another_number_of_partitions_is_left_out(
    config: dict[str, Any], said: str, odd: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of them is asked first, the others begin, if ``min-nodes`` lets them."""
    grid = LocalGrid(app, {}, 3)
    grid.contexts[odd].node_config = config
    fed = federation(min_nodes=2)
    fed.meet(grid)
    assert set(fed.nodes) == {2, 3, 4} - {odd}
    assert any(line.startswith(f"node {odd} stays out: {said}") for line in caplog.messages)
    with pytest.raises(UserError, match=f"^node-timeout = 0.05: 2 nodes there, missing: .*; node {odd}: {said}"):
        federation(node_timeout=0.05).meet(grid)


def test_a_real_node_is_not_simulated_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given all clients, and the defence by norms was off."""
    monkeypatch.setattr(sys, "argv", ["/opt/bin/flwr-serverapp"])
    fed = federation()
    fed.meet(LocalGrid(app, {}, 2))
    assert len(fed.nodes) == 2
    assert not fed.simulated


def test_a_node_that_was_left_out_does_not_take_over() -> None:
    """All others are away for a moment; when they were back, they stayed out."""
    grid = LocalGrid(app, {}, 3)
    grid.contexts[2].node_config["num-partitions"] = 1
    fed = federation(min_nodes=2, node_timeout=0.05)
    fed.meet(grid)
    away = {node: grid.contexts.pop(node) for node in (3, 4)}
    fed.roll.ask_again.clear()
    fed.meet(grid)
    assert not fed.nodes
    grid.contexts |= away
    fed.roll.ask_again.clear()
    fed.meet(grid)
    assert set(fed.nodes) == {3, 4}


def test_more_nodes_than_a_simulation_has_are_refused_at_once() -> None:
    """The run waited for ``node-timeout``."""
    with pytest.raises(UserError, match=r"^min-nodes = 4: at most 3, the nodes of the simulation$"):
        federation(node_timeout=120.0, min_nodes=4).meet(LocalGrid(app, {}, 3))


@pytest.mark.parametrize("min_nodes", [0, 2])
def test_nodes_that_disagree_on_the_number_of_partitions(min_nodes: int) -> None:
    """Neither is the majority: with ``min-nodes`` the run began, and clients 2 and 5 of 6 were away in all rounds."""
    grid = LocalGrid(app, {}, 2)
    grid.contexts[2].node_config["num-partitions"] = 3
    with pytest.raises(UserError, match=r"2 nodes there, missing: one num-partitions, node 2 says 3, node 3 says 2$"):
        federation(node_timeout=0.05, min_nodes=min_nodes).meet(grid)


def test_many_missing_nodes_are_one_short_line() -> None:
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config["num-partitions"] = 50_000
    missing = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 49989 more of 50000"
    with pytest.raises(UserError, match=f"missing: nodes with partition-id {missing}$"):
        federation(node_timeout=0.05).meet(grid)


def test_a_second_node_of_a_taken_partition_waits(caplog: pytest.LogCaptureFixture) -> None:
    """The live one stays for as long as Flower lists it; then the other has its place, without another roll call."""
    grid = LocalGrid(app, {}, 2)
    fed = federation()
    fed.meet(grid)
    live = dict(fed.nodes)
    grid.contexts[77] = Context(1, 77, dict(grid.contexts[3].node_config), RecordDict(), {})
    with caplog.at_level("INFO", "fedsub"):
        for _ in range(3):
            fed.meet(grid)
            assert fed.nodes == live
    said = "node 77 waits: partition-id = 1 is that of node 3, which Flower still lists"
    assert [record.getMessage() for record in caplog.records] == [said]
    grid.contexts[76] = Context(1, 76, dict(grid.contexts[3].node_config), RecordDict(), {})
    fed.meet(grid)  # it waits too, and leaves
    del grid.contexts[3], grid.contexts[76]
    grid.app = None  # nobody is asked again
    fed.meet(grid)
    assert {node.node_id: node.partition_id for node in fed.nodes.values()} == {2: 0, 77: 1}


class Slow(LocalGrid):
    """The answers of late nodes stay away until they are let through; ``asked``: the nodes of all roll calls."""

    def __init__(self, count: int) -> None:
        super().__init__(app, {}, count)
        self.asked: list[int] = []
        self.held: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        self.asked += [message.metadata.dst_node_id for message in sent]
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [number for number in message_ids if number in self._replies]
        return super().pull_messages([n for n in there if self._replies[n].metadata.src_node_id not in self.held])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the server's clock shows; they pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr(fedsub_app.federation.roll.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(fedsub_app.federation.roll.time, "sleep", lambda seconds: pytest.fail("a round waited"))
    return now


def came(grid: LocalGrid, node_id: int, partition: int) -> None:
    """A node appears."""
    grid.contexts[node_id] = Context(1, node_id, {"partition-id": partition, "num-partitions": 2}, RecordDict(), {})


def test_a_late_node_is_called_once_and_its_answer_counts_however_late(clock: list[float]) -> None:
    grid = Slow(2)
    fed = federation(min_nodes=1)
    late = grid.contexts.pop(3)
    fed.meet(grid)
    grid.contexts[3] = late
    grid.held = {3}
    for _ in range(10):
        clock[0] += 2
        fed.meet(grid)  # no round waits for it
    assert grid.asked == [2, 3]
    assert set(fed.nodes) == {2}
    grid.held = set()
    fed.meet(grid)
    assert set(fed.nodes) == {2, 3}
    assert grid.asked == [2, 3]


def test_a_silent_node_costs_no_seconds_and_is_never_given_up(clock: list[float]) -> None:
    """It is called again after 2, 4, 8 minutes and so on; the first answer counts, the others are nobody's."""
    grid = Slow(1)
    fed = federation(min_nodes=1)
    fed.meet(grid)
    came(grid, 99, 1)
    grid.contexts[2].node_config["num-partitions"] = 2
    fed.nodes[2], fed.roll.num_partitions = Node(2, 0, 2, True), 2
    grid.held = {99}
    times = []
    for second in range(1000):
        clock[0] = float(second)
        fed.meet(grid)
        times += [second] * (grid.asked.count(99) - len(times))
    assert times == [0, 120, 360, 840]
    grid.held = set()
    fed.meet(grid)
    assert set(fed.nodes) == {2, 99}
    assert not fed.roll.called
    assert not fed.roll.waiting


def test_a_node_that_was_lost_is_called_when_flower_lists_it_again(clock: list[float]) -> None:
    """Whatever it was refused for: an operator may have mended it, and with its key it keeps its id."""
    grid = Slow(2)
    fed = federation()
    fed.meet(grid)
    for config in ({"partition-id": 5, "num-partitions": 2}, {"partition-id": 1, "num-partitions": 2}):
        lost = grid.contexts.pop(3)
        fed.meet(grid)
        assert set(fed.nodes) == {2}
        lost.node_config = config  # type: ignore[assignment]
        grid.contexts[3] = lost
        fed.meet(grid)
    assert grid.asked == [2, 3, 3, 3]
    assert set(fed.nodes) == {2, 3}


def test_a_node_that_was_away_when_flower_answered_for_it_is_called_again(clock: list[float]) -> None:
    """Flower's answer is none of the node's: it is listed again before the server looks."""
    grid = Slow(2)
    fed = federation(min_nodes=1)
    late = grid.contexts.pop(3)
    fed.meet(grid)
    grid.contexts[3], grid.held = late, {3}
    fed.meet(grid)
    (number,) = fed.roll.called
    failed = Message(Error(5, "Node Unavailable"), reply_to=grid._replies[number])
    failed.metadata.__dict__ |= {"_reply_to_message_id": number, "_src_node_id": 1}
    grid._replies[number] = failed
    grid.held = set()
    fed.meet(grid)
    fed.meet(grid)
    assert grid.asked == [2, 3, 3]
    assert set(fed.nodes) == {2, 3}


def test_a_node_that_answers_wrongly_stays_out_for_as_long(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    grid = Slow(2)
    fed = federation()
    fed.meet(grid)
    came(grid, 77, 9)
    for second in range(0, 400, 40):
        clock[0] = float(second)
        fed.meet(grid)
    said = "node 77 stays out: partition-id = 9: must be 0 to num-partitions - 1"
    assert [record.getMessage() for record in caplog.records] == [said], "said once"
    assert grid.asked == [2, 3, 77, 77, 77]
    del grid.contexts[3]
    grid.contexts[77].node_config["partition-id"] = 1
    clock[0] = 1000.0
    fed.meet(grid)
    assert set(fed.nodes) == {2, 77}


def test_min_nodes_are_enough() -> None:
    fed = federation(node_timeout=0.05, min_nodes=2)
    fed.meet(Comings(app, {}, lambda _: {1}))
    assert [node.partition_id for node in fed.nodes.values()] == [0, 2]


def test_late_nodes_are_waited_for() -> None:
    """As Flower's simulation: the ServerApp is there before the nodes are."""
    looks = iter([{0, 1, 2}, {0, 1, 2}, {1}, set()])
    fed = federation()
    fed.meet(Comings(app, {}, lambda _: next(looks, set())))
    assert fed.nodes == nodes(3)


def test_a_round_waits_for_a_node_where_all_have_left() -> None:
    """As at the start, and not one round later: after three abandoned rounds the run ends."""
    away: list[set[int]] = []
    grid = Comings(app, {}, lambda _: away.pop() if away else set())
    fed = federation()
    fed.meet(grid)
    away += [{0, 1, 2}] * 3
    fed.meet(grid)
    assert fed.nodes == nodes(3)


def test_two_nodes_of_one_partition() -> None:
    grid = LocalGrid(app, {}, 3)
    grid.contexts[4].node_config["partition-id"] = 1
    with pytest.raises(UserError, match=r"partition-id 2 of 3; node 4: partition-id = 1: two nodes have it$"):
        federation(node_timeout=0.05).meet(grid)
    begun = federation(min_nodes=2)
    begun.meet(grid)
    assert set(begun.nodes) == {2, 3}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "node 2: --node-config = {}: needs partition-id=<int> num-partitions=<int>"),
        (
            {"partition-id": 0, "private-data": "/home/ann/patients"},  # the server need not learn the path
            "node 2: --node-config = {'partition-id': 0}: needs partition-id=<int> num-partitions=<int>",
        ),
        (
            {"partition-id": "0", "num-partitions": 2},
            "node 2: --node-config = {'partition-id': '0', 'num-partitions': 2}: "
            "needs partition-id=<int> num-partitions=<int>",
        ),
        ({"partition-id": 2, "num-partitions": 2}, "node 2: partition-id = 2: must be 0 to num-partitions - 1"),
        ({"partition-id": -1, "num-partitions": 2}, "node 2: partition-id = -1: must be 0 to num-partitions - 1"),
    ],
)
def test_a_wrong_node_config(config: dict[str, Any], said: str) -> None:
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config = config
    with pytest.raises(UserError) as caught:
        federation().meet(grid)
    assert str(caught.value) == said


def test_a_node_of_another_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation()
    grid = LocalGrid(app, {})
    monkeypatch.setattr(fedsub_app.runs.node, "code_digest", lambda: "f00d")
    with pytest.raises(UserError, match=r"^node 2: this node runs other code \(digest f00d\) than the server \("):
        fed.meet(grid)


def test_the_digest_of_the_code_is_of_all_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    read, root = list[Path](), Path(__file__).parents[1]
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    code_digest.__wrapped__()
    assert {path.relative_to(root).parts[0] for path in read} == {"fedsub", "fedsub_app", "strategies", "client_apps"}


def test_a_node_restarted_from_another_checkout_in_the_middle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fed = Federation(resolve({}), {"run": "this", "state-dir": str(tmp_path)}, {"seed": 3})
    grid = LocalGrid(app, {}, 2)
    fed.meet(grid)
    phase = ask(fed, [0])
    fedsub_app.common.run_files._texts.clear()
    for module in (fedsub_app.runs.node, fedsub_app.common.code):
        monkeypatch.setattr(module, "code_digest", lambda: "f00d")
    assert list(fed.answers(phase, fed.exchange(grid, phase), nothing)) == []
    assert phase.dropped[0].reason.startswith("node failed: this node runs other code (digest f00d)")


def breaking(message_type: str, node_id: int) -> Callable[[Message, Context], Message]:
    """The ClientApp, which raises on one node."""

    def run(message: Message, context: Context) -> Message:
        if (message.metadata.message_type, context.node_id) == (message_type, node_id):
            raise OSError("disk full")
        return app(message=message, context=context)

    return run


def test_a_node_that_fails_the_roll_call() -> None:
    grid = LocalGrid(breaking(MessageType.QUERY, 3), {}, 2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"of 2; node 3: did not answer the roll call: OSError: disk full$"):
        federation(node_timeout=0.05).meet(grid)
    begun = federation(min_nodes=1)
    begun.meet(grid)
    assert set(begun.nodes) == {2}


# --- what comes back ------------------------------------------------------------------------------------------------


Parts = list[tuple[int, Json, dict[str, float]]]


def nothing(client: int) -> dict[str, Spec]:
    """No tensors are asked for."""
    return {}


def exchanged(
    reply: Callable[[Json, list[tuple[Json, Tensors]]], RecordDict], again: bool = False
) -> tuple[Parts, list[Dropped]]:
    """Ask clients 0, 2 (on one node) and 1 (on another) in round 5; ``reply`` makes the answer of the first node."""

    def honest(header: Json, parts: list[tuple[Json, Tensors]]) -> RecordDict:
        return pack(header, [({"client": config["client"]}, {}) for config, _ in parts])

    def run(message: Message, context: Context) -> Message:
        header, parts = unpack(message.content)
        stamp = {NONCE: header[NONCE]}
        answer = reply if context.node_id == 2 else honest
        return Message(answer(stamp, parts), reply_to=message)

    fed = federation(num_clients=3, placement="pinned")
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(3), 5)
    assert not phase.dropped
    replies = list(fed.exchange(LocalGrid(run, {}, 2), phase))  # type: ignore[arg-type]
    answers = fed.answers(phase, replies * 2 if again else replies, nothing)
    parts = [
        (client, part.config, {name: stack.row(row).item() for name, (stack, row) in part.rows.items()})
        for client, part, _ in answers
    ]
    return parts, phase.dropped


STALE = "stale reply: of another message"


def both(header: Json, *clients: Any) -> RecordDict:
    return pack(header, [({"client": client}, {}) for client in clients])


@pytest.mark.parametrize(
    ("reply", "reasons"),
    [
        (lambda header, parts: both(header, 0, 2), {}),
        *(
            (lambda header, parts, nonce=nonce: both(nonce, 0, 2), dict.fromkeys((0, 2), STALE))
            for nonce in ({"nonce": "0" * 11}, {"nonce": None}, {"nonce": [1]}, {})
        ),
        (
            lambda header, parts: RecordDict({"arrays": ArrayRecord({})}),
            dict.fromkeys((0, 2), "not fedsub's wire format (KeyError: 'fedsub.header')"),
        ),
        (
            lambda header, parts: both(header | {"error": "data-dir is empty"}),
            dict.fromkeys((0, 2), "node failed: data-dir is empty"),
        ),
        (lambda header, parts: both(header, 0), {2: "its node's reply does not hold it"}),
        (lambda header, parts: both(header, 0, 0, 2), {}),  # twice: the first one counts
        (lambda header, parts: both(header, 0, 2, 1), {}),  # 1 lives on the other node
        (lambda header, parts: both(header, 0, 2, 99, -1), {}),
        (lambda header, parts: both(header, 0, "2"), {2: "its node's reply does not hold it"}),
        (lambda header, parts: both(header, False, 2.0), dict.fromkeys((0, 2), "its node's reply does not hold it")),
        (lambda header, parts: both(header, None, [0], {"client": 0}, 0, 2), {}),
    ],
)
def test_answers_that_were_not_asked_for(reply: Any, reasons: dict[int, str]) -> None:
    """Whatever one node says, the other node's client counts, and nobody counts twice."""
    parts, dropped = exchanged(reply)
    assert dropped == [Dropped(client, reason) for client, reason in reasons.items()]
    assert [client for client, _, _ in parts] == [client for client in range(3) if client not in reasons]


def test_the_first_of_two_parts_counts() -> None:
    def twice(header: Json, parts: list[tuple[Json, Tensors]]) -> RecordDict:
        return pack(header, [({"client": 0}, {"w": torch.ones(1)}), ({"client": 0}, {"w": torch.zeros(1)})])

    (client, _, tensors), _ = exchanged(twice)[0]
    assert (client, tensors["w"]) == (0, 1)


def test_a_second_reply_is_ignored() -> None:
    answers = exchanged(lambda header, parts: both(header, 0, 2), again=True)
    once = exchanged(lambda header, parts: both(header, 0, 2))
    assert answers == once


def test_a_reply_sent_again_in_a_later_round_is_refused(run_local: RunLocal) -> None:
    """The node of client 1 answers round 2 with its answer to round 1."""
    kept: list[RecordDict] = []

    def run(message: Message, context: Context) -> Message:
        reply = app(message=message, context=context)
        if (context.node_id, message.metadata.message_type) == (3, MessageType.TRAIN):
            kept.append(reply.content)
            return Message(RecordDict({HEADER: kept[0][HEADER], TENSORS: kept[0][TENSORS]}), reply_to=message)
        return reply

    _, folder = run_local(grid=lambda _, keys: LocalGrid(run, keys, 2), placement="pinned", num_rounds=2)  # type: ignore
    reason = "stale reply: of another message"
    assert [line["dropped"] for line in rounds(folder)[1:]] == [[], [{"client": 1, "reason": reason}]]


def test_replies_to_an_earlier_round_are_ignored() -> None:
    """A reply that arrives after its round's timeout must not count as one of the next round."""
    grid = LocalGrid(lambda message, context: Message(both({"run": "this", "round": 1}, 0), reply_to=message), {})  # type: ignore[arg-type]
    fed = federation(num_clients=1)
    fed.roll.nodes = nodes(1)
    late = list(fed.exchange(grid, ask(fed, [0], 1)))
    phase = ask(fed, [0], 2)
    assert list(fed.answers(phase, late, nothing)) == []
    assert phase.dropped == [Dropped(0, "no reply within round-timeout")]


def test_a_late_reply_is_taken_from_flower_before_the_next_round() -> None:
    """Else Flower would hold it, up to a model, until the run ends."""

    class Late(LocalGrid):
        here = False

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return super().pull_messages(message_ids) if self.here else []

    grid = Late(answering, {})  # type: ignore[arg-type]
    fed = federation(num_clients=1, round_timeout=0.1)
    fed.roll.nodes = nodes(1)
    assert list(fed.exchange(grid, ask(fed, [0]))) == []
    assert len(grid._replies) == len(fed.late) == 1
    grid.here = True
    fed.meet(grid)
    assert not grid._replies
    assert not fed.late


def test_replies_that_wait_for_an_earlier_one_are_of_bounded_size() -> None:
    """By hand, for four: 4 messages, 3 for each of the 3 answered twice, 1 when none is on its way."""

    class FirstLast(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return super().pull_messages([*message_ids][1:] or message_ids)

    fed = federation(num_clients=40, message_clients=2)
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(40))
    answer = pack({NONCE: phase.outbox.header[NONCE]}, [({"client": client}, {}) for client in (10, 11)])
    fed.settings = fed.settings.model_copy(update={"message_mb": wire_bytes(answer) / 2**20})
    grid = FirstLast(answering, {}, 2)  # type: ignore[arg-type]
    answers = fed.answers(phase, fed.exchange(grid, phase), nothing)
    assert next(answers)[0] == 0
    assert phase.asked == list(range(2 * (4 + 3 + 3 + 1)))
    assert [client for client, _, _ in answers] == list(range(1, 40))


class Silent(LocalGrid):
    """The node with id 3 never answers a training message."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = super().pull_messages(message_ids)
        return [m for m in found if (m.metadata.src_node_id, m.metadata.message_type) != (3, MessageType.TRAIN)]


def test_a_silent_node_costs_the_timeout_and_its_own_clients(run_local: RunLocal) -> None:
    _, folder = run_local(
        grid=lambda app, keys: Silent(app, keys, 2), num_clients=3, placement="pinned", round_timeout=0.5, num_rounds=1
    )
    line = rounds(folder)[1]
    assert line["status"] == "ok"
    assert line["dropped"] == [{"client": 1, "reason": "no reply within round-timeout"}]


def test_a_node_that_fails_loses_its_own_clients_only(run_local: RunLocal) -> None:
    broken = breaking(MessageType.TRAIN, 3)
    _, folder = run_local(
        grid=lambda app, keys: LocalGrid(broken, keys, 2),  # type: ignore[arg-type]
        num_clients=3,
        placement="pinned",
        num_rounds=1,
    )
    assert rounds(folder)[1]["dropped"] == [{"client": 1, "reason": "node failed: OSError: disk full"}]
    assert rounds(folder)[1]["status"] == "ok"


# --- what the server says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["../../etc", "/etc", "..", "", "a/b", "x" * 65, "a\n"])
def test_a_run_that_is_a_path_is_refused_by_the_node(run: str, tmp_path: Path) -> None:
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config["state-dir"] = str(tmp_path / "node" / "state")
    said = asked_by(grid, {"run": run}, 0)[0]["error"]
    assert said == f"run = {run!r}: must be the id of a run, letters and digits"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("client", [-1, 2, 10**9, True, "0", None, "../x"])
def test_a_client_that_there_is_not_is_refused_by_the_node(client: Any, tmp_path: Path) -> None:
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config["state-dir"] = str(tmp_path)
    header, parts = asked_by(grid, {}, client)
    assert "error" not in header
    assert [config["error"] for config, _ in parts] == [
        f"UserError: client = {client!r}: must be an integer from 0 to 1"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]
    assert [path.name[:10] for path in (tmp_path / "abc").iterdir()] == [".settings-"]


@pytest.mark.parametrize("digest", ["../../../x", "0" * 16, "", 5, None])
def test_settings_under_another_digest_are_refused_by_the_node(digest: Any, tmp_path: Path) -> None:
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config["state-dir"] = str(tmp_path / "state")
    said = asked_by(grid, {"digest": digest}, 0)[0]["error"]
    assert said == f"digest = {digest!r}: not that of the settings"
    assert not list(tmp_path.iterdir())


def test_a_node_that_has_lost_the_settings_asks_for_them(run_local: RunLocal, tmp_path: Path) -> None:
    """As one that was restarted on an empty disk, or on a damaged one: its clients' round is not lost."""
    headers: list[Json] = []

    def run(message: Message, context: Context) -> Message:
        header, _ = unpack(message.content)
        headers.append(header)
        if len(headers) in (2, 4):
            fedsub_app.common.run_files._texts.clear()
            for file in tmp_path.rglob(".settings-*"):
                file.write_text("{}") if len(headers) == 4 else file.unlink()
        return app(message=message, context=context)

    _, whole = run_local("whole")
    _, folder = run_local("lost", grid=lambda _, keys: LocalGrid(run, keys))  # type: ignore[arg-type]
    assert rounds(folder) == rounds(whole)
    assert ["settings" in header for header in headers[:6]] == [True, False, True, False, True, False]


def test_settings_that_are_no_text_are_lacking(tmp_path: Path) -> None:
    (tmp_path / ".settings-1.json").write_bytes(b"\xff")
    assert kept_settings(tmp_path, "1") == ""


def test_a_message_is_made_again_for_a_node_that_has_lost_the_settings() -> None:
    """The server keeps no message that is on its way; what it sends twice counts twice, but for the papers' formula."""
    alive: list[weakref.ref[Message]] = []
    sent: list[int] = []
    headers: list[Json] = []

    class Watched(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            alive.extend(weakref.ref(message) for message in messages)
            sent.extend(wire_bytes(message.content) for message in messages)
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            assert not [message for message in alive if message()]
            return super().pull_messages(message_ids)

    def run(message: Message, context: Context) -> Message:
        header, parts = unpack(message.content)
        headers.append(header)
        assert all(tensors["w"] == config["client"] for config, tensors in parts)
        lost = context.node_id == 3 and "settings" not in header
        answer = pack(UNKNOWN_SETTINGS | {NONCE: header[NONCE]}, []) if lost else None
        return Message(answer, reply_to=message) if answer else answering(message, context)

    fed = Federation(resolve({"num-clients": 5, "placement": "pinned"}), {"run": "this"}, {"seed": 3})
    fed.roll.nodes = nodes(2)
    phase = ask(fed, range(5), task=lambda client: Task(client, {"w": torch.full((1,), float(client))}))
    grid = Watched(run, {}, 2)  # type: ignore[arg-type]
    assert [client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)] == list(range(5))
    assert ["settings" in header for header in headers] == [False, False, True]
    assert phase.outbox.bytes_down == sum(sent)
    assert sum(phase.outbox.formula_of.values()) == 5 * 4
    assert sorted(phase.asked) == list(range(5))


def test_a_node_that_may_have_lost_its_files_gets_the_initial_model_again(tmp_path: Path) -> None:
    """With its key it has its old id; it was dropped from every later round, without ``initial.safetensors``."""
    sent: list[bool] = []
    lost: list[bool] = []

    def run(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            return app(message=message, context=context)
        header, parts = unpack(message.content)
        sent.append(any(INITIAL in config for config, _ in parts))
        answer, client = (UNKNOWN_SETTINGS, []) if lost and lost.pop() else ({}, [({"client": 0}, {})])
        return Message(pack(answer | {NONCE: header[NONCE]}, client), reply_to=message)

    def asked(grid: LocalGrid) -> list[bool]:
        sent.clear()
        fed.meet(grid)
        phase = ask(fed, [0])
        assert [client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)] == [0]
        return sent

    settings = resolve({"num-clients": 1, "node-timeout": 0.05})
    header = {"run": "this", "state-dir": str(tmp_path)}
    fed = Federation(settings, header, {"seed": 3}, initial={"w": torch.ones(1)})
    grid = LocalGrid(run, {}, 1)  # type: ignore[arg-type]
    assert asked(grid) == [True]
    assert asked(grid) == [False]
    node = grid.contexts.pop(2)
    fed.meet(grid)
    grid.contexts[2] = node
    assert asked(grid) == [True]
    lost.append(True)
    assert asked(grid) == [False, True]
    assert asked(grid) == [False]


def test_an_initial_model_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    """The clients of its node failed in every round, however often the node was started again."""
    grid = LocalGrid(app, {})
    grid.contexts[2].node_config["state-dir"] = str(tmp_path)
    for value in (1.0, 2.0):
        asked_by(grid, {}, -1, ({INITIAL: True}, {"w": torch.tensor(value)}))
        assert initial_model(tmp_path / "abc") == {"w": value}
        initial_file(tmp_path / "abc").write_bytes(b"damaged")


def test_of_the_initial_model_travels_what_the_task_does_not_hold() -> None:
    initial = {"w": torch.ones(2), "b": torch.zeros(2)}
    fed = Federation(resolve({"num-clients": 1}), {"run": "this"}, initial=initial)
    fed.roll.nodes = nodes(1)
    (message,) = ask(fed, [0], task=lambda client: Task(client, {"w": torch.ones(2), "b": torch.ones(2)}))
    assert [array.shape for array in message.content.array_records[TENSORS].values()] == [(1, 2), (2, 2)]
    assert {name: x.tolist() for name, x in unpack(message.content)[1][-1][1].items()} == {"w": [1, 1], "b": [0, 0]}


def asked_by(
    grid: LocalGrid, header: Json, client: Any, *more: tuple[Json, Tensors]
) -> tuple[Json, list[tuple[Json, Tensors]]]:
    """Ask the node to train a client, with this in the message's header; returns its reply."""
    said = {"run": "abc", "round": 1, "phase": "train", "nonce": "0", "code": code_digest(), "checkpoints": []}
    text = json.dumps(resolve({"method": "local"}).flat() | {"experiment": ""})
    told = {"settings": text, "digest": settings_digest(text), "state-dir": "nowhere"}
    content = pack(said | told | header, [({"client": client}, {}), *more])
    (reply,) = grid.send_and_receive([Message(content, 2, MessageType.TRAIN, group_id="1")])
    return unpack(reply.content)


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_a_restarted_node_misses_its_round_only(run_local: RunLocal) -> None:
    _, folder = run_local(grid=Restarting, num_clients=3, placement="pinned")
    assert [line["dropped"] for line in rounds(folder)[1:]] == [
        [],
        [{"client": 1, "reason": "its node is away"}],
        [],
    ]
    assert all(line["clients"] == [0, 1, 2] for line in rounds(folder)[1:])


def test_simulated_nodes_stand_in_for_each_other(run_local: RunLocal) -> None:
    _, whole = run_local("whole", num_clients=3)
    _, folder = run_local(grid=Restarting, num_clients=3, placement="auto")
    assert rounds(folder) == rounds(whole)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_nodes_other_versions_are_named() -> None:
    here = fedsub_app.federation.roll.versions()
    differing = fedsub_app.federation.roll.differing_versions
    assert differing(here) == differing(None) == differing("none") == differing({}) == ""
    torch_there = here | {"torch": "1.0\n" + "x" * 100}
    assert differing(torch_there) == f"torch 1.0 {'x' * 15}… (the server {here['torch']})"
