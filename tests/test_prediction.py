"""`fedsub predict` and `fedsub export --onnx`: the model of the run on the run's own samples, read back from files."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_small
from PIL import Image
from test_private_data import images

from fedsub_app.analysis.clients import client_of
from fedsub_app.analysis.prediction import model_of, predictions, settled, write_onnx
from fedsub_app.cli.main import main
from fedsub_app.common.errors import UserError


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run on images of bytes, each client with a head of its own, and the test images as files."""
    folder = tmp_path_factory.mktemp("pictures")
    source = images(folder / "mine.npz", 100)
    files = []
    for number, pixels in enumerate(np.load(source)["test_images"]):
        files.append(folder / f"{number:02}.png")
        Image.fromarray(pixels).save(files[-1])
    keys: dict[str, Any] = {"dataset": "mine", "data_dir": str(folder), "method": "fedper", "evaluate": "personal"}
    run_small(folder / "run", model="fedpews-cnn", num_rounds=1, num_clients=2, **keys)
    return folder / "run", files


def test_files_are_predicted_as_the_test_set(pictures: tuple[Path, list[Path]], capsys: pytest.CaptureFixture) -> None:
    run, files = pictures
    assert main(["predict", str(run), *map(str, files)]) == 0
    rows = table(capsys.readouterr().out)
    network, _, problem, _ = model_of(run)
    with torch.no_grad():
        scores, labels = network(problem.data.test_x[:]).softmax(1).max(1)
    assert [row["file"] for row in rows] == list(map(str, files))
    assert [int(row["label"]) for row in rows] == labels.tolist()
    assert [row["score"] for row in rows] == [f"{score:.4f}" for score in scores.tolist()]


def test_a_client_predicts_with_its_own_model(pictures: tuple[Path, list[Path]]) -> None:
    """Its accuracy on its test samples is the score of its model."""
    run, files = pictures
    for number in range(2):
        client = client_of(run, number)
        expected = client.score("test")
        mine = client.place.partition.test[number].tolist()
        _, rows = predictions(run, [files[k] for k in mine], number)
        right = sum(label == client.place.problem.data.test_y[k] for (_, label, _), k in zip(rows, mine, strict=True))
        assert 100 * int(right) / len(mine) == pytest.approx(expected)


def test_a_clients_model_has_the_statistics_of_its_own_samples(tmp_path: Path) -> None:
    """Where its BatchNorm has those of its batch: the mean of what goes in, of the client's training samples."""
    images(tmp_path / "mine.npz", 100)
    keys: dict[str, Any] = {"dataset": "mine", "data_dir": str(tmp_path), "method": "fedper", "model": "feature-mlp"}
    run_small(tmp_path / "run", num_rounds=1, num_clients=2, evaluate="personal", **keys)
    for number in range(2):
        network, x, problem, _ = model_of(tmp_path / "run", number)
        own = problem.data.train_x[client_of(tmp_path / "run", number).place.partition.train[number]]
        network = settled(network, x)
        layer = next(m for m in network.modules() if isinstance(m, torch.nn.BatchNorm1d))
        inputs: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.extend(args))
        network(own)
        torch.testing.assert_close(layer.running_mean, inputs[0].mean(0))


@pytest.mark.parametrize("form", ["{kind}", "{part}/{kind}"])
def test_labels_of_a_folder_of_images_are_its_folders(tmp_path: Path, form: str) -> None:
    """A white and a black class, which three rounds tell apart."""
    for number in range(12):
        for kind, grey in (("night", 0), ("day", 255)):
            folder = tmp_path / "sky" / form.format(kind=kind, part="test" if number % 6 == 0 else "train")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), abs(grey - number)).save(folder / f"{number:02}.png")
    (tmp_path / "sky" / form.format(kind="empty", part="train")).mkdir()  # no class: it has no images
    keys: dict[str, Any] = {"dataset": "sky", "data_dir": str(tmp_path), "model": "feature-mlp", "partition": "iid"}
    run_small(tmp_path / "run", num_rounds=3, num_clients=2, local_epochs=5, **keys)
    files = [next((tmp_path / "sky").rglob(f"{kind}/00.png")) for kind in ("night", "day")]
    _, rows = predictions(tmp_path / "run", files)
    assert [label for _, label, _ in rows] == ["night", "day"]
    # the network's BatchNorm has the statistics of its batch: no file's label depends on the others
    assert [predictions(tmp_path / "run", [file])[1][0] for file in files] == rows
    Image.open(files[0]).convert("RGB").save(tmp_path / "colour.png")
    assert predictions(tmp_path / "run", [tmp_path / "colour.png"])[1][0][1:] == rows[0][1:]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"dataset": "synthetic-3k", "model": "fedpews-mlp"},
            "dataset = 'synthetic-3k': its samples are no images; predict",
        ),
        ({"dataset": "python-sources", "task": "next-token"}, "/run: predict reads images and tables; `client_of` and"),
    ],
    ids=["points", "texts"],
)
def test_what_predict_does_not_read(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    net = "from torch import nn\n\n\ndef net(num_classes):\n    return nn.Embedding(num_classes, num_classes)\n"
    (tmp_path / "net.py").write_text(net)
    model = {"model": f"{tmp_path / 'net.py'}:net", "domains": "json"} if "task" in keys else {}
    run_small(tmp_path / "run", **{"num_rounds": 1, "num_clients": 2, "partition": "iid"} | model | keys)
    with pytest.raises(UserError, match=said):
        predictions(tmp_path / "run", [tmp_path / "a.png"])


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run on a table whose labels are words, and the table's lines."""
    folder, random = tmp_path_factory.mktemp("patients"), np.random.default_rng(0)
    lines = ["split,age,weight,outcome"]
    for number in range(60):
        age, weight = random.normal(50, 10), random.normal(80, 9)
        outcome = "ill" if age + weight > 130 else "well"
        lines.append(f"{'test' if number % 4 == 0 else 'train'},{age:.3f},{weight:.3f},{outcome}")
    (folder / "patients.csv").write_text("\n".join(lines))
    keys: dict[str, Any] = {"dataset": f"csv:{folder / 'patients.csv'}", "label": "outcome", "partition": "iid"}
    run_small(folder / "run", num_rounds=2, num_clients=2, **keys)
    return folder / "run", lines


def test_rows_are_predicted_as_the_test_rows(patients: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Without their labels, or with wrong ones; normalised by the training rows; the label is the table's word."""
    run, lines = patients
    unlabelled, mislabelled = tmp_path / "new.csv", tmp_path / "other.csv"
    rows = [line.split(",") for line in lines if line.startswith("test")]
    unlabelled.write_text("\n".join(["weight,age", *(f"{weight},{age}" for _, age, weight, _ in rows)]))
    mislabelled.write_text("\n".join(["age,weight,outcome", *(f"{age},{weight},?" for _, age, weight, _ in rows)]))
    network, x, problem, _ = model_of(run)
    with torch.no_grad():
        scores, labels = settled(network, x)(problem.data.test_x[:]).softmax(1).max(1)
    expected = [[["ill", "well"][label], f"{score:.4f}"] for score, label in zip(scores, labels.tolist(), strict=True)]
    header, found = predictions(run, [unlabelled, mislabelled])
    assert header == ["file", "row", "label", "score"]
    assert [row[2:] for row in found] == expected * 2
    assert [row[:2] for row in found[-1:]] == [[mislabelled, len(rows) - 1]]


def test_a_note_says_what_has_changed_and_whose_model_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, net = tmp_path / "t.csv", tmp_path / "net.py"
    data.write_text("x,label\n" + "1,0\n2,1\n4,1\n" * 16)
    net.write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(1, 2)\n")
    keys: dict[str, Any] = {"dataset": f"csv:{data}", "model": f"{net}:net", "partition": "iid", "method": "fedavg"}
    run_small(tmp_path / "run", num_rounds=1, num_clients=2, **keys)
    run = tmp_path / "run"
    _, before = predictions(run, [data])
    assert not capsys.readouterr().err
    predictions(run, [data], 1)
    assert capsys.readouterr().err == "note: method = 'fedavg': client 1's model is the global one\n"
    data.write_text(data.read_text().replace("2,1", "5,1"))
    assert predictions(run, [data])[1] != before
    since = f"the file has changed since the run in {run} began\n"
    assert capsys.readouterr().err == f"note: dataset = 'csv:{data}': {since}"
    net.write_text(net.read_text() + "# a comment\n")
    client_of(run, 0)
    assert capsys.readouterr().err == f"note: model = '{net}:net': {since}"


def test_a_regression_has_its_columns(tmp_path: Path) -> None:
    lines = ["dose,effect", *(f"{n},{2 * n}" for n in range(30))]
    (tmp_path / "doses.csv").write_text("\n".join(lines))
    keys: dict[str, Any] = {"dataset": f"csv:{tmp_path / 'doses.csv'}", "label": "effect", "task": "regression"}
    run_small(tmp_path / "run", num_rounds=1, num_clients=2, partition="iid", **keys)
    header, rows = predictions(tmp_path / "run", [tmp_path / "doses.csv"])
    assert header == ["file", "row", "effect"]
    assert len(rows) == 30


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.txt", b"", "a.txt: must end in .png, .jpg"),
        ("a.png", b"no image", "a.png is not readable (must be an image: PNG, JPEG"),
        ("none.png", None, "none.png: No such file or directory"),
    ],
)
def test_a_file_that_is_no_image_is_named(
    file: str, content: bytes | None, said: str, pictures: tuple[Path, list[Path]], tmp_path: Path, capsys: Any
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    assert main(["predict", str(pictures[0]), str(tmp_path / file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/{said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age,outcome\n1,ill\n", "no column 'weight'"),
        ("age,weight\n", "no rows"),
        ("age,weight\n1,\n", "column 'weight' has 1 empty or infinite values"),
    ],
)
def test_a_wrong_table_is_named(text: str, said: str, patients: tuple[Path, list[str]], tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(UserError, match=f"new.csv': {said}"):
        predictions(patients[0], [tmp_path / "new.csv"])


def test_onnx_is_the_network(
    pictures: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pixels in, the same outputs, for any number of samples."""
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    run, files = pictures
    target = tmp_path / "a new folder" / "model.onnx"
    assert main(["export", str(run), "--onnx", str(target), "--client", "1"]) == 0
    assert capsys.readouterr().out == f"{target}\ninput: [1, 8, 8] each, pixels, 0 to 255\n"
    pixels = np.stack([np.asarray(Image.open(file), dtype=np.float32)[None] for file in files])
    assert [node.op_type for node in onnx.load(target).graph.node].count("MaxPool") == 3
    session = runtime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"input": pixels})
    network, _, problem, _ = model_of(run, 1)
    with torch.no_grad():
        expected = network(problem.data.test_x[:])
    np.testing.assert_allclose(outputs, expected.numpy(), rtol=1e-4, atol=1e-5)
    (one,) = session.run(None, {"input": pixels[:1]})
    np.testing.assert_allclose(one, outputs[:1], rtol=1e-4, atol=1e-5)


MIXED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(5, 4), nn.Linear(6, num_classes)

    def forward(self, ids, age):
        return self.head(torch.cat([self.words(ids), age], 1))

def load():
    part = {"ids": torch.arange(20).view(-1, 4) % 5, "age": torch.ones(5, 2)}, torch.arange(5) % 2
    return part, part
"""


def test_onnx_of_several_inputs_says_the_form_of_each(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    (source := tmp_path / "mixed.py").write_text(MIXED)
    keys: dict[str, Any] = {"dataset": f"{source}:load", "model": f"{source}:Net", "num_clients": 1, "partition": "iid"}
    run_small(tmp_path / "run", method="fedavg", num_rounds=1, min_samples=1, **keys)
    said = write_onnx(tmp_path / "run", tmp_path / "model.onnx")
    assert said == "ids: [4] each, tokens as in the run\nage: [2] each, normalised as in the run"


def test_a_model_is_of_one_run(pictures: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    run = str(pictures[0])
    assert main(["export", run, run, "--onnx", "x.onnx"]) == 2
    assert main(["export", run, "--client", "1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --onnx, --adapter, --merged: of one run, without --clients and --out",
        "error: --client 1: only with a model; --clients prints all clients' numbers",
    ]
