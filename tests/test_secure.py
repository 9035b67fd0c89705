"""Secure aggregation: the protocol by itself, the vectors, and whole runs beside the plain ones.

Bonawitz et al., CCS 2017, https://eprint.iacr.org/2017/281; Bell et al., CCS 2020, https://eprint.iacr.org/2020/704.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import SMALL
from flwr.app import Error, Message
from helpers import METHOD_KEYS, ends_as_if_never_stopped, rounds
from hypothesis import example, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.local_grid import CLIENT_FAILED, LocalGrid
from fedsub_app.federation.nodes import draw
from fedsub_app.federation.protocol import SECURE, Update
from fedsub_app.federation.wire import unpack
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.runs.config import applicable_keys, resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.secure import secagg
from fedsub_app.secure.client import COUNTS, COVERED, KEYS, OPENED, SHARES, SUM, Secrets, withheld
from fedsub_app.secure.secagg import (
    COMPLETE,
    CORRECTNESS,
    KEY,
    NONCE,
    SEALED,
    SECURITY,
    SHARE,
    Member,
    ProtocolError,
    Vector,
    degree_and_threshold,
    neighbourhoods,
    stream,
    unmasked,
)
from fedsub_app.secure.server import Session
from fedsub_app.secure.vectors import LARGEST, Layout, Scale, counted, counting
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Mean
from fedsub_app.training.problem import Problem
from strategies.base import SubnetStrategy
from strategies.hooks import Hooks, Merged
from strategies.rounds import check_defences
from strategies.secure import refusal

Run = Callable[..., tuple[Json, Path]]

# --- the protocol ---------------------------------------------------------------------------------------------------


class Group:
    """Clients that run the protocol among themselves; ``vectors``: those of the clients, by id."""

    def __init__(self, vectors: dict[int, Vector], dropouts: float = 0.34, no_shares: Collection[int] = ()) -> None:
        self.members = {client: Member(client) for client in vectors}
        self.keys = {client: member.public for client, member in self.members.items()}
        graph, self.least = neighbourhoods(vectors, dropouts, 0.1)
        sealed = {
            client: member.share({other: self.keys[other] for other in graph[client]}, self.least)
            for client, member in self.members.items()
            if client not in no_shares
        }
        self.sealed = sealed
        self.graph = {client: [other for other in graph[client] if other in sealed] for client in sealed}
        self.masked = {
            client: self.members[client].masked(vectors[client], {o: sealed[o][client] for o in others})
            for client, others in self.graph.items()
        }

    def open(self, alive: Collection[int], silent: Collection[int] = ()) -> Vector:
        """Return the sum of ``alive``; ``silent`` ones among them reveal nothing."""
        total = np.sum([self.masked[client] for client in sorted(alive)], axis=0, dtype=np.uint32)
        shares: dict[int, list[bytes]] = {}
        for client in sorted(set(alive) - set(silent)):
            there = [other for other in self.graph[client] if other in alive]
            lost = [other for other in self.graph[client] if other not in alive]
            for other, share in self.members[client].opened(there, lost).items():
                shares.setdefault(other, []).append(share)
        return unmasked(total, shares, alive, self.graph, self.keys, self.least)


def vectors(clients: int, length: int = 50) -> dict[int, Vector]:
    draws = np.random.default_rng(clients)
    return {3 * client: draws.integers(0, 2**32, length, dtype=np.uint32) for client in range(clients)}


@pytest.mark.parametrize("lost", [(), (0,), (6,), (0, 6)])
@pytest.mark.parametrize("silent", [(), (9,)])
def test_the_sum_is_exact_whoever_is_lost(lost: tuple[int, ...], silent: tuple[int, ...]) -> None:
    """Eight clients, each with seven neighbours: four shares reveal a secret."""
    of = vectors(8)
    alive = [client for client in of if client not in lost]
    opened = Group(of, 0.45).open(alive, silent)
    assert np.array_equal(opened, np.sum([of[client] for client in alive], axis=0, dtype=np.uint32))


def test_clients_that_send_no_shares_are_left_out() -> None:
    of = vectors(6)
    alive = [3, 6, 9, 12]
    group = Group(of, 0.4, no_shares=[0])
    assert np.array_equal(group.open(alive), np.sum([of[client] for client in alive], axis=0, dtype=np.uint32))


def test_the_sum_is_that_of_a_graph_that_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secagg, "degree_and_threshold", lambda *_: (12, 7))
    of = vectors(30, 5)
    alive = [client for client in of if client % 10]
    group = Group(of)
    assert {len(others) for others in group.graph.values()} == {12}
    assert np.array_equal(group.open(alive), np.sum([of[client] for client in alive], axis=0, dtype=np.uint32))


def test_of_lost_clients_without_a_neighbour_that_is_left_no_shares_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {c: [other for other in part if other != c] for part in ((0, 1, 2, 3), (4, 5, 6)) for c in part}
    monkeypatch.setitem(globals(), "neighbourhoods", lambda *_: (graph, 2))
    group = Group({client: np.full(3, client + 1, np.uint32) for client in graph})
    assert group.open([0, 1, 2, 3]).tolist() == [10] * 3


@given(st.integers(1, 150))
@example(COMPLETE + 1)
@example(COMPLETE + 2)
@hypothesis(max_examples=10)
def test_neighbours_are_mutual_and_equally_many(count: int) -> None:
    graph, least = neighbourhoods(range(count), 0.1, 0.1)
    assert min(2, count - 1) <= least <= max(1, len(graph[0]))
    assert all(client in graph[other] for client, others in graph.items() for other in others)
    assert len({len(others) for others in graph.values()}) == 1
    assert all(client not in others and others == sorted({*others}) for client, others in graph.items())
    assert len(graph[0]) == degree_and_threshold(count, 0.1, 0.1)[0]
    assert (len(graph[0]) == count - 1) is (count <= COMPLETE + 1)


@pytest.mark.parametrize(
    ("neighbours", "dropouts", "least"), [(2, 0.3, 2), (3, 0.4, 2), (9, 0.3, 7), (9, 0.0, 9), (10, 0.49, 6)]
)
def test_in_a_small_round_more_than_half_of_the_others_reveal_a_secret(
    neighbours: int, dropouts: float, least: int
) -> None:
    assert degree_and_threshold(neighbours + 1, dropouts, 0.1) == (neighbours, least)
    assert least > neighbours / 2


@pytest.mark.parametrize("clients", [100, 1000])
@pytest.mark.parametrize(("dropouts", "corrupted"), [(0.05, 0.05), (0.1, 0.2), (0.3, 0.1)])
def test_the_graph_is_the_smallest_that_keeps_the_bounds(clients: int, dropouts: float, corrupted: float) -> None:
    """The three failures of Bell et al. 2020, Section 3, by SciPy's hypergeometric tails; two neighbours fewer fail."""
    from scipy.stats import hypergeom

    degree, least = degree_and_threshold(clients, dropouts, corrupted)
    bad, lost = int(corrupted * clients), int(dropouts * clients)

    def safe(degree: int, least: int) -> bool:
        stolen = clients * hypergeom.sf(least - 1, clients - 1, bad, degree)
        abandoned = clients * hypergeom.sf(degree - least, clients - 1, lost, degree)
        apart = clients * hypergeom.sf(degree // 2 - 1, clients, bad + lost, degree // 2)
        return bool(max(stolen, apart) <= 2**-SECURITY and abandoned <= 2**-CORRECTNESS)

    assert safe(degree, least)
    assert not safe(degree, least - 1)
    assert not any(safe(degree - 2, least) for least in range(2, degree - 1))


def test_a_graph_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six clients, one corrupted, one lost, a bit of security: 1 / 2.

    Degree 2: a client between the two others is cut off with 6 * C(5, 1) / C(6, 2) = 2 > 1 / 2. Degree 4: two given
    neighbours are both gone with 6 * C(4, 0) / 15 = 2 / 5; no client has 2 corrupted neighbours, and 2 lost ones. That
    is too much for two bits, 1 / 4: the graph is complete.
    """
    for bits, found in ((1, (4, 2)), (2, (5, 5))):
        for name, value in {"COMPLETE": 2, "SECURITY": bits, "CORRECTNESS": 1}.items():
            monkeypatch.setattr(secagg, name, value)
        degree_and_threshold.cache_clear()
        assert degree_and_threshold(6, 0.17, 0.17) == found
    degree_and_threshold.cache_clear()


def test_a_masked_vector_alone_is_noise() -> None:
    """Also where both masks of one kind are known: those with the neighbours, or the client's own."""
    zeros = np.zeros(20_000, np.uint32)
    group = Group(dict.fromkeys(range(4), zeros))
    own = stream(group.members[0].own, b"own", len(zeros))
    for vector in (group.masked[0], group.masked[0] - own, own, group.masked[0] + group.masked[1]):
        signs = (vector >> 31).astype(int)
        assert abs(signs.mean() - 0.5) < 0.02, "a half of the highest bits"
        assert len(np.unique(vector)) > 19_900
    assert not np.array_equal(group.masked[0], Group(dict.fromkeys(range(4), zeros)).masked[0]), "drawn anew"


def test_a_client_answers_each_step_once_and_only_what_the_protocol_allows() -> None:
    group = Group(vectors(5), 0.3)  # four neighbours, three shares
    member = group.members[0]
    with pytest.raises(ProtocolError, match="step 1 of 3 does not follow 2"):
        member.share({3: group.keys[3], 6: group.keys[6]}, 2)
    with pytest.raises(ProtocolError, match="step 2 of 3 does not follow 2"):
        member.masked(np.zeros(5, np.uint32), {})
    member.opened([3, 6, 9], [12])
    with pytest.raises(ProtocolError, match="step 3 of 3 does not follow 3"):
        member.opened([3, 6, 12], [9])


@pytest.mark.parametrize(
    ("alive", "lost"), [([3, 6, 9, 12], [3]), ([3, 6], [9, 12]), ([3, 6, 9], []), ([3, 6, 9], [12, 15])]
)
def test_a_client_reveals_nothing_of(alive: list[int], lost: list[int]) -> None:
    """Both secrets of one client, with too few left, or of some of its neighbours alone or others."""
    with pytest.raises(ProtocolError, match=r"opening with [234] neighbours: at least 3, each alive or lost"):
        Group(vectors(5), 0.3).members[0].opened(alive, lost)


@pytest.mark.parametrize(("least", "neighbours"), [(1, 2), (0, 4), (5, 4)])
def test_a_threshold_of_one_or_more_than_all_neighbours_is_refused(least: int, neighbours: int) -> None:
    with pytest.raises(ProtocolError, match=f"threshold {least} of {neighbours} neighbours: must be at least 2"):
        Member(0).share({other: Member(other).public for other in range(1, neighbours + 1)}, least)


@pytest.mark.parametrize("others", [(1, 2), (1, 2, 3, 9)])
def test_a_client_masks_with_too_few_neighbours_or_a_stranger_nothing(others: tuple[int, ...]) -> None:
    """Three shares reveal a secret; client 9 has sent no key."""
    members = [Member(client) for client in range(4)]
    for member in members:
        member.share({other.client: other.public for other in members if other is not member}, 3)
    said = f"shares of {len(others)} neighbours: at least 3 are needed"
    with pytest.raises(ProtocolError, match=said):
        members[0].masked(np.zeros(3, np.uint32), dict.fromkeys(others, b""))


def test_shares_of_another_client_or_changed_ones_are_not_taken() -> None:
    first, second, third = (Member(client) for client in range(3))
    keys = {member.client: member.public for member in (first, second, third)}
    sealed = second.share({0: keys[0], 2: keys[2]}, 2)
    others = third.share({0: keys[0], 1: keys[1]}, 2)
    changed = bytes([sealed[0][0] ^ 1]) + sealed[0][1:]
    for wrong in ({1: others[0], 2: others[0]}, {1: changed, 2: others[0]}, {1: sealed[2], 2: others[0]}):
        member = Member(0, first.cipher, first.pair, first.own)
        member.share({1: keys[1], 2: keys[2]}, 2)
        with pytest.raises(ProtocolError, match="the shares of client 1 cannot be decrypted"):
            member.masked(np.zeros(3, np.uint32), wrong)


def test_too_few_shares_open_nothing() -> None:
    group = Group(vectors(5), 0.3)
    with pytest.raises(ProtocolError, match="2 of 3 shares of client 0: more neighbours are lost"):
        group.open([0, 3, 6, 9, 12], silent=[9, 12])


def test_shares_of_another_key_than_a_lost_clients_open_nothing() -> None:
    """Neighbours that reveal what they hold of somebody else's key: its public key is another one."""
    group = Group(vectors(5), 0.3)
    alive = [3, 6, 9]
    theirs = {client: [group.members[other].shares[client][secagg.SHARE :] for other in alive] for client in (0, 12)}
    zeros, graph = np.zeros(50, np.uint32), {12: alive}
    assert unmasked(zeros, {12: theirs[12]}, alive, graph, group.keys, 3).any()
    with pytest.raises(ProtocolError, match="the shares of client 12 are not those of its key"):
        unmasked(zeros, {12: theirs[0]}, alive, graph, group.keys, 3)


def test_a_public_key_that_anybody_could_use_is_refused() -> None:
    """The neutral element, with which every private key agrees on zeros."""
    member = Member(0)
    with pytest.raises(ProtocolError, match=r"^a public key is not valid$"):
        member.share({other: bytes(len(member.public)) for other in (1, 2)}, 2)


def test_a_client_without_its_secrets_says_so(tmp_path: Path) -> None:
    """They are deleted when they are taken: it answers once."""
    kept = Secrets(tmp_path, 1, 0)
    kept.begin(change=torch.ones(2), covered=torch.ones(2))
    kept.keep(Member(0))
    assert kept.take().client == 0
    with pytest.raises(UserError, match=r"^secure-aggregation: its secrets of this round are not there$"):
        kept.take()


def test_the_training_of_another_round_deletes_what_is_left_of_one(tmp_path: Path) -> None:
    left, first, second = (Secrets(tmp_path, *which) for which in ((3, 0), (4, 0), (4, 1)))
    left.begin(change=torch.ones(2))
    left.keep(Member(0))
    left.open_once(SUM, [1], [])
    first.begin(change=torch.ones(2))
    second.begin(change=torch.ones(2))
    files = sorted(path.name for path in (tmp_path / "secure").iterdir())
    assert files == ["client-000000.opened", "round-000004"]
    assert first.change.exists()


def test_a_trained_client_that_diverged_keeps_and_sends_nothing(tmp_path: Path) -> None:
    shapes = {"w": [2], "b": []}
    header: Json = {"round": 1, "secure": {"shapes": shapes, "absolute": [], "public": False}}
    trained = Update(0, {"w": torch.tensor([1.0, float("inf")]), "b": torch.tensor(0.0)}, {}, 5)
    update = withheld(tmp_path, header, {"client": 0}, {"w": torch.zeros(2), "b": torch.tensor(0.0)}, trained)
    assert (update.diverged, update.tensors) == (True, {})
    assert update.error == "tensor 'w': NaN or infinite values"
    assert not list(tmp_path.iterdir())


def test_fewer_shares_than_the_threshold_do_not_reveal_a_seed() -> None:
    """Shamir's polynomial through two of the three points that reveal a seed is another one."""
    group = Group(vectors(5), 0.3)
    shares = [group.members[other].shares[0][:SHARE] for other in group.graph[0]]
    assert (group.least, len(shares)) == (3, 4)
    assert len(group.sealed[0][3]) == SEALED
    assert len(group.keys[0]) == 2 * KEY
    assert {secagg.combine_shares(list(some)) for some in combinations(shares, 3)} == {group.members[0].own}
    for some in combinations(shares, 2):
        with suppress(ValueError):  # what two points give need not be a padded seed
            assert secagg.combine_shares(list(some)) != group.members[0].own


def test_no_two_messages_of_shares_have_one_nonce() -> None:
    """Both directions of a pair have one key."""
    sealed = [content for sent in Group(vectors(5)).sealed.values() for content in sent.values()]
    assert len({content[:NONCE] for content in sealed}) == len(sealed) == 20


def test_a_nodes_secrets_are_its_owners_alone(tmp_path: Path) -> None:
    of, before = Secrets(tmp_path, 3, 0), os.umask(0)
    try:
        of.begin(change=torch.ones(2))
        of.keep(Member(0))
        of.open_once(SUM, [1], [])
    finally:
        os.umask(before)
    made = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "secure").rglob("*")}
    assert set(made.values()) == {"0o700", "0o600"}
    assert len(made) == 4  # the round's folder, the change, the secrets, what was opened
    assert oct((tmp_path / "secure").stat().st_mode & 0o777) == "0o700"


# --- the vectors ----------------------------------------------------------------------------------------------------

SHAPES = {"w": [2, 2], "b": [2]}
SENT: Tensors = {"w": torch.zeros(2, 2), "b": torch.tensor([1.0, 2.0])}


def test_a_vector_by_hand() -> None:
    """Two clients, levels of half 2^31: changes of a half, a clipped one, weights 1 and 3 of at most 4."""
    layout, scale = Layout(SHAPES), Scale(clients=2, limit=1.0)
    assert scale.step == 1 / (LARGEST // 2)
    trained: Tensors = {"w": torch.tensor([[0.5, -0.5], [0.0, 3.0]]), "b": torch.tensor([1.0, 1.75])}
    changes, covered = layout.change(trained, SENT, {}, {})
    assert covered.all()
    vector = scale.vector(changes, 1 / 4)
    level = LARGEST // 2
    expected = [round(level * change / 4) % 2**32 for change in (0.5, -0.5, 0.0, 1.0, 0.0, -0.25)]
    assert vector[:6].tolist() == expected
    assert vector[6:].tolist() == [np.ceil(2**20 // 2 / 6)]
    still = scale.vector(layout.change(SENT, SENT, {}, {})[0], 3 / 4)
    change, clipped = scale.change(vector + still, 2)
    values, everywhere, sums = layout.mean(change, torch.tensor([1.0]), SENT)
    torch.testing.assert_close(values["w"], torch.tensor([[0.125, -0.125], [0.0, 0.25]]))
    torch.testing.assert_close(values["b"], torch.tensor([1.0, 2 - 0.0625]))
    assert all(mask.all() for mask in everywhere.values())
    assert sums == {}
    assert clipped == pytest.approx(1 / 12, abs=1e-5)
    assert scale.change(vector, 1)[1] == pytest.approx(1 / 6, abs=1e-5)


def test_positions_absolute_values_and_sums_by_hand() -> None:
    """One client has the first column, the other all but a row of its choice; the last position of b stays closed."""
    layout, scale = Layout(SHAPES | {"bits": [2]}, ["w", "b", "bits"]), Scale(2, 8.0)
    at: Tensors = {"w": torch.tensor([[True, False], [True, False]]), "b": torch.tensor([True, False])}
    own: Tensors = {"w": torch.tensor([[True], [False]])}
    enough = torch.tensor([True] * 5 + [False] + [True] * 2)
    narrow: Tensors = {"w": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([4.0]), "bits": torch.tensor([True, False])}
    whole: Tensors = {
        "w": torch.tensor([[3.0, 4.0], [5.0, 6.0]]),
        "b": torch.tensor([-2.0, 7.0]),
        "bits": torch.tensor([True, True]),
    }
    one, covered = layout.change(narrow, {}, at, {})
    other, chosen = layout.change(whole, {}, {}, own)
    assert covered.tolist() == [True, False, True, False, True, False, True, True]
    assert chosen.tolist() == [True, True, False, False] + [True] * 4
    vectors = [scale.vector(change * enough) for change in (one, other)]
    assert vectors[1][[2, 3, 5]].tolist() == [0, 0, 0], "neither of its row nor closed"
    counts = counted(counting(covered, 2) + counting(chosen, 2), 8, 2)
    assert counts.tolist() == [2, 1, 1, 0, 2, 1, 2, 2]
    change, _ = scale.change(vectors[0] + vectors[1], 2)
    values, covers, sums = layout.mean(change, counts * enough, SENT)
    torch.testing.assert_close(values["w"], torch.tensor([[2.0, 4.0], [2.0, 0.0]]))
    assert values["b"][0] == 1.0
    assert covers["w"].tolist() == [[True, True], [True, False]]
    assert covers["b"].tolist() == [True, False]
    torch.testing.assert_close(sums["bits"], torch.tensor([2.0, 1.0], dtype=torch.float64))


def test_a_whole_answer_may_contribute_positions_that_its_client_was_not_sent() -> None:
    """As those that FedDST grows: sent are ones in the first column, the client keeps all but one position."""
    at, own = torch.tensor([[True, False], [True, False]]), torch.tensor([[True, True], [False, True]])
    trained, sent = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2)
    change, covered = Layout({"w": [2, 2]}).change({"w": trained}, {"w": sent}, {"w": at}, {"w": own})
    assert covered.tolist() == [True, True, False, True]
    assert change.tolist() == [0, 2, 0, 4]


@pytest.mark.parametrize("clients", [3, 255, 256, 65535, 65536])
def test_counts_of_all_clients_do_not_overflow(clients: int) -> None:
    covered = torch.tensor([True, False, True, True, True])
    total = counting(covered, clients) * np.uint32(clients)
    assert counted(total, 5, clients).tolist() == [clients * int(each) for each in covered]


@given(st.integers(1, 1000), st.integers(1, 60_000), st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=5))
@hypothesis(max_examples=20)
def test_the_mean_is_within_its_bound(clients: int, samples: int, changes: list[float]) -> None:
    """Of as many clients as the scale allows, and with the heaviest weights the sum does not overflow."""
    scale, change = Scale(clients, 8.0), torch.tensor(changes)
    few, many = (scale.vector(change, count / samples) for count in (1, samples))
    weights = 1 / samples + clients - 1
    mean = scale.change(few + many * np.uint32(clients - 1), clients)[0] / weights
    bound = scale.step / 2 * clients / weights + 1e-6
    np.testing.assert_allclose(mean, np.clip(changes, -8, 8), atol=bound, rtol=1e-6)


def test_a_long_change_is_clipped_in_its_norm() -> None:
    scale = Scale(3, 8.0, norm=1.0)
    change, _ = scale.change(scale.vector(torch.tensor([3.0, 4.0])), 1)
    torch.testing.assert_close(change, torch.tensor([0.6, 0.8], dtype=torch.float64))
    closed, _ = scale.change(scale.vector(torch.tensor([3.0, 4.0]), 0.5, torch.tensor([True, False])), 1)
    torch.testing.assert_close(closed, torch.tensor([0.3, 0.0], dtype=torch.float64))  # as if both were sent


def test_a_change_at_the_limit_is_not_clipped_and_no_weight_is_above_one() -> None:
    scale = Scale(1, 1.0)
    vector = scale.vector(torch.tensor([1.0, -1.0]))
    assert vector[2] == 0
    assert np.array_equal(scale.vector(torch.tensor([1.0, -1.0]), 3.0), vector)


def test_sums_are_neither_clipped_in_the_norm_nor_weighed() -> None:
    scale = Scale(3, 8.0, norm=1.0, sums=1)
    change, _ = scale.change(scale.vector(torch.tensor([3.0, 4.0, 0.5]), 0.5), 1)
    torch.testing.assert_close(change, torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64))


# --- whole runs -----------------------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {"num_clients": 5, "train_per_class": 20, "partition": "dirichlet"}
SECURE_KEYS: dict[str, dict[str, Any]] = {
    # With Adam, which divides by a gradient's size, rounding may become a step (helpers.away).
    "fedpart": {"fedpart__momentum": "none", "optimizer": "sgd"},
    "fedpews": {"fedpews__warmup_rounds": 2, "min_contributors": 2},
    "fednova": {"weighting": "examples"},
    "scaffold": {"local_steps": 2},
    # Grown weights are 0 in every client: which of them are kept is arbitrary, and told apart in the next round only.
    "feddst": {"min_contributors": 2, "weighting": "uniform", "feddst__every": 3},
    **{name: {"min_contributors": 2} for name in ("heterofl", "fjord", "fiarse", "ssfl")},
    "fedrolex": {"min_contributors": 2, "fedrolex__assignment": "fixed"},
    "feddrop": {"min_contributors": 2, "feddrop__masked_loss": False},
    **{name: {"min_contributors": 2} for name in ("fedselect", "subfedavg")},
}
REFUSE = {
    "fedpac", "prunefl", "fedtiny", "fedrts", "flexlora", "flora", "fedex-lora", "hetlora", "local", "ist",
    "istprox",
}  # fmt: skip
TAKES = [name for name in METHODS if name not in REFUSE]


def settings_for(method: str = "fedavg", **keys: Any) -> Settings:
    every = SMALL | {"method": method} | WHOLE | METHOD_KEYS.get(method, {}) | SECURE_KEYS.get(method, {}) | keys
    flat = {name.replace("__", ".").replace("_", "-"): value for name, value in every.items()}
    return resolve(applicable_keys(flat))


def strategy_of(settings: Settings) -> SubnetStrategy:
    return METHODS[settings.method].strategy(settings, Problem.of(settings).network())


def model(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def away(one: Tensors, other: Tensors, start: Tensors) -> float:
    """How far two models are from each other, as a fraction of how far the second is from the start."""
    apart, moved = (
        torch.cat([(a[name] - b[name]).flatten() for name in a]).norm() for a, b in ((one, other), (other, start))
    )
    return float(apart / moved)


def parts_of(message: Message) -> tuple[str, list[tuple[int, Tensors]]]:
    """The step of a message of the protocol, and its clients' parts."""
    header, parts = unpack(message.content)
    step = header["secure"] if header.get("phase") == SECURE else header.get("phase", "")
    return step, [(config["client"], tensors) for config, tensors in parts if "client" in config]


class Lossy(LocalGrid):
    """Every message holds one client; in the steps that ``losses`` names these clients' nodes fail.

    Attributes
    ----------
    heard : (client, name of a tensor) -> the tensor, of every reply that the server has got.
    asked : (step, client), of every message.
    """

    losses: ClassVar[dict[str, Collection[int]]] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: dict[tuple[int, str], torch.Tensor] = {}
        self.asked: list[tuple[str, int]] = []
        Lossy.last = self

    last: ClassVar["Lossy"]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            step, parts = parts_of(message)
            self.asked += [(step, client) for client, _ in parts]
            (number,) = super().push_messages([message])
            ids.append(number)
            if any(client in self.losses.get(step, ()) for client, _ in parts):
                self._replies[number] = Message(Error(CLIENT_FAILED, "power cut"), reply_to=message)
            elif parts:
                _, answers = unpack(self._replies[number].content)
                self.heard |= {(each["client"], name): x for each, tensors in answers for name, x in tensors.items()}
        return ids


@pytest.fixture
def lossy(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Run one round of FedAvg, secure, on a grid that loses clients in steps; returns the run directory."""

    def run(losses: dict[str, Collection[int]], folder: str = "secure", **keys: Any) -> Path:
        monkeypatch.setattr(Lossy, "losses", losses)
        keys = WHOLE | {"num_rounds": 1, "message_clients": 1, "secure_aggregation": True} | keys
        return run_local(folder, Lossy, **keys)[1]

    return run


def test_fedavg_is_the_plain_run_and_no_secret_is_left(run_local: Run) -> None:
    keys = WHOLE | {"weighting": "examples"}
    _, plain = run_local("plain", **keys)
    _, folder = run_local("secure", secure_aggregation=True, **keys)
    assert away(model(folder), model(plain), strategy_of(settings_for()).current) < 1e-4
    lines = read_rounds(folder)[1:]
    assert all(line["clipped-values"] == 0 and not line["dropped"] for line in lines)
    other = read_rounds(plain)[1]
    assert lines[0]["bytes-up"] > other["bytes-up"]
    for key in ("bytes-up", "bytes-down"):  # the formula counts a byte of keys and shares as one, both ways
        more, by_formula = (lines[0][name] - other[name] for name in (key, f"formula-{key}"))
        assert 0.5 * more < by_formula < more
    left = [path for path in (folder / "clients" / "secure").rglob("*") if path.is_file()]
    assert {path.suffix for path in left} == {".opened"}, "neither secrets nor a change"


@pytest.mark.slow
@pytest.mark.parametrize("method", TAKES)
def test_every_method_that_takes_it_is_its_plain_run(method: str, run_local: Run) -> None:
    """Three rounds; rounding by the quantisation is all that differs."""
    keys = {"method": method} | WHOLE | METHOD_KEYS.get(method, {}) | SECURE_KEYS.get(method, {})
    _, plain = run_local("plain", **keys)
    _, folder = run_local("secure", secure_aggregation=True, **keys)
    assert away(model(folder), model(plain), strategy_of(settings_for(method)).current) < 1e-4
    assert [line["status"] for line in read_rounds(folder)[1:]] == ["ok"] * 3


@pytest.mark.run
@pytest.mark.parametrize("others", ["masks", "mean"])
def test_the_warm_up_is_the_plain_one(others: str, run_local: Run) -> None:
    """Each client takes its own mask, or probabilities, away from what all have together."""
    keys = WHOLE | {"method": "fedpews", "fedpews__others": others} | SECURE_KEYS["fedpews"]
    _, plain = run_local("plain", **keys)
    _, folder = run_local("secure", secure_aggregation=True, **keys)
    assert away(model(folder), model(plain), strategy_of(settings_for("fedpews")).current) < 1e-4
    one, other = ([line.get("units-covered-by") for line in read_rounds(f)[1:]] for f in (folder, plain))
    assert one == other
    assert [bool(each) for each in one] == [True, True, False]


def test_devices_upload_the_vector(run_local: Run, tmp_path: Path) -> None:
    """A device's seconds are those of the plain run, whose upload is as long."""
    phones = '[[class]]\nname = "phone"\nshare = 1.0\nflops-per-second = 1e12\ndown-mbps = 10\nup-mbps = 1\n'
    (tmp_path / "phones.toml").write_text(phones)
    keys: dict[str, Any] = {**WHOLE, "num_rounds": 1, "devices": str(tmp_path / "phones.toml")}
    seconds = [
        read_rounds(run_local(str(on), **keys, secure_aggregation=on)[1])[1]["device-seconds"] for on in (False, True)
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)


def test_a_round_opened_twice_says_so(lossy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops behind the opening of round 2; resumed, it loses another client and asks again."""
    opened = Session.opened

    def stopped(session: Session, step: str, alive: Sequence[int], total: Vector) -> Vector:
        result = opened(session, step, alive, total)
        if session._round == 2:
            raise KeyboardInterrupt
        return result

    keys: dict[str, Any] = {"num_rounds": 2, "secure_dropouts": 0.4}
    with monkeypatch.context() as patch:
        patch.setattr(Session, "opened", stopped)
        with pytest.raises(KeyboardInterrupt):
            lossy({}, **keys)
    line = read_rounds(lossy({"train": [1]}, resume=True, **keys))[2]
    assert line["status"] == "abandoned"
    assert "this round was opened before, with other clients" in line["abandoned"]


@pytest.mark.parametrize(
    "keys",
    [
        {"num_rounds": 1, "clip_norm": 0.1},
        {"clip_norm": 0.1, "dp_noise_multiplier": 1.0, "dp_noise_by": "clients", "weighting": "uniform"},
        {"method": "subfedavg"},  # fewer than min-contributors keep some positions, which are closed after the clip
        {"method": "fedpews", "fedpews__others": "mean", "clip_norm": 1.0},  # whose probabilities are summed besides
        {
            "method": "fedpews",
            "fedpews__others": "mean",
            "weighting": "examples",
            "secure_masks": "public",
            "clip_norm": 0,
        },
    ],
    ids=["fedavg", "noise", "closed", "sums", "weighed sums"],
)
def test_clients_clip_and_weigh_as_the_server_would(keys: dict[str, Any], run_local: Run) -> None:
    method = keys.get("method", "fedavg")
    keys = {
        **WHOLE,
        "clip_norm": 0.05,
        "num_rounds": 2,
        **METHOD_KEYS.get(method, {}),
        **SECURE_KEYS.get(method, {}),
        **keys,
    }
    _, plain = run_local("plain", **keys)
    _, folder = run_local("secure", **keys, secure_aggregation=True)
    assert away(model(folder), model(plain), strategy_of(settings_for(method)).current) < 1e-4


def test_what_the_server_hears_is_noise(lossy: Callable[..., Path], run_local: Run) -> None:
    """Every vector, and the sum of all but any one: no correlation with any client's update."""
    folder = lossy({})
    heard, start = Lossy.last.heard, strategy_of(settings_for()).current
    names = {name for _, name in heard}
    assert names == {KEYS, SHARES, SUM, OPENED}, "nothing else has come, but numbers of a few samples"
    lossy({}, "plain", secure_aggregation=False)
    updates = {
        client: torch.cat([(Lossy.last.heard[client, name] - x).flatten() for name, x in start.items()])
        for client in range(5)
    }
    vectors = [heard[client, SUM].numpy().view(np.uint32)[: len(updates[0])] for client in range(5)]
    total = np.sum(vectors, axis=0, dtype=np.uint32)
    seen = [*vectors, *(total - vector for vector in vectors)]
    chance = 5 / np.sqrt(len(updates[0]))
    for vector in seen:
        signed = vector.view(np.int32).astype(float)
        assert signed.std() == pytest.approx(2**32 / np.sqrt(12), rel=0.05), "the norm of noise, for any client"
        for update in updates.values():
            assert abs(np.corrcoef(signed, update)[0, 1]) < chance
            assert abs(np.corrcoef(np.abs(signed), np.abs(update))[0, 1]) < chance
    opened = torch.cat([(model(folder)[name] - x).flatten() for name, x in start.items()])
    mean = torch.stack([*updates.values()]).mean(0)
    assert (opened - mean).norm() < 1e-4 * mean.norm(), "the sum is what the server has learned"


@pytest.mark.parametrize("step", [KEYS, SHARES, SUM, "train", OPENED])
def test_a_client_lost_in_any_step_is_survived(step: str, lossy: Callable[..., Path]) -> None:
    """The round goes on with the others, and is the plain round of those whose vectors were summed."""
    folder = lossy({step: [1]}, secure_dropouts=0.3)
    (line,) = read_rounds(folder)[1:]
    assert line["status"] == "ok"
    dropped = [] if step == OPENED else [1]
    assert [drop["client"] for drop in line["dropped"]] == dropped
    assert line.get("partial") == ("4 of 5 replies" if dropped else None)
    plain = lossy({"train": dropped}, "plain", secure_aggregation=False)
    assert away(model(folder), model(plain), strategy_of(settings_for()).current) < 1e-4


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({"train": [0, 1, 3]}, "fewer than 3 clients are left in secure-aggregation"),
        ({SHARES: [1, 3]}, "more neighbours of client 0 are lost than secure-dropouts allows"),
        ({SUM: [1, 3]}, "more neighbours of client 0 are lost than secure-dropouts allows"),
        ({SHARES: [1], SUM: [3]}, "more neighbours of client 0 are lost than secure-dropouts allows"),
        ({SUM: [1], OPENED: [3]}, "more neighbours are lost than secure-dropouts allows"),
        ({OPENED: [1, 3]}, "more neighbours are lost than secure-dropouts allows"),
    ],
    ids=str,
)
def test_one_client_more_abandons_the_round_and_opens_nothing(
    losses: dict[str, Collection[int]], reason: str, lossy: Callable[..., Path]
) -> None:
    """Five clients, each with four neighbours, of which one may be lost. No client is asked twice to reveal shares."""
    with pytest.raises(RunFailed, match=reason):
        lossy(losses, secure_dropouts=0.3)
    asked = [client for step, client in Lossy.last.asked if step == OPENED]
    assert len(asked) == len({*asked})
    assert bool(asked) is (OPENED in losses)


def test_nobody_reveals_shares_where_a_lost_clients_key_cannot_be_put_together(
    lossy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shares reveal a secret; clients 4 and 5 are neighbours, and each has one other, which is left."""
    graph = {0: [1, 2, 3, 4], 1: [0, 2, 3, 5], 2: [0, 1, 3], 3: [0, 1, 2], 4: [0, 5], 5: [1, 4]}
    monkeypatch.setattr("fedsub_app.secure.server.neighbourhoods", lambda *_: (graph, 2))
    with pytest.raises(RunFailed, match=r"more neighbours of client [45] are lost than secure-dropouts allows"):
        lossy({SUM: [4, 5]}, num_clients=6)
    assert OPENED not in {step for step, _ in Lossy.last.asked}


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_whether_sums_are_enough(method: str) -> None:
    strategy = strategy_of(settings_for(method, secure_aggregation=True))
    if method in TAKES:
        check_defences(strategy)
        return
    assert refusal(strategy) != Hooks.secure
    said = rf"^secure-aggregation = true: not with method = '{method}': {refusal(strategy)}$"
    with pytest.raises(UserError, match=said):
        check_defences(strategy)


@pytest.mark.parametrize(
    ("method", "keys", "said"),
    [
        ("fedpart", {"fedpart__momentum": "mean", "optimizer": "adam"}, "its server also averages Adam's moments"),
        ("scaffold", {"local_steps": 0}, "with local-epochs the sums of changes and of variates, together, tell"),
        ("fedpews", {"fedpews__masks": "fixed"}, "its server writes back what one client alone has trained"),
        ("fedpews", {"fedpews__others": "highest"}, "the highest probability of a unit is a single client's"),
        (
            "fedpart",
            {"clip_norm": 1.0},
            "clip-norm = 1: not with method = 'fedpart': its clients are not sent the group",
        ),
        ("feddst", {"weighting": "auto"}, "weighting = 'auto': must be 'uniform' with secure-masks = 'secret'"),
        (
            "fednova",
            {"model": "mnist-cnn-bn", "dataset": "digits", "image_size": 28},
            "BatchNorm's statistics are averaged with other weights",
        ),
        ("fedselect", {"min_contributors": 1}, "min-contributors = 1: at least 2 with secure-aggregation"),
        ("fjord", {"min_contributors": 1}, "min-contributors = 1: at least 2 with secure-aggregation"),
        ("heterofl", {"heterofl__widths": "0.25, 0.5, 1"}, "secure-masks = 'secret': not with 1 of 5 clients, whose"),
        ("fedpm", {"secure_range": 0.5}, "secure-range = 0.5: at least 1 with fedpm, whose masks are summed"),
        ("fedpews", {"fedpews__others": "mean", "secure_range": 0.5}, "secure-range = 0.5: at least 1 with fedpews"),
        ("fedavg", {"num_clients": 26, "checkpoint_every": 2}, "checkpoint-every = 2: must be 1 with secure-aggreg"),
        ("feddrop", {"feddrop__masked_loss": True}, "not with 5 of 5 clients, whose units fewer than min-contributors"),
    ],
)
def test_settings_with_which_sums_are_not_enough(method: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_defences(strategy_of(settings_for(method, secure_aggregation=True, **keys)))


def test_a_method_of_ones_own_has_to_say_it() -> None:
    class Other(SubnetStrategy):
        """Has a merge of its own, which may look at single updates."""

        def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
            """Merge as FedAvg does."""
            return super().merge(mean, updates)

    settings = settings_for(secure_aggregation=True)
    with pytest.raises(UserError, match="not with method = 'fedavg': it is not said that its server needs no more"):
        check_defences(Other(settings, Problem.of(settings).network()))
    Other.secure = ""
    check_defences(Other(settings, Problem.of(settings).network()))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mean": "median"}, "mean = 'median': must be 'average' with secure-aggregation = true"),
        ({"robust": "on"}, "robust = 'on': must be 'off' with secure-aggregation = true"),
        (
            {"dp_noise_multiplier": 1.0, "clip_norm": 1.0},
            "dp-noise-by = 'server': must be 'clients' with secure-aggregation = true",
        ),
        ({"num_clients": 2}, "secure-aggregation = true: needs at least 3 clients a round, 2 take part"),
    ],
)
def test_settings_that_need_single_updates(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings_for(secure_aggregation=True, **keys)


# --- engines, resume, many clients ----------------------------------------------------------------------------------


def test_it_is_the_same_on_processes_and_after_a_resume(run_local: Run, tmp_path: Path) -> None:
    """Bit for bit, although all masks are drawn anew: they cancel exactly."""
    keys = WHOLE | {"secure_aggregation": True, "num_rounds": 4, "keep_checkpoints": 0, "message_clients": 2} | MASKED
    ends_as_if_never_stopped(run_local, tmp_path, keys)
    made: list[WorkerGrid] = []

    def grid(_: object, overrides: dict[str, Value]) -> WorkerGrid:
        made.append(WorkerGrid("fedsub_app.client_app", overrides, 2, "fork"))
        return made[0]

    _, with_workers = run_local("workers", grid, **keys)
    made[0].close()
    assert rounds(with_workers) == rounds(tmp_path / "whole")
    assert (with_workers / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_spares_stand_in_for_lost_clients(lossy: Callable[..., Path]) -> None:
    """Of seven clients that are asked five count: those that are drawn first, as in the plain run."""
    keys: dict[str, Any] = {"num_clients": 9, "clients_per_round": 5, "oversample": 1.4, "secure_dropouts": 0.49}
    for losses in ({}, {"train": draw(settings_for(**keys), 1)[:2]}):
        secure = lossy(losses, f"secure {losses}", **keys)
        plain = lossy(losses, f"plain {losses}", secure_aggregation=False, **keys)
        assert away(model(secure), model(plain), strategy_of(settings_for()).current) < 1e-4


def test_a_round_is_not_opened_again_with_other_clients(tmp_path: Path) -> None:
    store = Secrets(tmp_path, 3, 0)
    store.begin(change=torch.zeros(1))
    store.open_once(COUNTS, [1, 2], [4])
    store.open_once(SUM, [1, 2, 4], [])
    store.open_once(COUNTS, [1, 2], [4])
    Secrets(tmp_path, 4, 0).open_once(COUNTS, [1], [2, 4])
    with pytest.raises(ProtocolError, match="this round was opened before, with other clients"):
        Secrets(tmp_path, 3, 0).open_once(COUNTS, [1, 2, 4], [])


def test_the_record_of_openings_is_no_longer_after_a_repeated_one_and_may_be_torn(tmp_path: Path) -> None:
    store = Secrets(tmp_path, 3, 0)
    store.begin(change=torch.zeros(1))
    path = tmp_path / "secure" / "client-000000.opened"
    path.write_text("round-000002/secure/su")  # the machine failed, so that the client has not answered
    store.open_once(SUM, [1, 2], [])
    once = path.read_text()
    store.open_once(SUM, [1, 2], [])
    assert path.read_text() == once
    with pytest.raises(ProtocolError, match="this round was opened before, with other clients"):
        store.open_once(SUM, [1, 2, 4], [])


def test_the_documented_methods_are_those_that_take_it() -> None:
    """Each method is in one row of docs/security.md: "yes", or "no:" and the reason that the run is refused with."""
    text = (Path(__file__).parents[1] / "docs" / "security.md").read_text().partition("\n## Secure aggregation")[2]
    said = dict.fromkeys(METHODS, "")
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ")
        for name in re.findall(r"`([a-z-]+)`", cells[0]) if cells[1:] and cells[1].startswith(("yes", "no: ")) else ():
            assert not said[name], name
            said[name] = cells[1]
    for method, answer in said.items():
        reason = refusal(strategy_of(settings_for(method)))
        assert answer.startswith("yes") if not reason else answer == f"no: {reason}", method


# --- slices -----------------------------------------------------------------------------------------------------------

# Clients 1 and 3 have the whole network, the others half of its units.
SLICES: dict[str, Any] = {"method": "heterofl", "heterofl__widths": "0.5, 1", "heterofl__masked_loss": False}


def test_positions_of_too_few_clients_are_not_sent(lossy: Callable[..., Path]) -> None:
    """With three contributors at least, the units of the two wide clients keep their values, as in the plain run."""
    keys = SLICES | {"min_contributors": 3}
    secure, start = model(lossy({}, **keys)), strategy_of(settings_for(**keys)).current
    assert away(secure, model(lossy({}, "plain", secure_aggregation=False, **keys)), start) < 1e-4
    assert torch.equal(secure["fc1.weight"][-1], start["fc1.weight"][-1])
    assert not torch.equal(secure["fc1.weight"][0], start["fc1.weight"][0])


def test_masks_of_too_few_clients_are_not_counted(lossy: Callable[..., Path]) -> None:
    """FedPM's server gets no sum of four masks where five have to contribute: they would count as masks of zeros."""
    with pytest.raises(RunFailed, match="reason: 4 clients are left in secure-aggregation, of 5 needed"):
        lossy({SUM: [1]}, method="fedpm", min_contributors=5)


def test_a_position_that_is_left_to_too_few_is_not_opened(lossy: Callable[..., Path]) -> None:
    """One of the two wide clients is lost with its vector: the others give theirs again, without its units."""
    keys = SLICES | {"min_contributors": 2}
    secure, start = model(lossy({SUM: [1]}, **keys)), strategy_of(settings_for(**keys)).current
    asked = Lossy.last.asked
    assert asked.count((SUM, 0)) == 2
    assert asked.count((OPENED, 0)) == 1
    assert away(secure, model(lossy({"train": [1]}, "plain", secure_aggregation=False, **keys)), start) < 1e-4
    assert torch.equal(secure["fc1.weight"][-1], start["fc1.weight"][-1])
    lossy({SUM: [0]}, "narrow", **keys)
    assert Lossy.last.asked.count((SUM, 1)) == 1


# --- secret masks -----------------------------------------------------------------------------------------------------

# Three of ten classes a client: rows of the output layer belong to one or two of the five clients.
MASKED: dict[str, Any] = {
    "method": "heterofl", "heterofl__widths": "0.5, 1", "partition": "classes", "classes_per_client": 3,
    "min_contributors": 2,
}  # fmt: skip


class Truth:
    """What the clients keep and what the server opens, recorded where it happens.

    Attributes
    ----------
    changes, covered : client -> its change, and the positions that it contributes.
    opened : step -> the opened sum.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes: dict[int, torch.Tensor] = {}
        self.covered: dict[int, torch.Tensor] = {}
        self.opened: dict[str, Vector] = {}
        begin, opened = Secrets.begin, Session.opened

        def kept(store: Secrets, **tensors: torch.Tensor) -> None:
            client = int(store.path.stem.removeprefix("client-"))
            self.changes[client], self.covered[client] = tensors["change"].double(), tensors["covered"]
            begin(store, **tensors)

        def seen(session: Session, step: str, alive: Sequence[int], total: Vector) -> Vector:
            self.opened[step] = opened(session, step, alive, total)
            return self.opened[step]

        monkeypatch.setattr(Secrets, "begin", kept)
        monkeypatch.setattr(Session, "opened", seen)

    def mean(self, clients: Collection[int], counts: torch.Tensor, start: Tensors) -> Tensors:
        """The model with the clients' changes, over ``counts``, at the positions that two of them have."""
        total = sum((self.changes[client] for client in clients), torch.zeros(len(counts)))
        change = (total / counts.clamp(min=1)).split([x.numel() for x in start.values()])
        return {name: x + part.view(x.shape).float() for (name, x), part in zip(start.items(), change, strict=True)}


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Truth:
    return Truth(monkeypatch)


SUBFEDAVG: dict[str, Any] = {"method": "subfedavg", "min_contributors": 2} | METHOD_KEYS["subfedavg"]
FEDPEWS: dict[str, Any] = {"method": "fedpews", "min_contributors": 2}


@pytest.mark.parametrize("keys", [MASKED, SUBFEDAVG, FEDPEWS], ids=lambda keys: keys["method"])
def test_what_the_server_hears_of_secret_masks_is_noise(
    keys: dict[str, Any], lossy: Callable[..., Path], truth: Truth
) -> None:
    """Neither counts nor values correlate with any client's, also in the sum of all but one; closed positions are 0."""
    lossy({}, **keys)
    heard = Lossy.last.heard
    assert {name for _, name in heard} == {KEYS, SHARES, COUNTS, SUM, OPENED}
    size = len(truth.covered[0])
    counts = torch.stack([*truth.covered.values()]).sum(0)
    assert {0, 1, 2} & {*counts.tolist()} >= {1, 2}
    assert torch.equal(counted(truth.opened[COUNTS], size, 5), counts.int())
    assert not truth.opened[SUM][:size][counts.numpy() < 2].any(), "no client has sent what it alone has"
    chance = 5 / np.sqrt(size)
    for step, kind in ((COUNTS, np.uint8), (SUM, np.int32)):
        vectors = [heard[client, step].numpy().view(np.uint32) for client in range(5)]
        total = np.sum(vectors, axis=0, dtype=np.uint32)
        for vector in (*vectors, *(total - vector for vector in vectors)):
            numbers = vector.view(kind)[:size].astype(float)
            for client in range(5):
                for each in (truth.covered[client].double(), truth.changes[client], truth.changes[client].abs()):
                    if each.std():
                        assert abs(np.corrcoef(numbers, each)[0, 1]) < chance
                        assert abs(np.corrcoef(np.abs(numbers), each)[0, 1]) < chance


@pytest.mark.parametrize("step", [KEYS, SHARES, COUNTS, "train", OPENED])
def test_a_client_lost_before_its_mask_is_counted_is_as_if_not_asked(step: str, lossy: Callable[..., Path]) -> None:
    folder = lossy({step: [0]}, **MASKED)
    (line,) = read_rounds(folder)[1:]
    dropped = [] if step == OPENED else [0]
    assert [drop["client"] for drop in line["dropped"]] == dropped
    assert line.get("partial") == ("4 of 5 replies" if dropped else None)
    plain = lossy({"train": dropped}, "plain", secure_aggregation=False, **MASKED)
    assert away(model(folder), model(plain), strategy_of(settings_for(**MASKED)).current) < 1e-4


@pytest.mark.parametrize("step", ["train", COUNTS])
def test_a_client_whose_width_no_other_has_is_not_counted(step: str, lossy: Callable[..., Path], truth: Truth) -> None:
    """Columns that the wide clients alone have would tell the classes of client 3, if client 1 is lost."""
    (line,) = read_rounds(lossy({step: [1]}, **MASKED))[1:]
    assert [drop["client"] for drop in line["dropped"]] == [1, 3]
    assert line["dropped"][1]["reason"].startswith("one of the clients whose units fewer than min-contributors have")
    counts = torch.stack([truth.covered[client] for client in (0, 2, 4)]).sum(0).int()
    assert torch.equal(counted(truth.opened[COUNTS], len(counts), 5 - (step == "train")), counts)


def test_a_client_lost_after_its_mask_was_counted_counts_as_unchanged(lossy: Callable[..., Path], truth: Truth) -> None:
    """Its mask is not known: to count the others' would tell it. A position with a margin of one contributor is open.

    The vectors are given once more, because positions of two clients may have been left to one.
    """
    keys = MASKED | {"heterofl__widths": "1", "min_replies": 4}
    secure, start = model(lossy({SUM: [1]}, **keys)), strategy_of(settings_for(**keys)).current
    counts = torch.stack([*truth.covered.values()]).sum(0)
    assert Lossy.last.asked.count((SUM, 0)) == 2
    assert Lossy.last.asked.count((OPENED, 0)) == 2, "of the counts and of the values"
    assert Lossy.last.asked.count((COUNTS, 0)) == 1
    for client in truth.changes:
        truth.changes[client] = truth.changes[client] * (counts >= 3)
    assert away(secure, truth.mean([0, 2, 3, 4], counts, start), start) < 1e-4


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({COUNTS: [1, 3]}, "more neighbours of client 0 are lost than secure-dropouts allows"),
        ({COUNTS: [0], OPENED: [3]}, "more neighbours are lost than secure-dropouts allows"),
        ({COUNTS: [0], SUM: [3]}, "3 clients are left in secure-aggregation, of 4 needed"),
    ],
    ids=str,
)
def test_one_client_more_leaves_the_values_closed(
    losses: dict[str, Collection[int]], reason: str, lossy: Callable[..., Path], truth: Truth
) -> None:
    with pytest.raises(RunFailed, match=reason):
        lossy(losses, min_replies=4, **MASKED)
    assert SUM not in truth.opened
    asked = [client for step, client in Lossy.last.asked if step == OPENED]
    assert len(asked) == len({*asked})


@pytest.mark.parametrize("keys", [MASKED, SUBFEDAVG, FEDPEWS], ids=lambda keys: keys["method"])
def test_public_masks_travel_as_they_are(keys: dict[str, Any], lossy: Callable[..., Path], truth: Truth) -> None:
    """A client that is lost after it has told its mask is left out, as in the plain run."""
    secure = model(lossy({SUM: [1]}, secure_masks="public", **keys))
    assert {name for _, name in Lossy.last.heard} == {COVERED, KEYS, SHARES, SUM, OPENED}
    for client, covered in truth.covered.items():
        assert torch.equal(Lossy.last.heard[client, COVERED], covered)
    plain = model(lossy({"train": [1]}, "plain", secure_aggregation=False, **keys))
    assert away(secure, plain, strategy_of(settings_for(**keys)).current) < 1e-4
