"""SecAgg+: the sum of the clients' vectors of integers modulo 2^32, as pure functions; nothing here knows messages.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
https://eprint.iacr.org/2017/281. Bell et al.: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS
2020, https://eprint.iacr.org/2020/704: each client shares masks with some neighbours, not with all clients.

A client adds to its vector the stream of a seed of its own, and for each neighbour the stream of a key that both agree
on, with opposite signs. Shares of both secrets lie with the neighbours. At the end they reveal the seed of a client
whose vector is in the sum, or the private key of one whose vector is not: never both.

Key agreement X25519, key derivation HKDF-SHA256, encryption of the shares ChaCha20-Poly1305, streams ChaCha20, all of
the package cryptography; secret sharing is Flower's. Its ``pseudo_rand_gen`` is not used: it draws masks from a seed of
32 bits, which the server could try out.
"""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

Vector = np.ndarray[Any, np.dtype[np.uint32]]  # integers modulo 2^32
KEY = 32  # bytes of a key
SEED = 31  # bytes of a shared secret: padded by Flower to two blocks of 16
SHARE = 4 + 32  # bytes of a share of a seed
NONCE = 12
SEALED = NONCE + 2 * SHARE + 16  # bytes of an encrypted pair of shares
COMPLETE = 24  # neighbours: rounds of at most one client more have a complete graph
SECURITY, CORRECTNESS = 40, 30  # bits: sigma and eta of Bell et al. 2020


class ProtocolError(ValueError):
    """A message is not what the protocol allows at this place."""


def neighbourhoods(clients: Collection[int], dropouts: float, corrupted: float) -> tuple[dict[int, list[int]], int]:
    """Return each client's neighbours, sorted, and the number of shares that reveal a secret.

    The server draws the graph anew each round. In a small round all others are neighbours, and all of them but the
    fraction ``dropouts``, more than half, reveal a secret. In a larger one the clients stand on a ring in random order,
    and the next ones on both sides are neighbours, as many as :func:`degree_and_threshold` says.
    """
    ring = sorted(clients)
    degree, least = degree_and_threshold(len(ring), dropouts, corrupted)
    secrets.SystemRandom().shuffle(ring)
    steps = [step for step in range(-(degree // 2), degree - degree // 2 + 1) if step]
    graph = {c: sorted({ring[(place + step) % len(ring)] for step in steps}) for place, c in enumerate(ring)}
    return dict(sorted(graph.items())), least


@lru_cache
def degree_and_threshold(clients: int, dropouts: float, corrupted: float) -> tuple[int, int]:
    """Return the smallest even degree k of the graph, and the smallest threshold t, with which a round is safe.

    A fraction ``corrupted`` of the clients works with the server and another one, ``dropouts``, is lost, both chosen
    without knowledge of the graph (Bell et al. 2020, Section 3: the server is honest but curious). Then

    - some client has t corrupted neighbours with a probability of at most 2^-SECURITY;
    - the graph of the others falls apart, which needs k / 2 corrupted or lost clients in a row, with 2^-SECURITY;
    - some client has fewer than t neighbours left, so that the round is abandoned, with 2^-CORRECTNESS.

    Each is a union bound over the clients, of hypergeometric tails. Where no k does it, and in rounds of up to
    ``COMPLETE + 1`` clients, the graph is complete.
    """
    bad, lost, others = math.floor(corrupted * clients), math.floor(dropouts * clients), clients - 1
    for degree in range(2, others if others > COMPLETE else 0, 2):
        runs = clients * math.comb(clients - degree // 2, bad + lost - degree // 2) if 2 * (bad + lost) >= degree else 0
        least = _exceeded(clients, bad, degree, SECURITY)
        connected = runs << SECURITY <= math.comb(clients, bad + lost)
        if connected and least + _exceeded(clients, lost, degree, CORRECTNESS) <= degree + 1:
            return degree, least
    return others, others - math.floor(dropouts * others)


def _exceeded(clients: int, marked: int, degree: int, bits: int) -> int:
    """Return the least number, from 2 on, of which any client has as many marked neighbours with at most 2^-bits."""
    ways, number = 0, degree + 1
    while number > 2:
        ways += math.comb(marked, number - 1) * math.comb(clients - 1 - marked, degree - number + 1)
        if clients * ways << bits > math.comb(clients - 1, degree):
            break
        number -= 1
    return number


def stream(secret: bytes, purpose: bytes, length: int) -> Vector:
    """Return ``length`` pseudo-random integers: ChaCha20 under a key that is used for this stream alone."""
    encryptor = Cipher(ChaCha20(_derived(secret, purpose), bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * length)), dtype="<u4")


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY, salt=None, info=b"fedsub " + purpose).derive(secret)


def _agreed(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError("a public key is not valid") from None


def _private(seed: bytes) -> X25519PrivateKey:
    """Return the private key of the pairwise masks, of which shares are those of its seed."""
    return X25519PrivateKey.from_private_bytes(_derived(seed, b"key"))


def pair_mask(one: int, other: int, seed: bytes, public: bytes, length: int) -> Vector:
    """Return what ``one``, whose seed is known, adds to its vector for ``other``; ``other`` adds its negative."""
    mask = stream(_agreed(_private(seed), public), b"pair", length)
    return mask if one < other else -mask


@dataclass
class Member:
    """One client in one run of the protocol, and its secrets, drawn from the system's source.

    Its three answers follow one another: :meth:`share`, :meth:`masked`, :meth:`opened`. Each is given once. ``cipher``:
    private key by which shares are encrypted. ``pair``, ``own``: seeds of the pairwise masks' private key and of the
    client's own mask. ``keys``: neighbour -> its two public keys, of :attr:`public`. ``shares``: neighbour -> its
    shares of (own, pair). ``step``: number of answers given.
    """

    client: int
    cipher: bytes = field(default_factory=lambda: secrets.token_bytes(KEY))
    pair: bytes = field(default_factory=lambda: secrets.token_bytes(SEED))
    own: bytes = field(default_factory=lambda: secrets.token_bytes(SEED))
    threshold: int = 0
    keys: dict[int, bytes] = field(default_factory=dict)
    shares: dict[int, bytes] = field(default_factory=dict)
    step: int = 0

    @property
    def public(self) -> bytes:
        """Public keys of shares and of pairwise masks, 64 bytes."""
        both = X25519PrivateKey.from_private_bytes(self.cipher), _private(self.pair)
        return b"".join(key.public_key().public_bytes_raw() for key in both)

    def _next(self, step: int) -> None:
        if self.step != step:
            raise ProtocolError(f"step {step + 1} of 3 does not follow {self.step}: each is answered once a round")
        self.step += 1

    def _seal(self, other: int, sender: int) -> tuple[ChaCha20Poly1305, bytes]:
        agreed = _agreed(X25519PrivateKey.from_private_bytes(self.cipher), self.keys[other][:KEY])
        receiver = other if sender == self.client else self.client
        return ChaCha20Poly1305(_derived(agreed, b"shares")), f"{sender} to {receiver}".encode()

    def share(self, keys: Mapping[int, bytes], least: int) -> dict[int, bytes]:
        """Return, for each neighbour, the encrypted shares of both seeds, of which ``least`` reveal them."""
        self._next(0)
        if self.client in keys or not 2 <= least <= len(keys):
            raise ProtocolError(f"threshold {least} of {len(keys)} neighbours: must be at least 2 of them")
        self.keys, self.threshold = dict(keys), least
        both = zip(*(create_shares(seed, least, len(keys)) for seed in (self.own, self.pair)), strict=True)
        sealed = {}
        for other, (own, pair) in zip(keys, both, strict=True):
            cipher, route = self._seal(other, self.client)
            nonce = secrets.token_bytes(NONCE)
            sealed[other] = nonce + cipher.encrypt(nonce, own + pair, route)
        return sealed

    def masked(self, vector: Vector, sealed: Mapping[int, bytes]) -> Vector:
        """Return the vector under its masks; ``sealed``: the shares of the neighbours that take part from here on."""
        self._next(1)
        if not sealed.keys() <= self.keys.keys() or len(sealed) < self.threshold:
            raise ProtocolError(f"shares of {len(sealed)} neighbours: at least {self.threshold} are needed")
        total = vector + stream(self.own, b"own", len(vector))
        for other, content in sealed.items():
            cipher, route = self._seal(other, other)
            try:
                self.shares[other] = cipher.decrypt(content[:NONCE], content[NONCE:], route)
            except InvalidTag:
                raise ProtocolError(f"the shares of client {other} cannot be decrypted") from None
            total += pair_mask(self.client, other, self.pair, self.keys[other][KEY:], len(vector))
        return total

    def opened(self, alive: Sequence[int], lost: Sequence[int]) -> dict[int, bytes]:
        """Return the shares of the own masks of ``alive`` neighbours and of the pairwise keys of ``lost`` ones."""
        self._next(2)
        if {*alive} & {*lost} or {*alive, *lost} != self.shares.keys() or len(alive) < self.threshold:
            raise ProtocolError(f"opening with {len(alive)} neighbours: at least {self.threshold}, each alive or lost")
        own = {other: self.shares[other][:SHARE] for other in alive}
        return own | {other: self.shares[other][SHARE:] for other in lost}


def unmasked(
    total: Vector,
    shares: Mapping[int, Sequence[bytes]],
    alive: Collection[int],
    graph: Mapping[int, Collection[int]],
    keys: Mapping[int, bytes],
    least: int,
) -> Vector:
    """Return the sum of the vectors of ``alive``, from the sum of their masked vectors.

    ``shares``: client -> shares that its neighbours have revealed: of its own mask if it is alive, else of its key.
    ``graph``: client -> the neighbours that it shares masks with, of all clients that have sent shares. ``keys``:
    client -> its public keys. ``least``: number of shares that reveal a secret. ProtocolError: too few shares of a
    secret, or shares that are not those of the secret.
    """
    total = total.copy()
    for client in graph:
        others = [other for other in graph[client] if other in alive]
        if client not in alive and not others:
            continue
        if len(shares.get(client, ())) < least:
            count = f"{len(shares.get(client, ()))} of {least} shares of client {client}"
            raise ProtocolError(f"{count}: more neighbours are lost than secure-dropouts allows")
        seed = combine_shares(list(shares[client][:least]))
        if client in alive:
            total -= stream(seed, b"own", len(total))
            continue
        if _private(seed).public_key().public_bytes_raw() != keys[client][KEY:]:
            raise ProtocolError(f"the shares of client {client} are not those of its key")
        for other in others:
            total += pair_mask(client, other, seed, keys[other][KEY:], len(total))
    return total
