"""Driving Flower from the command line: the connection, the environment, a run whose exit code says how it ended.

``flwr run`` exits with 0 even where the run failed; :func:`run` asks for its status. Flower's runtime would re-install
torch on every run unless one variable is set before its SuperLink starts; :func:`setup` puts it (as a default that the
shell may override) into the Python environment that it runs in, so that a hand-typed ``flwr run`` has it too.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedsub_app.common.conf_files import is_file, read_toml
from fedsub_app.common.errors import UserError, printable
from fedsub_app.common.machine import cores
from fedsub_app.common.own_code import bundled
from fedsub_app.common.spelling import Value
from fedsub_app.deployment import processes

if TYPE_CHECKING:  # pydantic takes its time
    from fedsub_app.settings import Settings

CONNECTION, CLUSTER = "local-simulation", "ray-cluster"
LOCAL = ":local:"  # address of the SuperLink that Flower starts and keeps on this machine
# We write this option alone into a connection. Flower 1.41 warns of options in a run that is typed by hand; without it
# Flower would have two nodes of two cores each, whatever the machine.
NODES = "options.num-supernodes"
CPUS, GPUS, ALL_CPUS = (
    f"options.backend.{key}" for key in ("client-resources.num-cpus", "client-resources.num-gpus", "init-args.num-cpus")
)
FOLDER_KEY = "fedsub-federation"  # of a connection, which Flower ignores: the folder of a federation on this machine
DATA_KEY = "fedsub-data-dir"  # as well: the folder of data sets that the federation was started with
CERTIFICATE_KEY = "fedsub-certificate"  # as well: a user's certificate, beside which its key lies
NOT_SHOWN = (  # of a run's log: Flower's default number of nodes, which the connection sets, and a later version of Ray
    "Since flwr 1.32, default simulated SuperNodes",
    "To change federation size, use the following command",
    "flwr federation simulation-config",
    "FutureWarning: Tip: In future versions of Ray",
    "  warnings.warn(\n",
)
PROJECT = Path(__file__).resolve().parents[2]

# Flower gives the SuperLink that it starts 15 s, which a busy machine exceeds, and kills it; no option changes that.
FLWR = "from flwr.cli import app, local_superlink as s; s.LOCAL_SUPERLINK_STARTUP_TIMEOUT = 180.0; app.app()"
# Its commands present no certificate to a server; of a connection with one they do, wherever they trust an authority.
PRESENT = (
    "import ssl; trust = ssl.SSLContext.load_verify_locations; ssl.SSLContext.load_verify_locations = "
    "lambda self, *a, **k: (trust(self, *a, **k), self.load_cert_chain({!r}, {!r}))[0]; "
)

# Ports of the SuperLink that Flower starts: without them all users and environments of a machine would share one.
HTTP_PORT, CONTROL_PORT = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT"


def environment() -> dict[str, str]:
    """Variables that must be there before Flower's SuperLink starts, with our defaults."""
    owner = f"{sys.prefix}|{os.getuid()}"
    port = 20_000 + 2 * (zlib.crc32(owner.encode()) % 6000)  # below those that systems give to connections
    return {
        HTTP_PORT: str(port),
        CONTROL_PORT: str(port + 1),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else: `uv sync` with torch, minutes a run
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",  # its workers start before the actors, which do not take them
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds between looks for a run to start, by default 1
        **({"FEDSUB_RUNS": str(PROJECT / "runs")} if is_checkout() else {}),
    }


def is_checkout() -> bool:
    """Say whether this package lies in a checkout, of which Flower can make a bundle; else it was installed."""
    return (PROJECT / "pyproject.toml").exists()


def _home() -> Path:
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def setup(cluster: int | None = None) -> list[str]:
    """Register the connection ``local-simulation`` and the environment's defaults; returns what it did, a line each.

    ``cluster``: nodes of the connection ``ray-cluster`` to a running Ray cluster; ``None`` registers none. An
    environment with the defaults of another checkout is refused.
    """
    import torch  # on demand: it takes seconds

    from fedsub_app.common.section import flatten

    # A .pth file is read at the start of every Python of this environment, flwr and flower-superlink included.
    hook = Path(sysconfig.get_path("purelib")) / "fedsub_environment.pth"
    written = hook.read_text() if hook.exists() else ""
    other = re.search(r"'FEDSUB_RUNS', '(.+)/runs'\)", written)
    if other and Path(other[1]) != PROJECT and (Path(other[1]) / "pyproject.toml").exists():
        how = f"delete {hook} to set it up for {PROJECT}"
        raise UserError(f"{sys.prefix}: the environment of the checkout {other[1]}; {how}")
    lines = [f"environment {sys.prefix}{f', checkout {PROJECT}' if is_checkout() else ''}"]
    known, gpus = connections(), torch.cuda.device_count()
    for name in (CONNECTION, CLUSTER) if cluster or CLUSTER in known else (CONNECTION,):
        table = flatten(known.get(name, {}), deep=True)
        given = table | ({NODES: cluster} if cluster and name == CLUSTER else {})
        nodes = given.get(NODES)
        # An entry that stands there already may be its user's choice, and stays.
        connection = _simulation(nodes if isinstance(nodes, int) else cores(), gpus, name == CLUSTER) | given
        if connection != table and connection["address"] == LOCAL:
            config = connect(name, connection)
            lines.append(f"{config}: connection {name} {'brought up to date' if table else 'added'}")
    defaults = "; ".join(f"os.environ.setdefault({name!r}, {value!r})" for name, value in environment().items())
    line = f"import os; {defaults}\n"
    if written != line:
        hook.write_text(line)
        what = "replaces its earlier defaults with those" if written else "has defaults"
        lines.append(f"{hook}: {what} of {', '.join(environment())}")
    return lines if len(lines) > 1 else [*lines, "nothing to do"]


def connections() -> dict[str, Any]:
    """Return the connections of Flower's config.toml, by name."""
    return {name: table for name, table in _config()["superlink"].items() if isinstance(table, dict)}


def connect(name: str, connection: Mapping[str, Value]) -> Path:
    """Write a connection in the place of the one of its name, as Flower's own commands do; returns config.toml.

    Without keys there is none of that name any more.
    """
    from flwr.cli.flower_config import write_flower_config

    content = _config()
    content["superlink"].pop(name, None)
    content["superlink"] |= {name: dict(connection)} if connection else {}
    _home().mkdir(parents=True, exist_ok=True)
    return write_flower_config(content)


def _config() -> dict[str, Any]:
    config = _home() / "config.toml"
    content = read_toml(config) if config.exists() else {}
    return content if "superlink" in content else content | {"superlink": {"default": CONNECTION}}


def _simulation(nodes: int, gpus: int, cluster: bool) -> dict[str, Value]:
    """Return a connection to a simulation, as single keys: its nodes and what each of them may use."""
    table: dict[str, Value] = {"address": LOCAL, NODES: nodes, CPUS: 1}
    if cluster:  # it brings its own cores: given a number, Ray refuses a cluster that runs already
        return table
    if cores() < (os.cpu_count() or 1):  # Ray counts all
        table[ALL_CPUS] = cores()
    if share := gpu_share(nodes, gpus):  # without a share Ray hides them
        table[GPUS] = share
    return table


def gpu_share(workers: int, gpus: int) -> float:
    """Return the GPUs of each of some workers, a share of one or whole ones, in Ray's steps of 1/10,000."""
    if not gpus:
        return 0.0
    return float(gpus // workers) if gpus > workers else math.floor(10_000 / -(-workers // gpus)) / 10_000


def flwr(*arguments: str) -> list[str]:
    """Return a command of Flower's command line interface, with the certificate of a connection that it names."""
    known = connections()
    files = [Path(known[name][CERTIFICATE_KEY]) for name in arguments if CERTIFICATE_KEY in known.get(name, {})]
    present = "".join(PRESENT.format(str(path), str(path.with_suffix(".key"))) for path in files)
    return [sys.executable, "-P", "-c", present + FLWR, *arguments]


def full_environment() -> dict[str, str]:
    """Return this shell's environment with what Flower's commands need besides."""
    # Flower looks for flower-superlink and its other commands on the PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return environment() | os.environ | {"PATH": path}


def superlink() -> tuple[int, str] | None:
    """Return process id and command of this environment's SuperLink, or ``None``; that of another one is refused."""
    port = os.environ.get(HTTP_PORT) or environment()[HTTP_PORT]
    for pid, uid, user, *rest in processes.listed("pid", "uid", "user", "args"):
        command = "".join(rest)
        if "flower-superlink" in command and "--simulation" in command and f"--port {port} " in command:
            if int(uid) == os.getuid() and str(Path(sys.prefix) / "bin") in command:
                return int(pid), command
            how = f"set {HTTP_PORT} and {CONTROL_PORT} to free ports, or stop process {pid}"
            raise UserError(f"the SuperLink on port {port} is of user {user}: {printable(command, 80)}; {how}")
    return None


def stop() -> str:
    """Stop the SuperLink that Flower keeps running for this environment's simulations; returns what was done."""
    if not (found := superlink()):
        return "no SuperLink of this environment runs"
    pid, command = found
    processes.stop({"superlink": processes.Process([command], pid)})
    return f"stopped the SuperLink, process {pid}, and what it had started"


def run(connection: str, overrides: Mapping[str, Value]) -> int:
    """Run the app on a Flower connection, streaming its log; returns 0 only if the run completed."""
    from fedsub_app.runs.recorded import new_folder, settings_of

    settings = settings_of(overrides)  # fail early
    if not (table := connections().get(connection)):
        adds = {CONNECTION: "setup", CLUSTER: "setup --cluster N"}.get(connection, f"federation up --name {connection}")
        raise UserError(f"--engine {connection}: not in {_home() / 'config.toml'}; `fedsub {adds}` adds the connection")
    if table.get("address") == LOCAL:
        superlink()  # raises where it is of others
    # An experiment's file of this machine is not in the bundle: its keys are sent.
    overrides = settings.flat() | {"experiment": ""} if is_file(str(overrides.get("experiment"))) else dict(overrides)
    if connection in (CONNECTION, CLUSTER) or FOLDER_KEY in table:
        # The SuperLink, on this machine, has its own working directory and the environment of its first start.
        if data := settings.data_dir or table.get(DATA_KEY) or os.environ.get("FEDSUB_DATA"):
            overrides["data-dir"] = str(Path(str(data)).expanduser().resolve())
        if settings.start_from:
            overrides["start-from"] = str(Path(settings.start_from).expanduser().resolve())
        # Named here, so that what goes on with the run can be said however it ends.
        overrides["run-dir"] = str(Path(settings.run_dir or new_folder(settings)).expanduser().resolve())
    if connection in (CONNECTION, CLUSTER):  # a real node reads tables of its own data folder
        overrides |= local_paths(settings)
    if "devices" in overrides:
        overrides["devices"] = settings.devices  # the content of a file, which no other machine has
    keys = " ".join(f"{key}={_toml(value)}" for key, value in overrides.items())
    with bundle(settings) as project:
        try:
            answer = ask("run", str(project), connection, *(["-c", keys] if keys else []))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"`flwr list {connection}` shows whether Flower has begun the run") from None
        except UserError as error:
            raise UserError(f"connection {connection}: {error}") from None
    run_id, variables = str(answer["run-id"]), full_environment()
    try:
        _stream(flwr("log", run_id, connection, "--stream"), variables)
        status, details = _status(connection, run_id)
    except KeyboardInterrupt:
        subprocess.run(flwr("stop", run_id, connection), env=variables, capture_output=True, check=False)
        raise KeyboardInterrupt(_ended(connection, run_id, _status(connection, run_id)[0], overrides)) from None
    if status != "finished:completed":
        why = f" ({details})" if details not in ("", "N/A") else ""
        print(f"failed: {_ended(connection, run_id, status, overrides)}{why}", file=sys.stderr)
        return 1
    return 0


def _toml(value: Value) -> str:
    """Return a value as Flower reads it: numbers, booleans and plain strings are written alike in TOML and JSON."""
    if isinstance(value, str) and '"' in value and "'" not in value:  # Flower knows no escaped quotes
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False)


def local_paths(settings: "Settings") -> dict[str, Value]:
    """Return the settings that name files of the working directory, with absolute paths."""
    from fedsub_app.data import SOURCES, matching

    sources = {key: str(getattr(settings, key)).partition(":") for key in ("dataset", "model", "tokenizer")}
    return {
        key: f"{kind}:{Path(name).expanduser().absolute()}"
        for key, (kind, _, name) in sources.items()
        if kind in (*SOURCES, "transformers") and matching(name, Path())
    }


@contextmanager
def bundle(settings: "Settings") -> Iterator[Path]:
    """Yield the folder of which Flower makes a run's bundle: a copy of the checkout's code, with the user's files."""
    from fedsub_app.runs.config import TABLE
    from fedsub_app.runs.methods import BUILT_IN
    from fedsub_app.runs.recorded import own_code

    own = {key: text for key, text in own_code(settings.flat()).items() if text.rpartition(":")[0].endswith(".py")}
    included = read_toml(PROJECT / "pyproject.toml")["tool"]["flwr"]["app"]["fab-include"]
    with TemporaryDirectory(prefix="fedsub-") as folder:  # in the checkout Flower would read 50,000 files of .venv
        files = {path: path.relative_to(PROJECT) for pattern in included for path in PROJECT.glob(pattern)}
        for path, name in files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, Path(folder) / name)
        if settings.method not in BUILT_IN:  # Flower refuses keys that are not there
            options = settings.options.toml()
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in options.items()]
            with (Path(folder) / "pyproject.toml").open("a", encoding="utf-8") as file:
                file.write("\n".join(["", f"[{TABLE}.{settings.section}]", *lines, ""]))
        for key, text in own.items():
            copy = Path(folder) / bundled(text).relative_to(PROJECT)
            copy.parent.mkdir(exist_ok=True)
            try:
                shutil.copyfile(os.path.expanduser(text.rpartition(":")[0]), copy)
            except OSError as error:
                raise UserError(f"{key} = {text!r}: {error.strerror or error}") from error
        yield Path(folder)


def _stream(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Print what a command prints, line by line, without the lines that do not concern the user."""
    unbuffered = {**variables, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as log:
        assert log.stdout
        try:
            for line in log.stdout:
                if not any(text in line for text in NOT_SHOWN):
                    print(line, end="", flush=True)
        except KeyboardInterrupt:
            log.terminate()
            raise


def _ended(connection: str, run_id: str, status: str, overrides: Mapping[str, Value]) -> str:
    """Say what became of a run that did not complete, what stops it if it goes on, and what resumes it."""
    from fedsub_app.runs.recorded import resume_command

    message = f"run {run_id} is {status}"
    if not status.startswith("finished"):
        message += f"; `flwr stop {run_id} {connection}` stops it"
    folder = Path(str(overrides.get("run-dir", "")))
    if (folder / "settings.json").exists() and (status != "finished:failed" or [*folder.glob("checkpoints/*")]):
        message += f"; once it has ended, `{resume_command(folder)} --engine {connection}` goes on"
    return message


def _status(connection: str, run_id: str) -> tuple[str, str]:
    try:
        (about,) = ask("list", connection, "--run-id", run_id)["runs"]
    except UserError as error:
        return "unknown", str(error)
    return str(about["status"]), str(about["status-details"])


def ask(*arguments: str) -> dict[str, Any]:
    """Run one of Flower's commands; returns its answer. :class:`UserError`: Flower says it failed, or nothing."""
    done = subprocess.run(flwr(*arguments, "--format", "json"), env=full_environment(), capture_output=True, text=True)
    answer: dict[str, Any] = {}
    with suppress(json.JSONDecodeError):
        answer = json.loads(done.stdout[max(0, done.stdout.find("{")) :])
    if done.returncode or not answer.get("success"):
        message = str(answer.get("error-message") or done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"flwr {arguments[0]}: {printable(message[-1] if message else 'no message')}")
    return answer
