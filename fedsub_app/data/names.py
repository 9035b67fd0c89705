"""The names of the data sets: known ones, and those of your own files; torch is not imported here."""

import glob
import os
import zipfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

from platformdirs import user_cache_path

from fedsub_app.common.errors import UserError
from fedsub_app.data.settings import READERS

ALIASES = {"cifar-mnist": "cifar10+mnist", "path-oct-tissue": "pathmnist+octmnist+tissuemnist"}
MEDMNIST = (  # the 2-D names of medmnist.INFO, spelled out: importing it takes a second
    *("pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist", "breastmnist", "bloodmnist"),
    *("tissuemnist", "organamnist", "organcmnist", "organsmnist", "chestmnist"),
)
EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}  # split → classes
KNOWN = {  # name → what it is; known.py has their loaders
    "synthetic": "32,000 generated points of FedPeWS, 5 features, 4 classes (no file needed)",
    "synthetic-3k": "the same with 3,200 training points",
    "synthetic-cyclic": "as synthetic, other layout: FedAvg close to the paper's round counts",
    "synthetic-cyclic-3k": "the same with 3,200 training points",
    "digits": "scikit-learn's 1,797 digits, 8x8 grey, 10 classes (no file needed)",
    "diabetes": "scikit-learn's diabetes, 442 patients, 10 features; task = regression (no file needed)",
    "python-sources": "characters of Python's standard library; domains: packages; task = next-token (no file needed)",
    "mnist": "MNIST, 28x28 grey, 10 classes",
    "fashion-mnist": "Fashion-MNIST, 28x28 grey, 10 classes",
    "emnist": "EMNIST digits, 28x28 grey",
    **{f"emnist-{split}": f"EMNIST {split}, 28x28 grey" for split in EMNIST},
    "cifar10": "CIFAR-10, 32x32 RGB, 10 classes",
    "cifar100": "CIFAR-100, 32x32 RGB, 100 classes",
    "cifar10-c": "CIFAR-10-C, 32x32 RGB, 10 classes; domains: corruptions, 'fog, snow-3' (severity 5 if not given)",
    **dict.fromkeys(MEDMNIST, "MedMNIST v2, 28x28"),
    "chestmnist": "MedMNIST v2, 28x28; task = multi-label",
    "cub200": "CUB-200-2011, birds, RGB of many sizes, 200 classes",
    "flowers102": "Oxford's flowers, RGB of many sizes, 102 classes",
    "fgvc-aircraft": "FGVC Aircraft, RGB of many sizes, 100 variants",
    "dtd": "Describable Textures, RGB of many sizes, 47 classes",
    "stanford-cars": "Stanford Cars, RGB of many sizes, 196 classes",
}
ARCHIVES = (".tar.xz", ".tar.gz", ".tgz", ".tar")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
NPZ_KEYS = ("train_images", "train_labels", "test_images", "test_labels")


def dataset_names(data_dir: str | None = None) -> dict[str, str]:
    """Return name and one-line description of the data sets known, and of your own files found in ``data_dir``."""
    aliases = {alias: f"= {meaning}" for alias, meaning in ALIASES.items()}
    return KNOWN | aliases | {name: f"your own: {path}" for name, path in own_files(data_folder(data_dir)).items()}


def own_files(data: Path) -> dict[str, Path]:
    """Return name and path of the image sets of our own forms in a folder and its direct subfolders."""
    files: dict[str, Path] = {}
    for path in sorted([*data.glob("*"), *data.glob("*/*")], key=lambda path: (len(path.parts), path.name)):
        suffix = next((suffix for suffix in (".npz", *ARCHIVES) if path.name.endswith(suffix)), "")
        if suffix and not path.is_file():
            continue
        is_npz = suffix == ".npz" and set(NPZ_KEYS) <= npz_keys(path)
        is_folder = not suffix and path.name not in ("train", "test") and folder_form(path) != ""
        name = path.name.removesuffix(suffix)
        if (is_npz or is_folder or suffix in ARCHIVES) and name not in KNOWN and name not in ALIASES:
            files.setdefault(name, path)
    return files


def private_name(path: Path) -> str:
    """Return the key ``dataset`` of a path: a table, or a file or folder of our own forms in its parent folder."""
    if path.suffix[1:] in READERS and path.is_file():
        return f"{path.suffix[1:]}:{path.absolute()}"
    name = next((name for name, file in own_files(path.parent).items() if file == path), "")
    if not name:
        tables = ", ".join(f".{kind}" for kind in READERS)
        forms = f"an .npz file, an image folder with classes or an archive of one ({', '.join(ARCHIVES)}), {tables}"
        raise UserError(f"private-data = {str(path)!r}: not there, or not {forms} under a name of its own")
    return name


def parts_of(dataset: str, data: Path) -> list[str]:
    """Return the names of the joined sets; :class:`UserError` where a set in the folder has the name of a known one."""
    named = dataset.split("+")
    for name in (name for name in named if name in KNOWN or name in ALIASES):
        forms = (name, *(f"{name}{suffix}" for suffix in ARCHIVES), *([] if name in MEDMNIST else [f"{name}.npz"]))
        for path in filter(None, (find(data, form) for form in forms)):
            if path.is_file() or folder_form(path):
                raise UserError(f"dataset = {name!r}: a known set, and {path} has the name too; rename that one")
    return [part for name in named for part in ALIASES.get(name, name).split("+")]


def data_folder(setting: str | None) -> Path:
    """Return the setting, else ``$FEDSUB_DATA``, else ``data`` in the user's cache folder (``~/.cache/fedsub``)."""
    variable = os.environ.get("FEDSUB_DATA")
    folder = Path(setting or variable or user_cache_path("fedsub") / "data")
    said = f"{'$FEDSUB_DATA' if variable and not setting else 'data-dir'} = {str(folder)!r}:"
    try:
        folder = folder.expanduser()
        folder.stat()  # raises an error that is_dir would hide
        if not folder.is_dir():
            raise UserError(f"{said} not a folder")
    except FileNotFoundError:  # it may be made for a download
        pass
    except OSError as error:
        raise UserError(f"{said} {error.strerror}") from None
    except RuntimeError:
        raise UserError(f"{said} '~' is the home of no user here") from None
    return folder


def in_data_folder(source: str, setting: str | None) -> str:
    """Return ``transformers:FOLDER`` with the path in the data folder, if the folder is there and not here."""
    kind, _, name = source.partition(":")
    folder = data_folder(setting) / os.path.expanduser(name)
    return f"{kind}:{folder}" if kind == "transformers" and not Path(name).is_dir() and folder.is_dir() else source


def matching(pattern: str, data: Path) -> list[Path]:
    """Return the files of a table, here or in the data folder: the file of this name, else all that match it."""
    pattern = os.path.expanduser(pattern)
    root = Path(pattern).anchor
    name = pattern.removeprefix(root)
    for folder in (Path(root),) if root else (Path(), data):
        if (folder / name).is_file():  # its name may have a [ or *
            return [folder / name]
        with suppress(ValueError):  # no pattern, or a ** that is not a whole part of it
            if files := sorted(folder.glob(name)):
                return files
    return []


def find(folder: Path, name: str) -> Path | None:
    """Return ``folder/name`` or else the first ``folder/*/name`` that exists."""
    paths = (folder / name, *sorted(folder.glob(f"*/{glob.escape(name)}")))
    return next((path for path in paths if path.exists()), None)


def folder_form(folder: Path) -> str:
    """Return how images lie in it: ``split`` ({train,test}/<class>/), ``classes``, ``domains`` (of classes), or ""."""
    if os.path.isdir(folder / "train"):  # False, too, of a folder that cannot be read, such as lost+found
        return "split"
    for form, pattern in (("classes", "*/*"), ("domains", "*/*/*")):
        files = islice(folder.glob(pattern), 100)
        if any(file.suffix.lower() in IMAGES and not file.name.startswith(".") for file in files):
            return form
    return ""


def npz_keys(path: Path) -> set[str]:
    """Return the keys of an npz file without reading its arrays; none where it is no npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {entry.removesuffix(".npy") for entry in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return set()
