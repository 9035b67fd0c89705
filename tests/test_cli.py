"""What a newcomer types: the README's own commands, files of one's own, plans, completion, versions; and Python."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from flwr.serverapp.strategy import Strategy
from helpers import rounds, tree
from typer.main import get_command

import fedsub
import fedsub_app
from fedsub_app.cli import main as cli
from fedsub_app.cli.arguments import split
from fedsub_app.cli.run import overrides_of
from fedsub_app.common.errors import UserError
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.common.tensors import Json
from fedsub_app.deployment import flower
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.runs.config import applicable_keys, resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.studies import reproduce
from fedsub_app.studies.batch import Job, run_job
from fedsub_app.studies.sweep import metric_of
from fedsub_app.studies.tables import read_table
from fedsub_app.studies.trials import Search, read_space

Run = Callable[..., tuple[Json, Path]]
OWN = """extends = "quickstart/digits"
method = "fedprox"
num-rounds = 2
prox-mu = 0.5
objective = "prox"
fedselect.alpha = 0.4
"""
TABLE = """title = "Of my own"
seeds = 1

[[setting]]
name = "mine"
experiment = "../my.toml"

[[method]]
label = "FedProx"

[[method]]
label = "FedSelect"
set = { method = "fedselect", objective = "none" }
"""


def commands(page: str, *first: str) -> list[str]:
    """The commands in a page's indented code that begin with these words, without comments and brackets."""
    text = (PROJECT / page).read_text().replace(" \\\n", " ")
    lines = re.findall(r"(?m)^    (\S.*)$", text)
    found = [re.sub(r"\s+#.*|[\[\]]", "", line) for line in lines]
    return [line for line in found if line.startswith(first)]


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments and options of a command line, by name; nothing is run."""
    context = get_command(cli.app).make_context("fedsub", list(words))
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command
        context = command.make_context(name, rest, parent=context)
    return context.params


@pytest.fixture
def desk(tmp_path: Path, run_local: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run and files of one's own."""
    run_local("runs/A", evaluate="global,personal")
    (tmp_path / "my.toml").write_text(OWN)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/mine.toml").write_text(TABLE)
    shutil.copy(tmp_path / "tables/mine.toml", tmp_path / "my-table.toml")
    (tmp_path / "my-table.toml").write_text(TABLE.replace("../my", "my"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "least"),
    [("README.md", 7), ("docs/running.md", 18), ("docs/outputs.md", 5), ("docs/data.md", 1), ("docs/install.md", 1)],
)
def test_the_guides_commands(page: str, least: int, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every one is read; its settings are resolved, its table is there; those that start no run are run."""
    shutil.copytree(desk / "runs/A", desk / "runs/B")
    lines = commands(page, "fedsub ")
    assert len(lines) >= least
    for line in lines:
        words = ["runs/A" if word.startswith("runs/2") else word for word in shlex.split(line)[1:]]
        options = parsed(words)
        if words[0] == "run":
            if not options["resume"]:
                chosen = resolve(overrides_of(options["words"], options["pairs"]))
                assert not (chosen.data_dir and chosen.train_per_class), "all of the reader's own samples"
            if options["dry_run"]:
                assert cli.main(words) == 0, line
        elif words[0] == "reproduce":
            table = read_table(options["name"])
            assert {*(options["only"] or ())} <= {row.label for row in table.rows}
        elif words[0] == "sweep":
            experiment, pairs = split(options["words"], options["pairs"])
            fixed, space = read_space(pairs)
            search = Search(experiment, fixed, space, "random", options["trials"])
            assert (
                metric_of(resolve(search.overrides(search.examples()[0])), options["metric"]) == "personal-validation"
            )
        elif words[0] in ("report", "export", "list", "help") or words[:3] == ["analyse", "runs/A"]:
            assert cli.main(words) == 0, line
    assert "error" not in capsys.readouterr().err


def test_the_command_of_a_table(desk: Path) -> None:
    """docs/own-data.md: its network takes the table's columns."""
    rows = [f"{20 + i},{50 + i % 7},{'ill' if i % 7 < 3 else 'well'},{'ABC'[i % 3]}" for i in range(60)]
    (desk / "patients.csv").write_text("\n".join(["age,weight,outcome,hospital", *rows]))
    (line,) = [line for line in commands("docs/own-data.md", "fedsub ") if "patients.csv" in line]
    assert cli.main([*shlex.split(line)[1:], "--dry-run"]) == 0


def test_the_readmes_python() -> None:
    """Its recipe, with a network and a function of the reader's."""
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", (PROJECT / "README.md").read_text())
    names: dict[str, Any] = {"fedsub": fedsub, "Net": torch.nn.Identity, "load_data": lambda context: None}
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["strategy"], Strategy)
    assert isinstance(names["app"], ClientApp)


def test_the_readme_is_short() -> None:
    """Recipes of at most six lines; nothing that a reader has to scroll for."""
    text = (PROJECT / "README.md").read_text()
    assert len(text.split()) < 800
    recipes = text.partition("## Recipes")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?m)(?:^    .*\n)+|(?<=```python\n)(?:^[^`].*\n)+", recipes)
    assert len(blocks) == 3
    assert all(block.count("\n") <= 6 for block in blocks)


def test_flowers_commands_in_the_guide() -> None:
    """Their keys as Flower itself reads them, all together and resolved."""
    lines = commands("docs/running.md", "flwr run ")
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line)
        assert words[:4] == ["flwr", "run", ".", "local-simulation"]
        given = [words[number + 1] for number, word in enumerate(words) if word == "-c"]
        resolve(parse_config_args(given))  # type: ignore[arg-type]


PAGES = [str(page.relative_to(PROJECT)) for page in sorted((PROJECT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "fedsub ")])
def test_the_pages_commands_can_be_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each page of the documentation: options, settings, tables and their rows are there."""
    monkeypatch.chdir(PROJECT)
    for line in commands(page, "fedsub "):
        words = shlex.split(line)[1:]
        options = parsed(words)
        if words[0] == "run" and not (options["resume"] or "my" in line):
            resolve(overrides_of(options["words"], options["pairs"]))
        elif words[0] == "reproduce" and "my-" not in line:
            given = parse_pairs([*(options["words"] or ()), *(options["pairs"] or ())])
            for row in read_table(options["name"]).rows:
                resolve(applicable_keys({**row.overrides, **given}))


def test_an_experiment_in_a_file_of_ones_own(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys of another method in it do nothing; what is given by hand goes before it."""
    settings = resolve({"experiment": "my.toml", "num-rounds": 1})
    assert (settings.method, settings.num_clients, settings.num_rounds, settings.prox_mu) == ("fedprox", 10, 1, 0.5)
    assert cli.main(["run", "my.toml", "--workers", "1", "-s", "num-rounds=1"]) == 0
    (folder,) = desk.glob("runs/*-my-seed0")
    assert f"run {folder}  fedprox on digits  400 training and 359 test samples" in capsys.readouterr().out
    assert cli.main(["run", "--resume", str(folder), "-s", "num-rounds=2", "--workers", "1"]) == 0
    assert [line["round"] for line in read_rounds(folder)] == [0, 1, 2]


def test_the_bundle_does_not_hold_it_so_its_keys_are_sent(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower is given resolves to the same settings where the file is not, also with another method by hand.

    A run that is resumed has its keys: it is given no others.
    """
    assert cli.main(["run", "my.toml", "num-rounds=1", "run-dir=one"]) == 0
    started: list[list[str]] = []

    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no SuperLink")

    monkeypatch.setattr(flower.subprocess, "run", refuse)
    monkeypatch.setattr(flower, "connections", lambda: {"mine": {"address": "127.0.0.1:1"}})
    fedselect = {"method": "fedselect", "objective": "none"}
    for given in ({}, {"num-rounds": 1}, {"method": "moon", "objective": "moon"}, fedselect):
        asked = {"experiment": str(desk / "my.toml"), **given}
        with pytest.raises(UserError, match="no SuperLink"):
            flower.run("mine", asked)
        arguments = started[-1][started[-1].index("mine") :]
        keys = parse_config_args([arguments[arguments.index("-c") + 1]])
        assert not keys["experiment"]
        assert resolve(keys).digest() == resolve(asked).digest()
    with pytest.raises(UserError, match="no SuperLink"):
        flower.run("mine", {"resume": True, "run-dir": "one", "num-rounds": 2})
    assert 'resume=true run-dir="one" num-rounds=2' in started[-1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the last of Flower's commands, which are all refused."""
    asked: list[str] = []

    def refuse(*words: str) -> None:
        asked[:] = words
        raise UserError("no SuperLink")

    monkeypatch.setattr(flower, "ask", refuse)
    monkeypatch.setattr(flower, "connections", lambda: {"mine": {"address": "127.0.0.1:1"}})
    return asked


def test_a_resumed_run_keeps_its_data_folder(desk: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine's nodes too, whatever $FEDSUB_DATA is now."""
    assert cli.main(["run", "my.toml", "num-rounds=1", "run-dir=one", f"data-dir={desk}"]) == 0
    for name in ("FEDSUB_DATA", "FLWR_HOME"):
        monkeypatch.setenv(name, str(desk / "other"))
    monkeypatch.setattr(flower, "connections", lambda: {flower.CONNECTION: {"insecure": True}})
    with pytest.raises(UserError, match="no SuperLink"):
        flower.run(flower.CONNECTION, {"resume": True, "run-dir": "one"})
    assert f'data-dir="{desk}"' in asked[-1]


def test_a_federation_has_the_data_that_it_was_started_with(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever $FEDSUB_DATA is in the shell that starts a run."""
    monkeypatch.setattr(flower, "connections", lambda: {"ours": {flower.FOLDER_KEY: "a", flower.DATA_KEY: "/ours"}})
    for name in ("FEDSUB_DATA", "FLWR_HOME"):
        monkeypatch.setenv(name, "/other")
    for given, folder in (({}, "/ours"), ({"data-dir": "/given"}, "/given")):
        with pytest.raises(UserError, match="no SuperLink"):
            flower.run("ours", given)
        assert f'data-dir="{folder}"' in asked[-1]


@pytest.mark.parametrize("more", [{}, {"experiment": "my.toml"}])
def test_devices_of_a_file_go_with_the_run(more: dict[str, Any], desk: Path, asked: list[str]) -> None:
    """Flower is given the file's content: neither the SuperLink nor a node has the file."""
    (desk / "wards.toml").write_text('class = [{name = "ward", share = 1.0, up-mbps = 2.0}]\n')
    with pytest.raises(UserError, match="no SuperLink"):
        flower.run("mine", more | {"devices": "wards.toml"})
    devices = parse_config_args([asked[-1]])["devices"]
    assert json.loads(str(devices)) == [{"name": "ward", "share": 1.0, "up-mbps": 2.0}]


def test_wrong_files_are_named(desk: Path) -> None:
    (desk / "circle.toml").write_text('extends = "circle.toml"\n')
    (desk / "odd.toml").write_text("num-round = 3\n")
    (desk / "broken.toml").write_text("num-rounds = \n")
    for name, said in {
        "nowhere.toml": "experiment = 'nowhere.toml': no nowhere.toml",
        "circle.toml": "circle.toml: extends = 'circle.toml': a circle (circle.toml -> circle.toml)",
        "odd.toml": "num-round = 3 in odd.toml: unknown key; did you mean num-rounds?",
        "broken.toml": "broken.toml: not valid TOML: ",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(said)}"):
            resolve({"experiment": name})
    with pytest.raises(UserError, match=re.escape("table 'nowhere.toml': no such file")):
        read_table("nowhere.toml")
    with pytest.raises(UserError, match=re.escape("my.toml: 'extends': unknown key; allowed are title, ")):
        read_table("my.toml")


def test_a_table_in_a_file_of_ones_own(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experiment is found from where the table's file lies."""

    def run_all(jobs: list[Job], *_: Any) -> list[tuple[Job, str]]:  # in this process: to start others takes seconds
        return [(job, reason) for job in jobs if (reason := run_job(job.overrides, job.folder))]

    monkeypatch.setattr(reproduce, "run_all", run_all)
    arguments = ["tables/mine.toml", "--only", "FedSelect", "--workers", "1", "--seeds", "1", "-s", "num-rounds=1"]
    arguments += ["-s", "gpu-exact=true", "-s", "evaluate=personal, global"]
    assert cli.main(["reproduce", *arguments]) == 0
    out = capsys.readouterr().out
    assert "runs/reproduce/mine/mine.md" in out
    page = (desk / "runs/reproduce/mine/mine.md").read_text()
    (command,) = re.findall("(?m)^- command: fedsub reproduce (.*)$", page)
    assert parsed(["reproduce", "--workers", "1", *shlex.split(command)]) == parsed(["reproduce", *arguments])


def test_the_opening_line_and_the_warm_up(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a run says is where it is and what it will do; a round of the warm-up is called so."""
    keys = {"model": "feature-mlp", "train-per-class": "40", "run-dir": "warm", "num-rounds": "3"}
    pairs = [word for key, value in keys.items() for word in ("-s", f"{key}={value}")]
    assert cli.main(["run", "fedpews/digits", "--workers", "1", *pairs, "-s", "fedpews.warmup-rounds=2"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"run {desk / 'warm'}  fedpews on digits  400 training and ")
    assert first.endswith("  2 clients, 2 a round  3 rounds, warm-up in rounds 1 to 2")
    assert "feature-mlp, 77,010 parameters" in first
    said = [line for line in lines if line.startswith("round ")]
    assert ["warm-up" in line.split("  ") for line in said] == [True, True, False]
    assert [line.get("stage") for line in read_rounds(desk / "warm")] == [None, "warm-up", "warm-up", None]


def test_a_warm_up_that_is_longer_than_the_run(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """W = 50 of 20 rounds, as with num-rounds = 20 on one of the paper's experiments."""
    assert cli.main(["run", "fedpews/table2-eta-1", "--dry-run", "-s", "num-rounds=20"]) == 0
    assert re.search(r"^rounds +warm-up: all of them$", capsys.readouterr().out, re.MULTILINE)


def test_a_plan_says_what_the_run_then_does(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes by the formula, of both parts of the method, and the clients' samples; nothing is written."""
    before = tree(desk)
    pairs = ["-s", "model=feature-mlp", "-s", "fedpews.warmup-rounds=1", "-s", "num-rounds=2", "-s", "lr=0.03"]
    assert cli.main(["run", "fedpews/digits", *pairs, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert tree(desk) == before
    assert cli.main(["run", "fedpews/digits", *pairs, "-s", "run-dir=run", "--workers", "1"]) == 0
    warm, after = read_rounds(desk / "run")[1:]
    assert "lr = 0.03" in plan
    down, up = (after[f"formula-bytes-{way}"] for way in ("down", "up"))
    assert re.search(
        rf"^round 2 +{down / 1000:.3g} kB down, {up / 1000:.3g} kB up by the formula, 2 clients$", plan, re.M
    )
    found = re.search(r"^round 1, warm-up +([\d.]+) kB down, at most ([\d.]+) kB up", plan, re.MULTILINE)
    assert found
    assert float(found[1]) == pytest.approx(warm["formula-bytes-down"] / 1000, rel=0.01)
    assert float(found[2]) >= warm["formula-bytes-up"] / 1000
    flops = re.search(r"^training +([\d.]+) GFLOPs", plan, re.MULTILINE)
    assert flops
    assert float(flops[1]) == pytest.approx(after["flops"] / 1e9, rel=0.01)
    assert plan.count("\n| ") == 2 + 2


def test_a_plan_of_many_clients_and_of_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["-s", "num-clients=30", "-s", "partition=iid", "-s", "model=feature-mlp", "-s", "method=ist"]
    assert cli.main(["run", "--dry-run", *keys]) == 0
    assert "30 clients: 47 to 48 training samples (median 48), " in capsys.readouterr().out
    assert cli.main(["run", "--dry-run", *keys, "-s", "clip-norm=1.0"]) == 2  # what the method refuses


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"fedsub [\d.]+, flwr 1\.4[12]\.\d+, ray .*, torch .*, Python 3\..*\n", capsys.readouterr().out)


COMPLETED = {
    "fedsub repr": "reproduce",
    "fedsub run fedpews/dig": "fedpews/digits",
    "fedsub run -s num-cl": "num-clients=",
    "fedsub reproduce quick": "quickstart-digits",
    "fedsub run --dry": "--dry-run",
}


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell does it: the function that the script registers, asked for the last word."""
    show_completion("bash", monkeypatch)
    script, command = tmp_path / "completion.bash", tmp_path / "fedsub"
    script.write_text(capsys.readouterr().out)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedsub_app.cli "$@"\n')
    command.chmod(0o755)
    for typed, expected in COMPLETED.items():
        words = " ".join(map(shlex.quote, typed.split()))
        ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _fedsub_completion {command}"
        run = ["bash", "-c", f". {script}; {ask}; echo ${{COMPREPLY[@]}}"]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert expected in done.stdout.split(), (typed, done.stdout, done.stderr[-300:])


def show_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print a shell's script; Typer asks the processes above for the shell, here an argument names it."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--show-completion", shell])
    assert ended.value.code == 0


def test_completion_for_zsh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    show_completion("zsh", monkeypatch)
    assert capsys.readouterr().out.startswith("#compdef fedsub")


def test_a_locale_of_ascii_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the checkout are UTF-8 all the same; what the terminal lacks is escaped."""
    for name, value in {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    for words in (["help", "fedpews"], ["list", "methods"]):
        done = subprocess.run([sys.executable, "-m", "fedsub_app.cli", *words], capture_output=True, check=False)
        assert (done.returncode, rb"Horv\xe1th" in done.stdout) == (0, True), done


def test_python_page(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its code, block after block, as one program; it gives what the command gives."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", (PROJECT / "docs/python.md").read_text())
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    record = names["record"]
    assert record.status == "completed"
    again = fedsub_app.run(
        {"experiment": "quickstart/digits", "method": "fedselect", "num-rounds": 5, "run-dir": "again"}, workers=2
    )
    assert rounds(again.folder) == rounds(record.folder)
    with pytest.raises(UserError, match="num-round = 3: unknown key"):
        fedsub_app.run({"num-round": 3})
