"""A real federation on this machine, as ``fedsub federation`` starts it: each process its own home and client state."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import Deployed, deployed, ended, left, pairs, so_far, wait_for
from filelock import FileLock
from helpers import fedsub, free_port, rounds

from fedsub_app.common.files import write_json
from fedsub_app.deployment import federation
from fedsub_app.deployment.federation import STATE

DIGITS = [
    "fedpews/digits",
    *pairs({"num-rounds": 3, "fedpews.warmup-rounds": 2, "train-per-class": 40, "robust": "on"}),
]


@pytest.mark.slow
def test_a_deployment_is_the_local_engine(tmp_path: Path) -> None:
    """Same metrics round by round, without TLS; mask scores stay on the nodes."""
    local = fedsub(tmp_path, "run", *DIGITS, *pairs({"run-dir": tmp_path / "local"}))
    assert local.code == 0, local.err
    with deployed(tmp_path, "--nodes", "2", "--insecure") as here:
        done = ended(here.run(*DIGITS, *pairs({"run-dir": tmp_path / "run"})))
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()
    same(tmp_path / "run", tmp_path / "local")
    assert not (tmp_path / "run" / "clients").exists()
    for number in range(2):
        run_id = json.loads((tmp_path / "run" / "settings.json").read_text())["run-id"]
        states = here.folder / f"node-{number}" / "state" / run_id
        assert [path.name for path in states.iterdir() if path.is_dir()] == [f"client-{number:06d}"]


SECURE: dict[str, object] = {
    "method": "fedselect", "num-clients": 7, "num-rounds": 2, "train-per-class": 20, "momentum": 0.0,
    "min-contributors": 2, "secure-aggregation": True, "eval-every": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_secure_aggregation_on_two_nodes(tmp_path: Path) -> None:
    """Secret masks, clients 1, 3 and 5 on node 1: interrupted and resumed, then with node 1 killed in the protocol.

    The resumed run is the local engine's, bit for bit. Of six neighbours five have to be there until the end: the
    round in which the node is killed is abandoned with its sum closed, the next one goes on with the other four.
    """
    local = fedsub(tmp_path, "run", *pairs(SECURE | {"run-dir": tmp_path / "local"}))
    assert local.code == 0, local.err
    with deployed(tmp_path, "--nodes", "2", "--insecure") as here:
        run = here.run(*pairs(SECURE | {"run-dir": tmp_path / "run"}))
        wait_for(lambda: so_far(tmp_path / "run"), 900)
        run.send_signal(signal.SIGINT)
        assert ended(run).returncode == 130
        done = ended(here.run("--resume", tmp_path / "run"), 900)
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()

        run = here.run(*pairs(SECURE | {"run-dir": tmp_path / "killed"}))
        wait_for(lambda: (tmp_path / "killed" / "settings.json").exists())
        secret = secure_folder(here, 1, tmp_path / "killed") / "round-000001" / "client-000001.json"
        wait_for(lambda: has_shared(secret), 900)
        for name in ("node-1", "node-1-superexec"):
            here.kill(name)
        done = ended(run, 900)
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()
    same(tmp_path / "run", tmp_path / "local")
    for number in range(2):
        files = [path.name for path in secure_folder(here, number, tmp_path / "run").rglob("*") if path.is_file()]
        assert sorted(files) == [f"client-{client:06d}.opened" for client in range(number, 7, 2)]
    first, second = so_far(tmp_path / "killed")
    assert first["status"] == "abandoned"
    assert first["abandoned"].endswith("lost than secure-dropouts allows")
    for path in secure_folder(here, 0, tmp_path / "killed").glob("*.opened"):
        assert "round-000001/secure/sum" not in path.read_text()
    assert second["status"] == "ok"
    assert [drop["client"] for drop in second["dropped"]] == [1, 3, 5]


def has_shared(path: Path) -> bool:
    """Say whether a client has answered with the shares of its secrets; its file is away while it answers."""
    try:
        return '"step": 1' in (text := path.read_text()) or '"step": 2' in text
    except FileNotFoundError:
        return False


def secure_folder(here: Deployed, node: int, run: Path) -> Path:
    """Return the folder in which a node keeps its clients' secrets of a run."""
    run_id = json.loads((run / "settings.json").read_text())["run-id"]
    return here.folder / f"node-{node}" / "state" / run_id / "secure"


def same(ours: Path, theirs: Path) -> None:
    """Two runs have the same metrics and the same model, bit for bit."""
    assert rounds(ours) == rounds(theirs)
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (ours, theirs))
    assert one["final-global-accuracy"] == other["final-global-accuracy"]
    assert one["status"] == other["status"] == "completed"
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """One SuperLink and four SuperNodes with TLS and node keys."""
    with deployed(tmp_path_factory.mktemp("four"), "--nodes", "4") as here:
        yield here


MNIST = {"dataset": "mnist", "num-clients": 4, "num-rounds": 3, "train-per-class": 60, "test-per-class": 20, "lr": 0.05}
MNIST |= {"robust": "on"}  # as it is by default on real nodes


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"method": "fedpews", "fedpews.warmup-rounds": 2, "evaluate": "global,global-local"},
        {"method": "fedper", "evaluate": "global,personal", "eval-every": 3},
    ],
    ids=lambda keys: keys["method"],
)
def test_four_nodes_with_keys_are_the_local_engine(method: dict[str, object], four: Deployed, tmp_path: Path) -> None:
    """MNIST's images, over TLS: same seed, same metrics and the same model as in one process."""
    if "FEDSUB_DATA" not in os.environ:
        pytest.skip("no MNIST: FEDSUB_DATA is not set")
    keys = pairs(MNIST | method)
    local = fedsub(tmp_path, "run", *keys, *pairs({"run-dir": tmp_path / "local"}))
    assert local.code == 0, local.err
    done = ended(four.run(*keys, *pairs({"run-dir": tmp_path / "run"})), 600)
    assert done.returncode == 0, done.stdout + done.stderr + four.logs()
    same(tmp_path / "run", tmp_path / "local")


@pytest.mark.slow
def test_what_ended_is_started_again_and_nothing_is_left(tmp_path: Path) -> None:
    """``status`` says what runs, ``up`` starts what does not, ``down`` ends all of it, also what lost its parent."""
    with deployed(tmp_path, "--nodes", "1") as here:
        before = here.now.processes
        assert here.federation("status").returncode == 0
        here.kill("superlink-superexec")
        said = here.federation("status")
        assert said.returncode == 1
        assert "superlink-superexec  has ended" in said.stdout
        refused = here.federation("up", "--nodes", "3")
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: --nodes 3: the federation that runs in {here.folder} has 1; ")
        here.up()
        after = here.now.processes
        assert {name for name in after if after[name].pid != before[name].pid} == {"superlink-superexec"}
        wait_for(lambda: len(left(here.folder)) == len(after), 20)  # a process that is being started may be seen twice
    assert here.federation("status").returncode == 1
    assert "[superlink.test]" not in (tmp_path / "user" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--nodes", "-1"], "Invalid value for '--nodes': -1 is not in the range 0<=x<=1000."),
        (["up", "--nodes", "3", "--partitions", "2"], "--partitions 2: at least the 3 of --nodes"),
        (
            ["up", "--nodes", "0"],
            "--nodes 0: only with --host, under which nodes of other machines reach the SuperLink",
        ),
        (["up", "--name", "a b"], "--name 'a b': must be letters, digits, _ and -, and neither 'default' nor 'local'"),
        (["up", "--name", "theirs"], "--name theirs: Flower's config.toml has such a connection, to another SuperLink"),
        (["up", "--port", "70000"], "Invalid value for '--port': 70000 is not in the range 1<=x<=65535."),
        (["up", "--host", "a/b"], "--host 'a/b': must be a name or an IP address"),
        (["down"], "DIR/federation.json: not there; `fedsub federation up --dir DIR` starts a federation"),
        (["status"], "DIR/federation.json: not there; `fedsub federation up --dir DIR` starts a federation"),
    ],
    ids=" ".join,
)
def test_a_wrong_federation_is_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capfd) -> None:
    """And nothing is started."""
    from fedsub_app.cli.main import main

    (tmp_path / "config.toml").write_text('[superlink.theirs]\naddress = "a.example.org:8000"\n')
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    folder = tmp_path / "federation"
    assert main(["federation", *arguments, "--dir", str(folder)]) == 2
    assert capfd.readouterr().err == f"error: {said.replace('DIR', str(folder))}\n"
    assert not (folder / STATE).exists()


def test_each_node_has_a_port_of_its_own(tmp_path: Path, monkeypatch) -> None:
    """Those of the last time are drawn again, too: others may listen there by now."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    drawn = iter([7, 7, 8, 7, 9, 10])
    monkeypatch.setattr(federation, "free_port", lambda: next(drawn))
    monkeypatch.setattr(federation, "answers", lambda _: False)
    before = federation.Federation(nodes=3, partitions=3, port=7, node_ports=[11, 11, 11])
    found = federation._configured(tmp_path, before, False, {})
    assert (found.port, sorted(found.node_ports)) == (7, [8, 9, 10])


def test_the_status_of_a_federation_that_does_not_answer(tmp_path: Path, monkeypatch, capsys) -> None:
    """The SuperLink hangs, or another Flower home has its connection: the processes are listed nevertheless."""
    from fedsub_app.cli.main import main

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(federation, "running", lambda _: {"superlink": {7: 2048}})
    write_json(tmp_path / STATE, {"nodes": 0, "processes": {"superlink": {"command": ["flower-superlink"], "pid": 7}}})
    assert main(["federation", "status", "--dir", str(tmp_path)]) == 1
    _, superlink, nodes = capsys.readouterr().out.splitlines()
    assert superlink == "  superlink  process 7, 2 MiB"
    assert nodes.startswith("nodes: flwr supernode: ")


@pytest.mark.parametrize("what", ["up", "down"])
def test_one_command_at_a_time_starts_and_ends_a_federation(what: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Two at once started each node twice, and the later ``down`` knew of one of them."""
    from fedsub_app.cli.main import main

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    write_json(tmp_path / STATE, {"processes": {}})
    with FileLock(tmp_path / ".lock"):
        assert main(["federation", what, "--dir", str(tmp_path)]) == 2
    said = f"error: {tmp_path}: another `fedsub federation up` or `down` is at work there\n"
    assert capsys.readouterr().err == said


def test_a_node_with_a_new_key_is_registered_again(tmp_path: Path, monkeypatch) -> None:
    """The SuperLink knows the key that was lost; it would refuse the new one until ``up`` gives up."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(federation.Starting, "all", lambda self: None)
    folder = tmp_path / "federation"
    federation.up(folder, nodes=2)
    write_json(folder / STATE, {"nodes": 2, "partitions": 2, "registered": [0, 1], "processes": {}})
    (folder / "superlink.db").touch()
    assert federation.up(folder).registered == [0, 1]
    (folder / "keys/node-1").unlink()
    assert federation.up(folder).registered == [0]


def test_a_process_id_that_others_have_now_is_left_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """``down`` after a reboot: the number is in use, by another program."""
    from fedsub_app.cli.main import main

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        processes = {"superlink": {"command": ["flower-superlink", "--insecure"], "pid": other.pid}}
        write_json(tmp_path / STATE, {"name": "federation", "port": free_port(), "processes": processes})
        assert main(["federation", "down", "--dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out == "ended: nothing ran\n"
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
