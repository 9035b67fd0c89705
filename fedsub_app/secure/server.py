"""The server's part in secure aggregation: the steps after a round's training, over any Flower grid."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from flwr.serverapp import Grid

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.phase import Dropped
from fedsub_app.federation.protocol import SECURE, BadReply, Spec, Task, formula_bytes
from fedsub_app.federation.settings import DefenceSettings
from fedsub_app.federation.wire import read_update
from fedsub_app.secure.client import KEYS, OPENED, SHARES, to_bytes, to_rows
from fedsub_app.secure.secagg import KEY, SEALED, SHARE, ProtocolError, Vector, neighbourhoods, unmasked


class Unopened(Exception):
    """The sum of a round cannot be opened; the message is the reason."""


class Session:
    """The protocol in one round: :meth:`meet`, :meth:`masked` and :meth:`opened`, once or more often.

    Each meeting is a run of the protocol of its own, with new secrets. ``clients``: clients of the last meeting that
    have given keys and shares, sorted; they alone are asked for vectors. ``dropped``: clients that are lost, with the
    reason. ``bytes``: key of the round's line -> bytes of all messages.
    """

    def __init__(self, federation: Federation, grid: Grid, server_round: int, settings: DefenceSettings) -> None:
        self._federation, self._grid, self._round, self._settings = federation, grid, server_round, settings
        self.dropped: list[Dropped] = []
        self.bytes = Counter[str]()

    def meet(self, clients: Collection[int]) -> None:
        """Exchange keys and shares among ``clients``; :class:`Unopened` where fewer than three are left."""
        answers = self._ask(KEYS, clients, Task, lambda _: Spec((1, 2 * KEY), torch.uint8))
        self._keys = {client: to_bytes(rows)[0] for client, rows in answers}
        if len(self._keys) < 3:  # a sum of two tells each client the other's value
            raise Unopened("fewer than 3 clients are left in secure-aggregation")
        settings = self._settings
        graph, self._least = neighbourhoods(self._keys, settings.secure_dropouts, settings.secure_corrupted)

        def keys_for(client: int) -> Task:
            rows = to_rows([self._keys[other] for other in graph[client]])
            return Task(client, {KEYS: rows}, {"neighbours": graph[client], "threshold": self._least})

        answers = self._ask(SHARES, graph, keys_for, lambda client: Spec((len(graph[client]), SEALED), torch.uint8))
        sealed = {client: dict(zip(graph[client], to_bytes(rows), strict=True)) for client, rows in answers}
        self._graph = {client: [other for other in graph[client] if other in sealed] for client in sealed}
        self._received = {c: {other: sealed[other][c] for other in others} for c, others in self._graph.items()}
        self._check(sealed, sealed)
        self.clients = sorted(sealed)

    def _check(self, clients: Iterable[int], there: Collection[int]) -> None:
        """Raise :class:`Unopened` where those that are there cannot put the secrets of ``clients`` together."""
        for client in clients:
            if sum(other in there for other in self._graph[client]) < self._least:
                raise Unopened(f"more neighbours of client {client} are lost than secure-dropouts allows")

    def _ask(
        self,
        step: str,
        clients: Collection[int],
        task: Callable[[int], Task],
        spec: Callable[[int], Spec],
        header: Json | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the clients' answers to one step; those without a valid one are dropped."""
        federation = self._federation

        def expected(client: int) -> Mapping[str, Spec]:
            return {step: spec(client)}

        phase = federation.ask(SECURE, self._round, clients, task, {"secure": step} | (header or {}), expected)
        for client, part, specs in federation.answers(phase, federation.exchange(self._grid, phase), expected):
            try:
                tensors = read_update(part, specs, {}, (1, 1)).tensors
                self.bytes["formula-bytes-up"] += formula_bytes(tensors)
                yield client, tensors[step].clone()
            except BadReply as error:
                phase.dropped.append(Dropped(client, str(error)))
        if step != OPENED:  # their vectors are in the sum
            self.dropped += phase.dropped
        self._unanswered = phase.dropped
        down = {"bytes-down": phase.outbox.bytes_down, "formula-bytes-down": sum(phase.outbox.formula_of.values())}
        self.bytes.update(down | {"bytes-up": phase.bytes_up})

    def masked(
        self, step: str, length: int, header: Json, tensors: Tensors, weights: Mapping[int, float]
    ) -> tuple[list[int], Vector]:
        """Return the clients that have answered a step with their masked vectors, and the sum of these vectors."""

        def shares_for(client: int) -> Task:
            received = self._received[client]
            rows = to_rows([*received.values()])
            return Task(client, {**tensors, SHARES: rows}, {"neighbours": [*received], "weight": weights[client]})

        alive, total = [], np.zeros(length, np.uint32)
        for client, vector in self._ask(step, self.clients, shares_for, lambda _: Spec((length,), torch.int32), header):
            alive.append(client)
            total += vector.numpy().view(np.uint32)
        return sorted(alive), total

    def opened(self, step: str, alive: Sequence[int], total: Vector) -> Vector:
        """Return the sum of the vectors of ``alive``, from that of their masked vectors; :class:`Unopened`.

        No client is asked where a secret cannot be put together: what it reveals then would be for nothing.
        """
        there = {*alive}
        sides = {c: [[o for o in self._graph[c] if (o in there) is kept] for kept in (True, False)] for c in alive}
        self._check((*alive, *{o for _, others in sides.values() for o in others}), there)
        tasks = {c: Task(c, {}, {"alive": kept, "lost": lost}) for c, (kept, lost) in sides.items()}
        specs = {client: Spec((len(self._graph[client]), SHARE), torch.uint8) for client in alive}
        answers = self._ask(OPENED, alive, tasks.__getitem__, specs.__getitem__, {"opens": step})
        shares: dict[int, list[bytes]] = {}
        for client, rows in answers:
            for other, share in zip((*sides[client][0], *sides[client][1]), to_bytes(rows), strict=True):
                shares.setdefault(other, []).append(share)
        try:
            return unmasked(total, shares, there, self._graph, self._keys, self._least)
        except ProtocolError as error:
            reasons = [f"client {one.client}: {one.reason}" for one in self._unanswered[:1]]
            raise Unopened("; ".join([str(error), *reasons])) from None
        except ValueError:
            raise Unopened("the shares that clients have revealed do not fit one another") from None
