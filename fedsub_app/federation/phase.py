"""One phase of a round: its messages, the clients that they ask, and the outcome."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import DEFAULT_TTL, Message, Metadata
from torch import equal

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Spec, Task, formula_bytes
from fedsub_app.federation.settings import FederationSettings
from fedsub_app.federation.wire import INITIAL, pack, wire_bytes

AWAY = "its node is away"
REFUSED = "the SuperLink, or a proxy before it, refuses its message as too large (client_max_body_size in nginx)"


Expected = Callable[[int], Mapping[str, Spec]]  # client -> the tensors of its reply


class Dropped(NamedTuple):
    """A client whose reply does not count in this round, and the reason: one printable line, as :class:`BadReply`'s."""

    client: int
    reason: str


@dataclass
class Outbox:
    """The messages of a phase; each is made when a node can take it.

    ``blocks``: client -> number of its block, whose clients travel in one message and have one reply (blocks.py).
    """

    header: Json  # of every message; has Flower's message type as ``phase``
    queues: dict[int, deque[int]]  # node id -> clients that it may be asked for, in this order; nodes may share one
    settings: FederationSettings  # bounds of a message's clients, bytes and lifetime
    task: Callable[[int], Task] = Task  # client -> its task; called when its message is made
    expected: Expected = lambda _: {}  # that count in message-mb
    run_settings: Json = field(default_factory=dict)  # that the header of a repeated message has in addition
    initial: Callable[[int], Tensors] = lambda _: {}  # node id -> the initial global model where the node lacks it
    work: Callable[[int], float] = lambda _: 1.0  # client -> how long it computes, in any unit
    blocks: Mapping[int, int] = field(default_factory=dict)
    sent: list[tuple[Metadata, list[int]]] = field(default_factory=list)  # each message, and the clients in it
    bytes_down: int = 0  # so far, on the wire
    formula_of: dict[int, int] = field(default_factory=dict)  # client -> bytes of its task by the papers' formula
    turn: float = 0.0  # work below which messages, one to each node, do not get smaller

    def __post_init__(self) -> None:
        self.shared = len({id(queue) for queue in self.queues.values()}) < len(self.queues)
        self._left = sum(map(self.work, next(iter(self.queues.values())))) if self.shared else 0.0

    @property
    def limit(self) -> float:
        """Work from which on a message takes no further client; read it once for nodes that are free at the same time.

        Where nodes share a queue the messages get smaller towards its end, so that none of them waits long for another.
        """
        return max(self.turn, self._left / 2) / len(self.queues) if self.shared and self.queues else math.inf

    def next_message(self, node_id: int, limit: float) -> Message | None:
        """Return the next message to a node, with work of about ``limit``; ``None`` where no client is left for it."""
        queue, size, work = self.queues.get(node_id, deque()), 0, 0.0
        tasks: list[Task] = []
        packed: set[int] = set()  # tensor objects in the message, which carries each of them once
        block: int | None = None  # of the last task
        while queue:
            again = block is not None and self.blocks.get(queue[0]) == block
            if tasks and not again and (len(tasks) >= self.settings.message_clients or work >= limit):
                break
            task, block = self.task(queue[0]), self.blocks.get(queue[0])
            new = {id(tensor): tensor.nbytes for tensor in task.tensors.values() if id(tensor) not in packed}
            if not again:
                size += sum(spec.nbytes for spec in self.expected(queue[0]).values())
            size += sum(new.values())
            if tasks and not again and size > self.settings.message_mb * 2**20:
                break
            packed |= new.keys()
            tasks.append(task)
            work += self.work(queue.popleft())
        self._left -= work
        if not tasks:
            return None
        self.formula_of |= {task.client: formula_bytes(task.tensors) for task in tasks}
        message = self._message(node_id, tasks, self.header)
        self.sent.append((message.metadata, [task.client for task in tasks]))
        return message

    def again(self, sent: Metadata) -> Message:
        """Return a message once more, with the run's settings; it replaces the one that was not answered."""
        place, clients = next((k, clients) for k, (metadata, clients) in enumerate(self.sent) if metadata is sent)
        tasks = [self.task(client) for client in clients]
        message = self._message(sent.dst_node_id, tasks, self.header | self.run_settings)
        self.sent[place] = (message.metadata, clients)
        return message

    def _message(self, node_id: int, tasks: Sequence[Task], header: Json) -> Message:
        parts: list[tuple[Json, Tensors]] = [({"client": task.client} | task.config, task.tensors) for task in tasks]
        for config, _ in parts if self.blocks else ():
            config["block"] = self.blocks[config["client"]]
        if initial := self.initial(node_id):
            sent = parts[0][1]  # in the first round the same values, which travel once
            same = {name: sent[name] for name, tensor in initial.items() if name in sent and equal(sent[name], tensor)}
            parts.append(({INITIAL: True}, initial | same))
        content = pack(header, parts)
        self.bytes_down += wire_bytes(content)
        lifetime = max(DEFAULT_TTL, self.settings.round_timeout)  # Flower throws away what is older
        return Message(content, node_id, header["phase"], ttl=lifetime, group_id=str(header["round"]))


class Phase:
    """One phase of a round: the clients to ask, and the outcome. Iterating over it makes its messages.

    Without an outbox no client is asked; ``dropped`` are at first the clients that cannot be asked.
    """

    def __init__(self, outbox: Outbox | None = None, dropped: Iterable[Dropped] = ()) -> None:
        self.outbox = outbox or Outbox({}, {}, FederationSettings())
        self.clients = sorted({client for queue in self.outbox.queues.values() for client in queue})
        self.open = set(self.clients)  # that have neither answered nor been dropped yet
        self.dropped = list(dropped)
        self.report: Json = {}  # entries for the round's line
        self.bytes_up = 0  # of the replies so far
        self.waiting_bytes = 0  # of replies that wait for an earlier client's

    def __iter__(self) -> Iterator[Message]:
        """Yield all messages, for the nodes in turn."""
        while any(self.outbox.queues.values()):
            limit = self.outbox.limit
            yield from filter(None, (self.outbox.next_message(node_id, limit) for node_id in self.outbox.queues))

    @property
    def asked(self) -> list[int]:
        """The clients that a message was made for."""
        return [client for _, clients in self.outbox.sent for client in clients]

    def clients_of_message(self, number: str) -> list[int]:
        return next((clients for metadata, clients in self.outbox.sent if metadata.message_id == number), [])

    def drop(self, clients: Collection[int], reason: str) -> None:
        """Record that no reply of these clients counts."""
        self.dropped += [Dropped(client, reason) for client in clients]
        self.open.difference_update(clients)

    def undelivered(self, message: Message, reason: str) -> None:
        """Drop the clients of a message that Flower has not taken, and ask its node for no more clients."""
        self.drop(next(clients for metadata, clients in self.outbox.sent if metadata is message.metadata), reason)
        self.give_up(message.metadata.dst_node_id, reason)

    def give_up(self, node_id: int, reason: str = AWAY) -> None:
        """Ask a node for no more clients; the ones that no other node serves are dropped."""
        queue = self.outbox.queues.pop(node_id, None)
        if queue and not any(other is queue for other in self.outbox.queues.values()):
            self.drop(queue, reason)
