"""Nodes with data of their own: the server knows no more of them than a bound, and says what does not fit."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from helpers import rounds, tokenizer_folder

from fedsub_app.analysis.activations import analyse
from fedsub_app.analysis.approximation import approximation
from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.data import private_name
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.plan import plan

RunLocal = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Value] = {"num_clients": 2, "private_examples": 60, "num_rounds": 2, "evaluate": "global,global-local"}


def images(path: Path, count: int, classes: int = 10, seed: int = 0, size: int = 8) -> Path:
    """An .npz of grey images, brighter from class to class; every class is in it."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pictures = (labels[:, None, None] * 20 + random.integers(0, 40, (count, size, size))).astype(np.uint8)
    test = slice(0, 2 * classes)
    np.savez(path, train_images=pictures, train_labels=labels, test_images=pictures[test], test_labels=labels[test])
    return path


class Private(LocalGrid):
    """Each node has one of the paths as its data."""

    def __init__(self, overrides: Any, paths: Iterable[Path | str]) -> None:
        found = list(paths)
        super().__init__(app, overrides, len(found))
        self.sent: list[Message] = []
        for context, path in zip(self.contexts.values(), found, strict=True):
            if path:
                context.node_config["private-data"] = str(path)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        self.sent += sent
        return super().push_messages(sent)


def test_each_node_trains_on_its_own(run_local: RunLocal, tmp_path: Path) -> None:
    """As many samples as it has, in another size, which is brought to that of the server's images."""
    first, second = images(tmp_path / "clinic-a.npz", 50), images(tmp_path / "clinic-b.npz", 30, seed=1, size=16)
    _, folder = run_local("private", grid=lambda _, keys: Private(keys, [first, second]), weighting="examples", **KEYS)
    lines = rounds(folder)
    assert [line["status"] for line in lines] == ["ok"] * 3
    assert all(line["dropped"] == [] for line in lines[1:])
    one, other = (lines[-1]["evaluated"][number]["global-local-accuracy"] for number in ("0", "1"))
    assert one > 10
    assert other > 10
    assert not (folder / "partition.json").exists(), "the server does not know their labels"
    _, swapped = run_local("swapped", grid=lambda _, keys: Private(keys, [first, first]), weighting="examples", **KEYS)
    assert (folder / "model.safetensors").read_bytes() != (swapped / "model.safetensors").read_bytes()


def test_all_samples_of_a_node_are_taken(tmp_path: Path) -> None:
    """Whatever the server takes of its own."""
    run = resolve({"private-examples": 9, "train-per-class": 3, "test-per-class": 2, "domains": "Art"})
    own = node._private_settings(run, str(images(tmp_path / "clinic.npz", 40)), "", 8)
    assert (own.train_per_class, own.test_per_class, own.domains) == (None, None, ())


def dropped(folder: Path) -> dict[int, str]:
    return {drop["client"]: drop["reason"] for drop in rounds(folder)[1]["dropped"]}


@pytest.mark.parametrize(
    ("count", "classes", "said"),
    [
        (61, 10, "num-examples = 61: must be an integer from 1 to 60"),
        (40, 8, "node failed: private-data = 'PATH': classes 8, the server's data set has 10"),
        (
            0,
            0,
            "node failed: private-data = 'PATH': not there, or not an .npz file, an image folder with classes or an ",
        ),
    ],
)
def test_data_that_do_not_fit_are_one_line(count: int, classes: int, said: str, run_local: RunLocal, tmp_path: Path):
    good, other = images(tmp_path / "a.npz", 40), tmp_path / "b.npz"
    if count:
        images(other, count, classes)
    _, folder = run_local("run", grid=lambda _, keys: Private(keys, [good, other]), **KEYS | {"evaluate": "global"})
    ((client, reason),) = dropped(folder).items()
    assert client == 1
    assert reason.startswith(said.replace("PATH", str(other))[:199])


def test_both_sides_must_want_it(run_local: RunLocal, tmp_path: Path) -> None:
    good = images(tmp_path / "a.npz", 40)
    _, folder = run_local("without", grid=lambda _, keys: Private(keys, [good, ""]), **KEYS | {"evaluate": "global"})
    said = "private-examples = 60 needs private-data=<path of an .npz file, image folder or table>"
    assert dropped(folder) == {1: f"node failed: --node-config: {said}"}
    keys = {"num_clients": 2, "placement": "pinned", "evaluate": "global", "num_rounds": 1}
    _, folder = run_local("not wanted", grid=lambda _, keys: Private(keys, [good, ""]), **keys)
    assert dropped(folder) == {0: f"node failed: private-data = '{good}': not used in a run with private-examples = 0"}


def test_a_refusal_stands_in_the_nodes_own_log(
    run_local: RunLocal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "simulated", lambda: False)
    paths = [images(tmp_path / "a.npz", 40), tmp_path / "gone.npz"]
    run_local(grid=lambda _, keys: Private(keys, paths), **KEYS | {"evaluate": "global", "num_rounds": 1})
    assert f"no answer to the server: private-data = '{paths[1]}': not there" in caplog.text


def test_a_node_is_one_client(run_local: RunLocal, tmp_path: Path) -> None:
    good = images(tmp_path / "a.npz", 40)
    said = "^node 2: num-partitions = 1: must be num-clients = 2 where each node has private data$"
    with pytest.raises(UserError, match=said):
        run_local(grid=lambda _, keys: Private(keys, [good]), **KEYS)


def test_an_analysis_needs_the_data(run_local: RunLocal, tmp_path: Path) -> None:
    good = images(tmp_path / "a.npz", 40)
    _, folder = run_local(grid=lambda _, keys: Private(keys, [good, good]), **KEYS)
    private = resolve({"num-clients": 2, "private-examples": 60})
    for tell in (partial(plan, private), partial(analyse, folder), partial(approximation, folder, 1)):
        with pytest.raises(UserError, match=r"^private-examples = 60: the clients' data are with their nodes$"):
            tell()


def test_a_known_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"under a name of its own$"):
        private_name(images(tmp_path / "mnist.npz", 20))


def test_no_path_of_a_node_travels(run_local: RunLocal, tmp_path: Path) -> None:
    """Neither to the server's files nor in a message to another node."""
    grids: list[Private] = []

    def grid(_: Any, keys: Any) -> Private:
        grids.append(Private(keys, [images(tmp_path / "secret-a.npz", 40), images(tmp_path / "secret-b.npz", 40)]))
        return grids[0]

    _, folder = run_local("run", grid=grid, **KEYS)
    texts = [str(message.content) for message in grids[0].sent]
    texts += [path.read_text() for path in folder.glob("*.json*")]
    assert texts
    assert not any("secret-" in text for text in texts)
    assert json.loads((folder / "settings.json").read_text())["settings"]["private-examples"] == 60


def test_a_table_of_a_nodes_own(run_local: RunLocal, tmp_path: Path) -> None:
    """Its columns are those that the run names, its classes those of the server's table."""
    for name, kinds in (("server", "ab"), ("clinic", "ab"), ("other", "ac")):
        rows = [f"{k % 7},{k / 3},{kinds[k % 2]}" for k in range(40)]
        (tmp_path / f"{name}.csv").write_text("age,weight,outcome\n" + "\n".join(rows) + "\n")
    keys = {"dataset": f"csv:{tmp_path}/server.csv", "input": "age, weight", "label": "outcome", "model": "feature-mlp"}
    paths = [tmp_path / "clinic.csv", tmp_path / "other.csv"]
    _, folder = run_local("run", grid=lambda _, given: Private(given, paths), **KEYS | keys | {"evaluate": "global"})
    labels = "labels ('a', 'c'), the server's data set has ('a', 'b')"
    assert dropped(folder) == {1: f"node failed: private-data = '{paths[1]}': {labels}"}


def test_classes_that_a_nodes_table_has_as_floats(run_local: RunLocal, tmp_path: Path) -> None:
    """A column that once had empty values has them: 1.0 is the class 1."""
    for name, kinds in (("server", ("0", "1")), ("clinic", ("0.0", "1.0"))):
        rows = [f"{k % 7},{kinds[k % 2]}" for k in range(40)]
        (tmp_path / f"{name}.csv").write_text("age,outcome\n" + "\n".join(rows) + "\n")
    keys = {"dataset": f"csv:{tmp_path}/server.csv", "input": "age", "label": "outcome", "model": "feature-mlp"}
    paths = [tmp_path / "clinic.csv"] * 2
    _, folder = run_local("run", grid=lambda _, given: Private(given, paths), **KEYS | keys | {"evaluate": "global"})
    assert dropped(folder) == {}


def test_a_table_of_a_nodes_own_needs_named_columns() -> None:
    """All columns of a file are in the file's order: one node's weight would be another's age."""
    header = {"run": "a", "shape": [2], "classes": 2}
    with pytest.raises(UserError, match=r"^input = '': must name the columns with private-data = 'notes.csv': tables"):
        node._private_place(node.settings_from('{"private-examples": 9}'), "notes.csv", header, Path())


def test_texts_of_a_nodes_own_need_the_servers_tokens() -> None:
    text = json.dumps({"private-examples": 9, "tokenizer": "words", "input": "text"})
    header = {"run": "a", "shape": {"input_ids": [5], "attention_mask": [5]}, "classes": 2}
    with pytest.raises(
        UserError, match=r"^tokenizer = 'words': differs between nodes; must be 'transformers:NAME' with"
    ):
        node._private_place(node.settings_from(text), "notes.csv", header, Path())


BAG = """
from torch import nn


class Bag(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 8), nn.Linear(8, num_classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return self.head((self.embed(input_ids) * mask).sum(-2) / mask.sum(-2).clamp(min=1))
"""


def test_texts_of_a_nodes_own_in_the_servers_tokens(run_local: RunLocal, tmp_path: Path) -> None:
    """A tokenizer in each node's data folder is the same on every node; a table of other classes is refused."""
    (tmp_path / "data").mkdir()
    tokenizer_folder(tmp_path / "data/tokens")
    (tmp_path / "bag.py").write_text(BAG)
    for name, other in (("server", "bad"), ("clinic", "bad"), ("elsewhere", "worse")):
        rows = [f"{('good', other)[k % 2]},{('good', 'film')[k % 2]} film" for k in range(40)]
        (tmp_path / f"{name}.csv").write_text("said,text\n" + "\n".join(rows) + "\n")
    keys = {"dataset": f"csv:{tmp_path}/server.csv", "input": "text", "label": "said", "tokens": 3, "lr": 0.5}
    keys |= {"tokenizer": "transformers:tokens", "model": f"{tmp_path}/bag.py:Bag", "evaluate": "global"}
    keys |= {"data_dir": str(tmp_path / "data")}
    paths = [tmp_path / "clinic.csv", tmp_path / "elsewhere.csv"]
    summary, folder = run_local("run", grid=lambda _, given: Private(given, paths), **KEYS | keys | {"num_rounds": 5})
    labels = "labels ('good', 'worse'), the server's data set has ('bad', 'good')"
    assert dropped(folder) == {1: f"node failed: private-data = '{paths[1]}': {labels}"}
    assert summary["final-global-accuracy"] == 100.0
    shutil.copytree(tmp_path / "data/tokens", tmp_path / "other/tokens")
    file = tmp_path / "other/tokens/tokenizer.json"
    made = json.loads(file.read_text())
    made["model"]["vocab"] |= {"good": 3, "film": 2}
    file.write_text(json.dumps(made))

    def grid(given: Any) -> Private:
        federation = Private(given, [paths[0], paths[0]])
        [*federation.contexts.values()][1].node_config["data-dir"] = str(tmp_path / "other")
        return federation

    _, folder = run_local("two", grid=lambda _, given: grid(given), **KEYS | keys)
    (reason,) = dropped(folder).values()
    assert re.search(r"clinic.csv': vocabulary of SHA-256 \w{16}, the server's data set has \w{16}$", reason)


def test_a_folder_of_other_classes_is_one_line(run_local: RunLocal, tmp_path: Path) -> None:
    """As many classes, and the second one of the server is the first one here."""
    from PIL import Image

    def folder(name: str, *classes: str) -> Path:
        for part in ("train", "test"):
            for number, kind in enumerate(classes):
                (tmp_path / name / part / kind).mkdir(parents=True)
                for k in range(4):
                    Image.new("L", (8, 6), 90 * number + k).save(tmp_path / name / part / kind / f"{k}.png")
        return tmp_path / name

    good, other = folder("server", "cat", "dog"), folder("node", "dog", "elk")
    keys = KEYS | {"dataset": "server", "data_dir": str(tmp_path), "train_per_class": 0, "test_per_class": 0}
    _, run = run_local("run", grid=lambda _, keys: Private(keys, [good, other]), **keys | {"evaluate": "global"})
    said = "labels ('dog', 'elk'), the server's data set has ('cat', 'dog')"
    assert dropped(run) == {1: f"node failed: private-data = '{other}': {said}"[:200]}


def test_images_of_an_npz_file_have_no_names_of_classes(run_local: RunLocal, tmp_path: Path) -> None:
    """A folder's names are not compared with them, whichever of the two is the server's."""
    from PIL import Image

    npz, folder = images(tmp_path / "npz.npz", 20, classes=2), tmp_path / "folder"
    for part, kind, k in ((part, kind, k) for part in ("train", "test") for kind in ("cat", "dog") for k in range(2)):
        (folder / part / kind).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 90 * k).save(folder / part / kind / f"{k}.png")
    keys = KEYS | {"data_dir": str(tmp_path), "train_per_class": 0, "test_per_class": 0, "num_rounds": 1}
    for server, own in (("folder", npz), ("npz", folder)):
        run = partial(run_local, f"of {server}", grid=lambda _, keys, own=own: Private(keys, [own, own]))
        assert dropped(run(dataset=server, **keys)[1]) == {}
