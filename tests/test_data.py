"""Data sets: real loaders on small files of the same formats, written here; every fault by its message."""

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.data import (
    Dataset,
    DataSettings,
    PartitionSettings,
    dataset_names,
    known,
    load_dataset,
    make_partition,
)
from fedsub_app.data.known import LOADERS
from fedsub_app.data.names import KNOWN, MEDMNIST
from fedsub_app.data.synthetic import LAYOUTS
from fedsub_app.runs.rounds import read_rounds

Array = NDArray[Any]
CORRUPTIONS = ("fog", "snow")
REAL_DATA = os.environ.get("FEDSUB_DATA")


@pytest.fixture(autouse=True)
def _in_a_data_folder_of_its_own(data_dir: Path) -> None:
    """For every test here."""


def load(name: str, **settings: Any) -> Dataset:
    return load_dataset(DataSettings(dataset=name, **settings))


def arrays(train: int = 20, test: int = 10, classes: int = 2, shape: tuple[int, ...] = (4, 4)) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (train, *shape), dtype=np.uint8),
        "train_labels": np.arange(train) % classes,
        "test_images": random.integers(0, 256, (test, *shape), dtype=np.uint8),
        "test_labels": np.arange(test) % classes,
    }


def write_npz(path: Path, **changes: Any) -> dict[str, Array]:
    content = {key: value for key, value in (arrays() | changes).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **content)
    return content


def idx(array: Array) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_idx(folder: Path, prefixes: tuple[str, str] = ("train", "t10k"), first_label: int = 0) -> dict[str, Array]:
    folder.mkdir(parents=True, exist_ok=True)
    content = arrays(shape=(28, 28), classes=3)
    for prefix, split in zip(prefixes, ("train", "test"), strict=True):
        for part, key in (("images-idx3", "images"), ("labels-idx1", "labels")):
            values = content[f"{split}_{key}"] + (first_label if key == "labels" else 0)
            (folder / f"{prefix}-{part}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
    return content


def png(pixels: Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def image_files() -> dict[str, bytes]:
    """train: 2 cats of value 10 and 11, 1 dog of value 20; test: one each of value 30, 40."""
    values = {"train/dog/a.png": 20, "train/cat/b.png": 11, "train/cat/a.png": 10, "test/cat/a.png": 30}
    values |= {"test/dog/a.png": 40}
    return {name: png(np.full((3, 5), value, dtype=np.uint8)) for name, value in values.items()}


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_tar(path: Path, files: dict[str, bytes], top: str = "") -> None:
    modes: dict[str, Any] = {".xz": "w:xz", ".gz": "w:gz", ".tar": "w"}
    with tarfile.open(path, modes[path.suffix]) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


# Generated and installed


@pytest.mark.parametrize("name", ["synthetic", "synthetic-3k", "synthetic-cyclic", "synthetic-cyclic-3k"])
def test_synthetic_points_lie_around_the_centres_of_the_note(name: str) -> None:
    data = load(name)
    cyclic, size = "cyclic" in name, 3_200 if name.endswith("3k") else 32_000
    grid = {
        False: [[0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0], [1, 0, 3, 2]],
        True: [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]],
    }[cyclic]
    spacing = 3.0 if cyclic else 1.0
    assert data.train_x.shape == (size, 5)
    assert data.train_x[:].dtype == torch.float32
    assert data.test_x.shape == (6_400, 5)
    assert data.num_classes == 4
    x, y = data.train_x[:][:, 0].numpy(), data.train_x[:][:, 1].numpy()
    np.testing.assert_allclose(
        data.train_x[:][:, 2:].numpy(), np.stack((x * x, y * y, x * y), axis=1), rtol=1e-4, atol=1e-5
    )
    for row in range(4):
        for column in range(4):  # sigma is a tenth of the spacing: the nearest centre is the own one, at 5 sigma
            cell = (np.round(x / spacing + 1.5) == column) & (np.round(y / spacing + 1.5) == row)
            assert abs(int(cell.sum()) - size // 16) <= 2
            assert np.mean(data.train_y.numpy()[cell] == grid[row][column]) > 0.99
            tolerance = spacing * 0.1 * 5 / np.sqrt(size / 16)
            assert abs(x[cell].mean() - (column - 1.5) * spacing) < tolerance
            assert abs(y[cell].std() - spacing * 0.1) < tolerance
    assert torch.bincount(data.train_y).tolist() == [size // 4] * 4
    assert torch.bincount(data.test_y).tolist() == [1_600] * 4


def test_synthetic_layouts_hold_every_class_once_a_row() -> None:
    for layout in LAYOUTS.values():
        assert all(sorted(row) == [0, 1, 2, 3] for row in layout.classes)


def test_synthetic_depends_on_the_seed_only() -> None:
    one, other = load("synthetic-3k", seed=1), load("synthetic-3k", seed=2)
    assert not torch.equal(one.train_x[:], other.train_x[:])
    assert torch.equal(one.train_x[:], load("synthetic-3k", seed=1, normalise="half").train_x[:])
    assert torch.equal(one.test_x[:], load("synthetic", seed=1).test_x[:])
    train_points, test_points = ({tuple(point) for point in x.tolist()} for x in (one.train_x[:], one.test_x[:]))
    assert not train_points & test_points


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    ours = load("digits", normalise="none")
    pixels, labels = torch.cat((ours.train_x[:], ours.test_x[:])), torch.cat((ours.train_y, ours.test_y))
    expected = sorted((label, *image.flatten() / 16) for image, label in zip(theirs.images, theirs.target, strict=True))
    assert sorted((y, *x) for x, y in zip(pixels.flatten(1).tolist(), labels.tolist(), strict=True)) == expected


def test_digits_are_split_by_class_and_seed() -> None:
    data = load("digits")
    assert data.train_x.shape == (1438, 1, 8, 8)
    assert data.test_x.shape == (359, 1, 8, 8)
    share = torch.bincount(data.test_y) / (torch.bincount(data.train_y) + torch.bincount(data.test_y))
    assert ((share - 0.2).abs() < 0.005).all()
    assert abs(float(data.train_x[:].mean())) < 1e-5
    assert abs(float(data.train_x[:].std()) - 1) < 1e-3
    assert load("digits") is data
    assert not torch.equal(load("digits", seed=1).test_y, data.test_y)


def test_normalise_and_image_size() -> None:
    plain, half = load("digits", normalise="none"), load("digits", normalise="half")
    assert (float(plain.train_x[:].min()), float(plain.train_x[:].max())) == (0.0, 1.0)
    torch.testing.assert_close(half.train_x[:], plain.train_x[:] * 2 - 1)
    large = load("digits", normalise="none", image_size=16)
    assert large.train_x.shape == (1438, 1, 16, 16)
    assert large.train_x[:].is_contiguous(memory_format=torch.channels_last)
    assert abs(float(large.train_x[:].mean()) - float(plain.train_x[:].mean())) < 0.01


# torchvision, medmnist


@pytest.mark.parametrize(
    ("name", "raw", "prefixes", "classes", "first"),
    [
        ("mnist", "MNIST/raw", ("train", "t10k"), 10, 0),
        ("fashion-mnist", "FashionMNIST/raw", ("train", "t10k"), 10, 0),
        ("emnist", "EMNIST/raw", ("emnist-digits-train", "emnist-digits-test"), 10, 0),
        ("emnist-letters", "EMNIST/raw", ("emnist-letters-train", "emnist-letters-test"), 26, 1),
        ("emnist-balanced", "EMNIST/raw", ("emnist-balanced-train", "emnist-balanced-test"), 47, 0),
    ],
)
def test_packed_idx_files_are_read_in_place(
    data_dir: Path, tmp_path: Path, name: str, raw: str, prefixes: tuple[str, str], classes: int, first: int
) -> None:
    content = write_idx(data_dir / raw, prefixes, first)
    before = sorted(data_dir.rglob("*"))
    data = load(name, normalise="none")
    np.testing.assert_allclose(data.train_x[:][:, 0].numpy() * 255, content["train_images"], atol=1e-4)
    assert data.test_y.tolist() == content["test_labels"].tolist()
    assert data.num_classes == classes
    assert sorted(data_dir.rglob("*")) == before
    assert not (tmp_path / "cache").exists()


def test_unpacked_idx_files_are_read_in_place(data_dir: Path, tmp_path: Path) -> None:
    write_idx(data_dir / "MNIST/raw")
    for packed in (data_dir / "MNIST/raw").glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    assert len(load("mnist").train_y) == 20
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3", lambda old: old[: len(old) // 2], "not a readable gzip file"),
        ("train-images-idx3", lambda old: b"no gzip", "not a readable gzip file"),
        (
            "t10k-images-idx3",
            lambda old: gzip.compress(gzip.decompress(old)[:-1]),
            r"7839 bytes, .* needs 7840",
        ),
        (
            "t10k-labels-idx1",
            lambda old: gzip.compress(b"\0\0\x0d\x01" + b"\0" * 8),
            "not an idx file of unsigned bytes",
        ),
        ("t10k-labels-idx1", lambda old: gzip.compress(idx(np.zeros(9))), "test has 9 labels for 10 images"),
        (
            "t10k-labels-idx1",
            lambda old: gzip.compress(idx(np.full(10, 11))),
            "test labels from 11 to 11, expected 0 to 9",
        ),
        (
            "train-images-idx3",
            lambda old: gzip.compress(idx(np.zeros((0, 28, 28)))),
            r"gz: empty, its header is \[0, 28, 28\]",
        ),
    ],
)
def test_damaged_idx(data_dir: Path, file: str, content: Callable[[bytes], bytes], message: str) -> None:
    write_idx(data_dir / "MNIST/raw")
    path = data_dir / f"MNIST/raw/{file}-ubyte.gz"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        load("mnist")
    assert str(path.parent) in str(error.value)
    assert "\n" not in str(error.value)


def test_medmnist_leaves_the_validation_part_out(data_dir: Path) -> None:
    changes = arrays(12, 6, shape=(28, 28)) | {"val_images": np.zeros((2, 28, 28), np.uint8)}
    changes["train_labels"] = changes["train_labels"][:, None]
    content = write_npz(data_dir / "medmnist/breastmnist.npz", **changes)
    data = load("breastmnist")
    assert data.train_y.tolist() == content["train_labels"][:, 0].tolist()
    assert data.test_x.shape == (6, 1, 28, 28)
    assert data.notes == ("breastmnist: partial: 12 train, 6 test images, upstream has 546 and 156",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_images": None}, "not a readable MedMNIST file .*test_images"),
        ({"train_labels": np.full(20, 2)}, "train labels from 2 to 2, expected 0 to 1"),
        ({"train_labels": np.zeros(20)}, "train labels are float64"),
        ({"test_labels": np.zeros(9, int)}, "test has 9 labels for 10 images"),
    ],
)
def test_damaged_medmnist(data_dir: Path, changes: dict[str, Any], message: str) -> None:
    write_npz(data_dir / "breastmnist.npz", **changes)
    with pytest.raises(UserError, match=message) as error:
        load("breastmnist")
    assert "breastmnist.npz" in str(error.value)


def test_truncated_medmnist(data_dir: Path) -> None:
    write_npz(data_dir / "breastmnist.npz")
    path = data_dir / "breastmnist.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"breastmnist\.npz: not a readable MedMNIST file"):
        load("breastmnist")


def test_every_known_name_has_a_loader() -> None:
    assert set(KNOWN) == set(LOADERS)


def test_medmnist_names_are_those_of_medmnist() -> None:
    from medmnist import INFO

    assert set(MEDMNIST) == {name for name in INFO if "3d" not in name}


@pytest.mark.parametrize(
    ("name", "kind", "missing"),
    [
        ("cifar10", "CIFAR10", "cifar-10-batches-py"),
        ("cifar100", "CIFAR100", "cifar-100-python"),
        ("mnist", "MNIST", "raw"),
    ],
)
def test_missing_without_a_network(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, missing: str
) -> None:
    import torchvision

    def no_network(*_: object) -> None:
        raise URLError("no route\nto host")

    monkeypatch.setattr(getattr(torchvision.datasets, kind), "download", no_network)
    write_npz(data_dir / f"sub/{name}-lossless-subset.npz")
    with pytest.raises(
        UserError, match=f"dataset = '{name}'.*{missing}.*no route to host.*{name}-lossless-subset"
    ) as error:
        load(name)
    assert str(data_dir) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_medmnist_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import medmnist

    def no_network(_: object) -> None:
        raise RuntimeError("Automatic download failed!")

    monkeypatch.setattr(medmnist.BloodMNIST, "download", no_network)
    with pytest.raises(UserError, match=r"dataset = 'bloodmnist'.* has no bloodmnist\.npz \(https://.*download failed"):
        load("bloodmnist")


def test_cifar_batches(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torchvision's files, without their md5: red is one more than their number, green two, blue three."""
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", None], ["data_batch_2", None]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": None})
    files: dict[str, Any] = {"batches.meta": {"label_names": [*"abcdefghij"]}}
    for grey, (name, labels) in enumerate((("data_batch_1", [3, 1]), ("data_batch_2", [0]), ("test_batch", [2, 9]))):
        pixels = np.repeat(np.arange(1, 4, dtype=np.uint8) + grey, 1024)
        files[name] = {"data": np.stack([pixels] * len(labels)), "labels": labels}
    write_folder(data_dir / "cifar-10-batches-py", {name: pickle.dumps(content) for name, content in files.items()})
    data = load("cifar10", normalise="none")
    assert (data.train_y.tolist(), data.test_y.tolist(), data.num_classes) == ([3, 1, 0], [2, 9], 10)
    assert (data.train_x[:][:, :, 5, 5] * 255).round().tolist() == [[1, 2, 3], [1, 2, 3], [2, 3, 4]]
    assert (data.test_x[:][:, :, 5, 5] * 255).round().tolist() == [[3, 4, 5]] * 2


def test_damaged_cifar_batches(data_dir: Path) -> None:
    (data_dir / "cifar-10-batches-py").mkdir()
    with pytest.raises(UserError, match=r"cifar-10-batches-py: .*corrupted"):
        load("cifar10")


# Own files


@pytest.mark.parametrize("shape", [(4, 4), (4, 5, 1), (4, 4, 3)])
def test_npz(data_dir: Path, shape: tuple[int, ...]) -> None:
    content = write_npz(data_dir / "sub/own.npz", **arrays(shape=shape), extra=np.zeros(3))
    data = load("own", normalise="none")
    pixels = content["train_images"].reshape(20, shape[0], shape[1], -1).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.train_x[:].numpy() * 255, pixels, atol=1e-4)
    assert data.train_x[:].is_contiguous(memory_format=torch.channels_last)
    assert data.test_y.tolist() == content["test_labels"].tolist()
    assert (data.num_classes, data.notes) == (2, ())
    assert "own" in dataset_names()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_labels": None}, r"missing key test_labels \(found"),
        ({"train_images": np.zeros((20, 4, 4))}, "train images are float64"),
        ({"train_images": np.zeros((20, 4), np.uint8)}, r"train images are uint8 \[20, 4\], expected"),
        ({"test_images": np.zeros((10, 3, 4, 4), np.uint8)}, r"test images are uint8 \[10, 3, 4, 4\], expected"),
        ({"train_images": np.zeros((0, 4, 4), np.uint8), "train_labels": np.zeros(0, int)}, "train images are empty"),
        ({"train_labels": np.zeros(19, int)}, "train has 19 labels for 20 images"),
        ({"train_labels": np.zeros(20)}, "train labels are float64"),
        ({"test_labels": np.zeros((10, 2), int)}, r"test labels are int64 \[10, 2\], expected"),
        ({"test_labels": np.full(10, -1)}, "test labels from -1 to -1, expected 0 to 9999"),
        ({"train_labels": np.arange(20) * 50_000}, "train labels from 0 to 950000, expected"),
        ({"train_labels": np.full(20, 2**64 - 1, np.uint64)}, "train labels from 18446744073709551615 to"),
        ({"train_labels": np.array([*range(10), 255] * 2)[:20]}, "labels up to 255, but no training image of class 10"),
        ({"test_labels": np.full(10, 2)}, "labels up to 2, but no training image of class 2: expected labels from 0"),
        ({"train_labels": np.array([None] * 20)}, "not a readable npz file .*allow_pickle"),
    ],
)
def test_damaged_npz(data_dir: Path, changes: dict[str, Any], message: str) -> None:
    write_npz(data_dir / "own.npz", **changes)
    with pytest.raises(UserError, match=rf"own\.npz: {message}"):
        load("own")


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY", b"PK\x03\x04 cut"])
def test_npz_that_is_none(data_dir: Path, content: bytes) -> None:
    (data_dir / "own.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"own\.npz: not a readable npz file") as error:
        load("own")
    assert "\n" not in str(error.value)


def test_truncated_npz(data_dir: Path) -> None:
    write_npz(data_dir / "own.npz")
    whole = (data_dir / "own.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[300] ^= 255
    for damaged in (whole[:-30], whole[: len(whole) // 2], bytes(flipped)):
        (data_dir / "own.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"own\.npz: not a readable npz file"):
            load("own")


@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz", "tar.xz", "sub/tar.xz", "top/tar.xz"])
def test_image_folder_and_archive(data_dir: Path, tmp_path: Path, form: str) -> None:
    where = data_dir / "sub" if form.startswith("sub/") else data_dir
    where.mkdir(exist_ok=True)
    files = image_files() | {"README.md": b"not an image", "train/cat/.hidden.png": b"", "train/cat/notes.txt": b""}
    if form == "folder":
        write_folder(where / "pets-jpeg-subset", files)
    else:
        write_tar(
            where / f"pets-jpeg-subset.{form.split('/')[-1]}", files, "./any/top/" if form.startswith("top/") else ""
        )
    data = load("pets-jpeg-subset", normalise="none")
    assert data.train_x.shape == (3, 1, 3, 5)
    assert (data.train_x[:][:, 0, 0, 0] * 255).round().tolist() == [10, 11, 20]
    assert data.train_y.tolist() == [0, 0, 1]
    assert (data.test_x[:][:, 0, 0, 0] * 255).round().tolist() == [30, 40]
    assert [note.split(": ", 1)[1] for note in data.notes] == [
        "lossy JPEG, not the original pixels",
        "partial: 3 train, 2 test images",
    ]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_decoded_images_are_kept_until_the_file_changes(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = data_dir / "pets.tar"
    write_tar(archive, image_files())
    load("pets")
    (cached,) = (tmp_path / "cache").iterdir()
    assert not (cached.stat().st_mode | cached.parent.stat().st_mode) & 0o077, "they may be a node's private images"

    def decode(*_: object) -> None:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr("fedsub_app.data.files._decode", decode)
        assert len(load("pets", seed=1).train_y) == 3  # another seed: not from the memory of the process
    cached.write_bytes(b"damaged")
    assert len(load("pets", seed=2).train_y) == 3
    more = image_files() | {"train/cat/c.png": png(np.zeros((3, 5), np.uint8))}
    write_tar(archive, more)
    assert len(load("pets", seed=3).train_y) == 4
    assert not list((tmp_path / "cache").glob(".*"))
    for size in (2, 9):
        load("pets", image_size=size)
    assert len(list((tmp_path / "cache").iterdir())) == 4, "each size of its own, not from the smaller images"


def test_an_archive_of_two_folders_loses_no_image(data_dir: Path) -> None:
    write_tar(data_dir / "pets.tar", {f"{top}/{name}": image for top in "ab" for name, image in image_files().items()})
    with pytest.raises(UserError, match=r"pets.tar: image train/dog/a.png is in it twice: must be once, below one f"):
        load("pets")


def test_grey_and_colour_images_together(data_dir: Path) -> None:
    write_folder(
        data_dir / "pets", image_files() | {"train/dog/b.png": png(np.full((3, 5, 3), (1, 2, 3), dtype=np.uint8))}
    )
    data = load("pets", normalise="none")
    assert (data.train_x[:][:, :, 0, 0] * 255).round().tolist() == [[10] * 3, [11] * 3, [20] * 3, [1, 2, 3]]


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_images_have_one_channel(data_dir: Path, mode: str) -> None:
    """Of one bit, of eight, and with a transparency, which is dropped."""
    for place in ("train/a", "train/b", "test/a"):
        (data_dir / "pets" / place).mkdir(parents=True)
        Image.new("L", (3, 4), 255).convert(mode).save(data_dir / "pets" / place / "one.png")
    x = load("pets", normalise="none").train_x[:]
    assert (x.shape, x.unique().tolist()) == ((2, 1, 4, 3), [1.0])


GOOD = image_files()["train/cat/a.png"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/cat/c.png": GOOD[:45]}, "image train/cat/c.png is not readable"),
        ({"train/cat/c.png": b""}, "image train/cat/c.png is not readable"),
        ({"train/cat/c.png": png(np.zeros((3, 5), np.uint16))}, "image train/cat/c.png is not readable .*8 bits"),
        ({"test/cat/c.png": png(np.zeros((4, 5), np.uint8))}, "image .* expected one size"),
        ({"test/bird/a.png": GOOD}, "class bird is in test/ but not in train/"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_images(data_dir: Path, files: dict[str, bytes], message: str, packed: bool) -> None:
    if packed:
        write_tar(data_dir / "pets.tar.gz", image_files() | files)
    else:
        write_folder(data_dir / "pets", image_files() | files)
    with pytest.raises(UserError, match=f"pets.*{message}"):
        load("pets")


def write_images(folder: Path, number: int, sizes: tuple[int, ...] = (6,), value: int = 0) -> None:
    folder.mkdir(parents=True)
    for i in range(number):
        size = sizes[i % len(sizes)]
        Image.fromarray(np.full((size, size, 3), value + i, np.uint8)).save(folder / f"{i:03}.png")


def test_images_without_a_test_part_like_mini_imagenet(data_dir: Path) -> None:
    for label, name in enumerate(("n01", "n02")):
        write_images(data_dir / "mini" / name, 12, value=100 * label)
    found = load("mini", normalise="none")
    values = found.test_x[:][:, 0, 0, 0] * 255
    assert values.round().tolist() == [5, 11, 105, 111]  # every sixth image of a class
    assert torch.bincount(found.train_y).tolist() == [10, 10]
    assert "comes without a test part" in found.notes[0]
    assert "mini" in dataset_names()


def test_domains_of_images_like_office_home(data_dir: Path) -> None:
    write_images(data_dir / "office/Art/Alarm", 6, sizes=(6, 9))
    write_images(data_dir / "office/Art/Bed", 6)
    write_images(data_dir / "office/Real World/Bed", 12)
    with pytest.raises(
        UserError, match=r"image Alarm/001.png|image train/Alarm/001.png .*expected one size, or image-size"
    ):
        load("office")
    found = load("office", image_size=8)
    assert found.sources == ("Art", "Real World")
    assert found.num_classes == 2  # the same in both
    assert found.train_x.shape == (20, 3, 8, 8)
    counts = torch.stack([torch.bincount(found.train_y[found.train_source == i], minlength=2) for i in (0, 1)])
    assert counts.tolist() == [[5, 5], [0, 10]]
    partition = make_partition(found, PartitionSettings(partition="source", num_clients=2))
    assert [found.test_source[test].unique().tolist() for test in partition.test] == [[0], [1]]
    assert load("office", image_size=8, domains=("Real World",)).sources == ("Real World",)
    both = load("digits+office", image_size=8)
    assert both.train_y[both.train_source > 0].unique().tolist() == [10, 11]  # behind the ten digits
    for wrong, message in (
        (("Clipart",), r"domains: 'Clipart': allowed are Art, Real World"),
        (("Art", "Art"), "named twice"),
    ):
        with pytest.raises(UserError, match=message):
            load("office", image_size=8, domains=wrong)
    with pytest.raises(UserError, match="dataset 'digits' has none"):
        load("digits", domains=("Art",))
    with pytest.raises(UserError, match="needs a single set"):
        load("office+digits", domains=("Art",))
    write_images(data_dir / "office/Real World/Aeroplane", 6)  # which is now class 0, also of images that are decoded
    found = load("office", image_size=8)
    assert torch.bincount(found.train_y[found.train_source == 0]).tolist() == [0, 5, 5]


def test_parts_of_a_split_are_no_domains(data_dir: Path) -> None:
    """Test/ would be trained on."""
    for part in ("Train", "Test"):
        write_images(data_dir / f"mine/{part}/Bed", 6)
    with pytest.raises(UserError, match=r"mine: Test/ would be a domain; the folders of a split are train/ and test/$"):
        load("mine")


def write_cifar10_c(folder: Path, images: int = 60) -> None:
    """Two corruptions; an image's grey value is its severity, plus 10 for the second one."""
    folder.mkdir()
    grey = np.repeat(np.arange(1, 6, dtype=np.uint8), images)
    for name, more in zip(CORRUPTIONS, (0, 10), strict=True):
        np.save(folder / f"{name}.npy", np.broadcast_to((grey + more)[:, None, None, None], (5 * images, 32, 32, 3)))
    np.save(folder / "labels.npy", np.tile(np.arange(images) % 10, 5))


def test_cifar10_c_is_a_domain_a_corruption_and_severity(data_dir: Path) -> None:
    write_cifar10_c(data_dir / "CIFAR-10-C")
    found = load("cifar10-c", domains=("snow-2", "fog"), normalise="none")
    assert found.sources == ("snow-2", "fog")
    for source, grey in enumerate((12, 5)):
        for x, of in ((found.train_x[:], found.train_source), (found.test_x[:], found.test_source)):
            assert (x[of == source] * 255).round().unique().tolist() == [grey]
    assert torch.bincount(found.train_y).tolist() == [10] * 10
    assert torch.bincount(found.test_y).tolist() == [2] * 10
    assert load("cifar10-c").sources == ("fog", "snow")
    settings = PartitionSettings(partition="source-classes", num_clients=2, classes_per_client=5)
    partition = make_partition(load("cifar10-c"), settings)
    for client, (train, test) in enumerate(zip(partition.train, partition.test, strict=True)):
        assert found.train_source[train].unique().tolist() == [client]
        assert found.test_source[test].unique().tolist() == [client]
        assert found.train_y[train].unique().tolist() == found.test_y[test].unique().tolist()
    labels = [found.train_y[train].unique().tolist() for train in partition.train]
    assert sorted(labels[0] + labels[1]) == list(range(10))


def test_the_experiment_on_cifar10_c_runs(data_dir: Path, run_local: Callable[..., tuple[Json, Path]]) -> None:
    write_cifar10_c(data_dir / "CIFAR-10-C", images=120)
    domains = {
        "train_per_class": 8,
        "test_per_class": 2,
        "domains": ", ".join(f"{c}-{s}" for c in CORRUPTIONS for s in range(1, 6)),
    }
    small = {"model": "lenet5", "num_rounds": 2, "local_epochs": 1, "method": "fedselect"}
    _, folder = run_local(experiment="fedselect/cifar10-c", **domains, **small)
    partition = json.loads((folder / "partition.json").read_text())
    assert [sum(count > 0 for count in counts) for counts in partition["counts"]] == [2] * 10
    assert partition["train"] == partition["validation"] == [8] * 10
    assert partition["test"] == [4] * 10
    lines = read_rounds(folder)
    assert all(0 <= metrics["personal-validation-accuracy"] <= 100 for metrics in lines[-1]["evaluated"].values())


def test_faults_of_cifar10_c(data_dir: Path) -> None:
    with pytest.raises(UserError, match=r"has no CIFAR-10-C/<corruption>.npy, labels.npy \(unpacked from https"):
        load("cifar10-c")
    write_cifar10_c(data_dir / "CIFAR-10-C")
    for wrong in ("rain", "fog-6", "fog-x"):
        with pytest.raises(UserError, match=f"domains: '{wrong}': allowed are fog, snow, each with -1 to -5"):
            load("cifar10-c", domains=(wrong,))
    (data_dir / "CIFAR-10-C/fog.npy").write_bytes(b"no array")
    with pytest.raises(UserError, match=r"fog.npy: not a readable npy file"):
        load("cifar10-c")
    np.save(data_dir / "CIFAR-10-C/fog.npy", np.zeros((310, 32, 32, 3), np.uint8))
    with pytest.raises(UserError, match=r"fog.npy: severity 5 has 52 labels for 62 images"):
        load("cifar10-c")


def test_image_folder_without_test_images(data_dir: Path) -> None:
    write_folder(data_dir / "pets", {"train/cat/a.png": GOOD})
    with pytest.raises(UserError, match=r"pets: no image in test/<class>/"):
        load("pets")


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5])
def test_damaged_archive(data_dir: Path, suffix: str, kept: float) -> None:
    path = data_dir / f"pets.{suffix}"
    noise = {f"train/cat/{i}.png": png(np.random.default_rng(i).integers(0, 256, (30, 30), np.uint8)) for i in range(9)}
    write_tar(path, noise | {"test/cat/0.png": noise["train/cat/0.png"]})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError, match=rf"pets\.{suffix}: (not a readable archive|no image in)"):
        load("pets")


def test_unknown_name(data_dir: Path) -> None:
    with pytest.raises(UserError, match=r"dataset = 'nope'.*nope\.npz.*known: synthetic,") as error:
        load("nope")
    assert str(data_dir) in str(error.value)
    for name in ("../own", "mnist/raw", "*"):
        with pytest.raises(UserError, match="no such name"):
            load(name)


def test_an_npz_file_that_holds_more_than_the_memory_is_not_unpacked(data_dir: Path) -> None:
    write_npz(data_dir / "own.npz")
    with zipfile.ZipFile(data_dir / "own.npz", "a") as archive:
        archive.writestr("more.npy", b"x")
        archive.filelist[-1].file_size = 10**15  # what the archive says that it holds
    with pytest.raises(UserError, match=r"own\.npz: 1e\+06 GB in memory, this machine has"):
        load("own")


def test_images_too_large_for_the_memory_are_refused_before_they_are_made(data_dir: Path) -> None:
    write_npz(data_dir / "own.npz", **arrays(9000, 9000, shape=(1, 1)))
    with pytest.raises(UserError, match=r"dataset = 'own', samples of 16777216 values: 1.21e\+03 GB in memory"):
        load("own", image_size=4096)


def test_a_set_that_a_known_name_hides_is_named(data_dir: Path) -> None:
    write_npz(data_dir / "sub/digits.npz")
    with pytest.raises(UserError, match=r"dataset = 'digits': a known set, and .*sub/digits.npz has the name too"):
        load("digits")
    write_folder(data_dir / "cifar-mnist", image_files())
    with pytest.raises(UserError, match=r"dataset = 'cifar-mnist': a known set, and .*data/cifar-mnist has the name"):
        load("cifar-mnist")
    write_npz(data_dir / "breastmnist.npz")  # which is where that set comes from
    assert load("breastmnist").notes


def test_archives_of_other_kinds(data_dir: Path) -> None:
    write_tar(data_dir / "pets.tar.gz", image_files())
    (data_dir / "pets.tar.gz").rename(data_dir / "pets.tgz")
    assert load("pets").num_classes == 2
    with zipfile.ZipFile(data_dir / "birds.zip", "w") as archive:
        archive.writestr("train/a/1.png", b"")
    with pytest.raises(UserError, match=r"birds\.zip: a zip archive; unpack it, or pack it again as one of \.tar"):
        load("birds")


def test_too_few_images_for_a_test_part(data_dir: Path) -> None:
    write_folder(data_dir / "pets", {f"cat/{number}.png": png(np.zeros((3, 3), np.uint8)) for number in range(5)})
    with pytest.raises(UserError, match=r"pets: no class has 6 images, of which every 6th is a test image"):
        load("pets")


def test_a_data_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passwd").write_text("mine")
    with pytest.raises(UserError, match=r"data-dir = '.*/passwd': not a folder"):
        load("mnist", data_dir=str(tmp_path / "passwd"))
    monkeypatch.setenv("FEDSUB_DATA", str(tmp_path / "passwd"))
    with pytest.raises(UserError, match=r"^\$FEDSUB_DATA = '.*/passwd': not a folder$"):
        load("mnist")
    monkeypatch.setenv("FEDSUB_DATA", "~nobody-here/a")
    with pytest.raises(UserError, match=r"^\$FEDSUB_DATA = '~nobody-here/a': '~' is the home of no user here$"):
        load("mnist")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_no_data_file(data_dir: Path) -> None:
    os.mkfifo(data_dir / "own.npz")  # whoever opens it waits for somebody who writes
    with pytest.raises(UserError, match=r"own\.npz: not a file"):
        load("own")


# --- whatever a data folder holds: a data set, or one line that says what is wrong ---------------------------------

ARRAYS = st.builds(
    lambda shape, dtype, seed: (np.random.default_rng(seed).integers(0, 300, shape) - 9 * (seed % 7 == 0)).astype(
        dtype
    ),
    st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=5),
    st.sampled_from(
        [np.uint8, np.int64, np.uint64, np.int8, np.float32, np.bool_, "S3", "datetime64[s]", np.complex64]
    ),
    st.integers(0, 99),
)
LABELS = st.lists(st.integers(-1, 4) | st.sampled_from([255, 10**6, 2**62]), max_size=8).map(
    lambda labels: np.array(labels, dtype=np.int64)
)


def check_whatever_it_holds(**settings: Any) -> None:
    """Load the set ``own`` as a run does; if it is refused the message is one line that names the file."""
    said = ""
    try:
        data = load("own", **settings)
        partition = make_partition(data, PartitionSettings(num_clients=1, partition="iid"))
    except UserError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert "own" in said
        return
    for x, y in ((data.train_x[:], data.train_y), (data.test_x[:], data.test_y)):
        assert torch.isfinite(x).all()
        assert len(x) == len(y) > 0
        assert 0 <= int(y.min()) <= int(y.max()) < data.num_classes
    assert set(data.train_y.tolist()) == set(range(data.num_classes))
    assert len(partition.train[0]) == len(data.train_y)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("train_images", "test_images"), ARRAYS),
            **dict.fromkeys(("train_labels", "test_labels"), ARRAYS | LABELS),
            "extra": ARRAYS,
        },
    ),
    st.sampled_from([None, 1, 5]),
)
@example({"train_labels": np.array([0, 1] * 10), "test_labels": np.array([1] * 10)}, None)
@effort(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_npz_file_loads_or_is_refused(changes: dict[str, Array], image_size: int | None) -> None:
    with TemporaryDirectory() as folder:
        write_npz(Path(folder) / "own.npz", **changes)
        check_whatever_it_holds(data_dir=folder, image_size=image_size)


@given(st.sampled_from([".npz", ".tar", ".tar.gz"]), st.floats(0, 1), st.integers(1, 255), st.sampled_from([0, 1, 9]))
@effort(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damaged_file_loads_or_is_refused(form: str, place: float, flip: int, gone: int) -> None:
    """A byte is flipped, some are gone, or (9) the rest is."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"own{form}"
        write_npz(path) if form == ".npz" else write_tar(path, image_files())
        data = bytearray(path.read_bytes())
        at = min(int(place * len(data)), len(data) - 1)
        data[at] ^= flip
        data[at : len(data) if gone == 9 else at + gone] = b""
        path.write_bytes(bytes(data))
        check_whatever_it_holds(data_dir=folder)


CONTENTS = st.sampled_from(
    [
        png(np.zeros((3, 4), np.uint8)),
        png(np.zeros((3, 4), np.uint8))[:-9],
        png(np.zeros((2, 2, 3), np.uint8)),
        png(np.zeros((2, 2), np.uint16)),
        b"",
        b"no image",
    ]
)
NAMES = st.sampled_from(["a.png", "b.PNG", "c.jpg", ".hidden.png", "notes.txt", "d\udcff.png", "é ü.png", "e.npz"])
CLASSES = st.sampled_from(
    ["train/x", "train/y", "test/x", "test/y", "test/z", "x", "train", "test", "p/q", "p/q/r", "p/s"]
)


@given(st.dictionaries(st.tuples(CLASSES, NAMES).map("/".join), CONTENTS, max_size=9), st.booleans(), st.booleans())
@effort(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_image_folder_loads_or_is_refused(files: dict[str, bytes], packed: bool, sized: bool) -> None:
    with TemporaryDirectory() as folder:
        if packed:
            write_tar(Path(folder) / "own.tar", files)
        else:
            write_folder(Path(folder) / "own", files)
        check_whatever_it_holds(data_dir=folder, image_size=4 if sized else None)


def test_cache_folder_that_cannot_be_written(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FEDSUB_CACHE", str(tmp_path / "file"))
    write_tar(data_dir / "pets.tar", image_files())
    with pytest.raises(UserError, match="FEDSUB_CACHE"):
        load("pets")


# Choice per class, combination


def test_combination(data_dir: Path) -> None:
    write_npz(data_dir / "colour.npz", **arrays(shape=(8, 8, 3)))
    write_npz(data_dir / "grey.npz", **arrays(12, 6, classes=3))
    data = load("colour+grey", normalise="none")
    assert data.train_x.shape == (32, 3, 8, 8)
    assert data.num_classes == 5
    assert data.sources == ("colour", "grey")
    assert data.train_source.tolist() == [0] * 20 + [1] * 12
    assert data.test_y.tolist() == [0, 1] * 5 + [2, 3, 4] * 2
    grey = data.train_x[20:]
    assert torch.equal(grey[:, 0], grey[:, 1])
    alone = load("grey", normalise="none", image_size=8)
    torch.testing.assert_close(grey[:, :1], alone.train_x[:])
    normal = load("colour+grey")
    torch.testing.assert_close(normal.train_x[:].mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.train_x[:].std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_a_set_is_not_combined_with_itself() -> None:
    with pytest.raises(UserError, match=r"dataset = 'digits\+digits': 'digits' is in it twice"):
        load("digits+digits")


def test_aliases_stand_for_combinations() -> None:
    assert dataset_names()["cifar-mnist"] == "= cifar10+mnist"
    with pytest.raises(UserError, match="joined by '\\+', not synthetic"):
        load("digits+synthetic")


def test_choice_per_class_is_balanced_and_seeded() -> None:
    data = load("digits", train_per_class=20, test_per_class=10)
    assert torch.bincount(data.train_y).tolist() == [20] * 10
    assert torch.bincount(data.test_y).tolist() == [10] * 10
    other = load("digits", train_per_class=20, test_per_class=10, normalise="none", seed=1)
    assert not torch.equal(other.train_y, data.train_y)
    assert data.notes == ()


def test_test_images_from_left_over_training_images(data_dir: Path) -> None:
    pixels = np.repeat(np.arange(40, dtype=np.uint8), 16).reshape(40, 4, 4)
    write_npz(data_dir / "own.npz", train_images=pixels, train_labels=np.arange(40) % 2)
    data = load("own", train_per_class=8, test_per_class=12, normalise="none")
    values = torch.cat((data.train_x[:], data.test_x[:]))[:, 0, 0, 0].mul(255).round().long()
    assert sorted(values.tolist()) == list(range(40))  # together all training images, none twice
    assert torch.equal(values % 2, torch.cat((data.train_y, data.test_y)))
    assert len(data.notes) == 1
    assert "5 a class in the test set" in data.notes[0]
    assert load("own", train_per_class=8, test_per_class=5).notes == ()  # as many as the test set has
    assert len(load("own", train_per_class=8, test_per_class=6).notes) == 1
    with pytest.raises(UserError, match="test-per-class = 13: class 0 of own has 12 test images"):
        load("own", train_per_class=8, test_per_class=13)
    with pytest.raises(UserError, match="train-per-class = 21: class 0 of own has 20 train images"):
        load("own", train_per_class=21)


def test_smaller_images_are_means_of_all_pixels(data_dir: Path) -> None:
    """One white pixel of 64 is a part of one of four, neither all of it nor lost."""
    pixels = np.zeros((20, 8, 8), np.uint8)
    pixels[:, 0, 0] = 255
    write_npz(data_dir / "own.npz", train_images=pixels)
    assert 0 < float(load("own", image_size=2, normalise="none").train_x[:][0, 0, 0, 0]) < 0.5


def test_a_constant_channel_does_not_divide_by_zero(data_dir: Path) -> None:
    write_npz(data_dir / "own.npz", train_images=np.full((20, 4, 4), 7, np.uint8))
    assert load("own").train_x[:].abs().max() < 1e-6


# The real files beside a checkout, where they are


@pytest.mark.skipif(not REAL_DATA, reason="FEDSUB_DATA is not set")
@pytest.mark.parametrize(
    ("name", "train", "test"), [("breastmnist", [147, 399], [42, 114]), ("pneumoniamnist", [1214, 3494], [234, 390])]
)
def test_real_medmnist(name: str, train: list[int], test: list[int]) -> None:
    try:
        data = load(name, data_dir=REAL_DATA)
    except UserError as error:
        pytest.skip(str(error))
    assert torch.bincount(data.train_y).tolist() == train
    assert torch.bincount(data.test_y).tolist() == test
    assert data.notes == ()


def test_a_set_of_a_package_that_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an import does, which the command turns into one line."""
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as error:
        known._of_sklearn("digits.csv.gz", ",")
    assert error.value.name == "sklearn"
