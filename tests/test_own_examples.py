"""The examples of data, tasks and networks of one's own: each file runs, and the loss falls."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from federations import Deployed, deployed, ended, pairs
from helpers import fedsub, install_method, run_flower
from safetensors.torch import save_file
from test_engines import flower  # noqa: F401  (a fixture)
from torch import nn

import fedsub_app
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.reports.records import Record

pytestmark = pytest.mark.run


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a file of the examples from the checkout."""

    def run(name: str, **keys: Any) -> Record:
        monkeypatch.chdir(PROJECT)
        given = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
        return fedsub_app.run({"experiment": f"./examples/{name}.toml", "run-dir": str(tmp_path / "run")} | given)

    return run


def falls(record: Record, key: str) -> bool:
    values = [line[key] for line in record.lines if key in line]
    return bool(values[-1] < values[0])


def test_each_example_has_a_page() -> None:
    pages = {page.stem: page.read_text() for page in (PROJECT / "docs/examples").glob("*.md")}
    named = {re.findall(r"fedsub run (examples/[\w/-]+\.toml)", text)[0] for text in pages.values()}
    quickstarts = ("quickstart", "quickstart-fedsub")  # whose page is own-app.md
    files = {file for file in (PROJECT / "examples").glob("*/*.toml") if file.parent.name not in quickstarts}
    assert named == {file.relative_to(PROJECT).as_posix() for file in files}
    assert all(f"examples/{name}.md" in (PROJECT / "docs/own-data.md").read_text() for name in pages)


def test_diabetes(example: Any) -> None:
    record = example("diabetes/diabetes", num_rounds=3)
    assert falls(record, "global-rmse")
    assert record.summary["best-personal-rmse"] <= record.summary["final-personal-rmse"]


def test_next_characters(example: Any) -> None:
    record = example("text/next-characters", domains="json, logging", num_clients=2, num_rounds=2, local_steps=8)
    assert falls(record, "global-perplexity")
    assert 0 <= record.lines[-1]["global-accuracy"] <= 100


def sentiment(folder: Path) -> str:
    """A small stand-in for the four files."""
    (folder / "sentiment").mkdir(parents=True)
    for name in ("amazon", "movies", "nyt", "tweets"):
        words = [("good", 2.0), ("fine", 1.0), ("bad", -2.0)]
        lines = [f"{k}\t{words[k % 3][1]}\t{name} is a {words[k % 3][0]} 'one" for k in range(12)]
        (folder / f"sentiment/{name}.tsv").write_text("id\trating\ttext\n" + "\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.parametrize("method", ["fedper", "fedavg"])
def test_sentiment_of_a_few_sentences(example: Any, tmp_path: Path, method: str) -> None:
    keys = {"method": method, "tokenizer": "characters", "tokens": 24, "num_rounds": 2, "clients_per_round": 20}
    record = example("text/sentiment", data_dir=sentiment(tmp_path), **keys)
    assert record.partition["train"] == [2] * 20
    assert falls(record, "train-loss") or falls(record, "personal-rmse")


@pytest.mark.slow  # next characters and diabetes go the same way in make test
def test_sentiment_of_four_sources(example: Any) -> None:
    pytest.importorskip("tokenizers")
    if not (Path(os.environ.get("FEDSUB_DATA", "")) / "sentiment/movies.tsv").is_file():
        pytest.skip("needs sentiment/*.tsv in $FEDSUB_DATA")
    record = example("text/sentiment", num_rounds=1, local_steps=20)
    assert len(record.partition["train"]) == 20
    assert min(record.partition["train"]) > 600
    assert record.lines[-1]["personal-rmse"] < 3


PRUNED = {"method": "subfedavg", "subfedavg.score": 5.0, "subfedavg.distance": 0.0}
OWN_NETWORK = [PRUNED, {"method": "ist"}, {"method": "fedpews", "fedpews.warmup-rounds": 1}]


@pytest.mark.parametrize("keys", OWN_NETWORK, ids=lambda keys: keys["method"])
def test_a_network_of_ones_own(example: Any, keys: dict[str, Any]) -> None:
    assert falls(example("own-network/digits", num_rounds=3, **keys), "train-loss")


# --- on Flower's engines: the model of the local engine, bit for bit ------------------------------------------------

FEW = {"num-rounds": 1, "robust": "on", "node-timeout": 600.0}  # on real nodes ``robust`` is on by default
SENTIMENT = {"tokenizer": "characters", "tokens": 24, "clients-per-round": 4}
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("diabetes/diabetes", {}),
    ("text/next-characters", {"domains": "json, logging", "num-clients": 2, "local-steps": 4}),
    ("text/sentiment", SENTIMENT),
    *(("own-network/digits", {"train-per-class": 40} | keys) for keys in OWN_NETWORK),
]
MY_CODE = """
import torch
from fedsub import Task
from fedsub_app.common.tasks import Regression

class Largest(Regression):
    score = "worst"

    def metrics(self, sums):
        return {"worst": super().metrics(sums)["rmse"], "mae": 0.0, "loss": super().metrics(sums)["loss"]}

def load(seed):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
    return (x, x.sum(1)), (x[:20], x[:20].sum(1))

def net(num_classes):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, num_classes))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sentiment(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package with a method, which all processes find."""
    site = tmp_path_factory.mktemp("site")
    install_method(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Iterator[Deployed]:
    """Two SuperNodes with TLS and keys, whose data folder is the corpus."""
    with deployed(tmp_path_factory.mktemp("nodes"), "--nodes", "2", "--data-dir", corpus) as here:
        yield here


@pytest.fixture(scope="module")
def my_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose network, data, task, method and initial model are of files, and whose learning rate is by scores."""
    folder = tmp_path_factory.mktemp("code")
    names = {"model": "net", "dataset": "load", "task": "Largest"}
    for key in names:
        (folder / f"my_{key}.py").write_text(MY_CODE)
    own = {key: f"{folder}/my_{key}.py:{name}" for key, name in names.items()}
    method = {"method": f"{PROJECT}/examples/own-method/fedavgm.py:FedAvgM", "fedavgm.beta": 0.5}
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    save_file(model.state_dict(), folder / "start.safetensors")
    keys = {"start-from": str(folder / "start.safetensors"), "lr-schedule": "plateau", "lr-patience": 0, "lr": 1.0}
    return own | method | keys | {"optimizer": "rmsprop", "partition": "iid", "num-clients": 3, "num-rounds": 3}


def same_model(run: Callable[..., Any], keys: dict[str, Any], folder: Path) -> None:
    """A run on another engine completes with the model of the local engine."""
    local = run_flower(dict(os.environ), *pairs(keys | {"run-dir": folder / "local"}), "--workers", "1")
    done = run(*pairs(keys | {"run-dir": folder / "other"}))
    assert local.returncode == done.returncode == 0, local.stderr + done.stdout + done.stderr
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("local", "other")]
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), EXAMPLES)
def test_on_worker_processes(name: str, keys: Any, corpus: str, tmp_path: Path) -> None:
    def with_workers(*words: str) -> subprocess.CompletedProcess[str]:
        done = fedsub(tmp_path, "run", *words, "--workers", "2")
        return subprocess.CompletedProcess(words, done.code, done.out, done.err)

    keys = {"experiment": f"{PROJECT}/examples/{name}.toml", "data-dir": corpus} | FEW | keys
    same_model(with_workers, keys, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), EXAMPLES)
def test_on_flowers_simulation(name: str, keys: Any, flower: Any, corpus: str, tmp_path: Path) -> None:  # noqa: F811
    keys = {"experiment": f"{PROJECT}/examples/{name}.toml", "data-dir": corpus} | FEW | keys
    same_model(partial(run_flower, flower, "--engine", "local-simulation"), keys, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), EXAMPLES)
def test_on_supernodes(name: str, keys: Any, nodes: Deployed, corpus: str, tmp_path: Path) -> None:
    keys = {"experiment": f"{PROJECT}/examples/{name}.toml", "data-dir": corpus} | FEW | keys
    same_model(lambda *words: ended(nodes.run(*words), 600), keys, tmp_path)


@pytest.mark.slow
def test_ones_own_files_on_flowers_simulation(my_code: Any, flower: Any, tmp_path: Path) -> None:  # noqa: F811
    same_model(partial(run_flower, flower, "--engine", "local-simulation"), FEW | my_code, tmp_path)


@pytest.mark.slow
def test_ones_own_files_on_supernodes(my_code: Any, nodes: Deployed, tmp_path: Path) -> None:
    """Their digest is part of that of all code, which server and nodes compare."""
    same_model(lambda *words: ended(nodes.run(*words), 600), FEW | my_code, tmp_path)


INSTALLED = {"experiment": "quickstart/digits", "method": "hsu", "hsu.beta": 0.5, "num-rounds": 2}


@pytest.mark.slow
def test_a_packages_method_on_flowers_simulation(flower: Any, tmp_path: Path) -> None:  # noqa: F811
    same_model(partial(run_flower, flower, "--engine", "local-simulation"), FEW | INSTALLED, tmp_path)


@pytest.mark.slow
def test_a_packages_method_on_supernodes(nodes: Deployed, tmp_path: Path) -> None:
    same_model(lambda *words: ended(nodes.run(*words), 600), FEW | INSTALLED, tmp_path)
