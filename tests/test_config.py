"""Settings: order of the sources, and one clear line for every wrong one."""

from pathlib import Path

import pytest

from fedsub_app import config
from fedsub_app.common.errors import UserError
from fedsub_app.config import defaults, describe, experiments, parse_pairs, resolve
from fedsub_app.methods import METHODS


def test_defaults_resolve_and_every_key_is_described() -> None:
    settings = resolve({})
    assert settings.method == "fedpews"
    assert set(describe()) == set(defaults())


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
    monkeypatch.setattr(config, "conf_folder", lambda: tmp_path)
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


@pytest.mark.parametrize("name", sorted(experiments()))
def test_every_experiment_resolves_for_every_method(name: str) -> None:
    for method in METHODS:
        resolve({"experiment": name, "method": method})


def test_settings_come_back_from_their_flat_form() -> None:
    settings = resolve({"experiment": "fedpews/digits", "fedpews.lambda": 3})
    again = resolve({key: value for key, value in settings.flat().items() if key != "experiment"})
    assert again.flat() == settings.flat() | {"experiment": ""}
    assert again.digest() == settings.digest()
    assert resolve({"seed": 1}).digest() != resolve({}).digest()


def test_pairs() -> None:
    assert parse_pairs(["lr=0.1", "method=fedavg", "class-lists='0 2 | 1 3'", "resume=true", "seed=3"]) == {
        "lr": 0.1,
        "method": "fedavg",
        "class-lists": "0 2 | 1 3",
        "resume": True,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"num-round": 3}, "num-round = 3: unknown key; did you mean num-rounds?"),
        ({"fedpews.lamda": 3}, "fedpews.lamda = 3: unknown key; did you mean fedpews.lambda?"),
        ({"method": "fedavgg"}, f"method = 'fedavgg': allowed are {', '.join(METHODS)}"),
        (
            {"experiment": "fedpews/digit"},
            "experiment = 'fedpews/digit': no conf/fedpews/digit.toml; did you mean fedpews/digits?",
        ),
        ({"lr": -1}, "lr = -1: must be greater than 0"),
        ({"lr": "fast"}, "lr = 'fast': must be number"),
        ({"lr": float("nan")}, "lr = nan: must be a finite number"),
        ({"lr": float("inf")}, "lr = inf: must be a finite number"),
        ({"num-rounds": 2.5}, "num-rounds = 2.5: must be integer"),
        ({"num-rounds": True}, "num-rounds = True: must be integer"),
        ({"num-rounds": 0}, "num-rounds = 0: must be greater than or equal to 1"),
        ({"optimizer": "sdg"}, "optimizer = 'sdg': must be 'sgd' or 'adam'"),
        ({"participation": 1.5}, "participation = 1.5: must be less than or equal to 1"),
        ({"clients-per-round": 9}, "clients-per-round = 9: at most num-clients = 2"),
        ({"min-replies": 3}, "min-replies = 3: at most the 2 clients that take part in a round"),
        ({"evaluate": "globl"}, "evaluate = 'globl': allowed are global, global-local, personal, comma-separated"),
        ({"fedpews.warmup-rounds": 51}, "fedpews.warmup-rounds = 51: must be at most num-rounds = 50"),
        ({"fedpews.masks": "random"}, "fedpews.masks = 'random': must be 'learned' or 'fixed'"),
        ({"prox-mu": -0.1}, "prox-mu = -0.1: must be greater than or equal to 0"),
        ({"resume": True}, "run-dir = '': resume = true needs the run directory to resume"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum = 0.9: allowed with optimizer = 'sgd' only"),
        ({"lr-decay-at": "200 x"}, "lr-decay-at = '200 x': must be rounds from 1 on, such as '200 400', or ''"),
        ({"seed": -1}, "seed = -1: must be greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(keys: dict[str, str | int | float | bool], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(keys)
    assert str(caught.value) == line
