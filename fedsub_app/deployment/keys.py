"""Credentials of a federation's machines: certificates for TLS, a key pair a node, SuperExecs' secrets.

================================  =============================================================================
ca.crt                            certificate of the federation's own authority; everybody has it
ca.key                            its private key, which signs the server's certificate; belongs off the machines
server.pem, server.key            the SuperLink's certificate and private key
superlink.secret, node-0.secret   shared by SuperLink or SuperNode with the SuperExec that works for it
node-0, node-0.pub                a SuperNode's key pair (OpenSSH, P-384); the SuperLink knows the public one
user-ann.pem, user-ann.key        certificate and private key of a user, who may start runs through the door
users.pem                         ca.crt and the certificates of all users, which the door trusts
================================  =============================================================================
"""

import os
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsub_app.common.errors import UserError

T = TypeVar("T")
Pair = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]  # a key and its certificate
CA_DAYS = 3650
SKEW = timedelta(days=1)  # certificates are valid that long before they are made, for machines whose clock is behind
OTHER_USES = (  # of a key than to sign certificates
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("encipher_only", "decipher_only"),
)
THIS_MACHINE = ("localhost", "127.0.0.1")


def make_keys(
    folder: Path, hosts: Sequence[str] = (), nodes: int = 0, days: int = 365, users: Sequence[str] = ()
) -> list[Path]:
    """Write missing certificates and keys into ``folder``; returns the files that were written.

    The server's certificate is replaced if it has expired or lacks a host, and keeps its other hosts. A user's is
    replaced if it has expired; keys of nodes and of the authority never are. A user whose certificate was deleted is
    none any more.

    ``hosts``: names and IP addresses under which nodes reach the SuperLink, besides those of this machine. ``nodes``:
    how many node keys there have to be. ``days``: for which a new certificate is valid, at least 1. ``users``: names of
    users, of letters, digits, _ and -.

    :class:`UserError`: a host is neither a name nor an address, a user's name is none, or the authority's key is needed
    and not there.
    """
    for user in users:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", user):
            raise UserError(f"--user {user!r}: must be up to 60 letters, digits, _ and -")
    named = list(dict.fromkeys([*THIS_MACHINE, *hosts]))
    every = dict.fromkeys([*map(general_name, named), *_hosts(folder / "server.pem")])
    names = x509.SubjectAlternativeName(every)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []

    def write(name: str, content: bytes, private: bool = True) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
            file.write(content)
        written.append(path)

    def write_pair(pair: Pair, key_name: str, name: str) -> None:
        write(key_name, pair[0].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        write(name, pair[1].public_bytes(Encoding.PEM), private=False)

    if not (folder / "ca.crt").exists():
        if (signed := folder / "server.pem").exists():
            raise UserError(f"{folder / 'ca.crt'}: not there, but it signed {signed.name}; put it back or delete both")
        uses = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(OTHER_USES, False))
        authority = _issued(f"fedsub federation {secrets.token_hex(4)}", CA_DAYS, uses, authority=True)
        write_pair(authority, "ca.key", "ca.crt")
    if not _serves(folder / "server.pem", names) or not (folder / "server.key").exists():
        write_pair(_server(folder, named[-1], names, days), "server.key", "server.pem")
    for owner in ["superlink", *(f"node-{number}" for number in range(nodes))]:
        if not (folder / f"{owner}.secret").exists():
            write(f"{owner}.secret", secrets.token_bytes(32))
    for number in range(nodes):
        name = f"node-{number}"
        new = not (folder / name).exists()
        if new:
            key = ec.generate_private_key(ec.SECP384R1())
            write(name, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        if new or not (folder / f"{name}.pub").exists():
            known = _read(folder / name, lambda text: load_ssh_private_key(text, None))
            assert known
            public = known.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            write(f"{name}.pub", public + b"\n", private=False)
    for user in users:
        if not _serves(folder / f"user-{user}.pem"):
            # Signed by the key itself: the door lists it, and forgets it when told to.
            pair = _issued(user, days, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))
            write_pair(pair, f"user-{user}.key", f"user-{user}.pem")
    trusted = [folder / "ca.crt", *sorted(folder.glob("user-*.pem"))]
    listed = b"".join(path.read_bytes() for path in trusted)
    if _read(folder / "users.pem", bytes) != listed:
        write("users.pem", listed, private=False)
    return written


def general_name(host: str) -> x509.GeneralName:
    """Return a host for a certificate; :class:`UserError` where it is neither a name nor an IP address."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        labels = host.split(".")
        if len(host) <= 253 and all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", x) for x in labels):
            return x509.DNSName(host)
    raise UserError(f"--host {host!r}: must be a name or an IP address") from None


def _server(folder: Path, host: str, names: x509.SubjectAlternativeName, days: int) -> Pair:
    authority = _read(folder / "ca.crt", x509.load_pem_x509_certificate)
    assert authority  # make_keys has made one
    signer = _read(folder / "ca.key", lambda text: load_pem_private_key(text, None))
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise UserError(f"{folder / 'ca.key'}: not there, or no EC key; it has to sign the server's certificate")
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return _issued(host[:64], days, use, names, by=(signer, authority.subject))


def _issued(
    name: str,
    days: int,
    *extensions: x509.ExtensionType,
    by: tuple[ec.EllipticCurvePrivateKey, x509.Name] | None = None,
    authority: bool = False,
) -> Pair:
    """Return a new key and its certificate, signed ``by`` a key of this name, or else by itself."""
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.now(UTC)
    subject, public = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key()
    signer, issuer = by or (key, subject)
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - SKEW).not_valid_after(now + timedelta(days=days))
    for extension in (
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
        *extensions,
    ):
        builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints | x509.KeyUsage))
    return key, builder.sign(signer, hashes.SHA384())


def _serves(path: Path, names: x509.SubjectAlternativeName | None = None) -> bool:
    """Say whether a certificate is there, has not ended and is of these hosts."""
    certificate = _read(path, x509.load_pem_x509_certificate)
    if certificate is None or certificate.not_valid_after_utc < datetime.now(UTC):
        return False
    return names is None or {*names} <= {*_hosts(path)}


def _hosts(path: Path) -> list[x509.GeneralName]:
    """Return the hosts that a server's certificate names; none where it is not there."""

    def named(text: bytes) -> list[x509.GeneralName]:
        extensions = x509.load_pem_x509_certificate(text).extensions
        return [*extensions.get_extension_for_class(x509.SubjectAlternativeName).value]

    return _read(path, named) or []


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return what a file holds; ``None`` where it is not there."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise UserError(f"{path}: cannot be read as a key or certificate ({error})") from None
