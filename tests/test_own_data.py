"""Data of one's own: tensors by name, data sets that are read lazily, tables, texts, code, and what is refused."""

import json
import math
import shutil
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from helpers import tokenizer_folder
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

import fedsub_app
from fedsub_app.common.code import code_digest, text_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Form, Inputs, blank, drawn, form_of, joined
from fedsub_app.common.tasks import TASKS, NextToken, Regression
from fedsub_app.data import LazySamples, load_dataset, make_partition, own
from fedsub_app.data.own import own_dataset
from fedsub_app.data.text import next_tokens, padded, python_packages, tokenizer_of
from fedsub_app.deployment.flower import local_paths
from fedsub_app.models import adopted, layer_groups, unit_groups
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve

CLASSES, TOKENS = TASKS["classification"], TASKS["next-token"]


# --- inputs of several tensors ----------------------------------------------------------------------------------------


class Bag(nn.Module):
    """A mean of embeddings under a mask: by hand what a batch must be."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None]
        mean = (self.embed(input_ids) * mask).sum(-2) / mask.sum(-2)
        return self.head(self.hidden(mean).relu())


def text_pair(count: int = 30) -> tuple[dict[str, Tensor], Tensor]:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (count, 5), generator=draws)
    mask = (torch.arange(5) < torch.randint(1, 6, (count, 1), generator=draws)).long()
    return {"input_ids": ids, "attention_mask": mask}, torch.arange(count) % 3


def test_inputs_are_taken_together() -> None:
    x, _ = text_pair()
    inputs = Inputs.of(x)
    some = inputs[torch.tensor([4, 1])]
    assert (len(inputs), len(some), some.names) == (30, 2, ("input_ids", "attention_mask"))
    assert torch.equal(some.tensors[0][1], x["input_ids"][1])
    both = joined([some, inputs[:1]], torch.cat)
    assert isinstance(both, Inputs)
    assert torch.equal(both.tensors[1], x["attention_mask"][[4, 1, 0]])


def test_a_network_takes_them_by_name_and_its_units_are_found() -> None:
    x, _ = text_pair()
    form = form_of(Inputs.of(x))
    assert isinstance(form, Form)
    assert (form.given, form.tokens) == ({"input_ids": (5,), "attention_mask": (5,)}, 20)
    model = adopted(Bag(), form)
    assert torch.equal(model(Inputs.of(x)), model(**x))
    assert [group.name for group in unit_groups(model)] == ["hidden"]
    assert sum(map(len, layer_groups(model))) == 5
    for made in (blank(3, form), drawn(3, form, torch.Generator(), torch.float64)):
        assert model(made).shape == (3, 3)


@pytest.mark.run
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "moon", "optimizer": "adam", "lr": 0.01},
        {"method": "fedavg", "stack-clients": True},
        {"method": "fedpews", "fedpews.warmup-rounds": 1},
        {"method": "ist"},
    ],
    ids=["moon", "stacked", "fedpews", "ist"],
)
def test_methods_train_on_several_tensors(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    pair = text_pair(60)
    general = {"num-rounds": 2, "partition": "iid", "evaluate": "global, personal"}
    record = fedsub_app.run(general | keys, model=Bag, data=(pair, pair))
    assert record.lines[-1]["status"] == "ok"
    assert record.lines[-1]["global-loss"] < record.lines[0]["global-loss"]


# --- map-style data sets ----------------------------------------------------------------------------------------------


class Rows(TorchDataset[Any]):
    """Items that count how often they are read."""

    reads = 0

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        Rows.reads += 1
        return self.items[number]


def rows(count: int = 12) -> Rows:
    x, y = text_pair(count)
    return Rows([({key: value[k] for key, value in x.items()}, int(y[k])) for k in range(count)])


def test_a_large_data_set_is_read_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "IN_MEMORY", 100)
    Rows.reads = 0
    lazy = own_dataset((rows(), rows()), CLASSES)
    assert isinstance(lazy.train_x, LazySamples)
    assert Rows.reads <= 2 * (12 + 3)  # once each for y, and the first for its form
    client = lazy.train_x.part(torch.tensor([3, 5, 7]))
    before = Rows.reads
    batch = client[torch.tensor([2, 0])]
    assert Rows.reads == before + 2
    monkeypatch.setattr(own, "IN_MEMORY", 10**9)
    whole = own_dataset((rows(), rows()), CLASSES)
    expected = whole.train_x[torch.tensor([7, 3])]
    assert isinstance(batch, Inputs)
    assert isinstance(expected, Inputs)
    assert all(torch.equal(a, b) for a, b in zip(batch.tensors, expected.tensors, strict=True))
    assert torch.equal(lazy.train_y, whole.train_y)


@pytest.mark.run
def test_a_lazy_run_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    models = []
    for limit in (0, 10**9):
        monkeypatch.setattr(own, "IN_MEMORY", limit)
        record = fedsub_app.run(
            {"method": "fedavg", "num-rounds": 2, "partition": "iid"}, model=Bag, data=(rows(40), rows(10))
        )
        models.append((record.folder / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_integers_of_a_task_of_ones_own_are_no_classes() -> None:
    """Counts ended in a traceback, and the highest of the ranks that K - 1 outputs tell apart went to no client."""

    class Ranks(Regression):
        def outputs(self, y: Tensor) -> int:
            return int(y.max())

        def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
            return y

    data = own_dataset(((X, torch.arange(len(X)) % 4), (X, torch.arange(len(X)) % 4)), Ranks())
    assert (data.num_classes, data.has_classes, data.label_count) == (3, False, 1)
    assert sum(map(len, make_partition(data, resolve({"partition": "iid"}).partitioning).train)) == len(X)
    with pytest.raises(UserError, match=r"^partition = 'classes'"):
        make_partition(data, resolve({"partition": "classes"}).partitioning)


def test_augmentation_is_refused_where_labels_would_have_to_move_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PerPixel(Regression):
        def loss(self, output: Tensor, y: Tensor, reduction: Any = "mean") -> Tensor:
            return super().loss(output, y.flatten(1), reduction)

        def sums(self, output: Tensor, y: Tensor) -> Any:
            return super().sums(output, y.flatten(1))

        def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
            return y

    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path))
    images = torch.arange(320.0).view(20, 1, 4, 4) / 320
    own = {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 16)), "task": PerPixel()}
    own["data"] = ((images, images[:, 0]), (images, images[:, 0]))
    keys = {"method": "fedavg", "num-rounds": 1, "partition": "iid", "lr": 0.01}
    assert fedsub_app.run(keys, **own).summary["rounds"] == 1
    with pytest.raises(UserError, match=r"^augment = 'crop-flip': moves images, but not labels of own, one a pixel$"):
        fedsub_app.run(keys | {"augment": "crop-flip"}, **own)


def test_groups_may_be_an_iterator_and_both_parts_have_them() -> None:
    groups = ["a", "b"] * (len(X) // 2)
    assert own_dataset(((X, Y, iter(groups)), (X, Y, iter(groups))), CLASSES).sources == ("a", "b")
    with pytest.raises(UserError, match=r"^test: no groups: the training samples have groups$"):
        own_dataset(((X, Y, groups), (X, Y)), CLASSES)
    with pytest.raises(UserError, match=r"^test: groups: the training samples have no groups$"):
        own_dataset(((X, Y), (X, Y, groups)), CLASSES)


def test_tokens_that_are_read_one_by_one_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample alone gave the number of tokens."""
    texts = Rows([(one[:-1], one[1:]) for one in torch.arange(60).view(12, 5)])
    forms = []
    for limit in (0, 10**9):
        monkeypatch.setattr(own, "IN_MEMORY", limit)
        forms.append(own_dataset((texts, texts), NextToken()).in_shape)
    assert forms[0] == forms[1]
    assert isinstance(forms[0], Form)
    assert forms[0].tokens == 60


def test_no_groups_may_be_none() -> None:
    assert own_dataset(((X, Y, None), (X, Y)), CLASSES).sources == ("own",)


def test_a_group_and_a_class_of_test_samples_alone_count() -> None:
    data = own_dataset(((X, Y, [*"aaaa"]), (X, Y + 1, [*"bbab"])), CLASSES)
    assert (data.sources, data.test_source.tolist(), data.num_classes) == (("a", "b"), [1, 1, 0, 1], 2)


def test_the_package_datasets_and_collate() -> None:
    from datasets import Dataset as Table

    table = Table.from_dict({"ids": [[1, 2], [3, 4], [5, 6]], "label": [0, 1, 1]})
    data = own_dataset((table, table), CLASSES)
    assert data.train_x[:].tolist() == [[1, 2], [3, 4], [5, 6]]  # type: ignore[union-attr]
    assert (data.train_y.tolist(), data.num_classes) == ([0, 1, 1], 2)

    def collate(items: list[Any]) -> Any:
        return {
            "input_ids": torch.stack([item["ids"] for item in items]) + 1,
            "labels": [int(i["label"]) for i in items],
        }

    data = own_dataset((table, table), CLASSES, collate=collate)
    assert data.train_x[:].tolist() == [[2, 3], [4, 5], [6, 7]]  # type: ignore[union-attr]


def test_the_format_of_the_package_datasets_stays() -> None:
    """A transform, and a choice of columns."""
    from datasets import Dataset as Table

    table = Table.from_dict({"x": [[2.0], [4.0]], "name": ["a", "b"], "label": [0, 1]})
    half = table.with_transform(lambda rows: {"x": torch.tensor(rows["x"]) / 2, "label": rows["label"]})
    chosen = (table.with_format(kind, columns=["x", "label"]) for kind in ("torch", "numpy", None))
    for form, values in ((half, [[1.0], [2.0]]), *((each, [[2.0], [4.0]]) for each in chosen)):
        data = own_dataset((form, form), CLASSES)
        assert data.train_x[:].tolist() == values  # type: ignore[union-attr]
        assert data.train_y.tolist() == [0, 1]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_named_inputs_may_come_in_any_order(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "IN_MEMORY", limit)
    items = [
        ({"a": torch.tensor([0.0]), "b": torch.tensor([1.0])}, 0),
        ({"b": torch.tensor([1.0]), "a": torch.tensor([0.0])}, 1),
    ]
    data = own_dataset((Rows(items), Rows(items)), CLASSES)
    batch = data.train_x[torch.tensor([0, 1])]
    assert isinstance(batch, Inputs)
    assert {name: tensor.tolist() for name, tensor in zip(batch.names, batch.tensors, strict=True)} == {
        "a": [[0.0], [0.0]],
        "b": [[1.0], [1.0]],
    }


def broken(items: list[Any]) -> Any:
    raise KeyError("ids")


X, Y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((X[0], Y[:3]), r"y of shapes \(3,\) and \(4,\)"),
        ((X[0, :2], Y), r"x of shapes \(2,\) and \(3,\)"),
        ((X[0, :1], Y), r"x of shapes \(1,\) and \(3,\)"),  # as a grey image among images of three colours
    ],
)
def test_several_shapes_are_one_line_where_samples_are_read_lazily(
    other: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "IN_MEMORY", 0)
    data = Rows([(X[0], Y), other])
    with pytest.raises(UserError, match=f"^train: {said}: must be one shape$"):
        own_dataset((data, data), CLASSES)


def without_axis(part: str) -> Any:
    """A collate of one item that forgets the axis of the samples of y, or of the last tensor of x."""

    def collate(items: list[Any]) -> Any:
        x, y = items[0]
        return ((x[0][None], x[1]), torch.tensor([y])) if part == "x" else (x[None], torch.as_tensor(y))

    return collate


@pytest.mark.parametrize(
    ("data", "collate", "message"),
    [
        ((X, Y), None, r"data = .*|train"),
        (((["a"], Y), (X, Y)), None, "train: a sample is no tensor but 'a' \\(str\\)"),
        ((({"ids": X.byte()}, Y), (X, Y)), None, "train: 'ids': x of dtype torch.uint8|train: x of dtype torch.uint8"),
        (((X, Y[:3]), (X, Y)), None, r"train: x of shape \(4, 3\), y of shape \(3,\), torch.int64"),
        (((X, Y), (X[0, 0], Y)), None, r"test: x of shape \(\), y of shape \(4,\)"),
        ((((X, X), Y), (X, Y)), None, r"test: samples of shape \(3,\): the training samples' is \(\(3,\), \(3,\)\)"),
        ((Rows([(X[0], Y), (X[0], Y[:3])]), (X, Y)), None, r"train: y of shapes \(3,\) and \(4,\): must be one shape"),
        (((X, Y, ["a"]), (X, Y)), None, "train: 1 groups for 4 samples: must be one a sample"),
        (((X, Y, torch.ones(4)), (X, Y)), None, "^train: groups of floats: must be names or integers; weights of"),
        (((X, Y, X[:, 0].numpy()), (X, Y)), None, "^train: groups of floats: must be names or integers; weights of"),
        (((X, Y), (X[:, :2], Y)), None, r"test: samples of shape \(2,\): the training samples' is \(3,\)"),
        ((Rows([(X[0], 1), (X[0, :2], 1)]), (X, Y)), None, r"train: x of shapes \(2,\) and \(3,\): must be one"),
        (
            (Rows([({"a": X[0], "b": X[0]}, 1), ({"a": X[0], "c": X[0]}, 1)]), (X, Y)),
            None,
            "an item has a, c: must have",
        ),
        (
            (Rows([{"a": X[0], "b": X[0], "label": 1}, {"a": X[0], "label": 1}]), (X, Y)),
            None,
            "^train: an item is one tensor: must be a mapping, as the first one$",
        ),
        (
            (Rows([{"a": X[0], "label": 1}, {"a": X[0], "b": X[0], "label": 1}]), (X, Y)),
            None,
            "^train: an item is a mapping: must be one tensor, as the first one$",
        ),
        ((Rows([((X[0], X[0]), 1), ((X[0],), 1)]), (X, Y)), None, "an item is a tuple of 1: must be a tuple of 2"),
        ((Rows([(X[0], 1)] * 2), (X, Y)), without_axis("y"), r"train: x of shape \(1, 3\), y of shape \(\),"),
        ((Rows([(X[0], Y)] * 2), (X, Y)), without_axis("y"), r"^train: x of shape \(1, 3\), y of shape \(4,\)"),
        ((Rows([((X[0], X[0]), 1)] * 2), (X, Y)), without_axis("x"), r"^train: x of shape \[\(1, 3\), \(3,\)\], y of"),
        (((X, Y), (X.long(), Y)), None, "^test: x of integers: the training samples' is of numbers$"),
        (((X.long(), Y), (X, Y)), None, "^test: x of numbers: the training samples' is of integers$"),
        ((Rows([X[0]]), (X, Y)), None, "an item is no"),
        ((Rows([("text", 1)]), (X, Y)), None, "train: a sample is no tensor but 'text' \\(str\\)"),
        ((Rows([(X[0], 1)]), (X, Y)), broken, "train: collate of samples \\[0\\]: KeyError: 'ids'"),
        ((Rows([]), (X, Y)), None, "train: no samples"),
        (((X[:0], Y[:0]), (X, Y)), None, "^train: no samples$"),
        (((X.numpy(), Y.numpy()), (X, Y)), None, r"^train = \(ndarray, ndarray\): must be \(x, y\) of tensors, "),
        ((X, Y, X, Y), None, r"^data = a tuple of 4: must be \(train, test\), each of which must be "),
        (((X, Y - 1), (X, Y)), None, "train: label -1: must be 0 to 0"),
        (((X, Y), (X / 0, Y)), None, "^test: x: must be finite numbers$"),
        (
            ((X.to_sparse(), Y), (X, Y)),
            None,
            "^train: x: is torch.sparse_coo on cpu; must be a dense tensor with values$",
        ),
        (
            ((X, Y.to_sparse()), (X, Y)),
            None,
            "^train: y: is torch.sparse_coo on cpu; must be a dense tensor with values$",
        ),
        (((X, Y), (X.to("meta"), Y)), None, "^test: x: is torch.strided on meta; must be a dense tensor with values$"),
        ((({"a": X, "b": X + torch.inf}, Y), (X, Y)), None, "^train: 'b': x: must be finite numbers$"),
        ((Rows([(X[0], 1), (X[0] / 0, 1)]), (X, Y)), None, "^train: x: must be finite numbers$"),
    ],
)
def test_data_that_are_none(data: Any, collate: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own_dataset(data, CLASSES, collate=collate)


# --- tables and texts -------------------------------------------------------------------------------------------------

TEXTS = ["a good film", "bad, very bad", "good", "so bad", "a film", "very good film"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "text": TEXTS * 5,
            "size": range(30),
            "width": [k / 7 for k in range(30)],
            "kind": ["yes", "no", "yes", "no", "yes", "yes"] * 5,
            "site": ["north", "south", "west"] * 10,
            "split": (["train"] * 4 + ["test"]) * 6,
        }
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_json(tmp_path / "t.jsonl", lines=True, orient="records")
    (tmp_path / "folder").mkdir()
    for split, part in frame.groupby("split"):
        part.drop(columns="split").to_csv(tmp_path / "folder" / f"{split}.csv", index=False)
    return tmp_path


def keys_of(table: Path, source: str, **keys: Any) -> dict[str, Any]:
    return {"dataset": source, "data-dir": str(table), "method": "fedavg"} | {
        k.replace("_", "-"): v for k, v in keys.items()
    }


@pytest.mark.parametrize("source", ["csv:t.csv", "tsv:t.tsv", "parquet:t.parquet", "jsonl:t.jsonl", "hf:{}/folder"])
def test_columns_of_numbers(table: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(table / "cache"))
    keys = keys_of(table, source.format(table), input="size, width", label="kind", group="site")
    data = load_dataset(resolve(keys).data)
    assert (len(data.train_y), len(data.test_y), data.in_shape, data.num_classes) == (24, 6, (2,), 2)
    assert data.sources == ("north", "south", "west")
    x = torch.as_tensor(data.train_x[:])
    assert torch.allclose(x.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(x.std(0, correction=0), torch.ones(2))
    assert data.train_y[:4].tolist() == [1, 0, 1, 0]
    clients = make_partition(data, resolve(keys | {"partition": "column", "num-clients": 3}).partitioning)
    assert [len(data.train_source[own].unique()) for own in clients.train] == [1, 1, 1]


def vectors(*rows: object) -> str:
    """Return the lines of a table of 24 rows, of the column ``v`` and two classes."""
    return "".join(json.dumps({"v": rows[k % len(rows)], "kind": k % 2}) + "\n" for k in range(24))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_vectors(tmp_path: Path, kind: str) -> None:
    """Such as features that another program made: each number is normalised as a column's are."""
    import pandas as pd

    (tmp_path / "t.jsonl").write_text(vectors([1, 5.0], [3, 5.0]))
    pd.read_json(tmp_path / "t.jsonl", lines=True).assign(more=range(24)).to_parquet(tmp_path / "t.parquet")
    wanted = "v" if kind == "jsonl" else "more, v"
    data = load_dataset(resolve(keys_of(tmp_path, f"{kind}:t.{kind}", label="kind", input=wanted)).data)
    x = torch.as_tensor(data.train_x[:])
    assert data.in_shape == ((2,) if kind == "jsonl" else (3,))
    assert x[:4, -2:].tolist() == [[-1, 0], [1, 0], [-1, 0], [1, 0]]


def test_a_group_without_test_samples_is_named(tmp_path: Path) -> None:
    """Where no sample has a class, the message names none."""
    rows = "\n".join(f"{k},{k},{'small' if k == 1 else 'large'}" for k in range(12))
    (tmp_path / "t.csv").write_text(f"size,dose,site\n{rows}\n")
    keys = keys_of(tmp_path, "csv:t.csv", task="regression", input="size", label="dose", group="site")
    run = resolve(keys | {"partition": "column", "num-clients": 2})
    with pytest.raises(UserError, match=r"the test set has no sample of client 1's sources small; use 'holdout'$"):
        make_partition(load_dataset(run.data), run.partitioning)


@pytest.mark.parametrize("kind", ["datetime64[ns]", "timedelta64[s]", object])
def test_dates_are_no_numbers_to_learn(tmp_path: Path, kind: Any) -> None:
    """A date in a file becomes one of pandas' types, of which NumPy would take the microseconds, or Python's."""
    import pandas as pd

    day = date(2024, 1, 2) if kind is object else 5
    pd.DataFrame({"size": range(12), "day": pd.Series([day] * 12, dtype=kind)}).to_parquet(tmp_path / "t.parquet")
    keys = keys_of(tmp_path, "parquet:t.parquet", task="regression", input="size", label="day")
    with pytest.raises(UserError, match=r"^label = 'day': must be numbers \(TypeError: float\(\) argument must be"):
        load_dataset(resolve(keys).data)


@pytest.mark.parametrize("rows", [([1, 2], [1, 2, 3]), (["a"], ["b"]), ([[1, 2]],), ([1, 2], [1, 1e999]), ([1], 2)])
def test_a_column_of_no_vectors_is_one_line(tmp_path: Path, rows: tuple[object, ...]) -> None:
    (tmp_path / "t.jsonl").write_text(vectors(*rows))
    said = "^dataset = 'jsonl:t.jsonl': column 'v': must be numbers, or vectors of one length, without infinite ones$"
    with pytest.raises(UserError, match=said):
        load_dataset(resolve(keys_of(tmp_path, "jsonl:t.jsonl", label="kind")).data)


def test_a_table_without_a_test_part_and_several_files(table: Path) -> None:
    import pandas as pd

    for name in ("one", "two"):
        pd.DataFrame({"x": range(12), "label": [0, 1] * 6}).to_csv(table / f"s-{name}.csv", index=False)
    data = load_dataset(resolve(keys_of(table, "csv:s-*.csv", group="file")).data)
    assert (len(data.train_y), len(data.test_y), data.sources) == (20, 4, ("s-one", "s-two"))
    assert data.notes[0].startswith("the table comes without a test part: every 6th sample")
    keys = keys_of(table, "csv:s-*.csv", task="regression", input="x", label="x", group="label")
    assert torch.bincount(load_dataset(resolve(keys).data).test_source).tolist() == [2, 2]  # of each group


def test_files_of_one_name_in_several_folders_are_several_groups(tmp_path: Path) -> None:
    for folder in ("north", "south"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ward1.csv").write_text("x,label\n" + "1,0\n2,1\n" * 9)
    data = load_dataset(resolve(keys_of(tmp_path, "csv:*/ward*.csv", group="file")).data)
    assert data.sources == ("north/ward1", "south/ward1")


def test_a_class_of_test_rows_alone_is_a_note(tmp_path: Path) -> None:
    """The labels of some published test sets are hidden behind -1."""
    (tmp_path / "t.csv").write_text("x,label,split\n" + "1,0,train\n2,1,train\n3,-1,test\n" * 6)
    data = load_dataset(resolve(keys_of(tmp_path, "csv:t.csv")).data)
    assert data.notes == ("no training sample of the class -1",)


def test_numbers_name_columns_and_words_stay_words(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame(np.arange(48).reshape(24, 2) % 4).to_parquet(tmp_path / "t.parquet")
    assert load_dataset(resolve(keys_of(tmp_path, "parquet:t.parquet", label="1")).data).labels == ("1", "3")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"x": k, "label": f"0{k % 2}"}) + "\n" for k in range(24)))
    assert load_dataset(resolve(keys_of(tmp_path, "jsonl:t.jsonl")).data).labels == ("00", "01")


def test_a_file_without_rows_changes_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n" + "1,0\n2,1\n" * 9)
    (tmp_path / "b.csv").write_text("x,label\n")
    assert load_dataset(resolve(keys_of(tmp_path, "csv:*.csv")).data).in_shape == (1,)


def test_a_column_of_the_name_of_the_made_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("file,x,label\n" + "1,5,0\n2,6,1\n" * 9)
    keys = keys_of(tmp_path, "csv:a[1].csv", normalise="none")
    data = load_dataset(resolve(keys).data)
    assert torch.as_tensor(data.train_x[:])[:2].tolist() == [[1, 5], [2, 6]]
    assert load_dataset(resolve(keys | {"group": "file"}).data).sources == ("1", "2")


def test_a_column_of_texts(table: Path) -> None:
    keys = keys_of(table, "csv:t.csv", input="text", label="kind", tokens=6)
    data = load_dataset(resolve(keys).data)
    assert isinstance(data.in_shape, Form)
    assert data.in_shape.given == {"input_ids": (6,), "attention_mask": (6,)}
    x = data.train_x[:]
    assert isinstance(x, Inputs)
    assert x.tensors[1][2].tolist() == [1, 1, 1, 1, 0, 0]  # "good"
    keys |= {"task": "next-token", "group": "site"}
    data = load_dataset(resolve(keys).data)
    sizes = [0, 0, 0]  # a text of n characters has n - 1 next ones, at most six a sample
    for k in (k for k in range(30) if k % 5 != 4):
        sizes[k % 3] += (len(TEXTS[k % 6]) + 4) // 6
    assert torch.bincount(data.train_source).tolist() == sizes
    assert data.in_shape.single  # type: ignore[union-attr]
    assert data.train_y.shape[1:] == (6,)
    assert data.num_classes == data.in_shape.tokens  # type: ignore[union-attr]


def test_next_tokens_by_hand() -> None:
    x, y, text = next_tokens([[1, 2, 3, 4, 5, 6], [7], [8, 9]], 3)
    assert x.tolist() == [[1, 2, 3], [4, 5, 0], [8, 0, 0]]
    assert y.tolist() == [[2, 3, 4], [5, 6, -100], [9, -100, -100]]
    assert text.tolist() == [0, 0, 2]
    ids, mask = padded([[1, 2, 3, 4], []], 3)
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 0]], [[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize("text", [[8, 1, 2, 9], [9, 1, 2, 8]])
def test_a_texts_first_and_last_token_are_of_one_vocabulary(text: list[int]) -> None:
    """The first one is no label and the last one no input; other labels of tokens have their own numbers."""
    texts = torch.tensor([text] * 3)
    for part, tokens in (((texts[:, :-1], texts[:, 1:]), 10), ((texts, texts % 3), 3)):
        data = own_dataset((part, part), TOKENS)
        assert isinstance(data.in_shape, Form)
        assert (data.num_classes, data.in_shape.tokens) == (tokens, 10)


@pytest.mark.parametrize("name", ["characters", "words", "bpe"])
def test_tokenizers_of_the_training_texts(name: str) -> None:
    if name != "characters":
        pytest.importorskip("tokenizers")
    encode, size, _ = tokenizer_of(name, TEXTS, 30)
    tokens = encode([*TEXTS, "zebra ~"])
    assert 0 < size <= 30
    assert all(0 < token < size for text in tokens for token in text)
    assert tokens[0] == encode(TEXTS)[0]
    assert 1 in tokens[-1]  # unknown
    assert name != "characters" or tokenizer_of(name, TEXTS, 9).size == 9


def test_texts_without_a_next_token_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text\n" + "a\n" * 12)
    keys = keys_of(tmp_path, "csv:t.csv", input="text", task="next-token")
    with pytest.raises(UserError, match=r"^dataset = 'csv:t.csv', train: no samples$"):
        load_dataset(resolve(keys).data)


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    """In the form in which transformers saves one, without a network."""
    tokenizer_folder(tmp_path)
    encode, size, _ = tokenizer_of(f"transformers:{tmp_path}", TEXTS, 9)
    assert size == 4
    assert encode(["good film", "a good one", ""]) == [[2, 3], [1, 2, 1], []]
    assert encode([]) == []


def test_a_tokenizer_without_its_package_or_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("transformers"):
        with pytest.raises(UserError, match=r"^tokenizer = 'transformers:/.*gone': ") as error:
            tokenizer_of(f"transformers:{tmp_path}/gone", TEXTS, 9)
        assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers; `pip install transformers`$"):
        tokenizer_of("transformers:x", TEXTS, 9)


def test_a_data_set_of_the_cache(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, one that the package datasets has downloaded before."""
    import datasets

    cache = table / "cache"
    files = {name: str(table / "folder" / f"{name}.csv") for name in ("train", "test")}
    datasets.load_dataset("csv", data_files=files, cache_dir=str(cache))
    (prepared,) = {path.parent for path in cache.glob("csv/*/*/*/*.arrow")}
    kept = cache / "ward___patients/default/0.0.0" / prepared.name
    shutil.copytree(prepared, kept)
    for file in kept.glob("csv-*.arrow"):
        file.rename(kept / file.name.replace("csv-", "patients-"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    keys = keys_of(table, "hf:ward/patients", input="size, width", label="kind", group="site")
    data = load_dataset(resolve(keys).data)
    assert (len(data.train_y), len(data.test_y), data.sources) == (24, 6, ("north", "south", "west"))
    with pytest.raises(UserError, match=r"^dataset = 'hf:ward/others': "):
        load_dataset(resolve(keys | {"dataset": "hf:ward/others"}).data)


def test_a_test_split_comes_before_a_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    splits = enumerate(("train", "validation", "test"))
    parts = {name: datasets.Dataset.from_dict({"x": [value] * 2, "label": [0, 1]}) for value, name in splits}
    monkeypatch.setattr(datasets, "load_dataset", lambda _: parts)
    for name, value, notes in (("all", 2, ()), ("no test", 1, ("tested on its validation split",))):
        data = load_dataset(resolve({"dataset": f"hf:{name}", "normalise": "none"}).data)
        assert (torch.as_tensor(data.test_x[:]).tolist(), data.notes) == ([[value], [value]], notes)
        parts.pop("test", None)


BROKEN = "def load():\n    raise ValueError('no\\ndatabase')\n"


@pytest.mark.parametrize(
    ("source", "files", "said"),
    [
        (
            "csv:t.csv",
            {"t.csv": "x,kind,split\n1,a,train\n2,b,val\n"},
            "^t.csv: column 'split' has 'val': must be 'train'",
        ),
        ("csv:t.csv", {"t.csv": "x,kind,split\n1,a,train\n2,b,train\n"}, "dataset = 'csv:t.csv': no test samples$"),
        ("csv:t.csv", {"t.csv": "x,kind,split\n1,a,test\n2,b,test\n"}, "dataset = 'csv:t.csv': no training samples$"),
        ("csv:t.csv", {"t.csv": "x,kind\n1,a\n2,b\n"}, "no test samples; .*: every 6th sample of a class or group"),
        (
            "csv:t.csv",
            {"t.csv": "x,kind\n" + "1,a\ninf,b\n" * 9},
            "column 'x' has 8 empty or infinite values; must have",
        ),
        ("csv:t.csv", {"t.csv": "x,kind\n" + "1,1\n2,inf\n" * 9}, "column 'kind' has 9 empty or infinite values; must"),
        (
            "csv:t.csv",
            {"t.csv": "x,kind\n" + "1,yes\n2,NA\n" * 9},
            "has 9 empty or infinite values; must have none; words such as NA,",
        ),
        (
            "csv:t.csv",
            {"t.csv": "x,kind\n" + "1,a\n1e39,b\n" * 9},
            "column 'x' has 8 empty or infinite values; must have",
        ),
        ("csv:t.csv", {"t.csv": "kind\na\nb\n" * 9}, "dataset = 'csv:t.csv': no column of inputs besides kind"),
        ("parquet:t.parquet", {"t.parquet": "PAR1"}, r"^t.parquet: not a readable parquet file \("),
        ("hf:{}/some", {"some/test.csv": "x,kind\n1,a\n"}, "/some': has test; must have train$"),
        ("load.py:load", {"load.py": BROKEN}, "dataset = 'load.py:load': ValueError: no database$"),
    ],
    ids=[
        "split",
        "no test",
        "no training",
        "too few",
        "inf",
        "class inf",
        "no float32",
        "word",
        "no inputs",
        "parquet",
        "hf",
        "code",
    ],
)
def test_a_table_that_is_not_one_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, files: dict[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    label = "label" if source.startswith("load.py") else "kind"
    with pytest.raises(UserError, match=said) as error:
        load_dataset(resolve(keys_of(tmp_path, source.format(tmp_path), label=label)).data)
    assert "\n" not in str(error.value)


def test_images_of_a_folder_of_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def load(name: str, width: int) -> Any:
        for split in ("train", "test"):
            for kind, brightness, size in (("cat", 0, 4), ("dog", 255, width)):
                folder = tmp_path / name / split / kind
                folder.mkdir(parents=True)
                Image.new("RGB", (size, 3), (brightness, 0, 255)).save(folder / "one.png")
        return load_dataset(resolve(keys_of(tmp_path, f"hf:{tmp_path}/{name}", label="label", normalise="none")).data)

    data = load("alike", width=4)
    assert (len(data.train_y), len(data.test_y), data.in_shape, data.num_classes) == (2, 2, (3, 3, 4), 2)
    assert torch.as_tensor(data.train_x[:])[:, :, 0, 0].tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]
    assert data.labels == ("cat", "dog")
    with pytest.raises(UserError, match=r"images of \(3, 4, 3\) and \(3, 5, 3\): must be of one size$"):
        load("wider", width=5)
    (tmp_path / "alike/train/cat/two.png").write_text("no image")
    with pytest.raises(UserError, match=r"^image column 'image': .*UnidentifiedImageError"):
        load_dataset(resolve(keys_of(tmp_path, f"hf:{tmp_path}/alike", label="label")).data)


def test_the_sources_of_the_standard_library() -> None:
    assert {"asyncio", "email", "json"} <= python_packages().keys()
    keys = {"dataset": "python-sources", "domains": "json, email", "task": "next-token", "partition": "source"}
    data = load_dataset(resolve(keys).data)
    assert (data.sources, data.num_classes, data.in_shape.tokens) == (("json", "email"), 98, 98)  # type: ignore
    assert torch.equal(torch.as_tensor(data.train_x[:1])[0, 1:], data.train_y[0, :-1])
    train, test = (torch.bincount(source) for source in (data.train_source, data.test_source))
    assert torch.equal(test, (train + test) // 6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "csv:gone.csv"}, "dataset = 'csv:gone.csv': no such file here or in"),
        ({"label": "sort"}, "no column 'sort'; allowed: text, size, width, kind, site$"),
        ({"group": "where"}, "no column 'where'; allowed"),
        ({"dataset": "csv:**.csv"}, r"dataset = 'csv:\*\*.csv': no such file here or in"),
        ({"image-size": 9}, "image-size = 9: must be 0 with dataset = 'csv:t.csv', which is no set of images"),
        ({"domains": "fog"}, "domains = 'fog': must be '' with dataset"),
        ({"train-per-class": 5}, "train-per-class = 5: must be 0 with dataset"),
        ({"input": "size", "task": "next-token"}, "task = 'next-token': input = 'size': must be one column of texts"),
        ({"dataset": "jsonl:d.jsonl", "label": "d"}, "label = 'd': {'bytes': 'x'} is no class; must be integers or"),
        (
            {"input": "size", "repeat-classes": True, "classes-per-client": 1, "num-clients": 3},
            "repeat-classes = true: needs num-clients",
        ),
        ({"input": "text, size"}, "input = 'text, size': must be numbers or vectors, or one column of texts"),
        (
            {"dataset": "jsonl:d.jsonl", "input": "d"},
            "input = 'd': must be numbers or .*; they are d .object.",
        ),
        ({"input": "size", "label": "width"}, "label = 'width': 0.142.* is no class; must be integers or words"),
        ({"input": "size", "task": "regression"}, "label = 'kind': must be numbers"),
        ({"input": "text", "tokenizer": "letters"}, "tokenizer = 'letters': allowed are characters, words, bpe"),
        ({"input": "size", "label": "kind, site"}, "label = 'kind, site': must be one column"),
        ({"label": ""}, "label = '': must be one column"),
        ({"dataset": "csv:u.csv", "label": ""}, "label = '': must be one column"),
        ({"input": "size, kind"}, "input = 'size, kind': 'kind' is the label; must be other columns"),
        ({"dataset": "hf:/nowhere/at/all"}, "dataset = 'hf:/nowhere/at/all': "),
        ({"dataset": "my_data.py:load", "label": "label"}, "dataset = 'my_data.py': No such file"),
        ({"dataset": "my_data.py:load"}, "label = 'kind': must be 'label' with dataset = 'my_data.py:load', which has"),
        ({"dataset": "digits", "input": "size"}, "^input = 'size': must be '' with dataset = 'digits', which has no"),
        ({"input": "size", "partition": "column", "num-clients": 4}, "partition = 'column' has 1 groups"),
        (
            {"input": "text", "partition": "iid"},
            "model = 'feature-mlp': takes one tensor of numbers, these inputs are tokens",
        ),
        ({"input": "size", "partition": "flwr:No"}, "partition = 'flwr:No': must be 'iid'"),
        ({"input": "size", "partition": "flwr:NoPartitioner"}, "flwr-datasets has no NoPartitioner; allowed are"),
        (
            {"input": "size", "partition": "flwr:LinearPartitioner", "partition-options": "a=1"},
            "partition-options = 'a=1': TypeError",
        ),
    ],
)
def test_a_source_that_cannot_be_read(table: Path, keys: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(table)
    (table / "u.csv").write_text("size,kind\n" + "1,a\n2,b\n" * 9)  # without a test part
    (table / "d.jsonl").write_text('{"d": {"bytes": "x"}, "kind": "a"}\n' * 12)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        fedsub_app.run(keys_of(table, "csv:t.csv", label="kind", model="feature-mlp", num_rounds=1) | keys)


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("Iid", "", [8, 8, 8]),
        ("Linear", "", [4, 8, 12]),
        ("Square", "", [1, 6, 17]),
        ("Exponential", "", [2, 5, 17]),
        ("Size", "partition_sizes=[3, 5, 16]", [3, 5, 16]),
        ("NaturalId", "partition_by='source'", [8, 8, 8]),
        ("Dirichlet", "partition_by='label', alpha=0.5, min_partition_size=2", None),
        ("InnerDirichlet", "partition_by='label', alpha=0.5, partition_sizes=[4, 8, 12]", [4, 8, 12]),
        ("Pathological", "partition_by='label', num_classes_per_partition=2", None),
        ("Shard", "partition_by='label', num_shards_per_partition=2", [8, 8, 8]),
        ("Continuous", "partition_by='index', strictness=1.0", [8, 8, 8]),
    ],
)
def test_the_partitioners_of_flwr_datasets(table: Path, name: str, options: str, sizes: list[int] | None) -> None:
    """Each sample goes to one client."""
    keys = keys_of(table, "csv:t.csv", input="size", label="kind", group="site", partition=f"flwr:{name}Partitioner")
    settings = resolve(keys | {"num-clients": 3, "partition-options": options})
    clients = make_partition(load_dataset(settings.data), settings.partitioning).train
    assert torch.cat(clients).sort().values.tolist() == list(range(24))
    assert sizes in (None, [len(own) for own in clients])


def test_a_node_reads_tables_of_its_own_folder_alone(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the folder that the server names."""
    monkeypatch.setattr("sys.argv", ["flwr-clientapp"])
    keys = keys_of(table, "csv:t.csv", input="size", label="kind", model="feature-mlp", partition="iid")

    def read(folder: str, **more: str) -> Any:
        text = json.dumps(keys | more)
        header = {"code": code_digest(), "settings": text, "digest": text_digest(text), "run": "a"}
        context = Context(1, 2, {"data-dir": folder}, RecordDict(), {})
        return node.named(node.settings_from(text), header, context)(0).problem.data

    assert len(read(str(table)).train_y) == 24
    monkeypatch.setenv("FEDSUB_DATA", str(table / "folder"))
    with pytest.raises(UserError, match=r"folder/t.csv': no such file"):
        read("")
    for name in ("csv:/etc/passwd", "csv:../t.csv", "hf:some/name"):
        with pytest.raises(UserError, match=f"^dataset = '{name}': a node reads tables of its own data folder only$"):
            read(str(table), dataset=name)


def test_a_simulation_is_given_whole_paths(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have another working directory."""
    monkeypatch.chdir(table)
    given = resolve({"dataset": "csv:*.csv", "tokenizer": "transformers:folder", "model": "torchvision:resnet18"})
    assert local_paths(given) == {"dataset": f"csv:{table}/*.csv", "tokenizer": f"transformers:{table}/folder"}
    assert local_paths(resolve({"dataset": "csv:gone.csv", "model": "transformers:on/the-hub"})) == {}
    (table / "t[1].csv").touch()
    monkeypatch.setenv("HOME", str(table))
    for name, path in {"t[1].csv": "t[1].csv", "~/t.csv": "t.csv"}.items():
        assert local_paths(resolve({"dataset": f"csv:{name}"})) == {"dataset": f"csv:{table}/{path}"}
    assert local_paths(resolve({"dataset": "csv:**.csv"})) == {}  # Python's glob refuses it


@pytest.mark.parametrize("source", ["csv:~/t.csv", "hf:~/folder"])
def test_a_home_is_a_folder_of_sources(table: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setenv("HOME", str(table))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(table / "cache"))
    keys = keys_of(table, source, input="size", label="kind")
    assert len(load_dataset(resolve(keys).data).train_y) == 24


def test_a_column_is_dealt_over_a_multiple_of_clients(table: Path) -> None:
    """Each of six clients has half of a site, and no sample is lost."""
    keys = keys_of(table, "csv:t.csv", input="size", label="kind", group="site", partition="column", num_clients=6)
    data = load_dataset(resolve(keys).data)
    clients = make_partition(data, resolve(keys).partitioning).train
    assert [data.train_source[own].unique().tolist() for own in clients] == [[0], [0], [1], [1], [2], [2]]
    assert [len(own) for own in clients] == [4] * 6
    assert int(clients[0].max()) > int(clients[1].min()), "a file may be sorted by class"
    assert torch.cat(clients).sort().values.tolist() == list(range(24))
    with pytest.raises(UserError, match="partition = 'column' has 3 groups; expected at most that or a multiple"):
        make_partition(data, resolve(keys | {"num-clients": 4}).partitioning)


@pytest.mark.run
def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(
        "import torch\n"
        "def load(seed, folder):\n"
        "    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))\n"
        "    site = ['a', 'b', 'c'] * 20\n"
        "    return (x, (x.sum(1) > 0).long(), site), (x[:20], (x[:20].sum(1) > 0).long(), site[:20])\n"
    )
    monkeypatch.chdir(tmp_path)
    keys = {"dataset": "my_data.py:load", "model": "feature-mlp", "method": "fedavg", "partition": "column"}
    record = fedsub_app.run(keys | {"num-clients": 2, "num-rounds": 2, "run-dir": "run"})
    assert record.lines[-1]["global-loss"] < record.lines[0]["global-loss"]
    assert sorted(record.partition["train"]) == [20, 40]


@pytest.mark.parametrize("several", [True, False])
def test_classes_that_some_rows_have_as_numbers_are_those_words(tmp_path: Path, several: bool) -> None:
    """Pandas reads 0 as a number where all of a file, or of a part of a long one, are numbers, and else as a word."""
    numbers, words = ("".join(f"{k},{label}\n" for k in range(24)) for label in (1, 2)), "5,other\n" * 12 + "6,1\n" * 12
    content = ["x,label\n" + "".join(numbers) * (1 if several else 10_000), words]
    for name, text in zip("ab", [content[0], f"x,label\n{words}"] if several else ["".join(content)], strict=False):
        (tmp_path / f"t-{name}.csv").write_text(text)
    data = load_dataset(resolve(keys_of(tmp_path, "csv:t-*.csv")).data)
    assert data.labels == ("1", "2", "other")


def test_columns_of_json_are_not_taken_for_dates_by_their_names(tmp_path: Path) -> None:
    rows = [{"start_time": 1.6e9 + 1e6 * k, "modified": f"v{k % 2}", "label": k % 2} for k in range(24)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "t.jsonl").write_text(text, encoding="utf-8-sig")  # with a byte order mark
    data = load_dataset(resolve(keys_of(tmp_path, "jsonl:t.jsonl", input="start_time", group="modified")).data)
    assert (data.in_shape, data.sources) == ((1,), ("v0", "v1"))


def test_infinity_among_words_is_no_class(tmp_path: Path) -> None:
    rows = ({"x": k, "label": math.inf if k == 3 else "a"} for k in range(24))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"^label = 'label': inf is no class; must be integers or words$"):
        load_dataset(resolve(keys_of(tmp_path, "jsonl:t.jsonl", input="x")).data)


def test_an_empty_value_of_pandas_own_types_is_one_line(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"x": pd.array([1, None, 3] * 8, dtype="Float64"), "label": [0, 1] * 12})
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="column 'x' has 6 empty or infinite values; must have none"):
        load_dataset(resolve(keys_of(tmp_path, "parquet:t.parquet")).data)


def test_images_of_16_bits_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted as they are, all their pixels above 255 would be white."""
    from PIL import Image

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            (tmp_path / "deep" / split / kind).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "deep" / split / kind / "one.png")
    with pytest.raises(UserError, match="column 'image': pixels of mode I;16, expected 8 bits a channel"):
        load_dataset(resolve(keys_of(tmp_path, f"hf:{tmp_path}/deep", label="label")).data)


@pytest.mark.parametrize("source", ["csv:t.csv", "t", "pets", "t.py:load"])
def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """In one process, as a notebook is."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)

    def write(count: int) -> None:
        (tmp_path / "t.csv").write_text("x,label\n" + "".join(f"{k},{k % 2}\n" for k in range(count)))
        x, y = np.zeros((count, 4, 4), np.uint8), np.arange(count) % 2
        np.savez(tmp_path / "t.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
        part = f"(torch.zeros({count}, 2), torch.arange({count}) % 2)"
        (tmp_path / "t.py").write_text(f"import torch\ndef load():\n    return {part}, {part}\n")
        for k in range(count):
            (tmp_path / f"pets/{k % 2}").mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), k).save(tmp_path / f"pets/{k % 2}/{k}.png")

    sizes = []
    for count in (24, 36):
        write(count)
        data = load_dataset(resolve(keys_of(tmp_path, source)).data)
        assert load_dataset(resolve(keys_of(tmp_path, source)).data) is data
        sizes.append(len(data.train_y) + len(data.test_y))
    assert sizes == ([48, 72] if source in ("t", "t.py:load") else [24, 36])


def test_small_numbers_are_normalised_and_constant_columns_are_not(tmp_path: Path) -> None:
    """Such as farads; a constant column has no deviation but that of rounding."""
    rows = "".join(f"{k}e-12,0.1,1.7e18,0,{k % 2}\n" for k in range(36))
    (tmp_path / "t.csv").write_text(f"a,b,c,d,label\n{rows}")
    x = load_dataset(resolve(keys_of(tmp_path, "csv:t.csv")).data).train_x[:]
    assert isinstance(x, torch.Tensor)
    torch.testing.assert_close(x.std(0, correction=0), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(x.mean(0), torch.zeros(4), atol=1e-5, rtol=0)


def test_a_run_is_not_resumed_with_other_samples(tmp_path: Path) -> None:
    table, keys = tmp_path / "t.csv", keys_of(tmp_path, "csv:t.csv", num_clients=2, num_rounds=1, model="feature-mlp")
    table.write_text("x,label\n" + "1,0\n2,1\n" * 24)
    keys |= {"method": "fedavg", "partition": "iid", "run-dir": str(tmp_path / "run")}
    fedsub_app.run(keys)
    more = keys | {"resume": True, "num-rounds": 2}
    before = table.read_text()
    for other in ("1,0\n2,1\n" * 30, "1,0\n2,1\n" * 23 + "1,0\n3,1\n"):
        table.write_text(f"x,label\n{other}")
        with pytest.raises(UserError, match=r"^dataset = 'csv:t.csv': the file has changed since the run in .* began"):
            fedsub_app.run(more)
    table.write_text(before)
    assert fedsub_app.run(more).lines[-1]["round"] == 2


def test_a_run_is_not_resumed_with_other_images(tmp_path: Path) -> None:
    """Of the same labels: one pixel is another."""
    y, x = np.arange(24) % 2, np.random.default_rng(0).integers(0, 256, (24, 8, 8), np.uint8)

    def save(pixel: int) -> None:
        x[5, 3, 3] = pixel
        np.savez(tmp_path / "t.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)

    keys = keys_of(tmp_path, "t", num_clients=2, num_rounds=1, model="feature-mlp", train_per_class=0)
    keys |= {"partition": "iid", "run-dir": str(tmp_path / "run")}
    save(7)
    fedsub_app.run(keys)
    more = keys | {"resume": True, "num-rounds": 2}
    save(8)
    with pytest.raises(UserError, match=r"^dataset = 't': the samples have changed since the run in .* began"):
        fedsub_app.run(more)
    save(7)
    assert fedsub_app.run(more).lines[-1]["round"] == 2


def test_texts_are_padded_by_the_tokenizers_own_token(tmp_path: Path) -> None:
    """Decoders take the output at the last token that is none of their padding."""
    tokenizer_folder(tmp_path / "words")
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "film"}'
    (tmp_path / "words/tokenizer_config.json").write_text(config)
    (tmp_path / "t.csv").write_text("text,label\n" + "good,0\ngood good,1\n" * 12)
    keys = keys_of(tmp_path, "csv:t.csv", input="text", tokens=3, tokenizer=f"transformers:{tmp_path}/words")
    x = load_dataset(resolve(keys).data).train_x[:2]
    assert isinstance(x, Inputs)
    assert [part.tolist() for part in x.tensors] == [[[2, 3, 3], [2, 2, 3]], [[1, 0, 0], [1, 1, 0]]]
