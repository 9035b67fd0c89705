"""Which node hosts which clients; who takes part in a round; messages to them and their answers.

``num-clients`` is the experiment's; SuperNodes are hosts. A roll call asks each node once for its ``partition-id``:
client ``c`` lives on the node with ``c % num_partitions == partition_id``. Where all nodes are simulated they share
data and client state, and take the sampled clients from one queue instead.
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedsub_app.common.code import code_digest, text_digest
from fedsub_app.common.errors import UserError, printable
from fedsub_app.common.failures import MachineFailed
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.phase import Dropped, Phase
from fedsub_app.federation.protocol import (
    STAMP,
    BadReply,
    Part,
    Spec,
    Task,
    asks_for_settings,
    formula_bytes,
    pack,
    unpack_reply,
    wire_bytes,
    with_header,
)
from fedsub_app.federation.settings import FederationSettings

log = logging.getLogger("fedsub")
IN_FLIGHT = 2  # messages that a node has at a time
MOST_HELD = 4  # times message-mb: answers that wait for an earlier client's
ASK_AGAIN_S = 120.0  # after the first roll call to a node that has not answered it rightly; twice that after the next
MOST_NODES = 100_000
Answer = tuple[int, Part, Mapping[str, Spec]]  # a client, its part of a reply, what it was asked for


@dataclass(frozen=True)
class Node:
    """A host of clients, as it answered the roll call."""

    node_id: int
    partition_id: int
    num_partitions: int
    simulated: bool
    gpu: bool = False  # it sees one

    @property
    def name(self) -> str:
        """The partition id, which stays the same when the node is restarted (the node id does not)."""
        return f"node {self.partition_id}"


def draw(settings: FederationSettings, server_round: int) -> list[int]:
    """Return the clients that a round asks, in the order in which they are drawn, seeded by (seed, round).

    The first ``sample_size`` take part; those after them are asked as well and stand in for them (``oversample``).
    """
    order = torch.randperm(settings.num_clients, generator=generator(settings.seed, server_round, "sample"))
    drawn: list[int] = order[: settings.asked_size].tolist()
    return drawn


def sample(settings: FederationSettings, server_round: int) -> list[int]:
    """Return the clients that a round asks: sorted, seeded by (seed, round)."""
    return sorted(draw(settings, server_round))


class Federation:
    """The nodes of a run and their clients."""

    def __init__(
        self, settings: FederationSettings, header: Json, told: Json | None = None, device: str = "cpu"
    ) -> None:
        """``header`` goes into every message: the run's id, where client state lies.

        ``told``: the run's settings, which go with the roll call; later messages have their digest, and a node that has
        not got them asks for them. ``device``: ``"cuda"`` where the server computes on a GPU.
        """
        self.settings = settings
        self.device = device
        self.told = {"settings": json.dumps(told)} if told else {}
        self.header = header | ({"digest": text_digest(self.told["settings"])} if told else {})
        self.nodes: dict[int, Node] = {}
        self.met = False
        self.waiting: dict[int, Node] = {}  # those whose partition another node has
        self.called: dict[str, int] = {}  # roll calls without an answer yet: message id -> node
        self.ask_again: dict[
            int, tuple[float, float]
        ] = {}  # a node that stays out -> when, by the clock, and s till then
        self.complaints: dict[int, str] = {}  # why a node stays out, as it was logged
        self.late: set[str] = set()  # messages of earlier phases that were not waited for

    def sample(self, server_round: int) -> list[int]:
        """Return the clients of a round: sorted, seeded by (seed, round), independent of nodes and engine."""
        return sample(self.settings, server_round)

    @property
    def simulated(self) -> bool:
        """Whether no node is a machine of its own: all answers come, whichever is first."""
        return all(node.simulated for node in self.nodes.values())

    def meet(self, grid: Grid) -> None:
        """Call the roll of nodes that are not known yet and forget those that left.

        The first call waits until ``min-nodes`` nodes (by default as many as the nodes' ``num-partitions``) have
        answered, and rejects a misconfigured node with an error. Later ones wait for nobody: they look whether roll
        calls were answered since, however late, and a node that answers wrongly stays out with a warning. A node
        outside is called when Flower lists it and, while it stays out, again after 2, 4, 8 minutes and so on: a call
        that it got just before it was killed is lost, and Flower does not say so.

        A later node whose partition id is taken waits until Flower no longer lists the one that has it: a SuperNode
        that was killed and started again is first listed beside its old id, for up to two heartbeats (60 s).

        Raises
        ------
        UserError
            At the start: ``node-timeout`` is over (the message says who is missing), or a node cannot take part.
        """
        self._forget_late(grid)
        deadline = time.monotonic() + self.settings.node_timeout
        wait = not self.nodes  # also when all have left: the round is abandoned if none comes back in time
        while True:
            present = set(grid.get_node_ids())
            for known in (self.nodes, self.waiting, self.ask_again, self.complaints):
                for node_id in known.keys() - present:  # one that comes back is called again
                    del known[node_id]
            self._call_roll(grid, sorted(present - self.nodes.keys() - self.waiting.keys()))
            self._take_answers(grid)
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
            time.sleep(_pause(self.settings.node_timeout + time.monotonic() - deadline))

    def _forget_late(self, grid: Grid) -> None:
        """Throw the replies away that came too late, which a SuperLink keeps until somebody asks for them."""
        for reply in grid.pull_messages(list(self.late)) if self.late else ():
            self.late.discard(reply.metadata.reply_to_message_id)

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

    def _call_roll(self, grid: Grid, node_ids: Sequence[int]) -> None:
        """Call those whose turn it is."""
        now = time.monotonic()
        due = [node_id for node_id in node_ids if self.ask_again.get(node_id, (0.0, 0.0))[0] <= now]
        for node_id in due:
            pause = 2 * self.ask_again[node_id][1] if node_id in self.ask_again else ASK_AGAIN_S
            self.ask_again[node_id] = (now + pause, pause)
        if due:
            calls = _roll_call(due, self.header | self.told)
            stored = set(grid.push_messages(calls))  # without those to nodes that have left just now
            asked = {call.metadata.message_id: call.metadata.dst_node_id for call in calls}
            self.called |= {number: node_id for number, node_id in asked.items() if number in stored}

    def _take_answers(self, grid: Grid) -> None:
        """Look at the answers that have come; before the first round a wrong one is an error."""
        replies = list(grid.pull_messages(list(self.called))) if self.called else []
        present = set(grid.get_node_ids()) if replies else set()
        for reply in replies:
            node_id = self.called.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None or node_id not in present or node_id in self.nodes or node_id in self.waiting:
                continue  # not asked for, or a second one, or of a node that has left
            if reply.has_error() and reply.metadata.src_node_id != node_id:  # Flower's: it had left, and is back
                self.ask_again.pop(node_id, None)
                continue
            try:
                node = self._admitted(node_id, reply)
            except BadReply as error:
                if not self.met:
                    raise UserError(f"node {node_id}: {error}") from None
                if self.complaints.get(node_id) != str(error):
                    log.warning("node %s stays out: %s", node_id, error)
                self.complaints[node_id] = str(error)
                continue
            self.complaints.pop(node_id, None)
            self.ask_again.pop(node_id, None)
            if twin := self._twin(node):
                said = "node %s waits: partition-id = %s is that of node %s, which Flower still lists"
                log.warning(said, node_id, node.partition_id, twin.node_id)
                self.waiting[node_id] = node
            else:
                self.nodes[node_id] = node

    def _admitted(self, node_id: int, reply: Message) -> Node:
        """Return the node that has answered the roll call; :class:`BadReply`: it cannot take part."""
        node = _read_roll_call(node_id, reply)
        count = next(iter(self.nodes.values()), node).num_partitions
        if node.num_partitions != count:
            raise BadReply(f"num-partitions = {node.num_partitions}: the nodes before it say {count}")
        if self.settings.private_examples and node.num_partitions != self.settings.num_clients:
            clients = f"num-clients = {self.settings.num_clients}"
            raise BadReply(
                f"num-partitions = {node.num_partitions}: must be {clients} where each node has private data"
            )
        if self.device == "cuda" and node.simulated and not node.gpu:
            raise BadReply(
                "it sees no GPU, the server uses one: its connection needs a share of them, which "
                "`fedsub setup` writes; or device = cpu"
            )
        twin = self._twin(node)
        if twin and not self.met:
            raise BadReply(f"partition-id = {node.partition_id}: two nodes have it ({twin.node_id}, {node_id})")
        return node

    def hosts(self, clients: Sequence[int]) -> tuple[dict[int, deque[int]], list[Dropped]]:
        """Return which node may be asked for which of the sorted clients; those whose node is away are dropped.

        Simulated nodes share one queue, and a fast one takes more of it; a real node has its own.
        """
        nodes = sorted(self.nodes.values(), key=lambda node: node.partition_id)
        placement = self.settings.placement
        if self.settings.private_examples:
            placement = "pinned"
        if placement == "auto":
            placement = "balanced" if all(node.simulated for node in nodes) else "pinned"
        if placement == "balanced" and nodes:
            queue = deque(clients)
            return {node.node_id: queue for node in nodes}, []
        queues: dict[int, deque[int]] = {}
        dropped = []
        for client in clients:
            node = next((node for node in nodes if client % node.num_partitions == node.partition_id), None)
            if node:
                queues.setdefault(node.node_id, deque()).append(client)
            else:
                dropped.append(Dropped(client, "its node is away"))
        return queues, dropped

    def ask(
        self,
        kind: str,
        server_round: int,
        clients: Iterable[int],
        task: Callable[[int], Task],
        extra: Json,
        expected: Callable[[int], Mapping[str, Spec]] = lambda _: {},
    ) -> Phase:
        """Return a phase that asks each of the clients for its task; those that no node hosts now are dropped.

        Parameters
        ----------
        task : called when the client's message is made.
        extra : goes into every message's header.
        expected : the tensors that a client answers with, which count in ``message-mb``.
        """
        queues, dropped = self.hosts(sorted(clients))
        budget = self.settings.message_mb * 2**20

        def make(node_id: int, queue: deque[int], most: int) -> tuple[Message, list[int]]:
            parts: list[tuple[Json, Tensors]] = []
            known: set[int] = set()  # tensor objects that the message has: it carries each of them once
            size = 0
            while queue and len(parts) < most:
                one = task(queue[0])
                new = {id(tensor): tensor.nbytes for tensor in one.tensors.values() if id(tensor) not in known}
                more = sum(new.values()) + sum(spec.nbytes for spec in expected(queue[0]).values())
                if parts and size + more > budget:
                    break
                known |= new.keys()
                size, phase.formula_down = size + more, phase.formula_down + formula_bytes(one.tensors)
                parts.append(({"client": queue.popleft()} | one.config, one.tensors))
            message = Message(pack(header, parts), node_id, kind, group_id=str(server_round))
            phase.bytes_down += wire_bytes(message.content)
            return message, [config["client"] for config, _ in parts]

        phase = Phase(kind, server_round, queues, make, dropped)
        stamp = {"phase": kind, "round": server_round, "nonce": phase.nonce}
        header = self.header | extra | stamp | {"code": code_digest()}
        return phase

    def exchange(self, grid: Grid, phase: Phase) -> Iterator[Message]:
        """Hand out a phase's messages and yield the replies as they come, until all are there or time is up.

        A node has at most ``IN_FLIGHT`` messages at a time: one to work on and the next one. None is handed out from a
        shared queue while many answers wait for an earlier client's. A node that has lost the settings gets its message
        again with them. Replies that nobody waits for any more are thrown away before a later phase.
        """
        flying: dict[str, Message] = {}
        try:
            yield from self._replies(grid, phase, flying)
        finally:
            self.late |= flying.keys()

    def _replies(self, grid: Grid, phase: Phase, flying: dict[str, Message]) -> Iterator[Message]:
        start = time.monotonic()
        again: set[str] = set()
        while self._hand_out(grid, phase, flying):
            found = []
            for reply in grid.pull_messages(list(flying)):
                message = flying.pop(reply.metadata.reply_to_message_id, None)
                if message is None:
                    continue
                node_id = message.metadata.dst_node_id
                if reply.has_error() and node_id not in set(grid.get_node_ids()):
                    phase.give_up(node_id)
                if message.metadata.message_id not in again and _lost_settings(reply):
                    known, content = message.metadata, message.content
                    message = Message(with_header(content, self.told), node_id, phase.kind, group_id=known.group_id)
                    _push(grid, message, flying)
                    again.add(message.metadata.message_id)
                    phase.again(message, known)
                else:
                    found.append(reply)
            elapsed = time.monotonic() - start
            if found:
                self._hand_out(grid, phase, flying)  # before the answers are looked at, so that no node idles
                yield from found
            elif elapsed > self.settings.round_timeout:
                return
            else:
                _wait(grid, elapsed)

    def _hand_out(self, grid: Grid, phase: Phase, flying: dict[str, Message]) -> bool:
        """Give the nodes what they may have; says whether any message is not answered yet."""
        load = Counter(message.metadata.dst_node_id for message in flying.values())
        for wanted in range(1, IN_FLIGHT + 1):
            for node_id in phase.nodes:
                full = phase.shared and flying and phase.held > MOST_HELD * self.settings.message_mb * 2**20
                if load[node_id] < wanted and not full:
                    message = phase.next_message(node_id, self.settings.message_clients)
                    if message:
                        _push(grid, message, flying)
                        load[node_id] += 1
        return bool(flying)

    def answers(
        self,
        phase: Phase,
        replies: Iterable[Message],
        expected: Callable[[int], Mapping[str, Spec]],
        in_order: bool = True,
    ) -> Iterator[Answer]:
        """Yield the parts that answer a phase's tasks, in the order of the clients, as early as that allows.

        ``in_order=False``: as they come. Who needs no more of them stops iterating.

        At the end the clients without a part are in ``phase.dropped``.

        ``expected`` says which tensors a client was asked for; none is decoded here. A reply is matched by the message
        it answers (the error reply for a dead node has another source id). One of another run, round or phase, or
        without the phase's nonce, drops its node's clients; a second one, one that was not asked for, and parts of
        clients that were not asked are ignored and logged.
        """
        found: dict[int, tuple[Answer, float]] = {}
        reasons = dict.fromkeys(phase.clients, "no reply within round-timeout")
        order = deque(phase.clients)
        for reply in replies:
            clients = phase.clients_of(reply)
            if not clients or clients[0] not in reasons or clients[0] in found:
                log.warning("ignored a reply of node %s: not asked for, or a second one", reply.metadata.src_node_id)
                continue
            try:
                parts = self._parts(phase, reply, {client: expected(client) for client in clients})
            except BadReply as error:
                lost = dict.fromkeys(clients, str(error))
            else:
                lost = {client: "its node's reply does not hold it" for client in clients if client not in parts}
                size = wire_bytes(reply.content) / len(clients)
                found |= {client: (part, size) for client, part in parts.items()}
            phase.dropped += [Dropped(client, reason) for client, reason in lost.items()]
            for client in clients:
                del reasons[client]
            if not in_order:
                yield from (found.pop(client)[0] for client in clients if client in found)
                continue
            while order and order[0] not in reasons:
                if (ready := found.pop(order.popleft(), None)) is not None:
                    yield ready[0]
            phase.held = int(sum(size for _, size in found.values()))
        gone = {drop.client for drop in phase.dropped}
        phase.dropped += [Dropped(client, reason) for client, reason in reasons.items() if client not in gone]
        yield from (found[client][0] for client in order if client in found)

    def _parts(self, phase: Phase, reply: Message, asked: Mapping[int, Mapping[str, Spec]]) -> dict[int, Answer]:
        """Return a reply's parts by client; :class:`BadReply`: there are none that count."""
        if reply.has_error():
            raise BadReply(f"node failed: {_brief(reply.error.reason)}")
        phase.bytes_up += wire_bytes(reply.content)
        header, parts = unpack_reply(reply.content, asked)
        stamp = (self.header.get("run"), phase.round, phase.kind, phase.nonce)
        if (theirs := tuple(header.get(key) for key in STAMP)) != stamp:
            replayed = ", of another message" if theirs[:-1] == stamp[:-1] else ""
            raise BadReply(f"stale reply: {', '.join(STAMP[:-1])} = {theirs[:-1]}{replayed}")
        if header.get("fatal") is True and self.simulated:
            raise MachineFailed(printable(str(header.get("error"))))
        if header.get("error"):
            raise BadReply(f"node failed: {_brief(str(header['error']))}")
        found: dict[int, Answer] = {}
        for part in parts:
            client = part.config.get("client")
            if type(client) is int and client in asked and client not in found:
                found[client] = (client, part, asked[client])
        if len(found) < len(parts):
            said = "ignored %d parts of a reply of node %s: of clients that were not asked of it, or twice"
            log.warning(said, len(parts) - len(found), reply.metadata.src_node_id)
        return found


def wake(grid: Grid) -> None:
    """Send a roll call and do not wait for answers: simulated nodes import the app while the server loads its data."""
    grid.push_messages(_roll_call(grid.get_node_ids(), {}))


def _roll_call(node_ids: Iterable[int], header: Json) -> list[Message]:
    content = pack(header | {"code": code_digest(), "phase": MessageType.QUERY}, [])
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
    return Node(node_id, number, count, answer.get("simulated") is True, answer.get("gpu") is True)


def _brief(reason: str | None) -> str:
    """Return the last line of a traceback, which names the exception."""
    lines = [line.strip() for line in (reason or "")[-10_000:].splitlines() if line.strip()] or ["no reason given"]
    return lines[-1]


def _push(grid: Grid, message: Message, flying: dict[str, Message]) -> None:
    flying |= {message_id: message for message_id in grid.push_messages([message]) if message_id}


def _wait(grid: Grid, elapsed: float) -> None:
    """Wait before the next look for answers; a grid that knows when one comes has a ``wait`` of its own.

    Flower's ``send_and_receive`` sleeps 0.1 s (simulation) or 3 s (deployment) between looks; this starts at 5 ms and
    backs off to 0.5 s, so short rounds are not dominated by the wait.
    """
    getattr(grid, "wait", time.sleep)(_pause(elapsed))


def _pause(elapsed: float) -> float:
    return min(0.5, max(0.005, elapsed / 50))


def _lost_settings(reply: Message) -> bool:
    return not reply.has_error() and asks_for_settings(reply.content)
