"""Sweeps: what is searched, what decides, and that a killed one goes on as if nothing had been."""

import csv
import json
import statistics
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from helpers import _main, forked
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from fedsub_app.cli import main as cli
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_json
from fedsub_app.common.score import Score
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.runs import config
from fedsub_app.runs.recorded import new_folder
from fedsub_app.studies import batch, sweep
from fedsub_app.studies.trials import Search, Space, Sweep, Trial, read_space

KEYS = ["evaluate=personal", "validation-fraction=0.2", "num-rounds=4", "method=fedselect"]
VALIDATED = [word for key in KEYS for word in ("-s", key)]


def test_values_ranges_and_what_stays() -> None:
    fixed, space = read_space(
        [
            "lr=0.01,0.1",
            "fedpews.lambda=0.5..5:log",
            "local-epochs=1..5",
            "method=fedavg,fedpews",
            "evaluate=global,personal",  # a key that is a list itself
            'lr-decay-at=["2, 4", "3"]',
            "momentum=0.9",
            "weight-decay=1e-4..1e-2",
            "model-options=width=32, norm='group'",  # one text of two options
            "partition-options=alpha=0.1,alpha=1.0",
        ]
    )
    assert fixed == {"evaluate": "global,personal", "momentum": 0.9, "model-options": "width=32, norm='group'"}
    assert space == {
        "lr": CategoricalDistribution((0.01, 0.1)),
        "fedpews.lambda": FloatDistribution(0.5, 5.0, log=True),
        "local-epochs": IntDistribution(1, 5),
        "method": CategoricalDistribution(("fedavg", "fedpews")),
        "lr-decay-at": CategoricalDistribution(("2, 4", "3")),
        "weight-decay": FloatDistribution(1e-4, 1e-2),
        "partition-options": CategoricalDistribution(("alpha=0.1", "alpha=1.0")),
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-s", "lr=0.1"], "nothing to search: give a key several values, -s lr=0.01,0.1, or a range, "),
        (["-s", "lr=0.1..0.01"], "lr = 0.1..0.01: the first number must be below the second"),
        (["-s", "lr=0..1:log"], "lr = 0..1:log: must be above 0 on a logarithmic scale"),
        (["-s", "batch-size=1.5..8"], "batch-size = 1.5..8: must be from one integer to another"),
        (["-s", "optimizer=1..2"], "optimizer = 1..2: only a number has a range; values to try stand with commas"),
        (["-s", "lr=0.1..x", "-s", "momentum=0,0.9", *VALIDATED], "lr = '0.1..x': must be a number"),
        (["-s", "learning=0.1,0.2", *VALIDATED], "learning = 0.1: unknown key; "),
        (["-s", "lr=0.1..5e6", "--trials", "2", *VALIDATED], "lr = 5000000.0: must be less than or equal to 1000000"),
        (
            ["-s", "batch-size=8,0", "-s", "lr=0.1,0.2", "--search", "optuna", "--trials", "2", *VALIDATED],
            "batch-size = 0: must be greater than or equal to 1",
        ),
        (
            ["-s", "lr=0.1..0.2", "-s", "optimizer=sgd,none", "--search", "optuna", "--trials", "2", *VALIDATED],
            "optimizer = 'none': must be ",
        ),
        (
            [
                *VALIDATED,
                *("-s", "method=fedavg,ditto", "-s", "ditto.lambda=1,-1", "--search", "optuna", "--trials", "2"),
            ],
            "ditto.lambda = -1: must be ",
        ),
        (["-s", "seed=1,2"], "seed = 1,2: must be one number, that of the first run; --seeds N runs N of them"),
        (["-s", "seed=abc"], "seed = abc: must be one number, that of the first run"),
        (["-s", "momentum=,"], "momentum = ,: no value"),
        (
            [*VALIDATED, "-s", "validation-fraction=0.2,0"],
            "--metric 'personal-validation': allowed with these settings are personal\n",
        ),
        (["-s", "resume=true"], "-s resume: a sweep sets it itself; allowed are the other keys"),
        (["-s", "lr=0.1..0.2"], "--trials: how many settings to try must be said, with a range and with Optuna"),
        (
            ["-s", "lr=0.1..0.2", "--search", "grid"],
            "lr = 0.1..0.2: a range has no grid; --search random or optuna, or values",
        ),
        (["-s", "lr=0.1,0.2", "--trials", "0"], "Invalid value for '--trials': 0 is not in the range 1<=x<=100000."),
        (
            ["-s", "lr=0.1,0.2"],
            "validation-fraction = 0.0: must be above 0, a sweep compares on validation data; "
            "--metric global would compare on test data",
        ),
        (
            ["-s", "lr=0.1,0.2", "-s", "validation-fraction=0.2"],
            "evaluate = 'global': must name global-local or personal, which have validation scores",
        ),
        (
            ["-s", "lr=0.1,0.2", "--metric", "personal"],
            "--metric 'personal': allowed with these settings are global",
        ),
        (  # the same run again and again, ranked by a key that it does not have
            ["method=fedavg", "fedselect.alpha=0.1,0.5"],
            "fedselect.alpha: does nothing with the method of any trial",
        ),
        (
            ["method=fedavg", "fedselect.alpha=0.1", "lr=0.1,0.2"],
            "fedselect.alpha: does nothing with the method of any",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_optuna_takes_lists_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_all", lambda jobs, *_: [(job, "not run") for job in jobs])
    arguments = ["sweep", "-s", "lr=0.1,0.2", "--search", "optuna", "--trials", "2", *VALIDATED]
    assert cli.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert len(params_of(tmp_path / "out")) == 2


def search_of(space: Space, method: str, trials: int, **fixed: Value) -> Search:
    keys = {"evaluate": "personal", "validation-fraction": 0.2, "model": "feature-mlp"} | fixed
    return Search("", keys, space, method, trials)


def test_a_grid_has_every_pair_once_and_methods_only_their_own_keys() -> None:
    methods, rates, sizes = map(CategoricalDistribution, (("fedavg", "ditto"), (0.1, 0.2), (8, 16, 32)))
    grid = search_of({"method": methods, "ditto.lambda": CategoricalDistribution((0.1, 1.0)), "lr": rates}, "grid", 100)
    assert grid.count == 2 + 4  # FedAvg has no lambda
    shuffled, more = (search_of({"lr": rates, "batch-size": sizes}, "random", count).points for count in (4, 100))
    assert shuffled
    assert more
    assert len({tuple(keys.values()) for keys in shuffled}) == 4
    assert more[:4] == shuffled
    assert len(more) == 6


def test_a_grid_that_goes_on_with_its_keys_in_another_order_has_every_pair_once(tmp_path: Path) -> None:
    pairs, tried = ["lr=0.1,0.2", "momentum=0.0,0.9"], set()
    for count, given in ((2, pairs), (4, pairs[::-1])):
        grid = sweep_of(search_of(read_space(given)[1], "grid", 4), tmp_path)
        tried = {(trial.keys["lr"], trial.keys["momentum"]) for trial in map(grid.trial, range(count))}
    assert tried == {(0.1, 0.0), (0.1, 0.9), (0.2, 0.0), (0.2, 0.9)}


def test_random_trials_are_in_range_and_the_same_however_many(tmp_path: Path) -> None:
    space: Space = {
        "lr": FloatDistribution(1e-4, 1.0, log=True),
        "local-epochs": IntDistribution(1, 3),
        "optimizer": CategoricalDistribution(("sgd", "adam")),
    }

    def drawn(count: int, **fixed: Value) -> list[Mapping[str, Value]]:
        search = sweep_of(search_of(space, "random", count, **fixed), tmp_path / f"{count}-{len(fixed)}")
        return [search.trial(number).keys for number in range(count)]

    plan = drawn(80)
    assert drawn(3) == plan[:3]
    assert drawn(3, seed=1) != plan[:3]
    rates = [float(keys["lr"]) for keys in plan]
    assert min(rates) >= 1e-4
    assert max(rates) <= 1.0
    assert 0.35 < sum(rate < 1e-2 for rate in rates) / 80 < 0.65  # half of the range in its logarithm
    assert {keys["local-epochs"] for keys in plan} == {1, 2, 3}
    assert {keys["optimizer"] for keys in plan} == {"sgd", "adam"}


def sweep_of(search: Search, out: Path) -> Sweep:
    return Sweep(search, "personal-validation", Score(), 1, out)


def params_of(out: Path) -> list[dict[str, Value]]:
    """Return the searched keys of the trials in a sweep's journal."""
    path = str(out / "sweep.journal")
    storage = JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))
    return [trial.params for trial in optuna.load_study(study_name="sweep", storage=storage).trials]


def finish(trial: Trial, accuracy: float) -> None:
    """Write what a finished run leaves behind."""
    for job in trial.jobs:
        settings = {"run-id": "0" * 12, "settings": job.settings.flat(), "digest": job.settings.digest()}
        write_json(job.folder / "settings.json", settings)
        summary = {"status": "completed", "final-personal-validation-accuracy": accuracy}
        write_json(job.folder / "summary.json", summary)


def test_optuna_goes_where_it_was_good_and_proposes_the_same_again(tmp_path: Path) -> None:
    space: Space = {"lr": FloatDistribution(0.0, 1.0), "momentum": CategoricalDistribution((0.0, 0.9))}
    proposed = []
    for name in "ab":
        for number in range(30):
            if number % 10 == 0:  # continued by another process
                search = sweep_of(search_of(space, "optuna", 30), tmp_path / name)
            trial = search.trial(number)
            finish(trial, 90 - 100 * abs(float(trial.keys["lr"]) - 0.7) - 10 * float(trial.keys["momentum"]))
        proposed.append([float(trial.keys["lr"]) for trial in search.started()])
    assert proposed[0] == proposed[1]
    assert statistics.fmean(abs(rate - 0.7) for rate in proposed[0][15:]) < 0.2  # random: 0.29


def test_a_torn_line_of_the_journal_is_cut_and_a_damaged_one_named(tmp_path: Path) -> None:
    search = Search("fedpews/digits", {}, {"lr": CategoricalDistribution((0.1, 0.2))}, "grid")
    _ = sweep_of(search, tmp_path).trial(0)
    journal = tmp_path / "sweep.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])  # as a power cut leaves it: the trial is drawn again
    assert sweep_of(search, tmp_path).trial(0).keys == {"lr": 0.1}
    damages = {b"{\n": "JSONDecodeError", b"7\n": "TypeError", b'{"op_code": 99}\n': "AssertionError"}
    for damage, name in damages.items():
        journal.write_bytes(damage + whole)
        with pytest.raises(UserError, match=rf"sweep\.journal: damaged \({name}: .+\); delete it to begin"):
            _ = sweep_of(search, tmp_path).study


def test_the_command_is_one_line_as_best_toml_has_it_in_a_comment(tmp_path: Path) -> None:
    pairs = ["lr=[0.1,\n0.2]"]
    search = Search("fedpews/digits", {}, read_space(pairs)[1], "grid")
    assert "-s 'lr=[0.1, 0.2]' --search" in sweep._command(sweep_of(search, tmp_path), pairs, None)


def test_experiments_of_one_name_are_two_sweeps_and_so_is_an_edited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, folders = Search("my.toml", {}, {"lr": CategoricalDistribution((0.1, 0.2))}, "grid"), set()
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        for line in ("", "num-rounds = 3\n"):
            Path("base.toml").write_text(f'extends = "quickstart/digits"\n{line}')
            for own in ("", "num-clients = 4\n"):
                Path("my.toml").write_text(f'extends = "base.toml"\n{own}')
                folders.add(sweep._folder(search, "global"))
    assert len(folders) == 8


def test_the_best_settings_can_be_run(tmp_path: Path) -> None:
    """The experiment names the objective of one method, and another one is the best."""
    (tmp_path / "my.toml").write_text('extends = "quickstart/digits"\nobjective = "prox"\n')
    search = Search(str(tmp_path / "my.toml"), {}, {"method": CategoricalDistribution(("moon",))}, "grid")
    (tmp_path / "best.toml").write_text(sweep._toml(search, sweep_of(search, tmp_path / "out").trial(0), "best"))
    assert config.resolve({"experiment": str(tmp_path / "best.toml")}).objective == "moon"


def test_the_seed_is_that_of_the_experiment(tmp_path: Path) -> None:
    """Trials run with it, and so does best.toml, which extends the experiment."""
    mine = tmp_path / "my.toml"
    mine.write_text('extends = "fedpews/digits"\nseed = 5\n')
    space: Space = {"lr": CategoricalDistribution((0.1, 0.2))}
    trial = sweep_of(Search(str(mine), {}, space, "grid"), tmp_path).trial(0)
    assert [job.settings.seed for job in trial.jobs] == [5]
    assert Search(str(mine), {"seed": 2}, space, "grid").seed == 2


def test_a_long_path_makes_no_name_that_a_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    path = f"{tmp_path}{'/folder' * 40}/file"
    Path(path).parent.mkdir(parents=True)
    Path(f"{path}.toml").write_text('extends = "quickstart/digits"')
    assert new_folder(config.resolve({"dataset": f"csv:{path}.csv"})).name.endswith("-folder-file.csv-seed0")
    search = Search(f"{path}.toml", {}, {"lr": CategoricalDistribution((0.1, 0.2))}, "grid")
    sweep._folder(search, "global").mkdir(parents=True)
    assert new_folder(config.resolve({"dataset": f"csv:{'/папка' * 40}/x.csv"})).is_dir()


def test_a_score_of_test_data_is_too_good_whether_high_or_low() -> None:
    assert sweep.metric_in_words("global", "rmse") == (
        "global TEST rmse at the end (so the best one's is too good: it was chosen by it)"
    )


@pytest.mark.run
def test_a_sweep_without_a_result_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundredth of 12 samples is none: no client has validation data."""
    keys = "num-rounds=1 num-clients=10 partition=iid train-per-class=12 validation-fraction=0.01 lr=0.1,0.2"
    assert cli.main(["sweep", "quickstart/digits", *keys.split(), "--workers", "1", "--out", str(tmp_path)]) == 1
    verdict = "No trial has a result, personal validation accuracy at the end."
    assert verdict in capsys.readouterr().out
    assert verdict in (tmp_path / "sweep.md").read_text()
    assert not (tmp_path / "best.toml").exists()


def test_a_folder_of_another_sweep_is_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", *VALIDATED, "--out", str(tmp_path)]
    _ = sweep_of(Search("fedpews/digits", {}, {}, "grid"), tmp_path).study
    assert cli.main([*arguments, "-s", "lr=0.1,0.2"]) == 2
    assert capsys.readouterr().err == (
        f"error: --out {tmp_path}: has another sweep, with experiment = 'fedpews/digits'\n"
    )


def test_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = get_context("spawn").SimpleQueue()
    for gpu in ("GPU-a", "GPU-b"):
        turns.put(gpu)
    monkeypatch.setenv(batch.VISIBLE, "GPU-a,GPU-b")
    monkeypatch.setattr(batch, "parent_process", lambda: True)  # this process has none, and is not to end with it
    monkeypatch.setattr(batch, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(batch.signal, "signal", lambda *_: None)  # this process and its children hear Ctrl-C
    seen = []
    for _ in range(2):
        batch._begin(turns)
        seen.append(batch.os.environ[batch.VISIBLE])
    assert seen == ["GPU-a", "GPU-b"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="a process is killed as on Linux")
def test_killed_and_resumed_it_has_the_same_trials_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys of FedSelect on digits; kill -9 in the second trial."""
    out = tmp_path / "out"
    arguments = ("sweep", "quickstart/digits", *VALIDATED, "-s", "lr=0.02..0.2:log", "-s", "fedselect.alpha=0.1,0.5")
    arguments += ("-s", "local-epochs=2", "--trials", "3", "--workers", "1", "--out", str(out))
    files = tmp_path / "stdout.txt", tmp_path / "stderr.txt"
    monkeypatch.setattr(batch, "get_context", forked)
    process = forked().Process(target=_main, args=(arguments, None, files, dict(batch.os.environ), None))
    process.start()
    rounds = out / "trial-001-seed0/rounds.jsonl"
    deadline = time.monotonic() + 120
    while not (rounds.exists() and b'"round": 1,' in rounds.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    planned = params_of(out)
    done = (out / "trial-000-seed0/rounds.jsonl").stat().st_mtime_ns
    assert not (out / "trial-001-seed0/summary.json").exists()
    assert cli.main(list(arguments)) == 0
    assert params_of(out)[: len(planned)] == planned
    assert (out / "trial-000-seed0/rounds.jsonl").stat().st_mtime_ns == done
    assert "resumed after round" in (out / "trial-001-seed0.log").read_text()

    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert len(rows) == 3
    found = {row["trial"]: row["personal-validation (%)"] for row in rows}
    ranked = [float(row["personal-validation (%)"]) for row in rows]
    assert ranked == sorted(ranked, reverse=True)
    text = (out / "sweep.md").read_text()
    assert "- chosen by: personal validation accuracy at the end" in text
    assert f"Best: trial {rows[0]['trial']} (" in text
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    # What the killed trial came to is what it comes to in one go.
    folder = tmp_path / "alone"
    overrides = parse_pairs([*KEYS, "local-epochs=2"]) | planned[1]
    overrides |= {"experiment": "quickstart/digits", "run-dir": str(folder)}
    assert batch.run_job(overrides, folder) == ""
    summary = json.loads((folder / "summary.json").read_text())
    assert found["1"] == f"{summary['final-personal-validation-accuracy']:.2f}"
    # The best settings are an experiment's file.
    (digest,) = digests(out, int(rows[0]["trial"]))
    assert config.resolve({"experiment": str(out / "best.toml")}).digest() == digest


def digests(out: Path, number: int) -> list[str]:
    """Return the digests of the runs of a trial."""
    return [json.loads(path.read_text())["digest"] for path in out.glob(f"trial-{number:03d}-seed*/settings.json")]
