"""Tables, reports and the command line."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from helpers import fedsub, forked

from fedsub_app.cli import main as cli
from fedsub_app.common import conf_files
from fedsub_app.common.files import write_json
from fedsub_app.common.progress import human_seconds
from fedsub_app.common.score import SCORES, Score
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.common.text import human_bytes
from fedsub_app.data import own_digest
from fedsub_app.reports.records import grouped
from fedsub_app.runs import config
from fedsub_app.settings import digest
from fedsub_app.studies import batch, reproduce
from fedsub_app.studies.evidence import t_interval
from fedsub_app.studies.tables import Paper, Row, read_table
from fedsub_app.training.workplace import workplace

Run = Callable[..., tuple[Json, Path]]
TABLE = """# A small table
title = "A small table"
seeds = 2

[[setting]]
name = "digits"
experiment = "fedpews/digits"
set = { num-rounds = 2, model = "feature-mlp", lr = 0.05, target-score = 1.0 }
paper.FedAvg = { rounds = "7", final = "12.3 ± 0.4" }

[[method]]
label = "FedAvg"
set = { method = "fedavg" }

[[method]]
label = "local"
set = { method = "local", target-score = 0.0 }
"""


@pytest.fixture(autouse=True)
def _no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "get_context", forked)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """FedPeWS's experiments and one more table."""
    conf = tmp_path / "conf"
    (conf / "my/tables").mkdir(parents=True)
    (conf / "fedpews").symlink_to(conf_files.conf_folder() / "fedpews")
    (conf / "my/tables/small.toml").write_text(TABLE)
    monkeypatch.setattr(conf_files, "conf_folder", lambda: conf)
    return "my-small"


@pytest.mark.parametrize("name", sorted(conf_files.tables()))
def test_every_table_resolves(name: str) -> None:
    table = read_table(name)
    for row in table.rows:
        config.resolve(row.overrides)
    assert len({row.slug for row in table.rows}) == len(table.rows)


def test_a_dry_run_lists_the_runs(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", table, "--seeds", "1", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "digits  FedAvg  seed 0: fedavg on digits, 2 clients, 2 rounds",
        "digits  local  seed 0: local on digits, 2 clients, 2 rounds",
    ]
    assert not (tmp_path / "out").exists()


def test_a_row_is_a_setting_with_a_method(table: str) -> None:
    fedavg, local = read_table(table).rows
    assert (fedavg.setting, fedavg.label, fedavg.slug) == ("digits", "FedAvg", "digits-fedavg")
    assert fedavg.paper == Paper(rounds="7", final="12.3 ± 0.4")
    assert local.paper == Paper()
    assert local.overrides["target-score"] == 0.0  # the method's keys win over the setting's


@pytest.mark.parametrize("key", ["fedselect.alpha", '"fedselect.alpha"'])
def test_a_methods_own_key_stands_as_in_an_experiment(table: str, key: str) -> None:
    own = f'set = {{ method = "fedselect", {key} = 0.3 }}'
    conf_files.tables()[table].write_text(TABLE.replace('set = { method = "fedavg" }', own))
    assert read_table(table).rows[0].overrides["fedselect.alpha"] == 0.3


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "final =",
            "finall =",
            "setting 1, paper, FedAvg: 'finall': unknown key; allowed are rounds, final, gigabytes, gflops",
        ),
        (
            '{ rounds = "7", final = "12.3 ± 0.4" }',
            '["7", "12.3"]',
            "setting 1, paper, FedAvg = ['7', '12.3']: must be a table of rounds, final, gigabytes, gflops",
        ),
        ('rounds = "7"', "rounds = 7", "setting 1, paper, FedAvg, rounds = 7: must be a text"),
        ("paper.FedAvg", "paper.FedAvgg", "setting 1, paper.FedAvgg: no such method; allowed are FedAvg, local"),
        ('label = "local"', 'name = "local"', "method 2: 'name': unknown key; allowed are label, set"),
        ('label = "local"\n', "", "method 2, label: missing"),
        ("seeds = 2", "seeds = 0", "seeds = 0: must be greater than or equal to 1"),
        (
            "seeds = 2",
            "seed = 2",
            "'seed': unknown key; allowed are title, about, seeds, first-seed, spread, cost-to-accuracy, reference, ",
        ),
        ("seeds = 2", 'seeds = 2\nreference = "all"', "reference = 'all': no such method; allowed are FedAvg, local"),
        (
            'label = "local"',
            'label = "fedavg!"',
            "rows 'digits FedAvg' and 'digits fedavg!' would share the folder 'digits-fedavg'; name one otherwise",
        ),
        ("seeds = 2", "seeds = 2000", "seeds = 2000: must be less than or equal to 1000"),
        (
            TABLE,
            TABLE.replace('"digits"', '"!"').replace('"local"', '"?"', 1),
            "row '! ?': must have a letter a to z or",
        ),
        ("seeds = 2", "seeds = 2 2", "not valid TOML: Expected newline or end of document after a statement"),
    ],
)
def test_a_wrong_table_is_one_line(
    table: str, old: str, new: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conf_files.tables()[table]
    file.write_text(TABLE.replace(old, new))
    assert cli.main(["reproduce", table]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: conf/my/tables/small.toml: {line}")
    assert said.count("\n") == 1


def test_a_table_is_run_written_and_not_run_twice(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["reproduce", table, "--out", str(out), "--workers", "2"]) == 0
    assert capsys.readouterr().out.count("done  ") == 4
    rows = list(csv.reader((out / "my-small.csv").open()))
    assert rows[0] == list(reproduce.table_header(Score()))
    assert len(set(rows[0])) == len(rows[0])
    fedavg = rows[1]
    finals = [
        json.loads((out / f"digits-fedavg/seed{seed}/summary.json").read_text())["final-global-accuracy"]
        for seed in (0, 1)
    ]
    # "local" keeps its models in its clients' states, which nobody asks for any more.
    assert not any((out / "digits-local/seed0/clients").iterdir())
    mean, spread = sum(finals) / 2, abs(finals[0] - finals[1]) / 2**0.5
    assert fedavg[4] == f"{mean:.2f} ± {spread:.2f} (2)"
    assert fedavg[3] == "7"
    assert fedavg[5] == "12.3 ± 0.4"
    kept = json.loads((out / "my-small.json").read_text())
    assert (kept["set"], kept["seeds"], kept["reference"]) == ({}, 2, "FedAvg")
    row, local = kept["rows"]
    assert (row["paper"], row["metric"], row["rounds"]) == (
        {"rounds": "7", "final": "12.3 ± 0.4"},
        "global-accuracy",
        2,
    )
    assert [run["final"] for run in row["runs"]] == finals
    assert row["runs"][0]["curve"]["round"] == [0, 1, 2]
    assert {"torch", "numpy", "torchvision"} <= row["runs"][0]["versions"].keys()
    assert row["runs"][0]["machine"]["capability"]
    apart = [run["final"] - other["final"] for run, other in zip(local["runs"], row["runs"], strict=True)]
    assert rows[2][6] == f"{t_interval(apart)} (2)"
    text = (out / "my-small.md").read_text()
    for fact in ("# A small table", "- commit: ", "- seeds: 0, 1", "- machine: ", "- data: digits"):
        assert fact in text
    assert "| minutes |" in text
    assert "on validation data" not in text  # no row has any
    page = (out / "report.html").read_text()
    assert f"{mean:.2f} ± {spread:.2f}" in page
    assert "reproduce my-small" in page
    assert cli.main(["reproduce", table, "--out", str(out)]) == 0  # all there: nothing is run again
    assert "done  " not in capsys.readouterr().out
    assert cli.main(["reproduce", table, "--out", str(out), "-s", "lr=0.01", "--seeds", "1"]) == 0  # other settings
    assert capsys.readouterr().out.count("done  ") == 2


def test_runs_are_checked_against_a_tables_file(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's keys and seeds are run anew; where it has one seed, hence no noise, another final is different."""
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    few = ["reproduce", table, "--workers", "1"]
    assert cli.main([*few, "--seeds", "1", "--only", "FedAvg", "-s", "num-rounds=1"]) == 0
    file = tmp_path / "reproduce/my-small/my-small.json"
    capsys.readouterr()
    assert cli.main([*few, "--check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "local" not in said  # the file has no such row
    assert "done  " in said  # not the runs that lie there
    assert said.endswith("\n1 equal, 0 within seed noise, 0 different\n")
    kept = json.loads(file.read_text())
    kept["rows"][0]["runs"][0]["final"] += 1.0
    file.write_text(json.dumps(kept))
    assert cli.main([*few, "--only", "FedAvg", "--check", str(file)]) == 1
    assert capsys.readouterr().out.endswith("\n0 equal, 0 within seed noise, 1 different\n")
    assert cli.main([*few, "--check", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_differences_are_points_of_percentages_alone() -> None:
    for score, words in ((SCORES["classification"], ", points"), (SCORES["regression"], "")):
        job: Any = SimpleNamespace(settings=SimpleNamespace(score=score))
        row: Any = None
        assert reproduce._points([(row, [job])]) == words


def test_a_file_that_sets_what_the_table_sets_is_refused(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row was run with the file's method, and compared with the row's numbers."""
    file = tmp_path / "set.json"
    file.write_text(json.dumps({"rows": [{"setting": "a", "method": "b", "runs": []}], "set": {"method": "moon"}}))
    assert cli.main(["reproduce", table, "--check", str(file)]) == 2
    assert capsys.readouterr().err.startswith("error: -s method: the table sets it; allowed are the other keys")


def test_the_file_of_another_table_is_refused_before_a_run(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": [{"setting": "digits", "method": "FedProx", "runs": []}]}))
    assert cli.main(["reproduce", table, "--check", str(file)]) == 2
    said = capsys.readouterr()
    assert said.err == f"error: --check {file}: has none of these rows of {table}\n"
    assert not said.out


def test_only_some_rows(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", table, "--out", str(tmp_path), "--seeds", "1", "--only"]
    assert cli.main([*arguments, "Local"]) == 2
    assert capsys.readouterr().err == "error: --only 'Local': allowed are 'digits', 'FedAvg', 'local'\n"
    assert cli.main([*arguments, "local", "--only", "digits"]) == 0
    rows = list(csv.reader((tmp_path / "my-small.csv").open()))
    assert [row[1] for row in rows[1:]] == ["local"]
    assert "--only local --only digits" in (tmp_path / "my-small.md").read_text()
    assert not (tmp_path / "digits-fedavg").exists()
    assert cli.main(arguments[:-1]) == 0
    assert (tmp_path / "my-small.png").exists()
    assert cli.main([*arguments, "local"]) == 0
    assert not (tmp_path / "my-small.png").exists()  # a picture of all rows


def test_a_table_named_like_its_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.toml").write_text(TABLE)
    assert cli.main(["reproduce", str(tmp_path / "report.toml"), "--dry-run"]) == 2
    assert capsys.readouterr().err.endswith(
        "/report.toml: report.csv and report.json are files of its page; name the table otherwise\n"
    )


def test_rows_of_another_metric_say_so_and_have_no_difference(table: str, tmp_path: Path) -> None:
    """The mean of clients' own models was subtracted from the global model's score, as if it were one number."""
    file = conf_files.tables()[table]
    file.write_text(file.read_text().replace('"local", target', '"local", evaluate = "personal", target'))
    assert cli.main(["reproduce", table, "--out", str(tmp_path), "--seeds", "1", "-s", "num-rounds=1"]) == 0
    fedavg, local = list(csv.reader((tmp_path / "my-small.csv").open()))[1:]
    assert fedavg[4].endswith(" global-accuracy")
    assert local[4].endswith(" personal-accuracy")
    assert local[6] == ""


def test_range_over_seeds_and_validation(table: str, tmp_path: Path) -> None:
    file = conf_files.tables()[table]
    file.write_text(file.read_text().replace("seeds = 2", 'seeds = 3\nspread = "range"'))
    keys = ["-s", "evaluate=personal,global", "-s", "validation-fraction=0.5", "-s", "num-rounds=1"]
    assert cli.main(["reproduce", table, "--out", str(tmp_path), "--only", "local", *keys]) == 0
    folders = sorted((tmp_path / "digits-local").glob("seed?"))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    cells = dict(zip(*list(csv.reader((tmp_path / "my-small.csv").open())), strict=True))
    for column, key in (
        ("final accuracy (%)", "personal-accuracy"),
        ("on validation data (%)", "personal-validation-accuracy"),
    ):
        low, middle, high = sorted(summary[f"final-{key}"] for summary in summaries)
        assert cells[column] == f"{middle:.2f} ({low:.2f} to {high:.2f}; 3)"
    assert "median (minimum to maximum)" in (tmp_path / "my-small.md").read_text()
    settings = config.resolve(
        {"run-dir": str(folders[0]), **json.loads((folders[0] / "settings.json").read_text())["settings"]}
    )
    place = workplace(settings)
    sizes = [len(indices) for indices in place.partition.validation]
    lines = [json.loads(line) for line in (folders[0] / "rounds.jsonl").read_text().splitlines()]
    for client, metrics in lines[-1]["evaluated"].items():  # a whole number of its own validation samples
        right = metrics["personal-validation-accuracy"] / 100 * sizes[int(client)]
        assert right == pytest.approx(round(right), abs=1e-6)


def test_a_stopped_table_goes_on(table: str, tmp_path: Path) -> None:
    """A run with a checkpoint but no summary is resumed, not started again."""
    job = reproduce.job_of(read_table(table).rows[0], 0, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    (job.folder / "summary.json").unlink()
    (job.folder / "checkpoints/round-000002.safetensors").unlink()
    assert job.summary() is None
    assert batch.run_job(job.overrides, job.folder) == ""
    assert "resumed after round 1 of 2" in (tmp_path / "run.log").read_text()
    assert job.summary() is not None


@pytest.mark.parametrize("state", ["finished", "stopped", "damaged"])
def test_a_run_of_other_settings_is_not_deleted(table: str, tmp_path: Path, state: str) -> None:
    """Another key makes another run: what is there, or cannot be read, stays beside it."""
    job = reproduce.job_of(read_table(table).rows[0], 0, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    if state != "finished":
        (job.folder / "summary.json").unlink()
    if state == "damaged":
        (job.folder / "settings.json").write_text("{")
    before = (job.folder / "rounds.jsonl").read_bytes()
    assert batch.run_job(job.overrides | {"lr": 0.01}, job.folder) == ""
    found = [path.read_bytes() for path in tmp_path.glob("run-before-*/rounds.jsonl")]
    assert found == [before]
    assert "; kept as run-before-" in (tmp_path / "run.log").read_text()


def test_a_run_of_other_settings_that_goes_on_is_not_moved(table: str, tmp_path: Path) -> None:
    """Two commands with one folder: the first one's rounds would have been written into the second one's run."""
    job = reproduce.job_of(read_table(table).rows[0], 0, tmp_path / "run")
    job.folder.mkdir()
    with FileLock(job.folder / ".lock"):
        said = batch.run_job(job.overrides, job.folder)
    assert said == f"{job.folder}: another process is running it, with other settings"
    assert [path.name for path in job.folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("edited", ["mine.toml", "net.py"])
def test_an_edited_file_is_run_anew(tmp_path: Path, edited: str) -> None:
    """The keys of the command are the same, and the file that they name is not; nor are two texts two seeds."""
    net = "def Net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "net.py").write_text(f"from torch import nn\n{net}")
    (tmp_path / "mine.toml").write_text('extends = "quickstart/digits"\nnum-rounds = 1\n')
    keys: dict[str, Value] = {"experiment": str(tmp_path / "mine.toml"), "model": f"{tmp_path}/net.py:Net"}
    job = batch.Job("mine", keys | {"run-dir": str(tmp_path / "run")}, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    with (tmp_path / edited).open("a") as file:
        file.write("lr = 0.02\n")
    job = replace(job)
    assert job.summary() is None
    assert batch.run_job(job.overrides, job.folder) == ""
    assert job.summary() is not None
    before, *none = tmp_path.glob("run-before-*")
    assert not none
    groups = grouped([before, job.folder])
    text = sha256((tmp_path / "net.py").read_bytes()).hexdigest()[:6]
    differs = {"mine.toml": "lr=0.02", "net.py": f"model={tmp_path}/net.py:Net ({text})"}
    assert [len(group.records) for group in groups] == [1, 1]
    assert groups[1].label == f"fedavg {differs[edited]}"


def test_edited_data_are_run_anew(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,label\n" + "1,0\n2,1\n" * 24)
    keys: dict[str, Value] = {"dataset": f"csv:{tmp_path}/t.csv", "model": "feature-mlp", "method": "fedavg"}
    keys |= {"num-rounds": 1, "partition": "iid", "evaluate": "global", "run-dir": str(tmp_path / "run")}
    job = batch.Job("mine", keys, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    assert job.summary() is not None
    (tmp_path / "t.csv").write_text("x,label\n" + "1,1\n2,0\n" * 24)
    assert job.summary() is None
    assert batch.run_job(job.overrides, job.folder) == ""
    assert job.summary() is not None
    assert len([*tmp_path.glob("run-before-*")]) == 1
    (tmp_path / "d.py").write_text("def load(): raise ValueError")  # a function may draw other samples at each call
    assert own_digest(replace(job, overrides=keys | {"dataset": f"{tmp_path}/d.py:load"}).settings.data) == ""


def test_the_commands_to_go_on_with_can_be_typed() -> None:
    rows = [Row("", "mine", {"experiment": "", "method": "my dir/m.py:Foo"}, Paper())] * 2
    assert reproduce._next(rows) == ["fedsub run 'method=my dir/m.py:Foo'", "fedsub help 'my dir/m.py:Foo'"]


@pytest.mark.parametrize(("method", "code"), [("local", 2), ("fedavg", 0)])
def test_more_rounds_need_the_clients_states(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, code: int
) -> None:
    """A table's runs do not keep them: clients that had to begin anew would not be said to."""
    row = next(row for row in read_table(table).rows if row.overrides["method"] == method)
    job = reproduce.job_of(row, 0, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    before = (job.folder / "rounds.jsonl").read_bytes()
    assert cli.main(["run", "--resume", str(job.folder), "num-rounds=9", "--workers", "1"]) == code
    if code:
        gone = "has no states of its clients: reproduce and sweep keep none; run it anew"
        assert capsys.readouterr().err == f"error: num-rounds = 9: the run to resume in {job.folder} {gone}\n"
        assert (job.folder / "rounds.jsonl").read_bytes() == before
        assert job.summary() is not None


def killed(*_: object) -> str:
    """A run whose process the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_a_killed_process_is_one_line(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "run_job", killed)
    assert cli.main(["reproduce", table, "--out", str(tmp_path), "--workers", "1", "--only", "local"]) == 1
    lines = capsys.readouterr().err.splitlines()
    said = "not run: a process was killed (out of memory?); the same command goes on"
    assert lines[0] == f"failed: digits local seed 0: {said}"
    assert all(line.endswith(said) for line in lines)
    assert "| digits | local | failed |" in (tmp_path / "my-small.md").read_text()


def test_a_run_of_other_settings_is_in_no_table(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made by an earlier command, whose folder it has; this command's process was killed before its turn."""
    command = ["reproduce", table, "--out", str(tmp_path), "--workers", "1", "--seeds", "1", "--only", "local"]
    assert cli.main(command) == 0
    assert "GFLOPs" in capsys.readouterr().out
    monkeypatch.setattr(batch, "run_job", killed)
    assert cli.main([*command, "-s", "lr=0.2"]) == 1
    assert "GFLOPs" not in capsys.readouterr().out


def test_a_run_of_an_earlier_version_counts(table: str, tmp_path: Path) -> None:
    """One that did not know all of today's settings: those have their defaults; a changed value is another run."""
    job = reproduce.job_of(read_table(table).rows[0], 0, tmp_path / "run")
    assert batch.run_job(job.overrides, job.folder) == ""
    content = json.loads((job.folder / "settings.json").read_text())
    del content["crc32"], content["settings"]["stack-clients"]
    write_json(job.folder / "settings.json", content | {"digest": digest(content["settings"])})
    assert job.summary() is not None
    content["settings"]["batch-size"] += 1
    write_json(job.folder / "settings.json", content | {"digest": digest(content["settings"])})
    assert job.summary() is None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes from /proc")
def test_killed_the_runs_end_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsub_app.cli", "reproduce", "fedpews-3k-and-digits", "--workers", "1"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("*/seed0/rounds.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert children
    while (alive := [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def test_the_machine_of_a_table_is_that_of_its_runs(table: str, tmp_path: Path) -> None:
    """Jobs of a cluster have another one than the command, and so may have runs of an earlier call."""
    job = reproduce.job_of(read_table(table).rows[0], 0, tmp_path / "run")
    about = {"machine": {"cpus": 64, "model": "EPYC", "processor": ""}, "device": {"type": "cuda", "name": "H100"}}
    write_json(job.folder / "settings.json", about)
    assert batch.facts("", [0], [job])["machine"] == "EPYC, 64 cores, H100; one thread a run"


def test_a_failing_row_is_named(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", table, "--out", str(tmp_path / "out"), "--seeds", "1", "-s", "dataset=nothing"]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: dataset = 'nothing'")


def test_rows_whose_data_are_missing_take_no_table_from_the_others(tmp_path: Path) -> None:
    other = '[[method]]\nlabel = "none"\nset = { method = "local", dataset = "nothing" }\n'
    (tmp_path / "mine.toml").write_text(TABLE + other)
    only = ("--only", "local", "--only", "none")
    command = ["reproduce", str(tmp_path / "mine.toml"), "--out", str(tmp_path), "--seeds", "1", *only]
    assert cli.main(command) == 1
    table = (tmp_path / "mine.md").read_text()
    assert "| digits | none | failed |" in table
    assert "- data: digits\n" in table


@pytest.mark.slow
def test_runs_are_jobs_of_a_cluster(tmp_path: Path) -> None:
    """submitit's cluster of this machine takes Slurm's place."""
    (tmp_path / "small.toml").write_text(TABLE)
    arguments = ("reproduce", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--seeds", "1")
    done = fedsub(tmp_path, *arguments, "--slurm", "cluster=local", "--slurm", "timeout_min=5")
    assert done.code == 0, done.err
    assert (tmp_path / "out/digits-fedavg/seed0/summary.json").exists()
    assert len([*(tmp_path / "runs/slurm").glob("*_result.pkl")]) == 2


@pytest.mark.slow
def test_stopped_the_jobs_of_a_cluster_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(TABLE)
    words = ["reproduce", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--seeds", "1"]
    words += ["-s", "num-rounds=5000", "--slurm", "cluster=local", "--slurm", "timeout_min=5"]
    environment = os.environ | {"FEDSUB_RUNS": str(tmp_path / "runs")}
    process = subprocess.Popen([sys.executable, "-m", "fedsub_app.cli", *words], env=environment)
    deadline = time.monotonic() + 120
    while len([*(tmp_path / "out").glob("*/seed0/rounds.jsonl")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    for folder in (tmp_path / "out").glob("*/seed0"):
        with FileLock(folder / ".lock", timeout=30):  # which a run holds while it lasts
            assert not (folder / "summary.json").exists()


def test_stopped_all_jobs_of_a_cluster_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that it is just given, and where it refuses; nobody waits until it says that they have ended."""
    cancelled: list[bool] = []
    asked: list[bool] = []

    def given(*_: Any) -> Any:
        time.sleep(0.2)
        return SimpleNamespace(done=lambda: False, result=waited, cancel=lambda check=True: cancelled.append(check))

    def waited() -> None:
        asked.append(True)
        time.sleep(2)

    cluster = SimpleNamespace(update_parameters=lambda **_: None, submit=given)
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=lambda *_, **__: cluster))
    monkeypatch.setattr(batch.signal, "signal", lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt), batch.SlurmPool(2, ("timeout_min=5",), tmp_path) as pool:
        pool.submit(str)
        pool.submit(str)
        raise KeyboardInterrupt
    assert cancelled == [False, False]


def spared(*_: Any) -> str:
    return "spared" if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []) else "reached"


def test_ctrl_c_does_not_reach_a_run_s_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment: a process that still imported printed a traceback of its own."""
    monkeypatch.undo()  # a process of its own, as in use
    monkeypatch.setattr(batch, "run_job", spared)
    assert [said for _, said in batch.run_all([batch.Job("run", {}, tmp_path)], 1)] == ["spared"]
    assert spared() == "reached"


def test_ctrl_c_ends_a_table_at_once(tmp_path: Path) -> None:
    """Also where the parent alone gets it."""
    (tmp_path / "small.toml").write_text(TABLE)
    words = ["reproduce", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "-s", "num-rounds=5000"]
    environment = os.environ | {"FEDSUB_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "fedsub_app.cli", *words, "--workers", "1"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not [*(tmp_path / "out").glob("*/seed0/rounds.jsonl")] and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "stopped: the same command goes on\n"
    assert process.returncode == 130
    with FileLock(next((tmp_path / "out").glob("*/seed0")) / ".lock", timeout=30):  # which a run holds while it lasts
        assert not [*(tmp_path / "out").glob("*/seed0/summary.json")]


def test_runs_go_on_without_the_reader_of_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fedsub reproduce | head -1`` ended the runs."""
    reader, writer = os.pipe()
    os.close(reader)
    nobody = os.fdopen(writer, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nobody)
        batch.say("1 of 2 rounds")
        batch.say("2 of 2 rounds")
    with pytest.raises(BrokenPipeError):
        nobody.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("cluster=nothing", " cluster=nothing: AutoExecutor doesn't know any"),
        ("cluster=local partitoin=gpu", " cluster=local partitoin=gpu: Parameter 'partitoin' need"),
        ("slurm_partition=gpu", ": timeout_min is missing, the minutes that a run may take"),
    ],
)
def test_a_wrong_or_missing_option_of_a_cluster_is_one_line(options: str, said: str, tmp_path: Path) -> None:
    """In a process of its own: submitit, where it is imported, closes all handlers of logging, pytest's as well."""
    (tmp_path / "small.toml").write_text(TABLE)
    words = [word for each in options.split() for word in ("--slurm", each)]
    done = fedsub(tmp_path, "reproduce", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), *words)
    assert done.code == 2, done.err
    assert done.err.startswith(f"error: --slurm{said}")


def test_unknown_names_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "fedpews-table99"]) == 2
    assert cli.main(["report", "/nonexistent"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: table 'fedpews-table99': allowed are ")
    assert errors[1] == "error: /nonexistent: not the directory of a run (no readable settings.json)"


def test_report_draws_runs_into_one_picture(run_local: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says of methods on other clients' data that their scores are of other problems."""
    clients = {"fedavg": 3, "fedprox": 3, "fednova": 4}
    folders = [str(run_local(name, method=name, num_clients=count)[1]) for name, count in clients.items()]
    for count, said in ((2, False), (3, True)):
        assert cli.main(["report", *folders[:count], "--out", str(tmp_path / "curves.png")]) == 0
        assert ("These runs differ in their data: num-clients\n" in capsys.readouterr().out) == said
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_leaves_what_it_should(run_local: Run, tmp_path: Path) -> None:
    summary, folder = run_local(target_score=30.0)
    written = {"settings.json", "rounds.jsonl", "summary.json", "model.safetensors", "partition.json"}
    pictures = {"partition.png", "curve.png"}
    assert {path.name for path in folder.iterdir()} & (written | pictures) == written
    pairs = ("model=feature-mlp", "method=fedavg", "num-rounds=1", f"run-dir={tmp_path / 'drawn'}")
    assert cli.main(["run", *(word for pair in pairs for word in ("-s", pair))]) == 0
    assert {path.name for path in (tmp_path / "drawn").iterdir()} >= written
    end = time.monotonic() + 120
    while not all((tmp_path / "drawn" / name).exists() for name in pictures):  # by a process of their own
        assert time.monotonic() < end
        time.sleep(0.1)
    assert summary["rounds-to-target"] in (None, 1, 2, 3)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    for key in ("bytes-up", "formula-bytes-up", "flops", "subnet-flops", "compute-seconds"):
        assert summary[f"total-{key}"] == pytest.approx(sum(line.get(key, 0) for line in lines))


def test_list_shows_every_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("fedpews", "synthetic-3k", "lenet5", "fedpews/digits", "fedpews-3k-and-digits"):
        assert name in text
    assert cli.main(["list", "settings"]) == 0
    text = capsys.readouterr().out
    for words in ('"sgd"', r"sgd \| adam", "number > 0", "Learning rate of the first round."):
        assert words in text


def test_units_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 999_600, 2.5e6)] == ["0 B", "999 B", "1.5 kB", "1 MB", "2.5 MB"]
    assert [human_seconds(s) for s in (4.4, 187, 3720)] == ["4 s", "3:07 min", "1:02 h"]
