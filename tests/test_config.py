"""Settings: order of the sources, and one clear line for every wrong one."""

import pytest

from fedsub_app.common.errors import UserError
from fedsub_app.config import defaults, describe, experiments, parse_pairs, resolve
from fedsub_app.methods import METHODS


def test_defaults_resolve_and_every_key_is_described() -> None:
    settings = resolve({})
    assert settings.method == "fedpews"
    assert set(describe()) == set(defaults())


def test_an_experiment_lies_between_defaults_and_single_keys() -> None:
    assert resolve({}).num_rounds == 50
    assert resolve({"experiment": "fedpews/table2-d"}).num_rounds == 500
    # a key set by hand wins even where it equals the default
    assert resolve({"experiment": "fedpews/table2-d", "num-rounds": 50}).num_rounds == 50


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
