"""The federation: the clients of a round, the nodes that host them, messages to the nodes and their replies.

``num-clients`` belongs to the experiment. A SuperNode hosts the clients with ``c % num_partitions == partition_id``.
Simulated nodes share data and client state, and take the sampled clients from one queue instead.
"""

import json
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import median, median_low

import torch
from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedsub_app.common.code import code_digest, settings_digest
from fedsub_app.common.errors import printable
from fedsub_app.common.failures import MachineFailed
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.phase import AWAY, REFUSED, Dropped, Expected, Outbox, Phase
from fedsub_app.federation.protocol import BadReply, Spec, Task
from fedsub_app.federation.roll import Node, Roll, brief, pause
from fedsub_app.federation.settings import FederationSettings
from fedsub_app.federation.wire import NONCE, Part, asks_for_settings, unpack_reply, wire_bytes

log = logging.getLogger("fedsub")
IN_FLIGHT = 2  # messages that a node has at a time
TURN_S = 0.1  # Flower's simulation takes one message for each node so often: no message is worth less
SILENT_S = 30.0  # after which the log names the nodes that a phase waits for
# A real node is waited for this many times the median time that a message takes the nodes, and at least FAIR_S.
FAIR, FAIR_S = 10, 120.0
MAX_WAITING = 4  # times message-mb: replies that wait for an earlier client's
# Message id -> a message that is not answered yet, the time when it was sent or its node answered the one before.
Flying = dict[str, tuple[Metadata, float]]
Answer = tuple[int, Part, Mapping[str, Spec]]  # a client, its part of a reply, the tensors that it was asked for


@lru_cache(maxsize=4)
def held_out(settings: FederationSettings) -> frozenset[int]:
    """Return the clients that never take part (``held-out-clients``), drawn from the seed."""
    order = torch.randperm(settings.num_clients, generator=generator(settings.seed, "held-out"))
    return frozenset(order[: settings.held_out_clients].tolist())


def takes_part(settings: FederationSettings) -> list[bool]:
    """Say of each client whether some round may ask it: it is not held out, and its device is wide enough."""
    devices, out = settings.client_devices, held_out(settings)
    wide = [not devices or devices.of(client).width >= settings.min_width for client in range(settings.num_clients)]
    return [client not in out and enough for client, enough in enumerate(wide)]


def available(settings: FederationSettings, server_round: int) -> list[bool]:
    """Say of each client whether a round may ask it: it takes part, and its device is there."""
    devices, there = settings.client_devices, takes_part(settings)
    if devices:
        there = [each and now for each, now in zip(there, devices.available(server_round), strict=True)]
    return there


def draw(settings: FederationSettings, server_round: int) -> list[int]:
    """Return the clients that a round asks, in the order in which they are drawn, seeded by (seed, round).

    The first ``sample_size`` take part; with ``oversample`` others are asked as well and stand in for them.
    """
    order = torch.randperm(settings.num_clients, generator=generator(settings.seed, server_round, "sample")).tolist()
    there = available(settings, server_round)
    return [client for client in order if there[client]][: settings.asked_size]


def sample(settings: FederationSettings, server_round: int) -> list[int]:
    """Return the clients that a round asks: sorted, seeded by (seed, round)."""
    return sorted(draw(settings, server_round))


class Federation:
    """The nodes of a run and their clients."""

    def __init__(
        self,
        settings: FederationSettings,
        header: Json,
        run_settings: Json | None = None,
        device: str = "cpu",
        initial: Tensors | None = None,
    ) -> None:
        """``header``, the run's id, goes into every message but for its ``state-dir``, the folder of client states.

        That and ``run_settings`` go with the roll call; later messages have the digest of the settings and of the code,
        and a node that lacks the settings asks for them. ``device``: ``"cuda"`` where the server computes on a GPU.
        ``initial``: the initial global model where nodes cannot rebuild it; a node gets it until it has replied, and
        again where it was away or has lost its files.
        """
        self.settings = settings
        self.run_settings = {"code": code_digest()} | {k: header[k] for k in ("state-dir",) if k in header}
        self.header = {key: value for key, value in header.items() if key not in self.run_settings}
        if run_settings:
            self.run_settings["settings"] = text = json.dumps(run_settings)
            self.header["digest"] = settings_digest(text)
        self.roll = Roll(settings, self.header | self.run_settings, device)
        self.initial, self._have_initial = initial or {}, dict[int, Node]()  # nodes that have replied, by id
        self.late: set[str] = set()  # messages of earlier phases that were not waited for

    def sample(self, server_round: int) -> list[int]:
        """Return the clients of a round: sorted, seeded by (seed, round), independent of nodes and engine."""
        return sample(self.settings, server_round)

    @property
    def nodes(self) -> dict[int, Node]:
        """Nodes that take part, by Flower's node id."""
        return self.roll.nodes

    @property
    def simulated(self) -> bool:
        """Whether all nodes are simulated: then every message is answered."""
        return all(node.simulated for node in self.nodes.values())

    @property
    def pinned(self) -> bool:
        """Whether each client has its node, instead of one that takes it from a queue."""
        placement = "pinned" if self.settings.private_examples else self.settings.placement
        return placement == "pinned" or (placement == "auto" and not self.simulated)

    def meet(self, grid: Grid) -> None:
        """Call the roll of new nodes and forget the nodes that left (:meth:`Roll.meet`); discard late replies."""
        for reply in grid.pull_messages(list(self.late)) if self.late else ():
            self.late.discard(reply.metadata.reply_to_message_id)
        self.roll.meet(grid)

    def hosts(self, clients: Sequence[int]) -> tuple[dict[int, deque[int]], list[Dropped]]:
        """Return the nodes' queues of clients, which simulated nodes share, and the clients whose node is away."""
        nodes = sorted(self.nodes.values(), key=lambda node: node.partition_id)
        if not self.pinned and nodes:
            queue = deque(clients)
            return {node.node_id: queue for node in nodes}, []
        queues, dropped = dict[int, deque[int]](), list[Dropped]()
        hosts = {node.partition_id: node for node in nodes}
        count = nodes[0].num_partitions if nodes else 1  # all say the same
        for client in clients:
            if node := hosts.get(client % count):
                queues.setdefault(node.node_id, deque()).append(client)
            else:
                dropped.append(Dropped(client, AWAY))
        return queues, dropped

    def ask(
        self,
        kind: str,
        server_round: int,
        clients: Iterable[int],
        task: Callable[[int], Task],
        extra: Json,
        expected: Expected = lambda _: {},
        work: Callable[[int], float] = lambda _: 1.0,
        blocks: Mapping[int, int] | None = None,
    ) -> Phase:
        """Return a phase that asks each client for its task; the arguments are :class:`Outbox`'s.

        ``extra`` goes into every message's header. Clients that no node hosts now are dropped. Simulated nodes begin
        with the clients, or blocks, that compute longest, where all replies may wait for the first client's.
        """
        order, blocks = sorted(clients), blocks or {}
        reply = sum(spec.nbytes for spec in expected(order[0]).values()) if order else 0
        replies = len({blocks.get(client, client) for client in order})
        if self.simulated and reply * replies <= MAX_WAITING * self.settings.message_mb * 2**20:
            works: Counter[int] = Counter()
            for client in order:
                works[blocks.get(client, client)] += work(client)  # type: ignore[assignment]
            order.sort(key=lambda client: works[blocks.get(client, client)], reverse=True)  # stable
        queues, dropped = self.hosts(order)
        stamp = {"phase": kind, "round": server_round, NONCE: secrets.token_urlsafe(8)}  # no reply can be sent twice
        header = self.header | extra | stamp

        def initial(node_id: int) -> Tensors:
            node = self._have_initial.get(node_id)
            return {} if node and node is self.nodes.get(node_id) else self.initial  # not one that has left since

        outbox = Outbox(header, queues, self.settings, task, expected, self.run_settings, initial, work, blocks)
        return Phase(outbox, dropped)

    def exchange(self, grid: Grid, phase: Phase) -> Iterator[Message]:
        """Send a phase's messages and yield the replies as they come, until all are there or the time is over.

        A node has at most ``IN_FLIGHT`` messages at a time: one to work on and the next one. A node that has lost the
        settings gets its message again with them. Late replies are discarded before a later phase. A real node that
        takes far longer than the others did is given up in this phase.
        """
        flying: Flying = {}  # without the messages' content, which may be a model each
        took: dict[int, list[float]] = {}  # node -> seconds of each message that it has answered
        start, again, named, done = time.monotonic(), set[str](), set[int](), 0.0
        wait = getattr(grid, "wait", None)  # of a grid of ours, in which a node has its message at once
        try:
            while self._hand_out(grid, phase, flying):
                ready = []
                for reply in grid.pull_messages(list(flying)):
                    sent, since = flying.pop(reply.metadata.reply_to_message_id, (None, 0.0))
                    if sent is None:
                        continue
                    now, failed = time.monotonic(), reply.has_error()
                    asks = not failed and asks_for_settings(reply.content)
                    if not (failed or asks):  # neither tells how long the work takes
                        took.setdefault(sent.dst_node_id, []).append(now - since)
                        done += sum(map(phase.outbox.work, phase.clients_of_message(sent.message_id)))
                    for number, (other, _) in flying.items():
                        if other.dst_node_id == sent.dst_node_id:
                            flying[number] = (other, now)  # the node begins with it now
                    if failed and sent.dst_node_id not in set(grid.get_node_ids()):
                        phase.give_up(sent.dst_node_id)
                    if asks and sent.message_id not in again:
                        self._have_initial.pop(sent.dst_node_id, None)
                        again.add(_push(grid, phase, phase.outbox.again(sent), flying))
                    else:
                        ready.append(reply)
                elapsed = time.monotonic() - start
                if ready:
                    phase.outbox.turn = 0.0 if wait else TURN_S * done / elapsed
                    self._hand_out(grid, phase, flying)  # before the replies are read, so that no node idles
                    yield from ready
                elif elapsed > self.settings.round_timeout:
                    return
                else:
                    if not self.simulated:  # else no result may depend on a machine's speed
                        self._give_up_silent(phase, flying, took, named)
                    # Not Flower's 0.1 s (simulation) or 3 s (deployment), which would dominate short rounds.
                    (wait or time.sleep)(pause(elapsed))
        finally:
            self.late |= flying.keys()

    def _give_up_silent(self, phase: Phase, flying: Flying, took: Mapping[int, list[float]], named: set[int]) -> None:
        """Name the nodes that are silent for long; drop the clients of those that take longer than is fair."""
        now = time.monotonic()
        silent = {sent.dst_node_id for sent, since in flying.values() if now - since > SILENT_S} - named
        if silent:
            log.warning("waiting for node %s: no reply for %.0f s", ", ".join(map(str, sorted(silent))), SILENT_S)
        named |= silent
        unheard = {sent.dst_node_id for sent, _ in flying.values()} - took.keys()
        times = [median(each) for each in took.values()] + [math.inf] * len(unheard)  # one fast node says little
        fair = max(FAIR_S, FAIR * median_low(times or [math.inf]))
        for message_id, (sent, since) in list(flying.items()):
            if now - since > fair:
                reason = f"no reply within {fair:.0f} s; the median node took {median_low(times):.0f} s"
                phase.drop(phase.clients_of_message(message_id), reason)
                phase.give_up(sent.dst_node_id, reason)
                del flying[message_id]
                self.late.add(message_id)

    def _hand_out(self, grid: Grid, phase: Phase, flying: Flying) -> bool:
        """Send the nodes' next messages; returns whether any message is not answered yet."""
        load = Counter(sent.dst_node_id for sent, _ in flying.values())
        outbox = phase.outbox
        for wanted in range(1, IN_FLIGHT + 1):
            limit = outbox.limit
            for node_id in list(outbox.queues):
                full = outbox.shared and flying and phase.waiting_bytes > MAX_WAITING * self.settings.message_mb * 2**20
                if load[node_id] < wanted and not full and (message := outbox.next_message(node_id, limit)):
                    _push(grid, phase, message, flying)
                    load[node_id] += 1
        return bool(flying)

    def answers(
        self, phase: Phase, replies: Iterable[Message], expected: Expected, in_order: bool = True
    ) -> Iterator[Answer]:
        """Yield the parts that answer a phase's tasks, in the order of the clients or, not ``in_order``, as they come.

        At the end the clients without a part are in ``phase.dropped``. A reply is matched by the message that it
        answers (the error reply for a dead node has another source id). One without the phase's nonce drops its node's
        clients; a second one, one that was not asked for, and parts of other clients are ignored and logged.
        """
        waiting: dict[int, tuple[Answer, float]] = {}
        order = deque(phase.clients)
        for reply in replies:
            clients = phase.clients_of_message(reply.metadata.reply_to_message_id)
            if not clients or clients[0] not in phase.open:
                log.warning("ignored a reply of node %s: not asked for, or a second one", reply.metadata.src_node_id)
                continue
            try:
                parts = self._parts(phase, reply, {client: expected(client) for client in clients})
            except BadReply as error:
                phase.drop(clients, str(error))
            else:
                phase.drop([client for client in clients if client not in parts], "its node's reply does not hold it")
                phase.open -= parts.keys()
                size = wire_bytes(reply.content) / len(clients)
                waiting |= {client: (part, size) for client, part in parts.items()}
            if not in_order:
                yield from (waiting.pop(client)[0] for client in clients if client in waiting)
                continue
            while order and order[0] not in phase.open:
                if (ready := waiting.pop(order.popleft(), None)) is not None:
                    yield ready[0]
            phase.waiting_bytes = int(sum(size for _, size in waiting.values()))
        phase.drop(sorted(phase.open), "no reply within round-timeout")
        yield from (waiting[client][0] for client in order if client in waiting)

    def _parts(self, phase: Phase, reply: Message, asked: Mapping[int, Mapping[str, Spec]]) -> dict[int, Answer]:
        """Return a reply's parts by client; :class:`BadReply` where the reply as a whole is not valid."""
        if reply.has_error():
            raise BadReply(f"node failed: {brief(reply.error.reason)}")
        phase.bytes_up += wire_bytes(reply.content)
        header, parts = unpack_reply(reply.content, asked)
        if header.get(NONCE) != phase.outbox.header.get(NONCE):
            raise BadReply("stale reply: of another message")
        if header.get("fatal") is True and self.simulated:
            raise MachineFailed(printable(str(header.get("error"))))
        if header.get("error"):
            raise BadReply(f"node failed: {brief(str(header['error']))}")
        if node := self.nodes.get(reply.metadata.src_node_id):
            self._have_initial[node.node_id] = node
        by_client: dict[int, Answer] = {}
        for part in parts:
            client = part.config.get("client")
            if type(client) is int and client in asked and client not in by_client:
                by_client[client] = (client, part, asked[client])
        if len(by_client) < len(parts):
            message = "ignored %d parts of a reply of node %s: of clients that were not asked of it, or twice"
            log.warning(message, len(parts) - len(by_client), reply.metadata.src_node_id)
        return by_client


def _push(grid: Grid, phase: Phase, message: Message, flying: Flying) -> str:
    """Send a message; returns its id, "" where Flower has not taken it."""
    message_id = next(iter(grid.push_messages([message])), None)  # none at all after HTTP 413, or in the simulation
    if message_id:
        flying[message_id] = (message.metadata, time.monotonic())
    else:
        refused = message_id is None and message.metadata.dst_node_id in set(grid.get_node_ids())
        phase.undelivered(message, REFUSED if refused else AWAY)
    return message_id or ""
