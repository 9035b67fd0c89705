"""One phase of a round: whom to ask, what was asked of whom, and what became of it."""

import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message, Metadata

from fedsub_app.common.errors import printable
from fedsub_app.common.tensors import Json

AWAY = "its node is away"
REFUSED = "the SuperLink, or a proxy before it, refuses its message as too large (client_max_body_size in nginx)"


@dataclass(frozen=True)
class Dropped:
    """A client whose answer does not count in this round, and why: one printable line."""

    client: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


class Phase:
    """One phase of a round: whom to ask, what was asked of whom, and what became of it.

    Its messages are made when they are asked for, by :meth:`next_message` or, all of them, by iterating over it.

    Parameters
    ----------
    kind, round : ``MessageType.TRAIN`` or ``EVALUATE``, and the round's number.
    queues : node id -> the clients that it may be asked for, sorted; nodes that share one take the next ones in turn.
    make : takes clients off the front of a queue, at most so many, and returns their message to a node; called with
        ``True`` the message is made a second time, with the settings.

    Attributes
    ----------
    sent : what Flower knows of each message, with the clients whose tasks it holds.
    dropped : clients whose answer does not count, and why.
    open : clients that have neither answered nor been dropped yet.
    report : what the round's line says of this phase (JSON-able).
    nonce : in its messages, and repeated in their replies, so that none of an earlier phase can be sent again.
    bytes_down, bytes_up : on the wire, so far.
    formula_down : what was sent, by the papers' formula.
    held : bytes of answers that came before those of earlier clients.
    """

    def __init__(
        self,
        kind: str = "",
        round_: int = 0,
        queues: Mapping[int, deque[int]] | None = None,
        make: "Callable[[int, deque[int], int, bool], tuple[Message, list[int]]] | None" = None,
        dropped: Iterable[Dropped] = (),
    ) -> None:
        self.kind, self.round = kind, round_
        self.sent: list[tuple[Metadata, list[int]]] = []
        self.dropped = list(dropped)
        self.report: Json = {}
        self.nonce = secrets.token_hex(8)
        self.bytes_down = self.bytes_up = self.formula_down = self.held = 0
        self._queues = dict(queues or {})
        self._make = make
        distinct = {id(queue): queue for queue in self._queues.values()}
        self.clients = sorted(client for queue in distinct.values() for client in queue)
        self.open = set(self.clients)
        self.shared = len(distinct) < len(self._queues)

    @property
    def asked(self) -> list[int]:
        """The clients that a message was made for."""
        return [client for _, clients in self.sent for client in clients]

    def clients_of(self, reply: Message) -> list[int]:
        """Return the clients whose tasks were in the message that a reply answers."""
        number = reply.metadata.reply_to_message_id
        return next((clients for metadata, clients in self.sent if metadata.message_id == number), [])

    @property
    def nodes(self) -> list[int]:
        """The nodes that may be asked."""
        return list(self._queues)

    def most(self, limit: int) -> int:
        """Return for how many clients the next message may be, at most ``limit``.

        Where nodes share a queue the messages get smaller towards its end, so that none of them waits long for another.
        """
        if not self.shared or not self._queues:
            return limit
        left = len(next(iter(self._queues.values())))
        return min(limit, -(-left // (2 * len(self._queues))))

    def next_message(self, node_id: int, most: int) -> Message | None:
        """Return the next message to a node, for at most so many clients; ``None``: there are none left for it."""
        queue = self._queues.get(node_id)
        if not queue:
            return None
        assert self._make
        message, clients = self._make(node_id, queue, most, False)
        self.sent.append((message.metadata, clients))
        return message

    def again(self, sent: Metadata) -> Message:
        """Make a message again, with the settings; it takes the place of the one that was not answered."""
        assert self._make
        place, clients = next((k, clients) for k, (metadata, clients) in enumerate(self.sent) if metadata is sent)
        message, _ = self._make(sent.dst_node_id, deque(clients), len(clients), True)
        self.sent[place] = (message.metadata, clients)
        return message

    def __iter__(self) -> Iterator[Message]:
        """Make all messages, for the nodes in turn."""
        left = True
        while left:
            left = False
            most = self.most(len(self.clients))
            for node_id in self.nodes:
                if message := self.next_message(node_id, most):
                    left = True
                    yield message

    def drop(self, clients: Collection[int], reason: str) -> None:
        """Take note that there will be no answer of these clients that counts."""
        self.dropped += [Dropped(client, reason) for client in clients]
        self.open.difference_update(clients)

    def not_taken(self, message: Message, reason: str) -> None:
        """Take note that Flower has not taken a message to a node, and why: its clients are dropped."""
        self.drop(next(clients for metadata, clients in self.sent if metadata is message.metadata), reason)
        self.give_up(message.metadata.dst_node_id, reason)

    def give_up(self, node_id: int, reason: str = AWAY) -> None:
        """Ask a node for no more clients; those that no other node may be asked for are dropped."""
        queue = self._queues.pop(node_id, None)
        if queue and not any(other is queue for other in self._queues.values()):
            self.drop(queue, reason)
