"""Random settings of random methods: a run ends well or by one line, and how it is stopped or sent changes no bit.

Each number is a draw of its own; `pytest -m slow tests/test_combinations.py` runs all of them.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from helpers import METHOD_KEYS, result

from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.runs.config import defaults, fields, resolve
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed

CASES = 400
MODELS = ("feature-mlp", "mnist-cnn", "lenet5", "lenet5-bn", "fedpews-cnn", "fedpart-cnn")
VALUES: dict[str, tuple[Value, ...]] = {
    "all-budgets": (True, False), "attack": ("sign-flip", "scale", "label-flip"), "attack-scale": (0.5, 1.0, 1e6),
    "attackers": (0, 1, 2, 3), "augment": ("none", "crop-flip"), "batch-size": (1, 5, 64, 1000),
    "byzantine-clients": (0, 1), "client-test": ("labels", "holdout", "pooled"), "clip-norm": (0.01, 0.5),
    "clients-per-round": (1, 2, 3), "deadline": (0.001, 0.1), "devices": ("phones", "boards", "heterofl"),
    "dp-noise-by": ("server", "clients"), "dp-noise-multiplier": (0.01, 1.0), "eval-every": (1, 2, 5),
    "evaluate": ("global-local", "personal", "global, personal", "personal, global-local, global"),
    "held-out-clients": (1, 2), "head": ("fc1", "fc2"), "local-epochs": (0, 2), "local-steps": (1, 3, 7),
    "lr": (1e-4, 1.0, 30.0), "lr-decay-every": (1, 2), "lr-schedule": ("step", "cosine", "plateau"),
    "max-bytes": (1.0, 1e6), "max-device-seconds": (0.1, 5.0), "max-flops": (1e7, 1e9), "max-update-norm": (1.5, 5.0),
    "mean": ("median", "trimmed", "krum"), "metrics": ("auc", "spread, f1"), "min-contributors": (2, 3),
    "min-replies": (2, 3), "min-width": (0.5, 1.0), "model-width": (0.25, 0.5), "momentum": (0.5, 0.9),
    "objective": ("prox", "moon"), "optimizer": ("adam", "adamw", "rmsprop"), "oversample": (1.3, 2.0),
    "participation": (0.1, 0.5), "robust": ("on",), "samples-per-client": (1, 5, 20), "secure-aggregation": (True,),
    "secure-masks": ("secret", "public"), "server-lr": (0.1, 2.0), "stop-at-score": (50.0, 90.0),
    "trainable": ("lora", "head", "bias", "norm", "last-1-blocks"), "trim-fraction": (0.0, 0.4),
    "validation-fraction": (0.1, 0.5), "weight-decay": (0.1,), "weighting": ("uniform", "examples"),
}  # fmt: skip
PARTITIONS = ("iid", "classes", "dirichlet", "quantity", "shards")


class Interrupted(LocalGrid):
    """Ctrl-C instead of the message after ``left`` others."""

    left = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().push_messages(messages)


def drawn(draws: random.Random) -> dict[str, Value]:
    """Keys of a small run, which may contradict each other."""
    method = draws.choice(sorted(name for name in METHODS if ":" not in name))
    keys: dict[str, Value] = {
        "method": method, "model": draws.choice(MODELS), "image-size": 16, "num-rounds": draws.choice((2, 3, 4)),
        "num-clients": draws.choice((3, 4, 6, 8)), "train-per-class": draws.choice((3, 10)), "test-per-class": 3,
        "partition": draws.choice(PARTITIONS), "seed": draws.randrange(9), "max-abandoned": 9,
    }  # fmt: skip
    if draws.random() < 0.6:
        more = METHOD_KEYS.get(method, {})
        keys |= {name.replace("__", ".").replace("_", "-"): value for name, value in more.items()}
    if METHODS[method].strategy.__module__ == "strategies.lora":
        keys["trainable"] = "lora"
    for key in draws.sample(sorted(VALUES), draws.choice((1, 2, 3, 4, 6))):
        keys[key] = draws.choice(VALUES[key])
    for key in [key for key in fields() if key.startswith(f"{method}.") and draws.random() < 0.3]:
        default = defaults()[key]
        keys[key] = draws.random() < 0.5 if isinstance(default, bool) else default
    return keys


def chosen(number: int) -> dict[str, Value]:
    """The first keys that do not contradict each other at once, of a number's draws."""
    draws = random.Random(number)
    for _ in range(200):
        keys = drawn(draws)
        try:
            resolve(keys)
        except UserError:
            continue
        return keys
    raise AssertionError("no draw is accepted")


def run(folder: Path, keys: dict[str, Value], grid: Any = LocalGrid, nodes: int = 1, **how: Any) -> Path:
    keys = keys | {"run-dir": str(folder), **how}
    run_experiment(grid(app, keys, nodes), resolve(keys))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CASES))
def test_any_settings_end_well_or_by_one_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, draws, said = chosen(number), random.Random(number), ""
    try:
        whole = result(run(tmp_path / "whole", keys))
    except (UserError, RunFailed) as error:
        said = str(error)
    if said:
        assert "\n" not in said, keys
        return
    monkeypatch.setattr(Interrupted, "left", draws.randrange(1, 8))
    try:
        parted = run(tmp_path / "parted", keys, Interrupted)
    except KeyboardInterrupt:
        parted = run(tmp_path / "parted", keys, resume=True)
    assert result(parted) == whole, keys
    messages, nodes = draws.choice((1, 2, 3)), draws.choice((1, 2, 3))
    sent = result(run(tmp_path / "sent", keys, nodes=nodes, **{"message-clients": messages}))
    assert sent == whole, keys
