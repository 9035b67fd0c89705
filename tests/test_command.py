"""The command's words: overrides without ``-s``, suggestions, help, copies; what answers without torch."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedsub_app.cli import main as cli
from fedsub_app.cli.listing import about_method
from fedsub_app.cli.run import overrides_of
from fedsub_app.common.conf_files import experiments
from fedsub_app.common.errors import UserError
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.plan import plan

FAST = {
    "--help": 0,
    "list": 0,
    "list settings": 0,
    "help fedselect": 0,
    "help lr": 0,
    "run quickstart/digits num-round=3": 2,
    "run method=fedavgg": 2,
    "run quickstart/digit": 2,
    "rnu": 2,
}


def test_settings_stand_alone_or_behind_s() -> None:
    assert overrides_of(["quickstart/digits", "lr=0.1"], ["method=ist"]) == {
        "experiment": "quickstart/digits",
        "lr": 0.1,
        "method": "ist",
    }
    assert overrides_of(None) == overrides_of([]) == {"experiment": "quickstart/digits"}
    assert overrides_of(["lr=0.1"]) == {"lr": 0.1}
    assert overrides_of(["devices=my-phones.toml"]) == {"devices": "my-phones.toml"}
    with pytest.raises(UserError, match="'b': expected key=value behind a"):
        overrides_of(["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rn"], "No such command 'rn'. Did you mean 'run'?"),
        (["run", "--worker", "2"], "No such option '--worker'. Did you mean '--workers'?"),
        (["help", "fedpa"], "help fedpa: no such method, setting or command; did you mean fedpac?"),
        (["cp", "quickstart/digit", "my.toml"], "cp quickstart/digit: did you mean quickstart/digits?"),
        (["run", "--workers", "two"], "Invalid value for '--workers': 'two' is not a valid int"),
    ],
)
def test_a_wrong_word_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_what_answers_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from fedsub_app.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    for words, code in FAST.items():
        command = [sys.executable, "-c", f"{program}; sys.exit(code)", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, (words, done.stderr)


def test_a_run_on_flower_loads_torch_beside_ray() -> None:
    program = (
        "import sys; import fedsub_app.client_app; from fedsub_app.deployment.flower import bundle; "
        "from fedsub_app.runs.recorded import new_folder, settings_of; settings = settings_of({})\n"
        "with bundle(settings): assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_ends_with_its_code_after_its_threads_and_exit_functions() -> None:
    program = (
        "import atexit, threading; from fedsub_app.cli.main import process; atexit.register(print, 'last'); "
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start(); process()"
    )
    for words, code in {"help fedselect": 0, "run method=fedavgg": 2}.items():
        command = [sys.executable, "-c", program, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.split()[-2:]) == (code, ["thread", "last"]), done.stderr


def test_more_ctrl_c_hide_neither_how_the_run_goes_on_nor_show_a_traceback() -> None:
    """The second one comes while a run closes, the third one while Python ends."""
    program = """
import atexit, os, signal
from types import SimpleNamespace
from fedsub_app.cli import main as cli

def stopped(*_):
    try:
        raise KeyboardInterrupt("`fedsub run --resume A` goes on")
    finally:
        os.kill(os.getpid(), signal.SIGINT)

cli.get_command = lambda _: SimpleNamespace(make_context=stopped)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
cli.process()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "stopped: `fedsub run --resume A` goes on\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_finds_no_room_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fedsub_app.cli", "help", "fedselect"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_help_page(name: str) -> None:
    page = about_method(name)
    assert page.startswith(f"# {name}\n\n{METHODS[name].description}.")
    assert all(f"| {name}.{field.alias} |" in page for field in METHODS[name].settings.model_fields.values())
    words = page.splitlines()[-1].split()
    assert words[:3] == ["fedsub", "run", "quickstart/digits"]
    assert "10 clients" in plan(resolve(overrides_of(words[2:], [])))  # its own command is not refused


def test_a_setting_has_a_help_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "dirichlet-alpha"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| dirichlet-alpha | 0.5 | number > 0")


def test_help_of_a_command_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "federation"):
        assert cli.main(["help", command]) == 0
        said = capsys.readouterr().out
        assert cli.main([command, "--help"]) == 0
        assert said == capsys.readouterr().out


@pytest.mark.parametrize("name", experiments())
def test_a_copy_is_the_experiment(name: str, tmp_path: Path) -> None:
    """Also of one that extends its neighbour."""
    assert cli.main(["cp", name, str(tmp_path / "my.toml")]) == 0
    copied, original = (resolve({"experiment": at}).digest() for at in (str(tmp_path / "my.toml"), name))
    assert copied == original
    tomllib.loads((tmp_path / "my.toml").read_text())
    assert cli.main(["cp", name, str(tmp_path / "my.toml")]) == 2


def test_the_command_that_runs_a_copy_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cp", "quickstart/digits", str(tmp_path / "mein Lauf.toml")]) == 0
    assert capsys.readouterr().out == f"fedsub run '{tmp_path / 'mein Lauf.toml'}'\n"


def test_without_an_output_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``>&-`` leaves a process without sys.stdout."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["list"]) == 0
    assert not capsys.readouterr().err
