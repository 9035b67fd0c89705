"""Where each data set comes from: a known one (known.py), or your own files."""

import re
from collections.abc import Sequence
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.data.files import list_images, read_images, read_npz
from fedsub_app.data.known import HELD_OUT, LOADERS, NotHere, Source, Split, read_listed
from fedsub_app.data.names import (
    ALIASES,
    ARCHIVES,
    KNOWN,
    MEDMNIST,
    data_folder,
    dataset_names,
    find,
    folder_form,
    own_files,
)
from fedsub_app.data.settings import DataSettings


def load_sources(name: str, settings: DataSettings) -> dict[str, Source]:
    """Return the sources of one set, all of them: its domains, which have the same classes, or else itself."""
    try:
        loaded = LOADERS.get(name, _own)(name, settings)
    except NotHere as error:
        similar = [other for other in own_files(data_folder(settings.data_dir)) if other.startswith(name)]
        instead = f"; found there and similar: {', '.join(similar)}" if similar else ""
        raise UserError(f"{error}{instead}") from error
    if isinstance(loaded, dict):
        return loaded
    if settings.domains:
        raise UserError(f"domains = {', '.join(settings.domains)!r}: dataset {name!r} has none; allowed is ''")
    return {name: loaded}


def check_hidden(name: str, data: Path) -> None:
    """Raise :class:`UserError` where the data folder has an image set of the name of a known one, which hides it."""
    if name not in KNOWN and name not in ALIASES:
        return
    forms = (name, *(f"{name}{suffix}" for suffix in ARCHIVES), *([] if name in MEDMNIST else [f"{name}.npz"]))
    for path in filter(None, (find(data, form) for form in forms)):
        if path.is_file() or folder_form(path):
            raise UserError(f"dataset = {name!r}: a known set, and {path} has the name too; rename that one")


def _own(name: str, settings: DataSettings) -> Source | dict[str, Source]:
    """Read ``<name>.npz``, the folder ``<name>`` or ``<name>.tar*``."""
    data = data_folder(settings.data_dir)
    file = own_files(data).get(name)
    if file and folder_form(file) == "domains":
        return _image_domains(file, settings)
    if file is None and re.fullmatch(r"[\w.-]+", name):
        file = find(data, f"{name}.npz")  # a file of other keys than ours: its reader says which are missing
    if file is None and (packed := find(data, f"{name}.zip")):
        raise UserError(f"{packed}: a zip archive; unpack it, or pack it again as one of {', '.join(ARCHIVES)}")
    if file is None:
        forms = f"{name}.npz, {name}/[{{train,test}}/ or <domain>/]<class>/, {name}{{{','.join(ARCHIVES)}}}"
        known = ", ".join(dataset_names(str(data)))
        raise UserError(f"dataset = {name!r}: no such name, and no {forms} in {data} or its subfolders; known: {known}")
    train, test = read_npz(file) if file.suffix == ".npz" else _read_folder(settings, file)
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    if empty := sorted(set(range(num_classes)) - set(train[1].tolist())):
        reason = f"labels up to {num_classes - 1}, but no training image of class {empty[0]}"
        raise UserError(f"{file}: {reason}: expected labels from 0 to n - 1, each with one")
    notes = [HELD_OUT] if folder_form(file) == "classes" else []
    if "jpeg" in name or "lossy" in name:
        notes.append("lossy JPEG, not the original pixels")
    if "subset" in name:
        notes.append(f"partial: {len(train[1])} train, {len(test[1])} test images")
    return Source(train, test, num_classes, tuple(notes))


def _image_domains(folder: Path, settings: DataSettings) -> dict[str, Source]:
    """Read ``<domain>/<class>/<image>``, such as Office-Home; a class has the same number in all domains."""
    known = {path.name: path for path in sorted(folder.iterdir()) if folder_form(path) == "classes"}
    if unknown := [domain for domain in settings.domains if domain not in known]:
        raise UserError(f"domains: {unknown[0]!r}: allowed are {', '.join(known)}")
    classes = sorted({path.name for domain in known.values() for path in domain.iterdir() if path.is_dir()})
    return {
        domain: Source(*_read_folder(settings, known[domain], classes), len(classes), (HELD_OUT,))
        for domain in settings.domains or known
    }


def _read_folder(settings: DataSettings, path: Path, classes: Sequence[str] = ()) -> tuple[Split, Split]:
    """Return the images of a folder, or of an archive, which are decoded in any case."""
    if path.is_file():
        return read_images(path, settings.image_size, classes)
    return read_listed(settings, path, list_images(path), classes)
