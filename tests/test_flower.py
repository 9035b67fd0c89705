"""The connections that `fedsub setup` writes, and what a simulation is told of this machine."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.cli.flower_config import parse_superlink_connection

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import flatten
from fedsub_app.deployment import flower

OLD = """[superlink]
default = "mine"

[superlink.mine]
address = "127.0.0.1:8000"
insecure = true

[superlink.local-simulation]
address = ":local:"
options.num-supernodes = {nodes}
options.backend.client-resources.num-cpus = 1
{more}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty FLWR_HOME of a machine with these cores and GPUs."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(flower.sysconfig, "get_path", lambda _: str(tmp_path))

    def of(cores: int, gpus: int = 0) -> Path:
        monkeypatch.setattr(flower, "cores", lambda: cores)
        monkeypatch.setattr(flower.os, "cpu_count", lambda: 16)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return tmp_path / "config.toml"

    return of


def connections(config: Path) -> Any:
    """The file's connections, as Flower itself reads them."""
    found = tomllib.loads(config.read_text())["superlink"]
    for name, table in found.items():
        if isinstance(table, dict):
            parse_superlink_connection(table, name)
    return found


@pytest.mark.parametrize(
    ("cores", "gpus", "share"), [(3, 2, 0.5), (16, 1, 0.0625), (4, 8, 2), (2, 0, 0), (7, 1, 0.1428), (2, 2, 1)]
)
def test_every_worker_finds_a_gpu(cores: int, gpus: int, share: float) -> None:
    assert flower.gpu_share(cores, gpus) == share
    if gpus:
        assert gpus // share >= cores if share >= 1 else gpus * int(1 / share) >= cores


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "gpus"), [(3, 2), (7, 1)])
def test_ray_places_them_all(cores: int, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that Ray is told of: it counts them and does not look."""
    import ray

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    ray.init(num_cpus=cores, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote(num_cpus=1, num_gpus=flower.gpu_share(cores, gpus))
        class Worker:
            def gpu(self) -> list[int]:
                return [int(number) for number in ray.get_gpu_ids()]

        workers = [Worker.remote() for _ in range(cores)]
        found = ray.get([worker.gpu.remote() for worker in workers], timeout=60)
    finally:
        ray.shutdown()
    assert all(len(own) == 1 for own in found)
    assert {number for own in found for number in own} == set(range(gpus))


def options(config: Path, name: str = "local-simulation") -> Any:
    return flatten(connections(config)[name], deep=True)


def test_a_new_connection_says_what_each_node_may_use(machine: Any) -> None:
    config = machine(3, 2)
    assert any("connection local-simulation added" in line for line in flower.setup(cluster=12))
    assert options(config) == {
        "address": ":local:",
        "options.num-supernodes": 3,
        "options.backend.client-resources.num-cpus": 1,
        "options.backend.init-args.num-cpus": 3,
        "options.backend.client-resources.num-gpus": 0.5,
    }
    assert options(config, "ray-cluster") == {
        "address": ":local:",
        "options.num-supernodes": 12,
        "options.backend.client-resources.num-cpus": 1,
    }
    assert flower.setup()[1:] == ["nothing to do"]


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        (3, ""),
        (3, "options.backend.init-args.num-cpus = 3"),
        (5, ""),  # a number that its user chose, or of before this machine's cores were changed
    ],
)
def test_an_old_connection_of_ours_is_brought_up_to_date(nodes: int, more: str, machine: Any) -> None:
    """It may lack its share of the GPUs, or have one that Ray cannot place."""
    config = machine(3, 2)
    config.write_text(OLD.format(nodes=nodes, more=more))
    said = flower.setup()
    assert any("local-simulation brought up to date" in line for line in said)
    assert options(config)["options.num-supernodes"] == nodes
    assert options(config)["options.backend.client-resources.num-gpus"] == flower.gpu_share(nodes, 2)
    assert connections(config)["mine"] == {"address": "127.0.0.1:8000", "insecure": True}
    assert flower.setup()[1:] == ["nothing to do"]


@pytest.mark.parametrize(
    "more",
    [
        "options.backend.client-resources.num-gpus = 0.25",
        "options.backend.init-args.num-cpus = 2",
        "options.verbose = true",
        'federation = "@none/default"',
    ],
)
def test_what_a_user_has_set_in_a_connection_stays(more: str, machine: Any) -> None:
    config = machine(3, 2)
    config.write_text(OLD.format(nodes=3, more=more))
    before = options(config)
    flower.setup()
    assert before.items() <= options(config).items()
    assert "options.backend.client-resources.num-gpus" in options(config)


def test_a_connection_to_another_superlink_is_left_alone(machine: Any) -> None:
    config = machine(3, 2)
    config.write_text('[superlink.local-simulation]\naddress = "127.0.0.1:9093"\n')
    before = config.read_bytes()
    flower.setup()
    assert config.read_bytes() == before


def test_a_connection_of_nested_tables_is_replaced_as_a_whole(machine: Any) -> None:
    """And nothing else, not one whose name begins alike."""
    config = machine(3, 2)
    rest = '# my own\n[superlink.local-simulation-2]\naddress = ":local:"\n'
    config.write_text(
        '[superlink]\ndefault = "local-simulation"\n\n'
        '[superlink.local-simulation]  # by hand\naddress = ":local:"\n\n'
        "[superlink.local-simulation.options]\n# all cores\nnum-supernodes = 3\n\n"
        "[superlink.local-simulation.options.backend]\nclient-resources.num-cpus = 1\n\n" + rest
    )
    assert any("local-simulation brought up to date" in line for line in flower.setup())
    assert options(config)["options.backend.client-resources.num-gpus"] == 0.5
    assert connections(config)["local-simulation-2"] == {"address": ":local:"}
    assert connections(config)["default"] == "local-simulation"
    before = options(config)
    flower.connect("mine", {"address": "127.0.0.1:8000", "insecure": True})
    assert connections(config)["mine"] == {"address": "127.0.0.1:8000", "insecure": True}
    flower.connect("mine", {})
    assert "mine" not in connections(config)
    assert options(config) == before


def test_an_installed_package_names_no_checkout(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2)
    monkeypatch.setattr(flower, "is_checkout", lambda: False)
    assert flower.setup()[0] == f"environment {sys.prefix}"


def test_an_environment_belongs_to_one_checkout(machine: Any, tmp_path: Path) -> None:
    """Setup says into which it writes; the defaults of another checkout, if that is still there, stay."""
    machine(2)
    first, *lines = flower.setup()
    assert first == f"environment {sys.prefix}, checkout {flower.PROJECT}"
    hook = tmp_path / "fedsub_environment.pth"
    assert any(line.startswith(f"{hook}: has defaults of {flower.HTTP_PORT}") for line in lines)
    other = tmp_path / "other"
    hook.write_text(hook.read_text().replace(str(flower.PROJECT), str(other)))
    assert any("replaces its earlier defaults" in line for line in flower.setup())  # a checkout that was deleted
    other.mkdir()
    (other / "pyproject.toml").touch()
    hook.write_text(before := hook.read_text().replace(str(flower.PROJECT), str(other)))
    with pytest.raises(UserError, match=f"the environment of the checkout {other}; delete {hook}"):
        flower.setup()
    assert hook.read_text() == before


def test_each_environment_and_user_has_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for prefix, user in (("/a", 1000), ("/b", 1000), ("/a", 1001)):
        monkeypatch.setattr(sys, "prefix", prefix)
        monkeypatch.setattr(flower.os, "getuid", lambda user=user: user)
        variables = flower.environment()
        http, control = int(variables[flower.HTTP_PORT]), int(variables[flower.CONTROL_PORT])
        assert 20_000 <= http < control < 32_768
        ports |= {http, control}
    assert len(ports) == 6


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("local-simulation", "setup"), ("ray-cluster", "setup --cluster N"), ("ours", "federation up --name ours")],
)
def test_a_home_without_the_connection_names_the_remedy(name: str, remedy: str, machine: Any) -> None:
    """Flower's own message, cut to a line, told neither the remedy nor the whole path of its file."""
    config = re.escape(str(machine(2)))
    with pytest.raises(UserError, match=f"^--engine {name}: not in {config}; `fedsub {remedy}` adds the connection$"):
        flower.run(name, {"experiment": "quickstart/digits"})


@pytest.mark.parametrize(
    ("uid", "program", "refused"), [("", "", False), ("54321", "", True), ("", "/other/.venv/bin", True)]
)
def test_a_superlink_of_others_is_refused(
    uid: str, program: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by ``fedsub stop``, which leaves it running; ps cuts the names of users after eight letters."""
    monkeypatch.setenv(flower.HTTP_PORT, "20100")
    folder = program or f"{sys.prefix}/bin"
    link = f"{folder}/python {folder}/flower-superlink --insecure --simulation --port 20100 --database x"
    found = f"   12 1 someone /usr/bin/other\n  345 {uid or flower.os.getuid()} researc+ {link}\n"
    listed = subprocess.CompletedProcess([], 0, found, "")
    monkeypatch.setattr(flower.subprocess, "run", lambda *_, **__: listed)
    stopped: list[Any] = []
    monkeypatch.setattr(flower.processes, "stop", lambda named: stopped.append(named["superlink"]))
    if refused:
        with pytest.raises(
            UserError, match=f"the SuperLink on port 20100 is of user researc.: .*; set {flower.HTTP_PORT} and "
        ):
            flower.stop()
        assert not stopped
    else:
        assert flower.stop() == "stopped the SuperLink, process 345, and what it had started"
        assert stopped == [flower.processes.Process([link], 345)]


def test_warnings_that_do_not_concern_the_user_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["round 1/2", "x.py:1: FutureWarning: Tip: In future versions of Ray, …", "  warnings.warn(", "round 2/2"]
    flower._stream([sys.executable, "-c", f"print(*{lines}, sep='\\n')"], {})
    assert capfd.readouterr().out == "round 1/2\nround 2/2\n"


@pytest.mark.parametrize("status", ["finished:failed", "finished:stopped"])
def test_a_run_that_failed_before_its_first_checkpoint_is_not_resumed(status: str, tmp_path: Path) -> None:
    """Its settings may be what was refused."""
    (tmp_path / "settings.json").touch()
    said = [flower._ended("mine", "7", status, {"run-dir": str(tmp_path)})]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "round-000001.safetensors").touch()
    said.append(flower._ended("mine", "7", status, {"run-dir": str(tmp_path)}))
    assert ["--resume" in line for line in said] == [status != "finished:failed", True]
