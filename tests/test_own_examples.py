"""The examples of data, tasks and networks of one's own: each file runs, and the loss falls."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

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


def test_the_page_names_each_example() -> None:
    page = (PROJECT / "docs/own-data.md").read_text() + (PROJECT / "docs/own-network.md").read_text()
    named = set(re.findall(r"fedsub run examples/([\w/-]+)\.toml", page))
    quickstarts = ("quickstart", "quickstart-fedsub")
    files = {file for file in (PROJECT / "examples").glob("*/*.toml") if file.parent.name not in quickstarts}
    assert named == {file.relative_to(PROJECT / "examples").with_suffix("").as_posix() for file in files}


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
    (folder / "sentiment").mkdir()
    for number, name in enumerate(("amazon", "movies", "nyt", "tweets")):
        words = [("good", 2.0), ("fine", 1.0), ("bad", -2.0)]
        lines = [f"{k}\t{words[k % 3][1]}\t{name} is a {words[k % 3][0]} 'one" for k in range(12 + number)]
        (folder / f"sentiment/{name}.tsv").write_text("id\trating\ttext\n" + "\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.parametrize("method", ["fedper", "fedavg"])
def test_sentiment_of_a_few_sentences(example: Any, tmp_path: Path, method: str) -> None:
    keys = {"method": method, "tokenizer": "characters", "tokens": 24, "num_rounds": 2, "lr": 0.005}
    record = example("text/sentiment", data_dir=sentiment(tmp_path), **keys)
    assert len(record.partition["train"]) == 4
    assert falls(record, "train-loss") or falls(record, "personal-rmse")


def test_sentiment_of_four_sources(example: Any) -> None:
    pytest.importorskip("tokenizers")
    if not (Path(os.environ.get("FEDSUB_DATA", "")) / "sentiment/movies.tsv").is_file():
        pytest.skip("needs sentiment/*.tsv in $FEDSUB_DATA")
    record = example("text/sentiment", num_rounds=1, local_steps=20)
    assert min(record.partition["train"]) > 3000
    assert record.lines[-1]["personal-rmse"] < 3


@pytest.mark.parametrize("method", ["subfedavg", "ist", "fedpews"])
def test_a_network_of_ones_own(example: Any, method: str) -> None:
    keys = {
        "subfedavg": {"subfedavg__score": 5.0, "subfedavg__distance": 0.0},
        "fedpews": {"fedpews__warmup_rounds": 1},
    }
    record = example("own-network/digits", method=method, num_rounds=3, **keys.get(method, {}))
    assert falls(record, "train-loss")
