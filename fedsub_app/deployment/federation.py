"""A federation on this machine: one SuperLink, its SuperNodes, a SuperExec beside each; nothing of it needs Docker.

``DIR/federation.json`` says what was started; beside it lie ``keys/``, ``superlink.db`` (registered nodes, runs), every
process's log, and a folder for each process that holds its FLWR_HOME and, of a node, its clients' state.
"""

import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedsub_app.common.errors import UserError, printable
from fedsub_app.common.files import read_json, write_json
from fedsub_app.common.spelling import Value
from fedsub_app.deployment import commands, flower
from fedsub_app.deployment.keys import general_name, make_keys
from fedsub_app.deployment.processes import Process, answers, free_port, running, start, stop

STATE = "federation.json"
START_S = 240.0  # a busy machine takes minutes; Flower alone takes a killed node for online for 60 s
LOOK_S = 0.5
SUPERLINK, SUPEREXEC, DOOR = "superlink", "-superexec", "door"  # names of processes, and the end of a name


@dataclass
class Federation:
    """The options of ``fedsub federation up``, and the processes of a federation.

    ``listen``: interface of the SuperLink's own port, which also takes runs and new nodes; not the loopback one: no
    door. ``node_ports``: port of each node for its SuperExec. ``registered``: the nodes whose public key the SuperLink
    knows. ``processes``: name -> process that was started last.
    """

    name: str = "federation"
    nodes: int = 2
    partitions: int = 2
    host: str = ""
    port: int = 0
    door: int = 8443
    listen: str = commands.LOOPBACK
    insecure: bool = False
    data_dir: str = ""
    node_ports: list[int] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)


def read(folder: Path) -> Federation:
    """Return the federation of a folder; :class:`UserError` where there is none."""
    path = folder / STATE
    if not path.exists():
        command = f"fedsub federation up --dir {shlex.quote(str(folder))}"
        raise UserError(f"{path}: not there; `{command}` starts a federation")
    try:
        content = read_json(path)
        content["processes"] = {name: Process(**process) for name, process in content["processes"].items()}
        return Federation(**content)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not what a federation wrote ({error})") from None


def up(folder: Path, **changes: Any) -> Federation:
    """Start a federation, or what has ended of the one that runs in ``folder``; print a line for each step.

    ``changes``: attributes of :class:`Federation`; ``None``: as it was, else the default.

    :class:`UserError`: another one runs there, or something does not start; then all that was started is ended.
    """
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder):
        known = read(folder) if (folder / STATE).exists() else Federation()
        before = running(known.processes)
        given = {key: value for key, value in changes.items() if value is not None}
        federation = _configured(folder, known, bool(before), given)
        keys = None if federation.insecure else folder / "keys"
        made = make_keys(keys, [federation.host] if federation.host else [], federation.nodes) if keys else []
        for path in made:
            print(f"{path}: made")
        old = federation.registered if (folder / "superlink.db").exists() else []
        federation.registered = [number for number in old if folder / "keys" / commands.node(number) not in made]
        if has_door(federation):
            text = door_settings(folder, federation.port, federation.door, federation.host)
            (folder / "door.conf").write_text(text, "utf-8", "surrogateescape")
        pids = {name: federation.processes[name].pid for name in before}
        wanted = _commands(folder, federation, keys).items()
        federation.processes = {name: Process(command, pids.get(name, 0)) for name, command in wanted}
        try:
            Starting(folder, federation).all()
        except BaseException:
            stop({name: process for name, process in federation.processes.items() if name not in before})
            raise
        return federation


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from starting and ending the federation of a folder; :class:`UserError` where one is doing so."""
    try:
        with FileLock(folder / ".lock", timeout=0, mode=0o600):
            yield
    except Timeout:
        raise UserError(f"{folder}: another `fedsub federation up` or `down` is at work there") from None


def _configured(folder: Path, base: Federation, runs: bool, given: Mapping[str, Any]) -> Federation:
    """Return ``base`` with the changes in ``given``, which are refused while it runs."""
    for key, value in given.items() if runs else ():
        if getattr(base, key) != value:
            has = f"the federation that runs in {folder} has {getattr(base, key)!r}"
            ends = f"`fedsub federation down --dir {shlex.quote(str(folder))}` ends it"
            raise UserError(f"--{key.replace('_', '-')} {value}: {has}; {ends}")
    if runs:
        return base
    partitions = {"partitions": given["nodes"]} if "nodes" in given else {}
    federation = replace(base, **{"insecure": False, **partitions, **given})  # insecure only when it is asked for
    check_name(federation.name)
    if federation.listen not in (commands.LOOPBACK, commands.ANY):
        raise UserError(f"--listen {federation.listen}: must be {commands.ANY}, or {commands.LOOPBACK}")
    if federation.nodes > federation.partitions:
        raise UserError(f"--partitions {federation.partitions}: at least the {federation.nodes} of --nodes")
    if not federation.nodes and not federation.host:
        raise UserError("--nodes 0: only with --host, under which nodes of other machines reach the SuperLink")
    if federation.host and federation.insecure and federation.listen == commands.LOOPBACK:
        how = "--listen 0.0.0.0 opens the SuperLink itself"
        raise UserError(f"--insecure: not with --host: its door asks for TLS; {how}")
    if federation.host:
        general_name(federation.host)
    if has_door(federation) and not commands.nginx():
        needs = "needs nginx, the door through which nodes of other machines come in"
        without = "--listen 0.0.0.0 lets everybody who reaches the port start code on all nodes"
        raise UserError(f"--host {federation.host}: {needs}; {without}")
    table = flower.connections().get(federation.name)
    if table is not None and table.get(flower.FOLDER_KEY) != str(folder):
        raise UserError(f"--name {federation.name}: Flower's config.toml has such a connection, to another SuperLink")
    federation.port = federation.port or free_port()
    for option in ("port", "door") if has_door(federation) else ("port",):
        if answers(port := getattr(federation, option)):
            raise UserError(f"--{option} {port}: another program listens there")
    ports = {federation.port}
    while len(ports) <= federation.nodes:  # the same one may be drawn twice
        ports.add(free_port())
    federation.node_ports = list(ports - {federation.port})
    return federation


def check_name(name: str) -> None:
    """Raise :class:`UserError` for a name that no connection of ours may have; two are words of the commands."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("default", "local"):
        raise UserError(f"--name {name!r}: must be letters, digits, _ and -, and neither 'default' nor 'local'")


def has_door(federation: Federation) -> bool:
    """Say whether nodes of other machines come in through a door of this one."""
    return bool(federation.host) and federation.listen == commands.LOOPBACK


def door_settings(folder: Path, port: int, door_port: int, host: str) -> str:
    """Return docker/nginx.conf for a federation's folder, whose SuperLink has ``port`` on this machine."""
    listen = f"listen [::]:{door_port} ssl;\n        " * (":" in host) + f"listen {door_port}"  # host: IPv6 too
    text = (flower.PROJECT / "docker" / "nginx.conf").read_text("utf-8")
    text = re.sub("/(tmp|keys)/", lambda found: f"{folder}/" + "keys/" * (found[1] == "keys"), text)
    return text.replace("superlink:8000", f"localhost:{port}").replace("listen 8443", listen)


def _commands(folder: Path, federation: Federation, keys: Path | None) -> dict[str, list[str]]:
    """Return the commands of the federation's processes, in the order in which they are started."""
    port = federation.port
    all_commands = {
        SUPERLINK: commands.superlink(port, str(folder / "superlink.db"), keys, federation.listen),
        SUPERLINK + SUPEREXEC: commands.server_superexec(port, keys),
    }
    if has_door(federation):
        all_commands[DOOR] = commands.door(folder)
    for number, node_port in enumerate(federation.node_ports):
        name, address = commands.node(number), f"{commands.LOOPBACK}:{port}"
        all_commands[name] = commands.supernode(address, number, federation.partitions, node_port, keys)
        all_commands[name + SUPEREXEC] = commands.node_superexec(number, node_port, keys)
    return all_commands


@dataclass
class Starting:
    """The start of a federation's processes that do not run yet."""

    folder: Path
    federation: Federation
    deadline: float = field(default_factory=lambda: time.monotonic() + START_S)

    def all(self) -> None:
        """Start everything, and wait until the nodes are online."""
        federation = self.federation
        if not federation.processes[SUPERLINK].pid:
            self.start(SUPERLINK)
            while not answers(federation.port):
                self.wait(f"the SuperLink does not answer on port {federation.port}", list(federation.processes))
        trust: dict[str, Value] = {"insecure": True}
        if not federation.insecure:
            trust = {"root-certificates": str(self.folder / "keys" / "ca.crt")}
        address = f"{commands.LOOPBACK}:{federation.port}"
        ours = {flower.FOLDER_KEY: str(self.folder), flower.DATA_KEY: federation.data_dir}
        config = flower.connect(federation.name, {"address": address, **trust, **ours})
        print(f"{config}: connection {federation.name}")
        for number in range(federation.nodes):
            if not federation.insecure and number not in federation.registered:
                public = self.folder / "keys" / f"{commands.node(number)}.pub"
                flower.ask("supernode", "register", str(public), federation.name)
                federation.registered.append(number)
                self.save()
        before = nodes_online(federation.name).items()  # of a node that was killed it is not true any more
        begun = [name for name, process in federation.processes.items() if not process.pid]
        for name in begun:
            self.start(name)
        nodes = [commands.node(number) for number in range(federation.nodes)]
        new = len(set(begun) & set(nodes))
        while len(now := nodes_online(federation.name)) < len(nodes) or len(now.items() - before) < new:
            # Flower refuses the key of a node that was killed until two heartbeats are missing.
            alive = running(federation.processes)
            for name in nodes:
                if name not in alive:
                    self.start(name)
            self.wait("not all nodes are online", [name for name in federation.processes if name not in nodes])

    def start(self, name: str) -> None:
        owner = self.folder / name.removesuffix(SUPEREXEC)
        owner.mkdir(mode=0o700, exist_ok=True)
        if owner.name == name != SUPERLINK:  # whose app may still be ending a run
            shutil.rmtree(owner / "apps", ignore_errors=True)  # Flower never completes one that a full disk has cut off
        folders = {"FLWR_HOME": str(owner), "FEDSUB_STATE": str(owner / "state")}
        if self.federation.data_dir:
            folders["FEDSUB_DATA"] = self.federation.data_dir
        process = self.federation.processes[name]
        pid = start(process.command, self.log(name), flower.full_environment() | folders)
        self.federation.processes[name] = replace(process, pid=pid)
        self.save()
        print(f"{name}: started")

    def wait(self, late: str, names: Collection[str]) -> None:
        """Wait a moment; raise :class:`UserError` if one of these processes has ended or time is up."""
        alive = running(self.federation.processes)
        for name in names:
            if self.federation.processes[name].pid and name not in alive:
                raise UserError(f"{name} has ended: {last_error(self.log(name))} ({self.log(name)})")
        if time.monotonic() > self.deadline:
            raise UserError(f"{late} within {START_S:g} s; the logs are in {self.folder}")
        time.sleep(LOOK_S)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def save(self) -> None:
        write_json(self.folder / STATE, asdict(self.federation))


def last_error(log: Path) -> str:
    """Return the last line of a log with an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-50:] if line.strip()]
    return printable(([line for line in lines if "error" in line.lower()] or lines or [""])[-1])


def nodes_online(connection: str) -> dict[str, str]:
    """Return the SuperNodes that a connection's SuperLink takes for online: id -> time since when."""
    nodes = flower.ask("supernode", "list", connection)["nodes"]
    return {str(node["node-id"]): str(node["online-at"]) for node in nodes if node["status"] == "online"}


def down(folder: Path) -> list[str]:
    """End the federation of a folder; returns the names of the processes that ran. Its files stay."""
    folder = folder.resolve()
    federation = read(folder)
    nodes = {name: process for name, process in federation.processes.items() if not name.startswith(SUPERLINK)}
    with _alone(folder):  # nodes first, so that they say good-bye: their keys are free then
        names = stop(nodes) + stop(federation.processes)
    if flower.connections().get(federation.name, {}).get(flower.FOLDER_KEY) == str(folder):
        flower.connect(federation.name, {})
    return names


def status(folder: Path) -> tuple[bool, list[str]]:
    """Return whether all processes of a folder's federation run and its nodes are online, and lines about each."""
    folder = folder.resolve()
    federation = read(folder)
    alive = running(federation.processes)
    security = "insecure" if federation.insecure else "TLS, node keys"
    nodes = f"{federation.nodes} of {federation.partitions} nodes"
    where = f"{commands.LOOPBACK}:{federation.port}, {security}, {nodes}, in {folder}"
    lines = [f"connection {federation.name}: {where}"]
    width = max(map(len, federation.processes))
    for name, process in federation.processes.items():
        memory = alive.get(name)
        state = f"process {process.pid}, {sum(memory.values()) / 1024:.0f} MiB" if memory else "has ended"
        lines.append(f"  {name:<{width}}  {state}")
    complete = len(alive) == len(federation.processes)
    try:
        online = nodes_online(federation.name) if SUPERLINK in alive else {}
    except UserError as error:  # it hangs, or this user's config.toml lacks the connection
        return False, [*lines, f"nodes: {error}"]
    if SUPERLINK in alive:
        lines.append(f"{len(online)} nodes are online: {' '.join(online)}")
    return complete and len(online) >= federation.nodes, lines
