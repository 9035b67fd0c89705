"""Where each data set comes from: a known one (known.py), or your own files."""

import re
from collections.abc import Sequence
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.data.files import list_images, read_images, read_npz
from fedsub_app.data.known import HELD_OUT, LOADERS, NotHere, Request, Source, Split, read_listed
from fedsub_app.data.names import (
    ALIASES,
    ARCHIVES,
    KNOWN,
    MEDMNIST,
    dataset_names,
    find,
    folder_form,
    own_files,
)


def load_sources(request: Request) -> dict[str, Source]:
    """Return the sources of one set, all of them: its domains, which have the same classes, or else itself.

    The name is without ``+``. Raises :class:`UserError` where it cannot.
    """
    try:
        loaded = LOADERS.get(request.name, _own)(request)
    except NotHere as error:
        similar = [other for other in own_files(request.data) if other.startswith(request.name)]
        instead = f"; found there and similar: {', '.join(similar)}" if similar else ""
        raise UserError(f"{error}{instead}") from error
    if isinstance(loaded, dict):
        return loaded
    if request.domains:
        raise UserError(f"domains = {', '.join(request.domains)!r}: dataset {request.name!r} has none; allowed is ''")
    return {request.name: loaded}


def check_hidden(name: str, data: Path) -> None:
    """Raise :class:`UserError` where the data folder has an image set of the name of a known one, which hides it."""
    if name not in KNOWN and name not in ALIASES:
        return
    forms = (name, *(f"{name}{suffix}" for suffix in ARCHIVES), *([] if name in MEDMNIST else [f"{name}.npz"]))
    for path in filter(None, (find(data, form) for form in forms)):
        if path.is_file() or folder_form(path):
            raise UserError(f"dataset = {name!r}: a known set, and {path} has the name too; rename that one")


def _own(request: Request) -> Source | dict[str, Source]:
    """Read ``<name>.npz``, the folder ``<name>`` or ``<name>.tar*``."""
    name, data = request.name, request.data
    file = own_files(data).get(name)
    if file and folder_form(file) == "domains":
        return _image_domains(file, request)
    if file is None and re.fullmatch(r"[\w.-]+", name):
        file = find(data, f"{name}.npz")  # a file of other keys than ours: its reader says which are missing
    if file is None and (packed := find(data, f"{name}.zip")):
        raise UserError(f"{packed}: a zip archive; unpack it, or pack it again as one of {', '.join(ARCHIVES)}")
    if file is None:
        forms = f"{name}.npz, {name}/[{{train,test}}/ or <domain>/]<class>/, {name}{{{','.join(ARCHIVES)}}}"
        known = ", ".join(dataset_names(str(data)))
        raise UserError(f"dataset = {name!r}: no such name, and no {forms} in {data} or its subfolders; known: {known}")
    train, test = read_npz(file) if file.suffix == ".npz" else _read_folder(request, file)
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


def _image_domains(folder: Path, request: Request) -> dict[str, Source]:
    """Read ``<domain>/<class>/<image>``, such as Office-Home; a class has the same number in all domains."""
    domains = request.domains
    known = {path.name: path for path in sorted(folder.iterdir()) if folder_form(path) == "classes"}
    unknown = [domain for domain in domains if domain not in known]
    if unknown:
        raise UserError(f"domains: {unknown[0]!r}: allowed are {', '.join(known)}")
    classes = sorted({path.name for domain in known.values() for path in domain.iterdir() if path.is_dir()})
    return {
        domain: Source(*_read_folder(request, known[domain], classes), len(classes), (HELD_OUT,))
        for domain in domains or known
    }


def _read_folder(request: Request, path: Path, classes: Sequence[str] = ()) -> tuple[Split, Split]:
    """Return the images of a folder, decoded or listed, or of an archive."""
    if path.is_file() or not request.listed:
        return read_images(path, request.image_size, classes)
    listed = list_images(path)
    classes = classes or sorted({parts[1] for parts, _ in listed if parts[0] == "train"})
    return read_listed(request, path, listed, classes)
