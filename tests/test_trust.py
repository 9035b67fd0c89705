"""Strangers read no key and no client's state, start nothing, and write nothing into a terminal or a spreadsheet."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from test_federation import answering, ask, federation, nodes, nothing

from fedsub_app.cli.main import main
from fedsub_app.common.code import code_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.data import DataSettings
from fedsub_app.data.arrays import read_idx
from fedsub_app.data.files import FORMATS, IMAGES, read_files
from fedsub_app.deployment import commands, processes
from fedsub_app.deployment import federation as machine
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.deployment.node import Node, run
from fedsub_app.federation import nodes as federation_nodes
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.wire import NONCE, UNKNOWN_SETTINGS, asks_for_settings, pack, unpack
from fedsub_app.reports.export import csv_text
from fedsub_app.runs.audit import append, verify
from fedsub_app.runs.config import resolve
from fedsub_app.runs.node import settings_from
from fedsub_app.runs.recorded import RunFailed

# --- who reads what ---------------------------------------------------------------------------------------------------


def modes(folder: Path) -> set[int]:
    """The permissions of a folder and of all that is in it."""
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*")) if not path.is_symlink()}


def test_a_run_is_its_owners_alone(run_local: Callable[..., Any]) -> None:
    _, folder = run_local(method="fedper", num_rounds=1)
    assert (folder / "clients").is_dir()
    assert modes(folder) == {0o700, 0o600}


def test_a_file_is_as_private_as_its_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a/b", b"")
        (tmp_path / "own").mkdir(mode=0o700)
        write_atomic(tmp_path / "own/a/b", b"")
    finally:
        os.umask(before)
    assert modes(tmp_path / "a") == {0o755, 0o644}
    assert modes(tmp_path / "own") == {0o700, 0o600}


def test_what_a_federation_writes_is_its_owners_alone(tmp_path: Path) -> None:
    """Database, logs and states are made by processes that are started under this umask."""
    said = tmp_path / "superlink.log"
    command = ["/bin/sh", "-c", f"umask; touch {tmp_path}/superlink.db"]
    pid = machine.start(command, said, os.environ)
    with suppress(ChildProcessError):  # it may have ended, and been reaped, before start returned
        os.waitpid(pid, 0)
    assert said.read_text() == "0077\n"
    assert modes(tmp_path / "superlink.db") == modes(said) == {0o600}


class Asked(Node):
    """A node whose program says under which umask it runs."""

    command = ("python", "-c", "import os; print(oct(os.umask(0)))")  # type: ignore[assignment]


def test_what_a_node_writes_is_its_owners_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        run(Asked("127.0.0.1:1", 0, 1, None, None, None, None, tmp_path / "state", 0))
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert capfd.readouterr().out == "0o77\n"
    assert modes(tmp_path / "state") == {0o700}


def test_a_start_waits_for_processes_that_run_and_ends_with_one_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    pid = machine.start(command, tmp_path / "superlink.log", os.environ)
    processes = {"superlink": machine.Process(command, pid), "node-0": machine.Process(["not", "started"])}
    starting = machine.Starting(tmp_path, machine.Federation(processes=processes))
    try:
        starting.wait("late", list(processes))
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(UserError, match=r"^superlink has ended: "):
        starting.wait("late", list(processes))


def test_keys_are_ignored_by_git_and_sent_to_no_builder() -> None:
    if not (PROJECT / ".git").exists():
        pytest.skip("not a checkout")
    ignored = ["git", "check-ignore", "docker/keys/ca.key", "docker/keys/node-0"]
    assert subprocess.run(ignored, cwd=PROJECT, capture_output=True, check=False).stdout.count(b"\n") == 2
    sent = (PROJECT / ".dockerignore").read_text().splitlines()[1:]
    copies = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", (PROJECT / "docker/Dockerfile").read_text())
    copied = [name for names in copies for name in names.split()]
    assert sent == ["*", *(f"!{name}" for name in sorted(copied, reverse=True))]


# --- who reaches what -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "answers", lambda _: False)
    return tmp_path


def test_other_machines_reach_the_door_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "nginx", lambda: "/usr/sbin/nginx")
    given = {"host": "a.example.org", "port": 8000}
    found = machine._commands(home, machine._configured(home, machine.Federation(), False, given), home / "keys")
    assert "--host=127.0.0.1" in found["superlink"]
    assert not any("0.0.0.0" in word for command in found.values() for word in command)
    assert found["door"] == ["/usr/sbin/nginx", "-c", f"{home}/door.conf", "-g", "daemon off;"]
    text = machine.door_settings(home, 8000, 9443, "a.example.org")
    assert "[::]" not in text
    assert "listen [::]:9443 ssl;\n        listen 9443 ssl;" in machine.door_settings(home, 8000, 9443, "fd00::1")
    assert "listen 9443 ssl;" in text
    assert "location /v1/fleet/ {\n            proxy_pass https://localhost:8000;" in text
    assert f'ssl_certificate_key "{home}/keys/server.key";' in text
    assert f'ssl_client_certificate "{home}/keys/users.pem";' in text
    assert "location /v1/control/ {\n            if ($ssl_client_verify != SUCCESS) {\n" in text
    assert "/tmp" not in text.replace(str(home), "")
    text = machine.door_settings(Path("/srv/my keys/a"), 8000, 9443, "10.77.0.1")
    assert 'ssl_certificate "/srv/my keys/a/keys/server.pem";' in text
    assert not re.search(r'[^"]/srv/', text)


def test_the_superlink_listens_to_others_when_it_is_asked_to(home: Path) -> None:
    given = {"host": "a.example.org", "listen": "0.0.0.0"}
    found = machine._commands(home, machine._configured(home, machine.Federation(), False, given), home / "keys")
    assert "--host=0.0.0.0" in found["superlink"]
    assert "door" not in found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "a"}, "--host a: needs nginx, the door .*; --listen 0.0.0.0 lets everybody"),
        ({"host": "a", "insecure": True}, "--insecure: not with --host: its door asks for TLS"),
        ({"listen": "10.77.0.1"}, "--listen 10.77.0.1: must be 0.0.0.0, or 127.0.0.1$"),
        ({"name": "local"}, "--name 'local': must be letters, digits, _ and -, and neither 'default' nor 'local'$"),
    ],
)
def test_no_door_no_host(given: dict[str, Any], said: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "nginx", lambda: None)
    with pytest.raises(UserError, match=said):
        machine._configured(home, machine.Federation(), False, given)


@pytest.mark.parametrize("taken", ["port", "door"])
def test_a_port_that_another_program_has(taken: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nodes nobody looked whether nginx went on: ``up`` said that all was well."""
    monkeypatch.setattr(commands, "nginx", lambda: "/usr/sbin/nginx")
    monkeypatch.setattr(machine, "answers", lambda port: port == 7)
    with pytest.raises(UserError, match=f"^--{taken} 7: another program listens there$"):
        machine._configured(home, machine.Federation(), False, {"nodes": 0, "host": "a.example.org", taken: 7})


def test_a_federation_in_a_folder_of_any_letters_is_known_to_run(tmp_path: Path) -> None:
    """ps of the locale C has a question mark for each other letter."""
    command = [
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
        str(tmp_path / "für alle"),
    ]  # no shim that changes into it
    process = processes.Process(command, processes.start(command, tmp_path / "log", os.environ))
    try:
        assert processes.running({"it": process})
    finally:
        os.kill(process.pid, signal.SIGKILL)


def test_what_an_ended_process_has_started_is_ended_but_does_not_stand_for_it(tmp_path: Path) -> None:
    """A SuperExec that was killed in a run counted as running while its app did, and was not started again."""
    app = tmp_path / "flwr-app"
    app.write_text("#!/bin/sh\nsleep 60")
    app.chmod(0o755)
    command = ["sh", "-c", f"{app} & wait; exit"]
    process = {"it": processes.Process(command, processes.start(command, tmp_path / "log", os.environ))}
    deadline = time.monotonic() + 10
    while len(processes.running(process)["it"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process["it"].pid, signal.SIGKILL)
    os.waitid(os.P_PID, process["it"].pid, os.WEXITED | os.WNOWAIT)  # ps shows it for a moment more
    assert not processes.running(process)
    assert processes.stop(process) == ["it"]
    assert not processes.running(process, orphans=True)


def test_a_process_counts_as_started_when_ps_has_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment before, ps has nothing but the program's name in brackets, and the process was said to have ended."""
    listed, early = processes.listed, [True]

    def first_without(*columns: str) -> list[list[str]]:
        rows = listed(*columns)
        return [[*row[:-1], "[sleep]"] for row in rows] if early and early.pop() else rows

    monkeypatch.setattr(processes, "listed", first_without)
    command = ["sleep", "60"]
    process = processes.Process(command, processes.start(command, tmp_path / "log", os.environ))
    try:
        assert processes.running({"it": process})
    finally:
        os.kill(process.pid, signal.SIGKILL)


def test_a_process_whose_start_is_interrupted_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id is in no file yet, so that `fedsub federation down` could not end it."""
    started, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def interrupted(*columns: str) -> list[list[str]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "listed", interrupted)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **given: started.append(popen(*words, **given)) or started[0]
    )
    with pytest.raises(KeyboardInterrupt):
        processes.start(["sleep", "20"], tmp_path / "log", os.environ)
    assert started[0].wait(15) == -signal.SIGKILL


def test_the_doors_settings_are_written_in_a_locale_of_ascii_alone(tmp_path: Path) -> None:
    ascii_alone = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "FLWR_HOME": str(tmp_path)}
    code = """
import sys; from pathlib import Path; from fedsub_app.deployment import commands, federation
commands.nginx, federation.Starting.all = lambda: "nginx", lambda _: None
federation.up(Path(sys.argv[1]), host="localhost", nodes=0)"""
    folder = tmp_path / "für alle"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ascii_alone, check=False)
    assert not done.returncode, done.stderr
    assert f'"{folder}/keys/users.pem"' in (folder / "door.conf").read_text("utf-8")


# --- files and names of unknown origin --------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J"


def test_a_pipe_in_the_place_of_an_idx_file_is_named(data_dir: Path) -> None:
    """Reading from it would wait for ever."""
    folder = data_dir / "raw"
    folder.mkdir()
    os.mkfifo(folder / "train-images")
    with pytest.raises(UserError, match=r"raw/train-images: not a file$"):
        read_idx(folder / "train-images", 3)


def test_an_image_is_opened_by_no_other_program(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow runs Ghostscript on an EPS, whatever its name is."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was run"))
    for split in ("train", "test"):
        (data_dir / f"set/{split}/a").mkdir(parents=True)
        path = data_dir / f"set/{split}/a/1.png"
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UserError, match=r"1\.png is not readable"):
        read_files(DataSettings(), data_dir / "set")


def test_the_formats_are_those_of_the_names() -> None:
    from PIL import Image

    Image.init()
    assert {Image.EXTENSION[name] for name in IMAGES} == set(FORMATS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 5000, "unknown key|not valid TOML"),
        (f"lr = {'[' * 5000}{']' * 5000}", "not valid TOML: nested too deeply$"),
        (f"{'.'.join('a' * 5000)} = 1", "unknown key|nested too deeply$"),
        (f"lr = {'1' * 5000}", "not valid TOML: Exceeds the limit"),
        (r'"\u001b[2J" = 1', r"^\[2J = 1 in .*unknown key"),
    ],
    ids=["open", "brackets", "dots", "digits", "escapes"],
)
def test_a_settings_file_of_a_stranger_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        resolve({"experiment": str(path)})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "{", "[]"])
def test_a_node_refuses_settings_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"^settings"):
        settings_from(text)


def test_names_of_unknown_origin_reach_the_terminal_printable(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / f"run{ESCAPES}"
    folder.mkdir()
    assert main(["report", str(folder)]) == 2
    assert "\x1b" not in capsys.readouterr().err
    said = str(UserError(f"class {ESCAPES} is in test/ but not in train/\r\n"))
    assert said == r"class \x1b]0;owned\x07\x1b[2J is in test/ but not in train/\r\n"


def test_a_spreadsheet_computes_no_text() -> None:
    header = ["run", "lr"]
    rows = [["=cmd|' /C calc'!A0", -0.5], ["@SUM(A1)", "-0.5"], ["+a", "1e-3"], ["plain", ESCAPES]]
    assert csv_text(header, rows).splitlines() == [
        "run,lr",
        "'=cmd|' /C calc'!A0,-0.5",
        "'@SUM(A1),-0.5",
        "'+a,1e-3",
        r"plain,\x1b]0;owned\x07\x1b[2J",
    ]


# --- a node that does not answer --------------------------------------------------------------------------------------


def test_a_silent_node_is_named_and_waited_for_no_longer_than_is_fair(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others took 20 s: ten times as long is fair. A simulated node is waited for until ``round-timeout``."""
    now = [0.0]
    monkeypatch.setattr(federation_nodes.time, "monotonic", lambda: now[0])

    class Silent(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            there = [number for number in message_ids if self._replies[number].metadata.src_node_id != 3]
            return super().pull_messages(there if now[0] >= 20 else [])

        def wait(self, seconds: float) -> None:
            now[0] += 5

    for simulated, ended, reason in ((False, 225, "no reply within 200 s; the median"), (True, 905, "no reply")):
        caplog.clear()
        now[0] = 0.0
        fed = federation(num_clients=6, placement="pinned", round_timeout=900.0)
        fed.roll.nodes = nodes(3, simulated)
        phase = ask(fed, range(6))
        grid = Silent(answering, {}, 3)  # type: ignore[arg-type]
        assert [client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)] == [0, 2, 3, 5]
        assert now[0] <= ended
        assert [drop.client for drop in phase.dropped] == [1, 4]
        assert all(drop.reason.startswith(reason) for drop in phase.dropped)
        said = [] if simulated else ["waiting for node 3: no reply for 30 s"]
        assert [record.getMessage() for record in caplog.records] == said
        assert len(fed.late) == 1


def test_a_node_that_falls_silent_after_a_first_reply_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for until ``round-timeout``; the time of its next message counts from its last reply."""
    now, answered = [0.0], list[str]()
    monkeypatch.setattr(federation_nodes.time, "monotonic", lambda: now[0])

    class Silent(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            sent = [number for number in message_ids if now[0] >= 20]
            third = [number for number in sent if self._replies[number].metadata.src_node_id == 3]
            first = third[: not answered]
            answered.extend(first)
            return super().pull_messages([number for number in sent if number in first or number not in third])

        def wait(self, seconds: float) -> None:
            now[0] += 5

    fed = federation(num_clients=6, placement="pinned", message_clients=1, round_timeout=9000.0)
    fed.roll.nodes = nodes(2, False)
    phase = ask(fed, range(6))
    grid = Silent(answering, {}, 2)  # type: ignore[arg-type]
    assert [client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)] == [0, 1, 2, 4]
    assert [drop.client for drop in phase.dropped] == [3, 5]
    assert {drop.reason for drop in phase.dropped} == {"no reply within 120 s; the median node took 0 s"}
    assert 140 <= now[0] <= 150


@pytest.mark.parametrize("fast", [1, 2])
def test_no_time_is_fair_before_half_of_the_nodes_have_answered(fast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four nodes answers after 5 s, the others need 300 s: it made 120 s fair for them."""
    now = [0.0]
    monkeypatch.setattr(federation_nodes.time, "monotonic", lambda: now[0])

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            early = [number for number in message_ids if self._replies[number].metadata.src_node_id <= 1 + fast]
            return super().pull_messages(message_ids if now[0] >= 300 else early)

        def wait(self, seconds: float) -> None:
            now[0] += 5

    fed = federation(num_clients=4, placement="pinned", round_timeout=9000.0)
    fed.roll.nodes = nodes(4, False)
    phase = ask(fed, range(4))
    grid = Slow(answering, {}, 4)  # type: ignore[arg-type]
    list(fed.answers(phase, fed.exchange(grid, phase), nothing))
    assert [drop.client for drop in phase.dropped] == ([] if fast == 1 else [2, 3])


def test_a_node_that_asks_for_the_settings_says_nothing_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes work for 300 s here: the first answer, after 5 s, made 120 s fair for them."""
    now, asked = [0.0], list[int]()
    monkeypatch.setattr(federation_nodes.time, "monotonic", lambda: now[0])

    def forgetful(message: Message, context: Context) -> Message:
        if asked or message.metadata.dst_node_id != 2:
            return answering(message, context)
        asked.append(2)
        stamp = {NONCE: unpack(message.content)[0][NONCE]}
        return Message(pack(UNKNOWN_SETTINGS | stamp, []), reply_to=message)

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            asks = [number for number in message_ids if asks_for_settings(self._replies[number].content)]
            return super().pull_messages(asks if now[0] < 300 else message_ids)

        def wait(self, seconds: float) -> None:
            now[0] += 5

    fed = federation(num_clients=4, placement="pinned", round_timeout=9000.0)
    fed.roll.nodes = nodes(2, False)
    phase = ask(fed, range(4))
    grid = Slow(forgetful, {}, 2)  # type: ignore[arg-type]
    assert sorted(client for client, _, _ in fed.answers(phase, fed.exchange(grid, phase), nothing)) == [0, 1, 2, 3]
    assert phase.dropped == []


# --- what was done is on record ---------------------------------------------------------------------------------------


def test_a_run_on_real_nodes_is_audited_and_robust(
    run_local: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation has neither."""
    run_local("simulated", num_rounds=1)
    path = tmp_path / "runs/audit.jsonl"
    assert not path.exists()
    monkeypatch.setattr(federation_nodes.Federation, "simulated", property(lambda self: False))
    for name in ("one", "two"):
        _, folder = run_local(name, num_rounds=1)
        assert (folder / "model-best.safetensors").exists()
    lines = verify(path)
    assert [line["event"] for line in lines] == ["run begins", "run completed"] * 2
    assert [line["round"] for line in lines] == [1] * 4
    assert lines[0]["nodes"] == [2]
    assert lines[0]["code"] == code_digest()
    assert modes(path) == {0o600}


def test_an_audit_log_that_cannot_be_written_is_one_line(
    run_local: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another user's run has made it; the run ended with a traceback."""
    monkeypatch.setattr(federation_nodes.Federation, "simulated", property(lambda self: False))
    (tmp_path / "runs/audit.jsonl").mkdir(parents=True)
    with pytest.raises(RunFailed, match=r"audit.jsonl: cannot be written \(Is a directory\); when it can, .* goes on"):
        run_local("one", num_rounds=1)


def test_an_id_without_an_account_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with another user's number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    append(tmp_path / "audit.jsonl", "round")
    assert verify(tmp_path / "audit.jsonl")[0]["account"] == "uid 54321"


def test_an_audit_log_tells_which_line_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(4):
        append(path, "round", number=number)
    texts = path.read_text().splitlines(keepends=True)
    assert [line["number"] for line in verify(path)] == [0, 1, 2, 3]
    path.write_text("".join(texts)[:-20])
    append(path, "round", number=4)
    assert len(path.read_text().splitlines()) == 5
    with pytest.raises(UserError, match="line 4 or the one before it was changed"):
        verify(path)
    for spoilt in (texts[:1] + texts[2:], [texts[0], texts[1].replace("1", "7", 1), *texts[2:]], ["[]\n", *texts]):
        path.write_text("".join(spoilt))
        with pytest.raises(UserError, match="changed, or a line was taken out"):
            verify(path)
