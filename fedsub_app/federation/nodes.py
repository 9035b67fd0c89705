"""Which node hosts which clients; who takes part in a round; one message a node and phase.

``num-clients`` is the experiment's; SuperNodes are hosts. A roll call asks each node once for its ``partition-id``:
client ``c`` lives on the node with ``c % num_partitions == partition_id``. Where all nodes are simulated they share
data and client state, and the sampled clients are spread evenly over them instead.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedsub_app.common.code import code_digest
from fedsub_app.common.errors import UserError, printable
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import STAMP, BadReply, Part, Spec, Task, pack, unpack_reply, wire_bytes
from fedsub_app.federation.settings import FederationSettings

log = logging.getLogger("fedsub")
LATE_ROLL_CALL_S = 20.0  # how long a round waits for a node that has just come up
MOST_ROLL_CALLS = 3  # a node that is silent so often is not waited for again
MOST_NODES = 100_000
Answer = tuple[int, Part, Mapping[str, Spec]]  # a client, its part of a reply, what it was asked for


@dataclass(frozen=True)
class Node:
    """A host of clients, as it answered the roll call."""

    node_id: int
    partition_id: int
    num_partitions: int
    simulated: bool

    @property
    def name(self) -> str:
        """The partition id, which stays the same when the node is restarted (the node id does not)."""
        return f"node {self.partition_id}"


@dataclass(frozen=True)
class Dropped:
    """A client whose answer does not count in this round, and why: one printable line."""

    client: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass
class Phase:
    """One phase of a round: what was asked of whom, and what became of it.

    Attributes
    ----------
    kind, round : ``MessageType.TRAIN`` or ``EVALUATE``, and the round's number.
    sent : each message with the clients whose tasks it holds.
    dropped : clients whose answer does not count, and why.
    report : what the round's line says of this phase (JSON-able).
    nonce : in its messages, and repeated in their replies, so that none of an earlier phase can be sent again.
    """

    kind: str
    round: int
    sent: list[tuple[Message, list[int]]] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    report: Json = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def messages(self) -> list[Message]:
        """The messages, one a node."""
        return [message for message, _ in self.sent]

    @property
    def asked(self) -> list[int]:
        """The clients that a message was sent for."""
        return [client for _, clients in self.sent for client in clients]


def sample(settings: FederationSettings, server_round: int) -> list[int]:
    """Return the clients of a round: sorted, seeded by (seed, round)."""
    order = torch.randperm(settings.num_clients, generator=generator(settings.seed, server_round, "sample"))
    return sorted(order[: settings.sample_size].tolist())


class Federation:
    """The nodes of a run and their clients."""

    def __init__(self, settings: FederationSettings, header: Json) -> None:
        """``header`` goes into every message: the run's id, its settings, where client state lies."""
        self.settings = settings
        self.header = header
        self.nodes: dict[int, Node] = {}
        self.met = False
        self.refused: set[int] = set()  # ids of misconfigured nodes, which are not asked again
        self.waiting: dict[int, Node] = {}  # those whose partition another node has
        self.silent: dict[int, int] = {}  # how many roll calls in a row a node has not answered

    def sample(self, server_round: int) -> list[int]:
        """Return the clients of a round: sorted, seeded by (seed, round), independent of nodes and engine."""
        return sample(self.settings, server_round)

    def meet(self, grid: Grid) -> None:
        """Call the roll of nodes that are not known yet and forget those that left.

        The first call waits until ``min-nodes`` nodes (by default as many as the nodes' ``num-partitions``) have
        answered, and rejects a misconfigured node with an error. Later ones ignore it with a warning.

        A later node whose partition id is taken waits until Flower no longer lists the one that has it: a SuperNode
        that was killed and started again is first listed beside its old id, for up to two heartbeats (60 s).

        Raises
        ------
        UserError
            At the start: ``node-timeout`` is over (the message says who is missing), or a node cannot take part.
        """
        deadline = time.monotonic() + self.settings.node_timeout
        wait = not self.nodes  # also when all have left: the round is abandoned if none comes back in time
        while True:
            present = set(grid.get_node_ids())
            self.nodes = {node_id: node for node_id, node in self.nodes.items() if node_id in present}
            self.waiting = {node_id: node for node_id, node in self.waiting.items() if node_id in present}
            new = sorted(present - set(self.nodes) - set(self.waiting) - self.refused)
            if new:
                self._call_roll(grid, new, not self.met, deadline)
            for node_id, node in sorted(self.waiting.items()):
                if not self._twin(node):
                    log.info(
                        "node %s takes the place of the one that had partition-id = %s", node_id, node.partition_id
                    )
                    self.nodes[node_id] = self.waiting.pop(node_id)
            missing = self._missing()
            if not wait or not missing or (self.met and time.monotonic() > deadline):
                self.met = True
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"node-timeout = {self.settings.node_timeout:g}: {len(self.nodes)} nodes there, missing: {missing}"
                )
            time.sleep(0.1)

    def _missing(self) -> str:
        announced = max((node.num_partitions for node in self.nodes.values()), default=1)
        have = {node.partition_id for node in self.nodes.values()}
        absent = [number for number in range(announced) if number not in have]
        if self.settings.min_nodes:
            short = self.settings.min_nodes - len(self.nodes)
            return f"{short} of min-nodes = {self.settings.min_nodes}" if short > 0 else ""
        more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
        return f"nodes with partition-id {', '.join(map(str, absent[:10]))}{more} of {announced}" if absent else ""

    def _twin(self, node: Node) -> Node | None:
        """Return the node that has this one's partition."""
        return next((other for other in self.nodes.values() if other.partition_id == node.partition_id), None)

    def _call_roll(self, grid: Grid, node_ids: Sequence[int], first: bool, deadline: float) -> None:
        timeout = deadline - time.monotonic() if first else LATE_ROLL_CALL_S
        asked = _roll_call(node_ids)
        replies = exchange(grid, asked, max(1.0, timeout))
        node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
        for reply in replies:
            node_id = node_of.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:  # a second answer
                continue
            try:
                node = _read_roll_call(node_id, reply)
                count = next(iter(self.nodes.values()), node).num_partitions
                if node.num_partitions != count:
                    raise BadReply(f"num-partitions = {node.num_partitions}: the nodes before it say {count}")
                twin = self._twin(node)
                if twin and first:
                    raise BadReply(f"partition-id = {node.partition_id}: two nodes have it ({twin.node_id}, {node_id})")
            except BadReply as error:
                if first:
                    raise UserError(f"node {node_id}: {error}") from None
                log.warning("node %s stays out: %s", node_id, error)
                self.refused.add(node_id)
                continue
            if twin:
                said = "node %s waits: partition-id = %s is that of node %s, which Flower still lists"
                log.warning(said, node_id, node.partition_id, twin.node_id)
                self.waiting[node_id] = node
            else:
                self.nodes[node_id] = node
        self.silent = {node_id: self.silent.get(node_id, 0) + 1 for node_id in node_of.values()}
        if not first:
            self.refused |= {node_id for node_id, times in self.silent.items() if times >= MOST_ROLL_CALLS}

    def hosts(self, clients: Sequence[int]) -> tuple[dict[int, list[int]], list[Dropped]]:
        """Assign sorted clients to node ids; clients whose node is away are dropped."""
        nodes = sorted(self.nodes.values(), key=lambda node: node.partition_id)
        placement = self.settings.placement
        if placement == "auto":
            placement = "balanced" if all(node.simulated for node in nodes) else "pinned"
        assigned: dict[int, list[int]] = {}
        dropped = []
        owner: dict[int, int | None]
        if placement == "balanced" and nodes:
            owner = {client: nodes[rank * len(nodes) // len(clients)].node_id for rank, client in enumerate(clients)}
        else:
            owner = dict.fromkeys(clients)
            for node in nodes:
                owner |= {c: node.node_id for c in clients if c % node.num_partitions == node.partition_id}
        for client in clients:
            node_id = owner[client]
            if node_id is None:
                dropped.append(Dropped(client, "its node is away"))
            else:
                assigned.setdefault(node_id, []).append(client)
        return assigned, dropped

    def ask(self, kind: str, server_round: int, tasks: Mapping[int, Task], extra: Json) -> Phase:
        """Return a phase with one message a node, which holds the tasks of its clients.

        ``extra`` goes into every message's header. Clients that no node hosts now are dropped.
        """
        assigned, dropped = self.hosts(sorted(tasks))
        phase = Phase(kind, server_round, dropped=dropped)
        stamp = {"phase": kind, "round": server_round, "nonce": phase.nonce}
        header = self.header | extra | stamp | {"code": code_digest()}
        for node_id, clients in assigned.items():
            parts = [({"client": c} | tasks[c].config, tasks[c].tensors) for c in clients]
            phase.sent.append((Message(pack(header, parts), node_id, kind, group_id=str(server_round)), clients))
        return phase

    def answers(
        self, phase: Phase, replies: Iterable[Message], expected: Callable[[int], Mapping[str, Spec]]
    ) -> tuple[list[Answer], int]:
        """Return the parts that answer a phase's tasks, by client, and the bytes received; drops the others.

        ``expected`` says which tensors a client was asked for; none is decoded here. A reply is matched by the message
        it answers (the error reply for a dead node has another source id). One of another run, round or phase, or
        without the phase's nonce, drops its node's clients; a second one, one that was not asked for, and parts of
        clients that were not asked are ignored and logged.
        """
        parts: dict[int, Answer] = {}
        stamp = (self.header.get("run"), phase.round, phase.kind, phase.nonce)
        waiting = {message.metadata.message_id: clients for message, clients in phase.sent}
        reasons = dict.fromkeys(phase.asked, "no reply within round-timeout")
        received = 0
        for reply in replies:
            clients = waiting.pop(reply.metadata.reply_to_message_id, [])
            if not clients:
                log.warning("ignored a reply of node %s: not asked for, or a second one", reply.metadata.src_node_id)
                continue
            if reply.has_error():
                reasons |= {client: f"node failed: {_brief(reply.error.reason)}" for client in clients}
                continue
            received += wire_bytes(reply.content)
            try:
                asked = {client: expected(client) for client in clients}
                header, answered_parts = unpack_reply(reply.content, asked)
                if (theirs := tuple(header.get(key) for key in STAMP)) != stamp:
                    replayed = ", of another message" if theirs[:-1] == stamp[:-1] else ""
                    raise BadReply(f"stale reply: {', '.join(STAMP[:-1])} = {theirs[:-1]}{replayed}")
                if header.get("error"):
                    raise BadReply(f"node failed: {_brief(str(header['error']))}")
            except BadReply as error:
                reasons |= {client: str(error) for client in clients}
                continue
            reasons |= dict.fromkeys(clients, "its node's reply does not hold it")
            ignored = 0
            for part in answered_parts:
                client = part.config.get("client")
                if type(client) is int and client in asked and client not in parts:
                    parts[client] = (client, part, asked[client])
                else:
                    ignored += 1
            if ignored:
                said = "ignored %d parts of a reply of node %s: of clients that were not asked of it, or twice"
                log.warning(said, ignored, reply.metadata.src_node_id)
        phase.dropped += [Dropped(client, reason) for client, reason in sorted(reasons.items()) if client not in parts]
        return [parts[client] for client in sorted(parts)], received


def wake(grid: Grid) -> None:
    """Send a roll call and do not wait for answers: simulated nodes import the app while the server loads its data."""
    grid.push_messages(_roll_call(grid.get_node_ids()))


def _roll_call(node_ids: Iterable[int]) -> list[Message]:
    content = pack({"code": code_digest(), "phase": MessageType.QUERY}, [])
    return [Message(content, node_id, MessageType.QUERY, group_id="roll call") for node_id in node_ids]


def _read_roll_call(node_id: int, reply: Message) -> Node:
    if reply.has_error():
        raise BadReply(f"did not answer the roll call: {_brief(reply.error.reason)}")
    answer, _ = unpack_reply(reply.content, {})
    if "error" in answer:
        raise BadReply(str(answer["error"]))
    number, count = answer.get("partition-id"), answer.get("num-partitions")
    if type(number) is not int or type(count) is not int or not 0 <= number < count <= MOST_NODES:
        raise BadReply(
            f"partition-id, num-partitions = {number}, {count}: must be integers, 0 <= id < num <= {MOST_NODES}"
        )
    return Node(node_id, number, count, answer.get("simulated") is True)


def _brief(reason: str | None) -> str:
    """Return the last line of a traceback, which names the exception."""
    lines = [line.strip() for line in (reason or "")[-10_000:].splitlines() if line.strip()] or ["no reason given"]
    return lines[-1]


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
    """Send messages and collect their replies until all are there or ``timeout`` seconds are over.

    Flower's ``send_and_receive`` sleeps 0.1 s (simulation) or 3 s (deployment) between looks; this one starts at 5 ms
    and backs off to 0.5 s, so short rounds are not dominated by the wait.
    """
    waiting = [message_id for message_id in grid.push_messages(messages) if message_id]
    replies: list[Message] = []
    start = time.monotonic()
    while waiting:
        found = list(grid.pull_messages(waiting))
        replies += found
        answered = {reply.metadata.reply_to_message_id for reply in found}
        waiting = [message_id for message_id in waiting if message_id not in answered]
        elapsed = time.monotonic() - start
        if not waiting or elapsed > timeout:
            break
        time.sleep(min(0.5, max(0.005, elapsed / 50)))
    return replies
