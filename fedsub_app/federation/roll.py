"""The roll call finds the nodes that take part.

The server asks each node once for its ``partition-id``: client ``c`` lives on the node with
``c % num_partitions == partition_id``.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedsub_app.common.code import code_digest, versions
from fedsub_app.common.errors import UserError, printable
from fedsub_app.common.run_files import deployed
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import BadReply
from fedsub_app.federation.settings import FederationSettings
from fedsub_app.federation.wire import pack, unpack_reply

log = logging.getLogger("fedsub")
ASK_AGAIN_S = 120.0  # from the first roll call to the second, for a node without a valid answer; it doubles each time
MAX_NODES = 100_000


@dataclass(frozen=True)
class Node:
    """A host of clients, as it answered the roll call."""

    node_id: int
    partition_id: int  # stays the same when the node is restarted; the node id need not
    num_partitions: int
    simulated: bool
    gpu: bool = False  # the node sees one


class Roll:
    """The nodes that answered a run's roll call of this ``content``; ``device``: "cuda" if the server uses a GPU."""

    def __init__(self, settings: FederationSettings, content: Json, device: str = "cpu") -> None:
        self.settings, self.content, self.device = settings, content, device
        self.nodes: dict[int, Node] = {}  # nodes that take part, by Flower's node id
        self.met = False
        self.num_partitions = 0  # of the nodes of the first meeting; it stays, whoever leaves
        self.waiting: dict[int, Node] = {}  # nodes whose partition another node has
        self.called: dict[str, int] = {}  # roll calls without an answer yet: message id -> node
        self.ask_again: dict[int, tuple[float, float]] = {}  # node that stays out -> time of the next call, its delay
        self.complaints: dict[int, str] = {}  # the logged reason why a node stays out

    def meet(self, grid: Grid) -> None:
        """Call the roll of new nodes and forget the nodes that left.

        The first call waits until ``min-nodes`` nodes (by default as many as the nodes' ``num-partitions``) have
        answered. Later calls do not wait, unless all nodes have left: they read the answers that have come since. A
        node with an invalid answer stays out, with a warning. It is called when Flower lists it, and again after 2, 4,
        8 minutes and so on: Flower does not report a call that was lost because its node was killed.

        A later node whose partition id is taken waits until Flower no longer lists the node that has it: a SuperNode
        that was killed and started again is first listed beside its old id, for up to two heartbeats (60 s).

        :class:`UserError` at the start, where ``node-timeout`` is over, or no node can take part.
        """
        deadline = time.monotonic() + self.settings.node_timeout
        wait = False
        while True:
            present = set(grid.get_node_ids())
            for known in (self.nodes, self.waiting, self.ask_again, self.complaints):
                for node_id in known.keys() - present:  # a node that returns is called again
                    del known[node_id]
            wait |= not self.nodes  # where all nodes have left, the round is abandoned if none returns in time
            self._call_roll(grid, sorted(present - self.nodes.keys() - self.waiting.keys()))
            self._take_answers(grid)
            self._agree()
            for node_id, node in sorted(self.waiting.items()):
                if not self._twin(node):
                    log.info("node %s takes the place of the one of partition-id = %s", node_id, node.partition_id)
                    self.nodes[node_id] = self.waiting.pop(node_id)
            self._check_min_nodes()
            missing = self._missing()
            if not wait or not missing or (self.met and time.monotonic() > deadline):
                if not self.met:
                    self.met, self.num_partitions = True, max(node.num_partitions for node in self.nodes.values())
                return
            twins = {n: f"partition-id = {node.partition_id}: two nodes have it" for n, node in self.waiting.items()}
            wrong = [f"node {node_id}: {reason}" for node_id, reason in sorted((self.complaints | twins).items())]
            if wrong and not (self.met or self.nodes or self.called) and present <= self.complaints.keys():
                raise UserError("; ".join(wrong))
            if time.monotonic() > deadline:
                there = f"{len(self.nodes)} nodes there, missing: {missing}"
                raise UserError("; ".join([f"node-timeout = {self.settings.node_timeout:g}: {there}", *wrong]))
            time.sleep(pause(self.settings.node_timeout + time.monotonic() - deadline))

    def _check_min_nodes(self) -> None:
        """Refuse ``min-nodes`` above the nodes of a simulation, which are all there from the start."""
        least, here = self.settings.min_nodes or 0, len(self.nodes)
        if 0 < here < least and all(node.simulated and node.num_partitions == here for node in self.nodes.values()):
            raise UserError(f"min-nodes = {least}: at most {here}, the nodes of the simulation")

    def _missing(self) -> str:
        if len({node.num_partitions for node in self.nodes.values()}) > 1:  # as many nodes say one as another
            said = [f"node {node_id} says {self.nodes[node_id].num_partitions}" for node_id in sorted(self.nodes)[:10]]
            return f"one num-partitions, {', '.join(said)}"
        announced = max((node.num_partitions for node in self.nodes.values()), default=1)
        absent = sorted({*range(announced)} - {node.partition_id for node in self.nodes.values()})
        if self.settings.min_nodes:
            short = self.settings.min_nodes - len(self.nodes)
            return f"{short} of min-nodes = {self.settings.min_nodes}" if short > 0 else ""
        more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
        return f"nodes with partition-id {', '.join(map(str, absent[:10]))}{more} of {announced}" if absent else ""

    def _twin(self, node: Node) -> Node | None:
        return next((other for other in self.nodes.values() if other.partition_id == node.partition_id), None)

    def _call_roll(self, grid: Grid, node_ids: Sequence[int]) -> None:
        now = time.monotonic()
        due = [node_id for node_id in node_ids if self.ask_again.get(node_id, (0.0, 0.0))[0] <= now]
        for node_id in due:
            seconds = 2 * self.ask_again[node_id][1] if node_id in self.ask_again else ASK_AGAIN_S
            self.ask_again[node_id] = (now + seconds, seconds)
        if due:
            calls = _roll_call(due, self.content)
            stored = set(grid.push_messages(calls))  # without the calls to nodes that have left just now
            asked = {call.metadata.message_id: call.metadata.dst_node_id for call in calls}
            self.called |= {number: node_id for number, node_id in asked.items() if number in stored}

    def _take_answers(self, grid: Grid) -> None:
        replies = list(grid.pull_messages(list(self.called))) if self.called else []
        present = set(grid.get_node_ids()) if replies else set()
        for reply in replies:
            node_id = self.called.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None or node_id not in present or node_id in self.nodes or node_id in self.waiting:
                continue  # not asked for, or a second answer, or of a node that has left
            if reply.has_error() and reply.metadata.src_node_id != node_id:  # Flower's: it had left, and is back
                self.ask_again.pop(node_id, None)
                continue
            try:
                node = self._admitted(node_id, reply)
            except BadReply as error:
                self._leave_out(node_id, str(error))
                continue
            self.complaints.pop(node_id, None)
            self.ask_again.pop(node_id, None)
            if twin := self._twin(node):
                message = "node %s waits: partition-id = %s is that of node %s, which Flower still lists"
                log.warning(message, node_id, node.partition_id, twin.node_id)
                self.waiting[node_id] = node
            else:
                self.nodes[node_id] = node

    def _admitted(self, node_id: int, reply: Message) -> Node:
        """Return the node that has answered the roll call; :class:`BadReply` where it cannot take part."""
        if reply.has_error():
            raise BadReply(f"did not answer the roll call: {brief(reply.error.reason)}")
        answer, _ = unpack_reply(reply.content, {})
        if "error" in answer:
            raise BadReply(str(answer["error"]))
        number, count = answer.get("partition-id"), answer.get("num-partitions")
        if type(number) is not int or type(count) is not int or not 0 <= number < count <= MAX_NODES:
            said = f"partition-id, num-partitions = {number}, {count}"
            raise BadReply(f"{said}: must be integers, 0 <= id < num <= {MAX_NODES}")
        if differing := differing_versions(answer.get("versions")):
            log.warning("node %s has %s: its numbers may differ in the last digits", node_id, differing)
        simulated = answer.get("simulated") is True and not deployed()  # whom the server trusts as itself
        node = Node(node_id, number, count, simulated, answer.get("gpu") is True)
        if self.met and count != self.num_partitions:
            raise BadReply(f"num-partitions = {count}: the other nodes say {self.num_partitions}")
        if self.settings.private_examples and count != self.settings.num_clients:
            clients = f"num-clients = {self.settings.num_clients} where each node has private data"
            raise BadReply(f"num-partitions = {count}: must be {clients}")
        if self.device == "cuda" and node.simulated and not node.gpu:
            share = "its connection needs a share of them, which `fedsub setup` writes; or device = cpu"
            raise BadReply(f"it sees no GPU, the server uses one: {share}")
        return node

    def _agree(self) -> None:
        """Leave out the nodes that say another number of partitions than most of them do."""
        answered = self.nodes | self.waiting
        counts = Counter(node.num_partitions for node in answered.values()).most_common(2)
        if len(counts) > 1 and counts[0][1] > counts[1][1]:
            for node_id, node in answered.items():
                if node.num_partitions != counts[0][0]:
                    (self.nodes if node_id in self.nodes else self.waiting).pop(node_id)
                    reason = f"num-partitions = {node.num_partitions}: the other nodes say {counts[0][0]}"
                    self._leave_out(node_id, reason)

    def _leave_out(self, node_id: int, reason: str) -> None:
        if self.complaints.get(node_id) != reason:
            log.warning("node %s stays out: %s", node_id, reason)
        self.complaints[node_id] = reason


def wake(grid: Grid) -> None:
    """Send a roll call without waiting for answers: simulated nodes import the app while the server loads its data."""
    grid.push_messages(_roll_call(grid.get_node_ids(), {}))


def _roll_call(node_ids: Iterable[int], header: Json) -> list[Message]:
    content = pack(header | {"code": code_digest(), "phase": MessageType.QUERY}, [])
    return [Message(content, node_id, MessageType.QUERY, group_id="roll call") for node_id in node_ids]


def differing_versions(theirs: object) -> str:
    """Return in words the versions of a node that are not the server's; "" where all are the same or it names none."""
    named = theirs if isinstance(theirs, dict) else {}
    others = {n: printable(str(named[n]), 20) for n, here in versions().items() if named.get(n, here) != here}
    return ", ".join(f"{name} {other} (the server {versions()[name]})" for name, other in others.items())


def brief(reason: str | None) -> str:
    """Return the last line of a traceback, which names the exception."""
    lines = [line.strip() for line in (reason or "")[-10_000:].splitlines() if line.strip()] or ["no reason given"]
    return lines[-1]


def pause(elapsed: float) -> float:
    """Return the seconds until the next look for replies: a fiftieth of the elapsed ones, from 5 ms to 0.5 s."""
    return min(0.5, max(0.005, elapsed / 50))
