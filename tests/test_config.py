"""Settings: order of the sources, and one clear line for every wrong one."""

import math
import tomllib
from datetime import date
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fedsub_app.client_app import app
from fedsub_app.common import conf_files
from fedsub_app.common.conf_files import experiments
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.runs import config
from fedsub_app.runs.config import (
    applicable_keys,
    as_toml,
    canonical,
    defaults,
    describe,
    flatten,
    resolve,
)
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.settings import Settings
from strategies.base import SubnetStrategy

ACCURACIES = "allowed are global, global-local, personal, comma-separated"
ROUNDS = "must be rounds from 1 on, such as '200, 400', or ''"
LISTS = "must be class numbers, a comma between the lists of two clients, such as '0 2, 1 3'"
LONG = [("", f"conf/{'a' * 194}"), (".toml", "a" * 199)]  # longer than the name of a file can be
PARTITIONS = (
    "'iid', 'quantity', 'dirichlet', 'shards', 'classes', 'source', 'source-classes', 'lists', 'column' or 'flwr:NAME'"
)


def test_defaults_resolve_and_every_key_is_described() -> None:
    settings = resolve({})
    assert settings.method == "fedpews"
    assert set(describe()) == set(defaults())
    assert all(default and meaning for default, _, meaning in describe().values())


def test_flower_is_told_every_key_with_its_default() -> None:
    """``[tool.flwr.app.config]`` in pyproject.toml is what `make settings` writes."""
    text = (PROJECT / "pyproject.toml").read_text()
    assert as_toml() in text
    assert flatten(tomllib.loads(text)["tool"]["flwr"]["app"]["config"]) == defaults()


def test_settings_need_no_toml() -> None:
    strategy = SubnetStrategy(Settings(num_clients=3), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    assert strategy.settings.sample_size == 3
    assert Settings().toml() == {key: value for key, value in defaults().items() if "." not in key}
    assert {Settings(): 1}[resolve({"method": "fedavg"}).model_copy(update={"method": "fedpews"})] == 1  # hashable


def test_an_experiment_lies_between_defaults_and_single_keys() -> None:
    assert resolve({}).num_rounds == 50
    assert resolve({"experiment": "fedpews/table2-3k-eta-0.1"}).num_rounds == 500
    # a key set by hand wins even where it equals the default
    assert resolve({"experiment": "fedpews/table2-3k-eta-0.1", "num-rounds": 50}).num_rounds == 50


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conf/ with the folder of one paper, empty."""
    (tmp_path / "paper").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(conf_files, "conf_folder", lambda: tmp_path)
    return tmp_path


def test_an_experiment_lies_on_top_of_what_it_extends(conf: Path) -> None:
    (conf / "other/base.toml").write_text("lr = 0.3\nbatch-size = 7\n[fedpews]\nlambda = 3.0\nmask-lr = 0.3\n")
    (conf / "paper/middle.toml").write_text('extends = "other/base"\nlr = 0.2\n[fedpews]\nlambda = 2.0\n')
    (conf / "paper/top.toml").write_text('extends = "middle"\nlr = 0.1\n')
    settings = resolve({"experiment": "paper/top"}).flat()
    assert [settings[key] for key in ("lr", "batch-size", "fedpews.lambda", "fedpews.mask-lr")] == [0.1, 7, 2.0, 0.3]
    assert settings["experiment"] == "paper/top"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('extends = "b"', "conf/paper/b.toml: extends = 'paper/a': a circle (paper/a -> paper/b -> paper/a)"),
        ('experiment = "b"', "conf/paper/a.toml: experiment = 'b': the key is extends here"),
        ('extends = "a"', "conf/paper/a.toml: extends = 'paper/a': a circle (paper/a -> paper/a)"),
        ('extends = "bb"', "conf/paper/a.toml: extends = 'paper/bb': no conf/paper/bb.toml; did you mean paper/b?"),
        ("extends = 3", "conf/paper/a.toml: extends = 3: must be the name of an experiment"),
        ('extends = "c"', "lrr = 1 in conf/paper/c.toml: unknown key; did you mean lr?"),
        ("lr = = 1", "conf/paper/a.toml: not valid TOML: Invalid value (at line 1, column 6)"),
    ],
)
def test_a_wrong_experiment_is_one_line_that_names_the_file(conf: Path, text: str, line: str) -> None:
    (conf / "paper/a.toml").write_text(text)
    (conf / "paper/b.toml").write_text('extends = "a"')
    (conf / "paper/c.toml").write_text("lrr = 1")
    with pytest.raises(UserError) as caught:
        resolve({"experiment": "paper/a"})
    assert str(caught.value) == line


def test_a_wrong_value_is_refused_where_another_method_runs(conf: Path) -> None:
    """Keys that the experiment gives to other methods are validated as well; those that it does not give are not."""
    (conf / "paper/a.toml").write_text('method = "fedavg"\n[fedpews]\nlambda = -1.0\n')
    with pytest.raises(UserError, match=r"^fedpews\.lambda = -1\.0: must be greater than or equal to 0$"):
        resolve({"experiment": "paper/a"})


@pytest.mark.parametrize("name", sorted(experiments()))
def test_every_experiment_resolves_for_every_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "read_experiment", cache(config.read_experiment))  # the same files for each
    for method in METHODS:
        resolve({"experiment": name, "method": method})


def test_settings_come_back_from_their_flat_form() -> None:
    settings = resolve({"experiment": "fedpews/digits", "fedpews.lambda": 3})
    again = resolve({key: value for key, value in settings.flat().items() if key != "experiment"})
    assert again.flat() == settings.flat() | {"experiment": ""}
    assert again.digest() == settings.digest()
    assert resolve({"seed": 1}).digest() != resolve({}).digest()


@effort(deadline=None)
@given(
    st.fixed_dictionaries(
        {"method": st.sampled_from(sorted(METHODS))},
        optional={
            "evaluate": st.lists(st.sampled_from(["global", "global-local", "personal"]), min_size=1).map(",".join),
            "lr-decay-at": st.lists(st.integers(1, 99)).map(lambda rounds: ", ".join(map(str, rounds))),
            "domains": st.lists(st.sampled_from(["fog", "snow-3"])).map(" , ".join),
            "class-lists": st.sampled_from(["", "0", "0 2, 1 3", "0  2,1 3"]),
            "fedpart.stale": st.sampled_from(["full-first", "faithful", "sync-all"]),
            "fedselect.layer": st.sampled_from(["", "layer4"]),
            "fedper.personal": st.sampled_from(["body", "conv1, layer4.1"]),
            "target-score": st.floats(0, 100),
            "lr": st.floats(1e-9, 10) | st.integers(1, 9),
            **dict.fromkeys(("train-per-class", "image-size", "min-nodes", "keep-checkpoints"), st.integers(0, 3)),
            **dict.fromkeys(("data-dir", "run-dir"), st.sampled_from(["", "runs/one"])),
        },
    )
)
def test_flat_settings_resolve_to_the_same_ones(keys: dict[str, Value]) -> None:
    keys = applicable_keys(keys)
    settings = resolve(keys)
    assert resolve(settings.flat()) == settings
    assert all(settings.flat().get(key, canonical(key, value)) == canonical(key, value) for key, value in keys.items())
    assert all(isinstance(value, str | int | float | bool) for value in settings.flat().values())


def test_what_toml_writes_as_nothing_is_none() -> None:
    settings = resolve({"fedselect.layer": "", "method": "fedselect", "keep-checkpoints": 0})
    nothing = (settings.experiment, settings.data_dir, settings.train_per_class, settings.test_per_class)
    nothing += (settings.image_size, settings.clients_per_round, settings.min_nodes, settings.keep_checkpoints)
    nothing += (settings.target_score, settings.run_dir, settings.options.layer)
    assert set(nothing) == {None}
    assert (settings.domains, settings.lr_decay_at, settings.class_lists) == ((), (), ())
    assert settings.flat()["keep-checkpoints"] == settings.flat()["target-score"] == 0
    assert settings.flat()["fedselect.layer"] == settings.flat()["domains"] == ""


def test_lists_are_tuples() -> None:
    keys = {"evaluate": "global,personal", "lr-decay-at": "200, 400", "domains": "Real World,fog"}
    settings = resolve({**keys, "class-lists": "0 2, 1 3", "fedpews.masks": "fixed", "fedpews.shares": "0.25,0.75"})
    assert settings.evaluations == ("global", "personal")
    assert settings.lr_decay_at == (200, 400)
    assert settings.domains == ("Real World", "fog")
    assert settings.class_lists == ((0, 2), (1, 3))
    assert settings.options.shares == (0.25, 0.75)
    assert settings.flat()["evaluate"] == "global, personal"
    assert settings.flat()["class-lists"] == "0 2, 1 3"
    one = resolve(parse_pairs(["lr-decay-at=2", "num-clients=1", "partition=lists", "class-lists=3"]))
    assert (one.lr_decay_at, one.class_lists) == ((2,), ((3,),))
    assert one.flat()["lr-decay-at"] == "2"
    one = resolve(parse_pairs(["method=fedpews", "num-clients=1", "fedpews.masks=fixed", "fedpews.shares=1.0"]))
    assert one.flat()["fedpews.shares"] == "1.0"
    assert settings.flat()["fedpews.shares"] == "0.25, 0.75"
    assert resolve({"domains": " "}).domains == ()
    with pytest.raises(UserError, match=r"^domains = True: must be names, separated by commas, or ''$"):
        resolve({"domains": True})


@pytest.mark.parametrize(
    ("keys", "by_examples"),
    [
        ({}, True),
        ({"method": "ist"}, False),
        ({"weighting": "uniform"}, False),
        ({"mean": "median"}, False),
        ({"clip-norm": 1.0, "dp-noise-multiplier": 1.0}, False),  # the noise is for equal weights
    ],
)
def test_a_clients_weight_is_its_samples_where_the_paper_says_so(keys: dict[str, Value], by_examples: bool) -> None:
    assert resolve({"method": "fedavg"} | keys).by_examples == by_examples


@pytest.mark.parametrize(("method", "objective"), [("fedprox", "prox"), ("moon", "moon")])
def test_a_method_presets_its_objective(method: str, objective: str) -> None:
    settings = resolve({"method": method})
    assert settings.objective == settings.flat()["objective"] == objective
    assert resolve(settings.flat()) == settings
    assert resolve({"method": method, "objective": objective}) == settings
    assert resolve({"method": method, "objective": "none"}) == settings  # the default, which Flower may write out
    # given by hand it replaces what an experiment sets
    assert resolve({"experiment": "fedpews/cifar10-disjoint-classes", "method": method}).objective == objective


def test_pairs() -> None:
    assert parse_pairs(["lr=0.1", "method=fedavg", "class-lists='0 2, 1 3'", "resume=true", "seed=3"]) == {
        "lr": 0.1,
        "method": "fedavg",
        "class-lists": "0 2, 1 3",
        "resume": True,
        "seed": 3,
    }
    deep = "[" * 9999
    assert parse_pairs([f"lr={deep}", "model=a\nlr=1", f"seed={'9' * 5000}"]) == {
        "lr": deep,
        "model": "a\nlr=1",
        "seed": "9" * 5000,
    }
    assert parse_pairs(["run-dir=2026-01-01", "data-dir=10:30:00"]) == {"run-dir": "2026-01-01", "data-dir": "10:30:00"}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"num-round": 3}, "num-round = 3: unknown key; did you mean num-rounds?"),
        ({"fedpews.lamda": 3}, "fedpews.lamda = 3: unknown key; did you mean fedpews.lambda?"),
        ({"method": "fedavgg"}, f"method = 'fedavgg': allowed are {', '.join(METHODS)}; did you mean fedavg?"),
        ({"method": "FedPeWS"}, f"method = 'FedPeWS': allowed are {', '.join(METHODS)}; did you mean fedpews?"),
        (
            {"experiment": "fedpews/digit"},
            "experiment = 'fedpews/digit': no conf/fedpews/digit.toml; did you mean fedpews/digits?",
        ),
        *(({"experiment": "a" * 300 + end}, f"experiment = '{'a' * 99}…: no {start}…") for end, start in LONG),
        ({"lr": -1}, "lr = -1: must be greater than 0"),
        ({"lr": "fast"}, "lr = 'fast': must be a number"),
        ({"lr": float("nan")}, "lr = nan: must be a finite number"),
        ({"lr": float("inf")}, "lr = inf: must be a finite number"),
        ({"num-rounds": 2.5}, "num-rounds = 2.5: must be an integer"),
        ({"num-rounds": True}, "num-rounds = True: must be an integer"),
        ({"num-rounds": 0}, "num-rounds = 0: must be greater than or equal to 1"),
        ({"optimizer": "sdg"}, "optimizer = 'sdg': must be 'sgd', 'adam', 'adamw' or 'rmsprop'"),
        ({"participation": 1.5}, "participation = 1.5: must be less than or equal to 1"),
        ({"clients-per-round": 9}, "clients-per-round = 9: at most num-clients = 2"),
        ({"min-replies": 3}, "min-replies = 3: at most the 2 clients that take part in a round"),
        ({"evaluate": "globl"}, "evaluate = 'globl': allowed are global, global-local, personal, comma-separated"),
        ({"fedpews.masks": "random"}, "fedpews.masks = 'random': must be 'learned' or 'fixed'"),
        ({"prox-mu": -0.1}, "prox-mu = -0.1: must be greater than or equal to 0"),
        ({"resume": True}, "run-dir = '': resume = true needs the run directory to resume"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum = 0.9: allowed with optimizer = 'sgd' or 'rmsprop' only"),
        ({"evaluate": "global personal"}, f"evaluate = 'global personal': {ACCURACIES}"),
        ({"evaluate": ""}, f"evaluate = '': {ACCURACIES}"),
        ({"lr-decay-at": "200, x"}, f"lr-decay-at = '200, x': {ROUNDS}"),
        ({"lr-decay-at": "0, 20"}, f"lr-decay-at = '0, 20': {ROUNDS}"),
        ({"lr-decay-at": "200 400"}, f"lr-decay-at = '200 400': {ROUNDS}"),
        ({"lr-decay-at": 2.5}, f"lr-decay-at = 2.5: {ROUNDS}"),
        ({"lr-decay-at": 0}, f"lr-decay-at = 0: {ROUNDS}"),
        ({"class-lists": "0 2 | 1 3"}, f"class-lists = '0 2 | 1 3': {LISTS}"),
        ({"class-lists": "0, "}, f"class-lists = '0, ': {LISTS}"),
        ({"class-lists": "0, -1"}, f"class-lists = '0, -1': {LISTS}"),
        ({"domains": "fog,"}, "domains = 'fog,': must be names, separated by commas, or ''"),
        ({"train-per-class": -1}, "train-per-class = -1: must be greater than or equal to 0"),
        ({"image-size": "8"}, "image-size = '8': must be an integer"),
        ({"run-dir": 3}, "run-dir = 3: must be a text"),
        ({"target-score": 101}, "target-score = 101: must be less than or equal to 100"),
        ({"partition": "even"}, f"partition = 'even': must be {PARTITIONS}"),
        ({"num-clients": 0}, "num-clients = 0: must be greater than or equal to 1"),
        ({"shards-per-client": 0}, "shards-per-client = 0: must be greater than or equal to 1"),
        ({"dirichlet-alpha": 0}, "dirichlet-alpha = 0: must be greater than 0"),
        ({"validation-fraction": 1}, "validation-fraction = 1: must be less than 1"),
        ({"holdout-fraction": 0}, "holdout-fraction = 0: must be greater than 0"),
        ({"classes-per-client": 0}, "classes-per-client = 0: must be greater than or equal to 1"),
        ({"method": "moon", "objective": "prox"}, "objective = 'prox': must be 'moon' with method = 'moon'"),
        ({"method": "fedprox", "objective": "moon"}, "objective = 'moon': must be 'prox' with method = 'fedprox'"),
        ({"method": "fedpart", "fedpart.order": "up"}, "fedpart.order = 'up': must be 'shallow', 'deep' or 'random'"),
        (
            {"method": "fedselect", "fedpews.lambda": 1.0},
            "fedpews.lambda = 1.0: does nothing with method = 'fedselect'",
        ),
        ({"num-clients": 10**30}, f"num-clients = {10**30}: must be less than or equal to 100000"),
        ({"image-size": 10**6}, "image-size = 1000000: must be less than or equal to 4096"),
        ({"local-epochs": 10**30}, f"local-epochs = {10**30}: must be less than or equal to 10000"),
        (
            {"method": "fedrep", "fedrep.shared-epochs": 10**5},
            "fedrep.shared-epochs = 100000: must be less than or equal to 10000",
        ),
        ({"lr": 1e30}, "lr = 1e+30: must be less than or equal to 1000000"),
        ({"lr": 10**400}, f"lr = 1{'0' * 99}…: must be a number"),
        ({"round-timeout": 1e300}, "round-timeout = 1e+300: must be less than or equal to 1000000"),
        ({"run-dir": "a\0b"}, r"run-dir = 'a\x00b': must be printable text"),
        ({"data-dir": "\udcff"}, r"data-dir = '\udcff': must be printable text"),
        ({"start-from": "~nobody-here/a"}, "start-from = '~nobody-here/a': '~' is the home of no user here"),
        ({"method": ["fedavg"]}, "method = ['fedavg']: must be one text, number, true or false"),
        ({"dataset": ""}, "dataset = '': must be the name of a data set, or names joined by +"),
        ({"resume": "yes"}, "resume = 'yes': must be true or false"),
        ({"seed": -1}, "seed = -1: must be greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(keys: dict[str, str | int | float | bool], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(keys)
    assert str(caught.value) == line


RANGES: list[tuple[str, list[float | str], list[float | str]]] = [
    ("fedadam.beta1", [0.0, 0.99], [-0.1, 1.0]),
    ("heterofl.widths", ["1"], ["0", "1.1", ""]),
    ("subfedavg.target", [0.0, 0.99], [-0.1, 1.0]),
    ("subfedavg.channel-share", [0.0, 0.99], [-0.1, 1.0]),
    ("fedala.percent", [0.1, 100.0], [0.0, 100.1]),
    ("hetlora.gamma", [0.01, 1.0], [0.0, 1.1]),
    ("feddst.density", [0.01, 1.0], [0.0, 1.1]),
    ("fedtiny.noise", [0.0, 0.99], [-0.1, 1.0]),
    ("fedselect.alpha", [0.0, 1.0], [-0.1, 1.1]),
    ("participation", [0.01, 1.0], [0.0, 1.1]),
    ("oversample", [1.0, 10.0], [0.9, 10.1]),
    ("target-score", [100.0], [100.1]),
    ("stop-at-score", [100.0], [100.1]),
    ("trim-fraction", [0.0, 0.49], [-0.1, 0.5]),
    ("dp-delta", [0.01, 0.99], [0.0, 1.0]),
    ("secure-dropouts", [0.0, 0.49], [-0.1, 0.5]),
    ("secure-corrupted", [0.0, 0.49], [-0.1, 0.5]),
]


@pytest.mark.parametrize(("key", "inside", "outside"), RANGES)
def test_the_ends_of_ranges(key: str, inside: list[float | str], outside: list[float | str]) -> None:
    method = {"method": key.partition(".")[0]} if "." in key else {}
    for value in inside:
        resolve(method | {"num-clients": 1000, "participation": 0.1, key: value})
    for value in outside:
        with pytest.raises(UserError, match=f"^{key} = .*: must be "):
            resolve(method | {key: value})


# --- whatever keys are set to: a run, or one line that says what is wrong ------------------------------------------

VALUES = st.sampled_from(
    [
        *(-1, 0, 1, 2, 3, 10**6 + 1, 10**30, 10**400, True, False),
        *(-1.0, 0.0, 1e-300, 0.5, 1.0, 100.0, 1e6, 1e300, math.nan, math.inf),
        *("", "x", "a\0b", "\udcff", "a" * 300, "../x", "digits+digits", "head"),
        *(",", "1, 2", "0.5, 0.5", "0 1, 2", "nan, inf"),
        *([1], {"a": 1}, None, date(2026, 1, 1)),
    ]
)


@cache
def words() -> dict[str, st.SearchStrategy[str]]:
    """The words that a key allows, as they are listed, so that not every text is refused."""
    return {key: st.sampled_from(allowed.split()[::2] or ["x"]) for key, (_, allowed, _) in describe().items()}


@given(st.data(), st.sampled_from(sorted(METHODS)))
@effort(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_of_any_keys_run_or_are_refused_in_one_line(data: st.DataObject, method: str) -> None:
    general = sorted(key for key in defaults() if "." not in key and key not in ("method", "run-dir"))
    own = sorted(key for key in defaults() if key.startswith(f"{method}."))
    drawn = data.draw(st.lists(st.sampled_from(general + 4 * own), min_size=1, max_size=3, unique=True))
    keys = {key: data.draw(VALUES | words()[key], label=key) for key in drawn}
    refused = failed = ""
    with TemporaryDirectory() as folder:
        overrides: dict[str, Any] = {"num-rounds": 1, "model": "feature-mlp", "node-timeout": 0.1, "method": method}
        overrides |= {"train-per-class": 6, "test-per-class": 2, "run-dir": f"{folder}/run", "data-dir": folder} | keys
        try:
            run_experiment(LocalGrid(app, overrides), settings_of(overrides))
        except UserError as error:
            refused = str(error)
        except RunFailed as error:
            failed = str(error)
    assert not failed or "valid replies" in failed  # all clients' answers were refused
    assert "\n" not in refused
    assert len(refused) < 1200
    assert not refused or any(key in refused for key in defaults())
