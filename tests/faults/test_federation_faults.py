"""What befalls a real federation, and what becomes of its run: two nodes, TLS, node keys (docs/results/faults.md)."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import NAME, Deployed, back, deployed, ended, pairs, so_far, wait_for, why
from helpers import fedsub, free_port, rounds

from fedsub_app.deployment.keys import make_keys

KEYS = {"robust": "on", "fedpews.warmup-rounds": 2, "train-per-class": 40, "round-timeout": 200, "evaluate": "global"}
AWAY = ("no reply within round-timeout", "its node is away", "node failed: Error: Node Unavailable")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """One SuperLink and two SuperNodes with TLS and node keys."""
    with deployed(tmp_path_factory.mktemp("two"), "--nodes", "2") as found:
        yield found


def begin(here: Deployed, folder: Path, **keys: object) -> "subprocess.Popen[str]":
    return here.run("fedpews/digits", *pairs(KEYS | {"run-dir": folder} | keys))


def in_use(folder: Path) -> bool:
    """Whether a process runs this directory."""
    with (folder / ".lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def signalled(here: Deployed, number: int, *names: str) -> None:
    for name in names:
        os.killpg(here.pid(name), number)


def supernode(here: Deployed, home: Path, *trust: str, behind: float = 0.0) -> tuple[int | None, str]:
    """Start a SuperNode against the federation; returns its exit code, ``None``: it got in, and was ended, and its log.

    ``behind``: seconds that its clock is behind, as Flower signs its requests with it.
    """
    clock = (
        "import sys; from datetime import timedelta; from flwr.supernode import node_auth_http_interceptor as m; "
        f"now = m.now; m.now = lambda: now() - timedelta(seconds={behind}); "
        "from flwr.supernode.cli import flower_supernode; flower_supernode()"
    )
    place = ["--node-config=partition-id=0 num-partitions=2", "--isolation=process", f"--port={free_port()}"]
    address = [f"--superlink=127.0.0.1:{here.now.port}", "--max-wait-time=10"]
    log = home / "supernode.log"
    home.mkdir(exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, "-c", clock, *trust, *address, *place]
        variables = here.variables | {"FLWR_HOME": str(home)}
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(lambda: process.poll() is not None or ("Starting Flower" in log.read_text() and online(here) > 2), 60)
        return process.poll(), log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def said(log: str) -> list[str]:
    """The lines of a SuperNode's log that say why it has ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "Exit Code" in line or "terminated" in line), 0)
    return lines[first : first + 3]


def online(here: Deployed) -> int:
    """How many SuperNodes Flower lists as online."""
    return sum(node["status"] == "online" for node in here.flwr("supernode", "list", NAME)["nodes"])


def test_who_does_not_get_in(here: Deployed, tmp_path: Path) -> None:
    """A third node, in real processes: without a registered key, with another authority, plaintext, by the clock."""
    make_keys(tmp_path, nodes=1)
    ca, key = here.folder / "keys/ca.crt", f"--auth-supernode-private-key={tmp_path / 'node-0'}"
    ours, theirs = f"--root-certificates={ca}", f"--root-certificates={tmp_path / 'ca.crt'}"
    found = {
        "unregistered key": supernode(here, tmp_path / "a", ours, key),
        "no key": supernode(here, tmp_path / "b", ours),
        "another authority": supernode(here, tmp_path / "c", theirs, key),
        "plaintext": supernode(here, tmp_path / "d", "--insecure"),
    }
    here.flwr("supernode", "register", str(tmp_path / "node-0.pub"), NAME)
    for behind in (-60.0, 400.0, 120.0):
        found[f"clock {behind:g} s behind"] = supernode(here, tmp_path / f"{behind}", ours, key, behind=behind)
    for what, (code, log) in found.items():
        print(f"{what}: exit code {code}: {' / '.join(said(log))[:300]}")
    *refused, accepted = found.values()
    assert all(code is not None for code, _ in refused)
    assert all("Exit Code: 305" in log for _, log in refused[:4])
    assert accepted[0] is None


def test_a_frozen_and_a_killed_node_lose_their_rounds_and_nothing_else(here: Deployed, tmp_path: Path) -> None:
    """Frozen: too slow for the round, then cut off, then back. Killed: back with its key and its clients' state."""
    folder = tmp_path / "run"
    process = begin(here, folder, **{"num-rounds": 500})
    node = ("node-1", "node-1-superexec")
    try:
        wait_for(lambda: len(so_far(folder)) >= 2, 900)
        start = time.monotonic()
        signalled(here, signal.SIGSTOP, *node)
        wait_for(lambda: why(so_far(folder)[-1], 1).startswith(AWAY[1:]))
        frozen = time.monotonic() - start
        signalled(here, signal.SIGCONT, *node)
        lost, seconds = back(folder, 1)
        print(f"frozen for {frozen:.0f} s: {lost} rounds of its client, back after {seconds:.0f} s")

        start = time.monotonic()
        signalled(here, signal.SIGKILL, *node)
        here.up()
        up = time.monotonic() - start
        again, seconds = back(folder, 1, lost)
        print(f"killed: up again after {up:.0f} s, {again} rounds, back {seconds:.0f} s later")
    finally:
        process.send_signal(signal.SIGINT)
        done = ended(process)
    lines = so_far(folder)
    print(f"Ctrl-C: exit code {done.returncode}, {done.stderr.strip()[-200:]!r}; {len(lines)} rounds")
    assert done.returncode == 130, done.stderr
    assert f"fedsub run --resume {folder}" in done.stderr
    assert [line["status"] for line in lines] == ["ok"] * len(lines), "the other client's rounds count"
    assert all(why(line, 0) == "" for line in lines)
    assert all(why(line, 1).startswith(AWAY) for line in lines if why(line, 1))
    assert all(line["partial"] == "1 of 2 replies" for line in lines if why(line, 1))
    assert not any("lost-state" in line for line in lines)


def test_a_killed_superlink_costs_the_rounds_after_the_last_checkpoint(here: Deployed, tmp_path: Path) -> None:
    """It is started again, the run is resumed, and ends as if nothing had happened."""
    folder, keys = tmp_path / "run", {"num-rounds": 4}
    process = begin(here, folder, **keys)
    wait_for(lambda: len(so_far(folder)) >= 2, 900)
    here.kill("superlink")
    start = time.monotonic()
    done = ended(process)
    told = time.monotonic() - start
    here.up()
    up = time.monotonic() - start
    before = len(so_far(folder))
    wait_for(lambda: not in_use(folder), 900)  # the server's process tries to reach the SuperLink again for a while
    again = ended(here.run("--resume", folder), 900)
    print(
        f"SuperLink killed: exit {done.returncode} after {told:.0f} s, {done.stderr.strip()[-300:]!r}; up {up:.0f} s;"
    )
    print(f"{before} rounds were done; resumed: exit {again.returncode}, in {time.monotonic() - start:.0f} s in all")
    assert done.returncode == 1
    assert again.returncode == 0, again.stdout + again.stderr + here.logs()
    local = fedsub(tmp_path, "run", "fedpews/digits", *pairs(KEYS | keys | {"run-dir": tmp_path / "local"}))
    assert local.code == 0, local.err
    assert rounds(folder) == rounds(tmp_path / "local")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()


def test_two_runs_at_once_do_not_touch_each_other(here: Deployed, tmp_path: Path) -> None:
    keys = {"num-rounds": 2}
    both = [begin(here, tmp_path / str(seed), seed=seed, **keys) for seed in (1, 2)]
    for process in both:
        done = ended(process, 500)
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()
    for seed in (1, 2):
        own = pairs(KEYS | keys | {"seed": seed, "run-dir": tmp_path / f"local-{seed}"})
        local = fedsub(tmp_path, "run", "fedpews/digits", *own)
        assert local.code == 0, local.err
        assert rounds(tmp_path / str(seed)) == rounds(tmp_path / f"local-{seed}")
