"""Data sets with a name of their own: generated, installed, torchvision's, medmnist's. ``LOADERS`` is at the end."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedsub_app.common.errors import UserError, explained, one_line
from fedsub_app.common.late import Late
from fedsub_app.common.seeds import generator
from fedsub_app.data import synthetic, text
from fedsub_app.data.arrays import Array, checked, read_idx, read_npy
from fedsub_app.data.features import impatient
from fedsub_app.data.files import HOLD_OUT, Split, hold_out, read_files
from fedsub_app.data.names import EMNIST, MEDMNIST, data_folder, find, own_files
from fedsub_app.data.settings import DataSettings

torchvision_datasets = Late("torchvision.datasets")
HELD_OUT = f"it comes without a test part: every {HOLD_OUT}th image of a class is one"


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is prepared: its images are uint8 or float32 in [0, 1], [n, c, h, w], or listed files."""

    train: Split
    test: Split
    num_classes: int
    notes: tuple[str, ...] = ()


Labelled = Iterable[tuple[Path, int]]
Loader = Callable[[str, DataSettings], Source | dict[str, Source]]


def _of_sklearn(file: str, delimiter: str | None = None) -> Array:
    """Read a file of scikit-learn as its loaders do: importing scikit-learn costs every start a second."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    return np.loadtxt(Path(str(package.origin)).parent / "datasets/data" / file, delimiter=delimiter)


def _digits(name: str, settings: DataSettings) -> Source:
    table = torch.from_numpy(_of_sklearn("digits.csv.gz", ","))
    x, y = (table[:, :-1] / 16).float().reshape(-1, 1, 8, 8), table[:, -1].long()
    order = torch.randperm(len(y), generator=generator(settings.seed, "digits", "split"))
    in_test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        of_class = order[y[order] == label]
        in_test[of_class[: round(len(of_class) / 5)]] = True
    return Source((x[~in_test], y[~in_test]), (x[in_test], y[in_test]), 10)


def _diabetes(name: str, settings: DataSettings) -> Source:
    x, y = (torch.from_numpy(_of_sklearn(f"diabetes_{part}.csv.gz")) for part in ("data_raw", "target"))
    x = ((x - x.mean(0)) / x.std(0, correction=0)).float()  # each feature with mean 0 and deviation 1
    order = torch.randperm(len(y), generator=generator(settings.seed, "diabetes", "split"))
    test, train = order.tensor_split([len(y) // 5])
    return Source((x[train], y[train].float()), (x[test], y[test].float()), 1)


def _python_sources(name: str, settings: DataSettings) -> dict[str, Source]:
    packages = chosen_domains(settings, text.python_packages())
    return {name: Source(*text.source_samples(folder), len(text.ALPHABET) + 2) for name, folder in packages.items()}


def chosen_domains(settings: DataSettings, known: Mapping[str, Path]) -> dict[str, Path]:
    """Return the domains that the settings name, or else all."""
    if unknown := [domain for domain in settings.domains if domain not in known]:
        raise UserError(f"domains: {unknown[0]!r}: allowed are {', '.join(known)}")
    return {domain: known[domain] for domain in settings.domains or known}


def _idx(name: str, settings: DataSettings, kind_name: str, split: str = "") -> Source:
    """Read the idx files that torchvision's class ``kind_name`` downloads; ``split``: of EMNIST."""
    prefixes = (f"emnist-{split}-train", f"emnist-{split}-test") if split else ("train", "t10k")
    names = [f"{prefix}-{part}-ubyte" for prefix in prefixes for part in ("images-idx3", "labels-idx1")]
    options = {"split": split} if split else {}

    def download(root: str) -> object:
        return getattr(torchvision_datasets, kind_name)(root, download=True, **options)

    folder = _located(name, settings, f"{kind_name}/raw", "[.gz]", download, names)
    files = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in names]
    first = 1 if split == "letters" else 0  # EMNIST letters are labelled 1 to 26
    arrays = [read_idx(file, dimensions) for file, dimensions in zip(files, (3, 1, 3, 1), strict=True)]
    train, test = ((x, y.astype(np.int64) - first) for x, y in (arrays[:2], arrays[2:]))
    return _labelled(folder, train, test, EMNIST.get(split, 10))


def _cifar(name: str, settings: DataSettings, kind_name: str) -> Source:
    kind = getattr(torchvision_datasets, kind_name)
    origin = f"/ (unpacked from {kind.url})"
    folder = _located(name, settings, kind.base_folder, origin, lambda root: kind(root, download=True))
    with explained(f"{folder}:"):  # torchvision reads only files that have the right md5
        train, test = kind(str(folder.parent), train=True), kind(str(folder.parent), train=False)
    of_train, of_test = ((split.data, np.array(split.targets)) for split in (train, test))
    return _labelled(folder, of_train, of_test, len(train.classes))


def _medmnist(name: str, settings: DataSettings) -> Source:
    import medmnist

    info = medmnist.INFO[name]
    kind = getattr(medmnist, info["python_class"])
    origin = f" ({info['url']})"
    file = _located(name, settings, f"{name}.npz", origin, lambda root: kind(split="train", root=root, download=True))
    with explained(f"{file}: not a readable MedMNIST file"):
        train, test = (kind(split=split, root=str(file.parent)) for split in ("train", "test"))
    if info["task"].startswith("multi-label"):
        splits = [(checked(file, part.split, part.imgs, part.labels[:, 0])[0], part.labels) for part in (train, test)]
        x, y = zip(*((images, torch.from_numpy(labels).float()) for images, labels in splits), strict=True)
        source = Source((x[0], y[0]), (x[1], y[1]), len(info["label"]))
    else:
        source = _labelled(file, (train.imgs, train.labels), (test.imgs, test.labels), len(info["label"]))
    counts, upstream = (len(train.imgs), len(test.imgs)), (info["n_samples"]["train"], info["n_samples"]["test"])
    note = f"partial: {counts[0]} train, {counts[1]} test images, upstream has {upstream[0]} and {upstream[1]}"
    return source if counts == upstream else replace(source, notes=(note,))


def _labelled(file: Path, train: tuple[Array, Array], test: tuple[Array, Array], num_classes: int) -> Source:
    """Return upstream's arrays as a source. This function checks them, because upstream's loaders do not."""
    return Source(checked(file, "train", *train, num_classes), checked(file, "test", *test, num_classes), num_classes)


def _cub200(name: str, settings: DataSettings) -> Source:
    """Read CUB-200-2011 in its published form: lists of numbered images, of their classes and of the training part."""
    folder = _located(name, settings, "CUB_200_2011", "/ (unpacked from https://data.caltech.edu/records/65de6-vp158)")
    names = _numbered(folder / "images.txt")
    labels, in_train = _numbered(folder / "image_class_labels.txt"), _numbered(folder / "train_test_split.txt")
    classes = {number: label for label, number in enumerate(_numbered(folder / "classes.txt"))}
    if not names.keys() == labels.keys() == in_train.keys():
        raise UserError(f"{folder}: images.txt, image_class_labels.txt and train_test_split.txt number other images")
    splits: dict[str, list[tuple[Path, int]]] = {"1": [], "0": []}
    for number, image in names.items():
        if in_train[number] not in splits or labels[number] not in classes:
            entry = f"label {labels[number]!r}, training {in_train[number]!r}"
            raise UserError(f"{folder}: image {number} has {entry}, expected a class of classes.txt, and 0 or 1")
        splits[in_train[number]].append((folder / "images" / image, classes[labels[number]]))
    return _files(settings, folder, splits["1"], splits["0"], len(classes))


def _numbered(file: Path) -> dict[str, str]:
    """Read lines of a number and what it stands for."""
    with explained(f"{file}: not a readable list of numbers and values"):
        return dict(line.split(maxsplit=1) for line in file.read_text().splitlines())


def _published(
    name: str,
    settings: DataSettings,
    kind_name: str,
    base: str,
    holds: Sequence[str],
    test: Sequence[str] = ("val", "test"),
    downloads: bool = True,
) -> Source:
    """Let torchvision's class ``kind_name`` read the lists of a set, whose folder ``base`` has what ``holds`` names."""
    kind = getattr(torchvision_datasets, kind_name)
    origin = "" if downloads else "; torchvision cannot download it any more"
    download = (lambda root: kind(root, download=True)) if downloads else None
    root = _located(name, settings, base, origin, download, holds)
    with explained(f"{root}:"):
        splits = {split: kind(str(root.parent), split=split, loader=Path) for split in ("train", *test)}
        classes = splits["train"].classes  # torchvision's DTD numbers those of each split
        samples: dict[str, list[tuple[Path, int]]] = {}
        for split, listed in splits.items():
            items = (listed[n] for n in range(len(listed)))
            samples[split] = [(file, classes.index(listed.classes[label])) for file, label in items]
    return _files(settings, root, samples["train"], [s for split in test for s in samples[split]], len(classes))


def _cifar10_c(name: str, settings: DataSettings) -> dict[str, Source]:
    """Read CIFAR-10-C (Hendrycks, Dietterich, ICLR 2019): ``<corruption>.npy``, a fifth of its rows a severity."""
    origin = "/<corruption>.npy, labels.npy (unpacked from https://zenodo.org/records/2535967)"
    folder = _located(name, settings, "CIFAR-10-C", origin)
    known = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    labels = read_npy(folder / "labels.npy")
    sources = {}
    for domain in settings.domains or known:
        corruption, _, severity = domain.partition("-")
        number = int(severity or 5) if severity in ("", *"12345") else 0
        if corruption not in known or not number:
            raise UserError(f"domains: {domain!r}: allowed are {', '.join(known)}, each with -1 to -5 for its severity")
        file = folder / f"{corruption}.npy"
        images = read_npy(file)
        rows = slice(len(images) * (number - 1) // 5, len(images) * number // 5)
        x, y = checked(file, f"severity {number}", np.array(images[rows]), np.array(labels[rows]), 10)
        test = hold_out(y)
        sources[domain] = Source((x[~test], y[~test]), (x[test], y[test]), 10, (HELD_OUT,))
    return sources


def _files(settings: DataSettings, folder: Path, train: Labelled, test: Labelled, num_classes: int) -> Source:
    """Return images that are files with labels from 0; ``folder``: where they are, for the messages."""
    splits = (("train", train), ("test", test))
    listed = [((split, f"{label:04}", file.name), file) for split, samples in splits for file, label in samples]
    return Source(*read_files(settings, folder, [f"{label:04}" for label in range(num_classes)], listed), num_classes)


def _located(
    name: str,
    settings: DataSettings,
    base: str,
    origin: str,
    download: Callable[[str], object] | None = None,
    holds: Sequence[str] = (),
) -> Path:
    """Return where the file or folder ``base`` is, with all that it ``holds``; if missing, ``download`` gets it."""
    data = data_folder(settings.data_dir)
    path = find(data, base)
    if path and all((path / entry).exists() or (path / f"{entry}.gz").exists() for entry in holds):
        return path
    inside = f"/{{{', '.join(holds)}}}" if holds else ""
    missing = f"dataset = {name!r}: {data} has no {base}{inside}{origin}"
    similar = [other for other in own_files(data) if other.startswith(name)]
    instead = f"; found there and similar: {', '.join(similar)}" if similar else ""
    if not download:
        raise UserError(f"{missing}{instead}")
    try:
        data.mkdir(parents=True, exist_ok=True)
        with impatient():
            download(str(data))
    except Exception as error:  # no network, a full disk, a wrong checksum: all mean "not here"
        how = f"put it there, or start again with a network to download it (now: {one_line(error)[:200]})"
        raise UserError(f"{missing}; {how}{instead}") from error
    return data / base


CARS = ("devkit", "cars_train", "cars_test", "cars_test_annos_withlabels.mat")
LOADERS: dict[str, Loader] = {  # of the names of names.py; several sources are domains
    **dict.fromkeys(synthetic.NAMES, lambda name, settings: Source(*synthetic.generate(name, settings.seed), 4)),
    "digits": _digits,
    "diabetes": _diabetes,
    "python-sources": _python_sources,
    "mnist": partial(_idx, kind_name="MNIST"),
    "fashion-mnist": partial(_idx, kind_name="FashionMNIST"),
    "emnist": partial(_idx, kind_name="EMNIST", split="digits"),
    **{f"emnist-{split}": partial(_idx, kind_name="EMNIST", split=split) for split in EMNIST},
    "cifar10": partial(_cifar, kind_name="CIFAR10"),
    "cifar100": partial(_cifar, kind_name="CIFAR100"),
    "cifar10-c": _cifar10_c,
    **dict.fromkeys(MEDMNIST, _medmnist),
    "cub200": _cub200,
    "flowers102": partial(
        _published, kind_name="Flowers102", base="flowers-102", holds=("jpg", "imagelabels.mat", "setid.mat")
    ),
    "fgvc-aircraft": partial(_published, kind_name="FGVCAircraft", base="fgvc-aircraft-2013b", holds=("data",)),
    "dtd": partial(_published, kind_name="DTD", base="dtd", holds=("dtd",)),
    "stanford-cars": partial(
        _published, kind_name="StanfordCars", base="stanford_cars", holds=CARS, test=("test",), downloads=False
    ),
}
