"""A data set as tensors: known sets or your own files, chosen per class, brought to one form, joined, normalised."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import form_of
from fedsub_app.common.machine import check_memory
from fedsub_app.common.own_code import OWN, is_source, state_of
from fedsub_app.common.seeds import generator
from fedsub_app.common.spelling import one_of
from fedsub_app.common.tasks import TASKS, task_of
from fedsub_app.data import features, own, synthetic
from fedsub_app.data.arrays import read_npz
from fedsub_app.data.files import Pictures, Split, class_names, fingerprint, read_files
from fedsub_app.data.known import HELD_OUT, LOADERS, Source, chosen_domains
from fedsub_app.data.names import ARCHIVES, data_folder, dataset_names, find, folder_form, matching, own_files, parts_of
from fedsub_app.data.samples import Dataset, Samples, in_unit, normalised
from fedsub_app.data.settings import READERS, SOURCES, DataSettings
from fedsub_app.data.tables import load_source

ALONE = {*synthetic.NAMES, "diabetes", "python-sources"}  # sets without images


def load_dataset(settings: DataSettings) -> Dataset:
    """Return the data set, normalised, images channels-last; once per process and state of its files: read-only."""
    # The folder is part of the key: the environment may change between calls. So may a task of this name.
    folder = data_folder(settings.data_dir)
    state = _state(settings.dataset, folder) + state_of(settings.task)
    return _load(settings.model_copy(update={"data_dir": str(folder)}), state, id(TASKS.get(settings.task)))


def own_digest(settings: DataSettings) -> str:
    """Return the digest of the samples in a user's files as they are now; "" of another set, or if they are gone.

    It is "" of a function's samples too: each call may draw others, and its code has a digest of its own.
    """
    if is_source(settings.dataset) and settings.dataset.partition(":")[0] not in READERS:
        return ""
    with suppress(UserError):
        if state := _state(settings.dataset, data_folder(settings.data_dir)):
            return _digest(settings, state)
    return ""


@lru_cache(maxsize=100)  # of the seeds of a table or sweep, which asks again and again
def _digest(settings: DataSettings, state: str) -> str:
    return load_dataset(settings).digest


def _state(dataset: str, data: Path) -> str:
    """Return a text that changes with a user's own files, so that a notebook loads a changed data set again.

    For a folder of images the text changes when images are added to its folders or deleted.
    """
    kind, _, pattern = dataset.partition(":")
    if kind in READERS:
        return fingerprint(matching(pattern, data))
    if is_source(dataset):
        return state_of(dataset)
    if not (own := {*dataset.split("+")} - LOADERS.keys()):
        return ""
    files = [file for name, file in own_files(data).items() if name in own]
    inside = [path for file in files if file.is_dir() for path in (*file.glob("*/"), *file.glob("*/*/"))]
    return fingerprint([*files, *sorted(inside)])


@lru_cache(maxsize=2)
def _load(settings: DataSettings, state: str, task_id: int) -> Dataset:
    if settings.dataset.partition(":")[0] not in SOURCES:
        _check_unused(settings, ("input", "label", "group"), "has no columns")
    if is_source(settings.dataset):
        by_image = ("features", "domains", "image-size", "train-per-class", "test-per-class")
        _check_unused(settings, by_image, "is no set of images")
        return load_source(settings, task_of(settings.task))
    names = parts_of(settings.dataset, data_folder(settings.data_dir))
    if len(names) > 1 and set(names) & ALONE:
        raise UserError(f"dataset = {settings.dataset!r}: only image sets can be joined by '+', not synthetic ones")
    domains = ", ".join(settings.domains)
    if len(set(settings.domains)) < len(settings.domains):
        raise UserError(f"domains = {domains!r}: one is named twice")
    if domains and len(names) > 1:
        raise UserError(f"domains = {domains!r}: needs a single set, dataset = {settings.dataset!r}")
    if set(names) & ALONE:
        _check_unused(settings, ("features", "image-size"), "is no set of images")
    listed = settings.features != "none"
    if listed and settings.image_size:
        raise UserError(f"image-size = {settings.image_size}: must be 0 with features = {settings.features!r}")
    known: dict[str, Source] = {}
    first_label, num_classes = [], 0
    for name in names:
        found = _sources(name, settings)
        if twice := known.keys() & found.keys():
            raise UserError(f"dataset = {settings.dataset!r}: {min(twice)!r} is in it twice")
        for part, source in found.items():
            known[part] = (_with_features if listed else _choose)(part, source, settings)
        first_label += [num_classes] * len(found)
        num_classes += next(iter(found.values())).num_classes
    sources = list(known.values())
    if len({(s.train[1].shape[1:], s.train[1].is_floating_point()) for s in sources}) > 1:
        raise UserError(f"dataset = {settings.dataset!r}: labels of several kinds; sets joined by '+' must have one")
    train, test = [source.train for source in sources], [source.test for source in sources]
    parts = _one_form([x for x, _ in train + test if isinstance(x, Tensor)], settings)
    splits = (parts[: len(sources)], parts[len(sources) :])
    train_x, test_x = (part[0] if len(part) == 1 else torch.cat(part) for part in splits)
    form = form_of(train_x, test_x, tokens=num_classes)
    if train_x.ndim == 4:
        samples = normalised(train_x, test_x, settings.normalise)
    else:
        samples = Samples(train_x), Samples(test_x)

    def labelled(x: Samples, split: Sequence[Split]) -> own.Split:
        """Return a split; each source's labels follow those of the sources before it."""
        y = torch.cat([y + first for (_, y), first in zip(split, first_label, strict=True)])
        return own.Split(x, y, [name for name, (_, y) in zip(known, split, strict=True) for _ in range(len(y))])

    task, whole = task_of(settings.task), labelled(samples[0], train)
    notes = tuple(f"{name}: {note}" for name, source in known.items() for note in source.notes)
    notes += features.notes(settings.features, settings.backbone_dir) if listed else ()
    output = task.output(whole.y, num_classes)
    data = own.dataset_of(settings.dataset, whole, labelled(samples[1], test), task, form, output, notes, known)
    folder = None if names[0] in LOADERS else own_files(data_folder(settings.data_dir)).get(settings.dataset)
    return replace(data, labels=tuple(class_names(folder))) if folder and folder.is_dir() else data


def _sources(name: str, settings: DataSettings) -> dict[str, Source]:
    """Return all sources of one set: its domains, which have the same classes, or the set itself."""
    loaded = LOADERS.get(name, _own)(name, settings)
    if isinstance(loaded, dict):
        return loaded
    if settings.domains:
        raise UserError(f"domains = {', '.join(settings.domains)!r}: dataset {name!r} has none; allowed is ''")
    return {name: loaded}


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
        known = one_of(name, dataset_names(str(data)))
        if name == OWN:  # of fedsub.run(…, model=, data=), or of an app
            what = "an object of the program that ran it; resume with model= and data=, or load its model.safetensors"
            raise UserError(f"dataset = {name!r}: {what}")
        raise UserError(f"dataset = {name!r}: no such name, and no {forms} in {data} or its subfolders; known: {known}")
    train, test = read_npz(file) if file.suffix == ".npz" else read_files(settings, file)
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
    if parts := sorted(name for name in known if re.match("(train|test)(ing)?$", name, re.IGNORECASE)):
        raise UserError(f"{folder}: {parts[0]}/ would be a domain; the folders of a split are train/ and test/")
    domains, classes = chosen_domains(settings, known), class_names(folder)
    return {n: Source(*read_files(settings, path, classes), len(classes), (HELD_OUT,)) for n, path in domains.items()}


def _with_features(name: str, source: Source, settings: DataSettings) -> Source:
    """Return a source with its chosen images as features."""
    x = [x if isinstance(x, Pictures) else Pictures.all_of(x) for x, _ in (source.train, source.test)]
    train, test = (x[0], source.train[1]), (x[1], source.test[1])
    chosen = _choose(name, replace(source, train=train, test=test), settings)

    def of(split: Split, random_crops: bool) -> Split:
        x, y = split
        assert isinstance(x, Pictures)
        return features.extracted(name, x, random_crops, settings.features, settings.backbone_dir), y

    return replace(chosen, train=of(chosen.train, name in features.CROPPED), test=of(chosen.test, False))


def _check_unused(settings: DataSettings, keys: Sequence[str], why: str) -> None:
    """Raise :class:`UserError` for a key that says something and would do nothing with this data set."""
    given, defaults = settings.toml(), DataSettings().toml()
    for key in keys:
        if given[key] != defaults[key]:
            what = f"must be {defaults[key]!r} with dataset = {settings.dataset!r}, which {why}"
            raise UserError(f"{key} = {given[key]!r}: {what}")


def _choose(name: str, source: Source, settings: DataSettings) -> Source:
    """Choose ``train_per_class`` and ``test_per_class`` images of a source."""
    (train_x, train_y), (test_x, test_y) = source.train, source.test
    if not (settings.train_per_class or settings.test_per_class):
        return source
    if train_y.ndim > 1 or train_y.is_floating_point():
        key = "train" if settings.train_per_class else "test"
        raise UserError(f"{key}-per-class = {getattr(settings, f'{key}_per_class')}: {name} has no classes; must be 0")

    def chosen(split: str, labels: Tensor, wanted: int | None) -> Tensor | slice:
        """Return the sorted indices of ``wanted`` random samples of every class, of all samples where it is None."""
        if wanted is None:
            return slice(None)
        order = torch.randperm(len(labels), generator=generator(settings.seed, name, split, "per class"))
        indices = [order[labels[order] == label][:wanted] for label in range(source.num_classes)]
        for label, found in enumerate(map(len, indices)):
            if found < wanted:
                images = "train images" if split == "train" else "test images, not even among left-over train images"
                available = f"class {label} of {name} has {found} {images}"
                raise UserError(f"{split}-per-class = {wanted}: {available}; expected at most that, or 0 for all")
        return torch.cat(indices).sort().values

    notes = source.notes
    wanted = settings.test_per_class
    train = chosen("train", train_y, settings.train_per_class)
    fewest = int(torch.bincount(test_y, minlength=source.num_classes).min())
    if wanted and wanted > fewest:
        left_over = torch.ones(len(train_y), dtype=torch.bool)
        left_over[train] = False
        test_x, test_y = train_x[left_over], train_y[left_over]
        note = f"all test images are training images left over by the choice ({fewest} a class in the test set)"
        notes += (f"{note}, {wanted} a class",)
    test = chosen("test", test_y, wanted)
    return replace(source, train=(train_x[train], train_y[train]), test=(test_x[test], test_y[test]), notes=notes)


def _one_form(parts: list[Tensor], settings: DataSettings) -> list[Tensor]:
    """Return the sources' samples in one shape: images as float32, or as uint8 if all are of this shape and type."""
    shape = tuple(parts[0].shape[1:])
    if len(shape) == 3:
        channels, height, width = (max(part.shape[axis] for part in parts) for axis in (1, 2, 3))
        shape = (channels, settings.image_size or height, settings.image_size or width)
    same = all(part.dtype == torch.uint8 and part.shape[1:] == shape for part in parts)
    values, size = math.prod(shape), 1 if same else torch.float32.itemsize
    check_memory(f"dataset = {settings.dataset!r}, samples of {values} values", size * values * sum(map(len, parts)))
    if len(shape) != 3 or same:
        return parts
    formed = []
    for part in parts:
        x = in_unit(part)
        if x.shape[2:] != shape[1:]:
            x = interpolate(x, size=list(shape[1:]), mode="bilinear", antialias=True)
        formed.append(x if x.shape[1] == shape[0] else x.repeat(1, shape[0], 1, 1))
    return formed
