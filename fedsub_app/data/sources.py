"""Where each data set comes from: generated, installed, torchvision's, medmnist's, or your own files."""

import importlib.util
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.seeds import generator
from fedsub_app.data import synthetic
from fedsub_app.data.files import (
    ARCHIVES,
    HOLD_OUT,
    NPZ_KEYS,
    Array,
    Split,
    checked,
    find,
    folder_form,
    hold_out,
    npz_keys,
    read_images,
    read_npy,
    read_npz,
    unpacked_idx,
)

ALIASES = {"cifar-mnist": "cifar10+mnist", "path-oct-tissue": "pathmnist+octmnist+tissuemnist"}
MEDMNIST = (  # the 2-D names of medmnist.INFO with one label an image, spelled out: importing it takes a second
    *("pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist", "breastmnist", "bloodmnist"),
    *("tissuemnist", "organamnist", "organcmnist", "organsmnist"),
)
EMNIST = {"emnist": "digits"} | {
    f"emnist-{split}": split for split in ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
}
CIFAR10_C = "cifar10-c"
HELD_OUT = f"it comes without a test part: every {HOLD_OUT}th image of a class is one"
DOWNLOAD_SILENCE_S = 30.0


@dataclass(frozen=True, eq=False)
class Source:
    # x is uint8 or float32 in [0, 1] for images, [n, c, h, w]; [n, 5] for synthetic data
    train: Split
    test: Split
    num_classes: int
    notes: tuple[str, ...] = ()


def dataset_names(data_dir: str | None = None) -> dict[str, str]:
    """Return name and one-line description of the data sets known, and of your own files found in ``data_dir``."""
    return _built_in() | {name: f"your own: {path}" for name, path in _own_files(data_folder(data_dir)).items()}


def _built_in() -> dict[str, str]:
    return {
        "synthetic": "32,000 generated points of FedPeWS, 5 features, 4 classes (no file needed)",
        "synthetic-3k": "the same with 3,200 training points",
        "synthetic-cyclic": "as synthetic, other layout: FedAvg close to the paper's round counts",
        "synthetic-cyclic-3k": "the same with 3,200 training points",
        "digits": "scikit-learn's 1,797 digits, 8x8 grey, 10 classes (no file needed)",
        "mnist": "MNIST, 28x28 grey, 10 classes",
        "fashion-mnist": "Fashion-MNIST, 28x28 grey, 10 classes",
        **{name: f"EMNIST {split}, 28x28 grey" for name, split in EMNIST.items()},
        "cifar10": "CIFAR-10, 32x32 RGB, 10 classes",
        "cifar100": "CIFAR-100, 32x32 RGB, 100 classes",
        CIFAR10_C: "CIFAR-10-C, 32x32 RGB, 10 classes; domains: corruptions, 'fog, snow-3' (severity 5 if not given)",
        **dict.fromkeys(MEDMNIST, "MedMNIST v2, 28x28"),
        **{alias: f"= {meaning}" for alias, meaning in ALIASES.items()},
    }


def load_sources(name: str, data: Path, seed: int, image_size: int | None, domains: Sequence[str]) -> dict[str, Source]:
    """Return the sources of one set, all of them: its domains, which have the same classes, or else itself.

    ``name`` is without ``+``; ``domains`` are those wanted, none for all. Raises :class:`UserError` where it cannot.
    """
    if name == CIFAR10_C:
        return _cifar10_c(data, domains)
    folder = _own_files(data).get(name)
    if folder and folder_form(folder) == "domains":
        return _image_domains(folder, image_size, domains)
    if domains:
        raise UserError(f"domains = {', '.join(domains)!r}: dataset {name!r} has none; allowed is ''")
    return {name: _single(name, data, seed, image_size)}


def _single(name: str, data: Path, seed: int, image_size: int | None) -> Source:
    if name in synthetic.NAMES:
        return Source(*synthetic.generate(name, seed), synthetic.NUM_CLASSES)
    if name == "digits":
        return _digits(seed)
    if name in ("mnist", "fashion-mnist", *EMNIST):
        return _mnist_like(name, data)
    if name in ("cifar10", "cifar100"):
        return _cifar(name, data)
    if name in MEDMNIST:
        return _medmnist(name, data)
    if name == "chestmnist":
        raise UserError("dataset = 'chestmnist': its images have several labels each, expected one")
    return _own(name, data, image_size)


def _digits(seed: int) -> Source:
    # scikit-learn's own file, read as its load_digits reads it: importing scikit-learn costs every start a second.
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    table = np.loadtxt(Path(str(package.origin)).parent / "datasets/data/digits.csv.gz", delimiter=",")
    x, y = torch.from_numpy(table[:, :-1] / 16).float().reshape(-1, 1, 8, 8), torch.from_numpy(table[:, -1]).long()
    order = torch.randperm(len(y), generator=generator(seed, "digits", "split"))
    in_test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        of_class = order[y[order] == label]
        in_test[of_class[: round(len(of_class) / 5)]] = True
    return Source((x[~in_test], y[~in_test]), (x[in_test], y[in_test]), 10)


def _mnist_like(name: str, data: Path) -> Source:
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}.get(name, datasets.EMNIST)
    split = EMNIST.get(name)
    options = {"split": split} if split else {}
    prefixes = (f"emnist-{split}-train", f"emnist-{split}-test") if split else ("train", "t10k")
    files = [f"{prefix}-{part}-ubyte" for prefix in prefixes for part in ("images-idx3", "labels-idx1")]
    raw = f"{kind.__name__}/raw"
    wanted = f"{raw}/{{{','.join(files)}}}[.gz]"
    root = unpacked_idx(data, raw, files)
    if root is None:
        _download(name, data, wanted, lambda: kind(str(data), download=True, **options))
        root = unpacked_idx(data, raw, files)
    if root is None:
        raise UserError(f"dataset = {name!r}: the download left no {wanted} in {data}")
    train, test = kind(str(root), train=True, **options), kind(str(root), train=False, **options)
    first = 1 if split == "letters" else 0  # EMNIST letters are labelled 1 to 26
    return _labelled(
        find(data, raw) or root,
        (train.data.numpy(), train.targets.numpy() - first),
        (test.data.numpy(), test.targets.numpy() - first),
        len(train.classes) - first,
    )


def _cifar(name: str, data: Path) -> Source:
    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    found = find(data, kind.base_folder)
    if found is None:
        wanted = f"{kind.base_folder}/ (unpacked from {kind.url})"
        _download(name, data, wanted, lambda: kind(str(data), download=True))
        found = data / kind.base_folder
    try:
        train, test = kind(str(found.parent), train=True), kind(str(found.parent), train=False)
    except Exception as error:  # pickle raises many types; torchvision reads only files that have the right md5
        raise UserError(f"{found}: {one_line(error)}") from error
    return _labelled(
        found, (train.data, np.array(train.targets)), (test.data, np.array(test.targets)), len(train.classes)
    )


def _medmnist(name: str, data: Path) -> Source:
    import medmnist

    info = medmnist.INFO[name]
    kind = getattr(medmnist, info["python_class"])
    file = find(data, f"{name}.npz")
    if file is None:
        _download(name, data, f"{name}.npz ({info['url']})", lambda: kind(split="train", root=str(data), download=True))
        file = data / f"{name}.npz"
    try:
        train, test = (kind(split=split, root=str(file.parent)) for split in ("train", "test"))
    except Exception as error:  # zipfile, zlib and NumPy raise about ten types on damaged bytes
        raise UserError(f"{file}: not a readable MedMNIST file ({one_line(error)})") from error
    source = _labelled(file, (train.imgs, train.labels), (test.imgs, test.labels), len(info["label"]))
    found, upstream = (len(train.imgs), len(test.imgs)), (info["n_samples"]["train"], info["n_samples"]["test"])
    note = f"partial: {found[0]} train, {found[1]} test images, upstream has {upstream[0]} and {upstream[1]}"
    return source if found == upstream else replace(source, notes=(note,))


def _labelled(file: Path, train: tuple[Array, Array], test: tuple[Array, Array], num_classes: int) -> Source:
    """Check images and labels of upstream's loaders, which do not."""
    for split, (_, labels) in (("train", train), ("test", test)):
        if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            found = f"{split} labels from {labels.min()} to {labels.max()}"
            raise UserError(f"{file}: {found}, expected 0 to {num_classes - 1}")
    return Source(checked(file, "train", *train), checked(file, "test", *test), num_classes)


def _cifar10_c(data: Path, domains: Sequence[str]) -> dict[str, Source]:
    """Read corruptions of CIFAR-10's test images: ``<corruption>.npy``, a fifth of its rows a severity from 1 to 5.

    Hendrycks, Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019.
    """
    folder = find(data, "CIFAR-10-C")
    if folder is None:
        where = "unpacked from https://zenodo.org/records/2535967"
        raise UserError(f"dataset = {CIFAR10_C!r}: {data} has no CIFAR-10-C/<corruption>.npy, labels.npy ({where})")
    known = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    labels = read_npy(folder / "labels.npy")
    found = {}
    for domain in domains or known:
        corruption, _, severity = domain.partition("-")
        number = int(severity or 5) if severity in ("", *"12345") else 0
        if corruption not in known or not number:
            raise UserError(f"domains: {domain!r}: allowed are {', '.join(known)}, each with -1 to -5 for its severity")
        file = folder / f"{corruption}.npy"
        images = read_npy(file)
        rows = slice(len(images) * (number - 1) // 5, len(images) * number // 5)
        x, y = checked(file, f"severity {number}", np.array(images[rows]), np.array(labels[rows]))
        test = hold_out(y)
        found[domain] = Source((x[~test], y[~test]), (x[test], y[test]), 10, (HELD_OUT,))
    return found


def _image_domains(folder: Path, image_size: int | None, domains: Sequence[str]) -> dict[str, Source]:
    """Read ``<domain>/<class>/<image>``, such as Office-Home; a class has the same number in all domains."""
    known = {path.name: path for path in sorted(folder.iterdir()) if folder_form(path) == "classes"}
    unknown = [domain for domain in domains if domain not in known]
    if unknown:
        raise UserError(f"domains: {unknown[0]!r}: allowed are {', '.join(known)}")
    classes = sorted({path.name for domain in known.values() for path in domain.iterdir() if path.is_dir()})
    return {
        domain: Source(*read_images(known[domain], image_size, classes), len(classes), (HELD_OUT,))
        for domain in domains or known
    }


def _own(name: str, data: Path, image_size: int | None) -> Source:
    """Read ``<name>.npz``, the folder ``<name>`` or ``<name>.tar*``."""
    file = _own_files(data).get(name)
    if file is None and re.fullmatch(r"[\w.-]+", name):
        file = find(data, f"{name}.npz")  # not an image set, as it seems: let the reader say why
    if file is None:
        forms = f"{name}.npz, {name}/[{{train,test}}/ or <domain>/]<class>/, {name}{{{','.join(ARCHIVES)}}}"
        known = ", ".join(dataset_names(str(data)))
        raise UserError(f"dataset = {name!r}: no such name, and no {forms} in {data} or its subfolders; known: {known}")
    train, test = read_npz(file) if file.suffix == ".npz" else read_images(file, image_size)
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    notes = [HELD_OUT] if folder_form(file) == "classes" else []
    if "jpeg" in name or "lossy" in name:
        notes.append("lossy JPEG, not the original pixels")
    if "subset" in name:
        notes.append(f"partial: {len(train[1])} train, {len(test[1])} test images")
    return Source(train, test, num_classes, tuple(notes))


def _own_files(data: Path) -> dict[str, Path]:
    """Return name and path of the image sets of our own forms in a folder and its direct subfolders."""
    built_in = _built_in()
    found: dict[str, Path] = {}
    for path in sorted([*data.glob("*"), *data.glob("*/*")], key=lambda path: (len(path.parts), path.name)):
        suffix = next((suffix for suffix in (".npz", *ARCHIVES) if path.name.endswith(suffix)), "")
        is_npz = suffix == ".npz" and set(NPZ_KEYS) <= npz_keys(path)
        is_folder = not suffix and path.name not in ("train", "test") and folder_form(path) != ""
        name = path.name.removesuffix(suffix)
        if (is_npz or is_folder or suffix in ARCHIVES) and name not in built_in:
            found.setdefault(name, path)
    return found


def _download(name: str, data: Path, wanted: str, attempt: Callable[[], object]) -> None:
    """Let torchvision or medmnist download; where that fails, say what is missing and what is there instead."""
    silence = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_SILENCE_S)  # without it a network that swallows packets hangs for ever
    try:
        data.mkdir(parents=True, exist_ok=True)
        attempt()
    except Exception as error:  # no network, a full disk, a wrong checksum: all mean "not here"
        similar = [other for other in _own_files(data) if other.startswith(name)]
        instead = f"; found there and similar: {', '.join(similar)}" if similar else ""
        how = f"put it there, or start again with a network to download it (now: {one_line(error)[:200]})"
        raise UserError(f"dataset = {name!r}: {data} has no {wanted}; {how}{instead}") from error
    finally:
        socket.setdefaulttimeout(silence)


def data_folder(setting: str | None) -> Path:
    """The setting, or else ``$FEDSUB_DATA``, or else ``~/.cache/fedsub/data``."""
    return Path(setting or os.environ.get("FEDSUB_DATA") or "~/.cache/fedsub/data").expanduser()
