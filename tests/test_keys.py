"""The certificates and keys that ``fedsub federation keys`` makes do what they are for: real handshakes, in memory."""

import shutil
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from fedsub_app.common.errors import UserError
from fedsub_app.deployment import keys as module
from fedsub_app.deployment.keys import make_keys


def handshake(server: Path, client: Path, host: str, user: Path | None = None) -> None:
    """Connect, with the server's certificate of one folder and the authority of another. Raises where it is refused.

    ``user``: the certificate of a client of whom the server asks for one of its users'.
    """
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server / "server.pem", server / "server.key")
    theirs = ssl.create_default_context(cafile=client / "ca.crt")
    if user:
        ours.load_verify_locations(server / "users.pem")
        ours.verify_mode = ssl.CERT_REQUIRED
        theirs.load_cert_chain(user, user.with_suffix(".key"))
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [theirs.wrap_bio(down, up, server_hostname=host), ours.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ["a.example.org", "10.0.0.7", "::1"], 2)
    return folder


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "a.example.org", "10.0.0.7", "::1"])
def test_its_hosts_are_trusted(host: str, made: Path) -> None:
    handshake(made, made, host)


def test_others_are_not(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, another authority, a certificate that has ended; then a new one is made."""
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(made, made, "b.example.org")
    make_keys(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        handshake(made, tmp_path, "localhost")

    class Then(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) - timedelta(days=400)

    old = tmp_path / "old"
    monkeypatch.setattr(module, "datetime", Then)
    make_keys(old)
    monkeypatch.undo()
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        handshake(old, old, "localhost")
    assert [path.name for path in make_keys(old)] == ["server.key", "server.pem"]
    handshake(old, old, "localhost")


def test_a_user_is_one_whose_certificate_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is deleted or has ended. Another folder's user, and the server's own certificate, are refused."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        make_keys(folder, users=["ann", "bob"])
    for name in ("ann", "bob"):
        handshake(ours, ours, "localhost", ours / f"user-{name}.pem")
    for stranger in (theirs / "user-ann.pem", theirs / "server.pem", ours / "server.pem"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(ours, ours, "localhost", stranger)
    assert stat.S_IMODE((ours / "user-ann.key").stat().st_mode) == 0o600

    (ours / "user-bob.pem").rename(tmp_path / "user-bob.pem")
    (ours / "user-bob.key").rename(tmp_path / "user-bob.key")
    assert make_keys(ours, users=["ann"]) == [ours / "users.pem"]
    handshake(ours, ours, "localhost", ours / "user-ann.pem")
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        handshake(ours, ours, "localhost", tmp_path / "user-bob.pem")

    class Then(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) - timedelta(days=3)

    monkeypatch.setattr(module, "datetime", Then)
    make_keys(ours, days=1, users=["eve"])
    monkeypatch.undo()
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        handshake(ours, ours, "localhost", ours / "user-eve.pem")
    assert [path.name for path in make_keys(ours, users=["eve"])] == ["user-eve.key", "user-eve.pem", "users.pem"]
    handshake(ours, ours, "localhost", ours / "user-eve.pem")


@pytest.mark.parametrize("name", ["", "../ann", "CN=ann", "a" * 61])
def test_a_users_name_is_a_word(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--user '.*': must be up to 60 letters, digits, _ and -"):
        make_keys(tmp_path, users=[name])
    assert not list(tmp_path.iterdir())


def test_node_keys_are_what_flower_takes(made: Path) -> None:
    """OpenSSH form, a curve that Flower registers; each another one; private ones readable by their owner alone."""
    public = []
    for number in range(2):
        key = load_ssh_private_key((made / f"node-{number}").read_bytes(), None)
        public.append(public_key_to_bytes(key.public_key()))  # type: ignore[arg-type]
        told = load_ssh_public_key((made / f"node-{number}.pub").read_bytes())
        assert uses_nist_ec_curve(told)  # type: ignore[arg-type]
        assert public_key_to_bytes(told) == public[-1]  # type: ignore[arg-type]
    assert public[0] != public[1]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert {name for name, mode in modes.items() if mode != 0o600} == {
        "ca.crt",
        "users.pem",
        "server.pem",
        "node-0.pub",
        "node-1.pub",
    }


def test_what_is_there_stays(made: Path) -> None:
    """A second call adds nodes and hosts; the authority and the others' keys stay."""
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert make_keys(made, ["a.example.org"], 2) == []
    written = {path.name for path in make_keys(made, ["b.example.org"], 3)}
    assert written == {"server.key", "server.pem", "node-2", "node-2.pub", "node-2.secret"}
    handshake(made, made, "b.example.org")
    handshake(made, made, "a.example.org")  # whose name the first call gave
    after = {path.name: path.read_bytes() for path in made.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.key", "server.pem"}


def test_a_pair_of_which_half_was_written_is_completed(tmp_path: Path) -> None:
    """As by a process that was killed in between: the private key, which a SuperLink may know, stays."""
    make_keys(tmp_path, nodes=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "node-0.pub").unlink()
    assert make_keys(tmp_path, nodes=1) == [tmp_path / "node-0.pub"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "server.key").unlink()
    assert {path.name for path in make_keys(tmp_path, nodes=1)} == {"server.key", "server.pem"}
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(UserError, match=r"ca.crt: not there, but it signed server.pem; put it back or delete both$"):
        make_keys(tmp_path, nodes=1)
    assert (tmp_path / "ca.key").read_bytes() == before["ca.key"]


def test_without_the_authoritys_key_nothing_is_signed(tmp_path: Path) -> None:
    """It may lie elsewhere: only a new certificate needs it."""
    make_keys(tmp_path)
    (tmp_path / "ca.key").unlink()
    assert len(make_keys(tmp_path, nodes=1)) == 3
    with pytest.raises(UserError, match=r"ca.key: not there, or no EC key; it has to sign the server's certificate"):
        make_keys(tmp_path, ["a.example.org"])
    (tmp_path / "server.pem").write_text("no certificate")
    with pytest.raises(UserError, match=r"server.pem: cannot be read as a key or certificate \("):
        make_keys(tmp_path)
    make_keys(tmp_path / "hostless")
    shutil.copy(tmp_path / "hostless" / "ca.crt", tmp_path / "hostless" / "server.pem")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ca.crt").write_text("no certificate")
    for folder, name in (("hostless", "server.pem"), ("damaged", "ca.crt")):
        with pytest.raises(UserError, match=rf"{folder}/{name}: cannot be read as a key or certificate \("):
            make_keys(tmp_path / folder)


def test_days(tmp_path: Path) -> None:
    from cryptography import x509

    make_keys(tmp_path, days=2)
    found = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    assert timedelta(days=1, hours=23) < found.not_valid_after_utc - datetime.now(UTC) < timedelta(days=2)
