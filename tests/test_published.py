"""Sets of image files, written here as they are published: birds, flowers, aircraft, textures, cars."""

import hashlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Brightness
from PIL import Image

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.data import Dataset, DataSettings, load_dataset

FEATURES = "resnet101-densenet121-random"
Run = Callable[..., tuple[Json, Path]]


def load(name: str, **settings: Any) -> Dataset:
    return load_dataset(DataSettings(**{"dataset": name, "image_size": 6, "normalise": "none"} | settings))


def picture(file: Path, value: int) -> None:
    """An image of one grey value, of a size that depends on it; JPEG keeps such a value."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20 + value % 7, 30 + value % 5), (value,) * 3).save(file, quality=95)


def write_cub(data: Path) -> None:
    top = data / "CUB_200_2011"
    names = ["001.Black_footed_Albatross/a.jpg", "001.Black_footed_Albatross/b.jpg", "002.Laysan_Albatross/a.jpg"]
    names += ["003.Sooty_Albatross/a.jpg", "002.Laysan_Albatross/b.jpg", "003.Sooty_Albatross/b.jpg"]
    lists = {
        "classes.txt": sorted({name.partition("/")[0] for name in names}),
        "images.txt": names,
        "image_class_labels.txt": [str(int(name[:3])) for name in names],
        "train_test_split.txt": ["1", "0", "1", "1", "0", "0"],
    }
    for number, name in enumerate(names):
        picture(top / "images" / name, 10 * (number + 1))
    for file, values in lists.items():
        (top / file).write_text("".join(f"{number} {value}\n" for number, value in enumerate(values, 1)))


def write_flowers(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision.datasets import Flowers102

    top = data / "flowers-102"
    for number in range(1, 8):
        picture(top / f"jpg/image_{number:05}.jpg", 10 * number)
    savemat(top / "imagelabels.mat", {"labels": np.array([[1, 2, 1, 2, 102, 2, 1]])})
    savemat(top / "setid.mat", {"trnid": [[5, 1, 2]], "valid": [[3, 7]], "tstid": [[6, 4]]})
    md5 = {name: hashlib.md5((top / f"{name}.mat").read_bytes()).hexdigest() for name in ("imagelabels", "setid")}
    files = {"image": ("102flowers.tgz", ""), "label": ("imagelabels.mat", md5["imagelabels"])}
    monkeypatch.setattr(Flowers102, "_file_dict", files | {"setid": ("setid.mat", md5["setid"])})


def write_aircraft(data: Path) -> None:
    top = data / "fgvc-aircraft-2013b/data"
    for number in range(1, 6):
        picture(top / f"images/{number:07}.jpg", 10 * number)
    (top / "variants.txt").write_text("707-320\nA300B4\nF/A-18\n")
    lists = {"train": "2 F/A-18\n1 A300B4\n3 707-320\n", "val": "4 A300B4\n", "test": "5 F/A-18\n"}
    for split, text in lists.items():
        lines = "".join(f"{int(line.split()[0]):07} {line.split(' ', 1)[1]}\n" for line in text.splitlines())
        (top / f"images_variant_{split}.txt").write_text(lines)


def write_dtd(data: Path) -> None:
    top = data / "dtd/dtd"
    lists = {"train": ["zigzagged/c.jpg", "banded/a.jpg"], "val": ["banded/b.jpg"], "test": ["zigzagged/d.jpg"]}
    (top / "labels").mkdir(parents=True)
    values = {"a": 10, "b": 20, "c": 30, "d": 40}
    for split, names in lists.items():
        (top / f"labels/{split}1.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            picture(top / "images" / name, values[Path(name).stem])


def write_cars(data: Path) -> None:
    from scipy.io import savemat

    top = data / "stanford_cars"
    (top / "devkit").mkdir(parents=True)
    fields = [(name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
    lists = {"cars_train": (3, 1, 2), "cars_test": (2, 1)}
    value = 0
    for folder, labels in lists.items():
        rows = []
        for number, label in enumerate(labels, 1):
            value += 10
            picture(top / folder / f"{number:05}.jpg", value)
            rows.append((1, 1, 9, 9, label, f"{number:05}.jpg"))
        name = "devkit/cars_train_annos.mat" if folder == "cars_train" else "cars_test_annos_withlabels.mat"
        table = np.zeros((1, len(rows)), dtype=fields)
        for column, row in enumerate(rows):
            table[0, column] = row
        savemat(top / name, {"annotations": table})
    names = np.array([["AM General Hummer", "Acura RL", "Acura TL"]], dtype=object)
    savemat(top / "devkit/cars_meta.mat", {"class_names": names})


# name: grey values and labels of training and test images, by class and file name
SETS: dict[str, tuple[list[int], list[int], list[int], list[int], int]] = {
    "cub200": ([10, 30, 40], [0, 1, 2], [20, 50, 60], [0, 1, 2], 3),
    "flowers102": ([10, 20, 50], [0, 1, 101], [30, 70, 40, 60], [0, 0, 1, 1], 102),
    "fgvc-aircraft": ([30, 10, 20], [0, 1, 2], [40, 50], [1, 2], 3),
    "dtd": ([10, 30], [0, 1], [20, 40], [0, 1], 2),
    "stanford-cars": ([20, 30, 10], [0, 1, 2], [50, 40], [0, 1], 3),
}
WRITERS: dict[str, Callable[[Path], None]] = {
    "cub200": write_cub,
    "fgvc-aircraft": write_aircraft,
    "dtd": write_dtd,
    "stanford-cars": write_cars,
}


@pytest.fixture(params=sorted(SETS))
def name(request: pytest.FixtureRequest, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each set, written into a subfolder of the data folder."""
    if request.param == "flowers102":
        write_flowers(data_dir / "sets", monkeypatch)
    else:
        WRITERS[request.param](data_dir / "sets")
    return str(request.param)


def test_images_and_labels(name: str) -> None:
    train, train_y, test, test_y, classes = SETS[name]
    found = load(name)
    assert found.train_x.shape == (len(train), 3, 6, 6)
    for x, values in ((found.train_x[:], train), (found.test_x[:], test)):
        assert (x[:, 0, 3, 3] * 255).tolist() == pytest.approx(values, abs=1.5)
    assert (found.train_y.tolist(), found.test_y.tolist(), found.num_classes) == (train_y, test_y, classes)
    with pytest.raises(UserError, match="expected one size, or image-size"):
        load(name, image_size=None)


def test_other_labels_of_the_same_images_are_not_those_that_were_cached(data_dir: Path) -> None:
    write_cub(data_dir)
    load("cub200")
    (data_dir / "CUB_200_2011/image_class_labels.txt").write_text("1 3\n2 3\n3 2\n4 1\n5 2\n6 1\n")
    x = load("cub200", seed=1).train_x[:]
    assert (x[:, 0, 3, 3] * 255).tolist() == pytest.approx([40, 30, 10], abs=1.5)


def test_features_of_them(name: str, brightness: type[Brightness]) -> None:
    """A picture of one grey value has its brightness, however it is cropped."""
    train, train_y, test, test_y, _ = SETS[name]
    found = load(name, image_size=None, features=FEATURES)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for x, values in ((found.train_x[:], train), (found.test_x[:], test)):
        expected = ((torch.tensor(values)[:, None] / 255 - mean) / deviation).mean(1)
        torch.testing.assert_close(x[:, 0], expected, atol=0.02, rtol=0)
    assert (found.train_y.tolist(), found.test_y.tolist()) == (train_y, test_y)


def test_training_crops_are_random_where_the_paper_has_them(
    name: str,
    brightness: type[Brightness],
    tmp_path: Path,
) -> None:
    load(name, image_size=None, features=FEATURES)
    kinds = sorted(path.name.rpartition("-")[2] for path in (tmp_path / "cache/features").glob("*/*"))
    assert kinds == (["central", "central"] if name == "stanford-cars" else ["central", "random"])


def test_a_run_on_birds(data_dir: Path, brightness: type[Brightness], run_local: Run) -> None:
    write_cub(data_dir)
    keys = {"dataset": "cub200", "features": FEATURES, "partition": "iid", "samples_per_client": 8}
    summary, _ = run_local(method="fedavg", num_clients=2, num_rounds=1, **keys)
    assert summary["status"] == "completed"


@pytest.mark.parametrize(
    ("name", "kind", "needed"),
    [
        ("flowers102", "Flowers102", r"flowers-102/{jpg, imagelabels.mat, setid.mat}; .* \(now: OSError: no route\)"),
        ("fgvc-aircraft", "FGVCAircraft", r"fgvc-aircraft-2013b/{data}; .*no route"),
        ("dtd", "DTD", r"dtd/{dtd}; .*no route"),
        ("stanford-cars", "", r"stanford_cars/{devkit, .*}; torchvision cannot download it any more"),
        ("cub200", "", r"CUB_200_2011/ \(unpacked from https://"),
    ],
)
def test_missing(data_dir: Path, name: str, kind: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no route")

    if kind:
        module = getattr(import_module("torchvision.datasets"), kind).__module__
        monkeypatch.setattr(f"{module}.download_and_extract_archive", no_network)
    with pytest.raises(UserError, match=rf"dataset = '{name}': {data_dir} has no {needed}"):
        load(name)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("image_class_labels.txt", "1 1\n2 1\n", "number other images"),
        ("image_class_labels.txt", "1\n", "image_class_labels.txt: not a readable list"),
        ("train_test_split.txt", "".join(f"{k} 2\n" for k in range(1, 7)), "image 1 has label '1', training '2'"),
        ("image_class_labels.txt", "".join(f"{k} 9\n" for k in range(1, 7)), "image 1 has label '9', training '1'"),
        ("images/003.Sooty_Albatross/b.jpg", "", r"image test/0002/b.jpg is not readable"),
    ],
)
def test_damaged_birds(data_dir: Path, file: str, content: str, message: str) -> None:
    write_cub(data_dir)
    (data_dir / "CUB_200_2011" / file).write_text(content)
    with pytest.raises(UserError, match=message):
        load("cub200")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("fgvc-aircraft", "data/images_variant_train.txt", r"fgvc-aircraft-2013b: ValueError"),
        ("dtd", "dtd/labels/train1.txt", r"dtd: ValueError"),
        ("stanford-cars", "cars_test_annos_withlabels.mat", r"stanford_cars: .*(MatReadError|ValueError|Unknown mat)"),
    ],
)
def test_damaged_lists(data_dir: Path, name: str, file: str, message: str) -> None:
    WRITERS[name](data_dir)
    base = {"fgvc-aircraft": "fgvc-aircraft-2013b", "dtd": "dtd", "stanford-cars": "stanford_cars"}[name]
    (data_dir / base / file).write_text("nonsense\n")
    with pytest.raises(UserError, match=message):
        load(name)


def test_other_lists_of_the_same_images_are_read(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoded copies are of the classes and splits that the lists gave."""
    from fedsub_app.data import dataset

    write_cub(data_dir)
    assert (load("cub200").train_y.tolist(), len(load("cub200").test_y)) == ([0, 1, 2], 3)
    top = data_dir / "CUB_200_2011"
    (top / "image_class_labels.txt").write_text("1 3\n2 3\n3 2\n4 1\n5 2\n6 1\n")
    dataset._load.cache_clear()
    assert load("cub200").train_y.tolist() == [0, 1, 2]
    at = load("cub200").train_x[:][:, 0, 0, 0] * 255
    assert at.tolist() == pytest.approx([40, 30, 10])
