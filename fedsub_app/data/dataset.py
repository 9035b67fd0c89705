"""A data set as tensors: sources chosen per class, brought to one form, joined, normalised."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import form_of
from fedsub_app.common.machine import check_memory
from fedsub_app.common.seeds import generator
from fedsub_app.data import features, own, synthetic
from fedsub_app.data.features import Pictures
from fedsub_app.data.known import Source, Split
from fedsub_app.data.names import ALIASES, data_folder
from fedsub_app.data.samples import Dataset, Samples, in_unit, normalised
from fedsub_app.data.settings import DataSettings, is_source
from fedsub_app.data.sources import check_hidden, load_sources
from fedsub_app.data.tables import load_source
from fedsub_app.tasks import task_of

ALONE = {*synthetic.NAMES, "diabetes", "python-sources"}  # sets without images


def load_dataset(settings: DataSettings) -> Dataset:
    """Return the data set, normalised, images channels-last; loaded once per process, so treat it as read-only."""
    # The folder is part of the key: the environment may change between calls.
    return _load(settings.model_copy(update={"data_dir": str(data_folder(settings.data_dir))}))


@lru_cache(maxsize=2)
def _load(settings: DataSettings) -> Dataset:
    if is_source(settings.dataset):
        return load_source(settings, task_of(settings.task))
    named = settings.dataset.split("+")
    for part in named:
        check_hidden(part, data_folder(settings.data_dir))
    names = [name for part in named for name in ALIASES.get(part, part).split("+")]
    if len(names) > 1 and set(names) & ALONE:
        raise UserError(f"dataset = {settings.dataset!r}: only image sets can be joined by '+', not synthetic ones")
    domains = ", ".join(settings.domains)
    if len(set(settings.domains)) < len(settings.domains):
        raise UserError(f"domains = {domains!r}: one is named twice")
    if domains and len(names) > 1:
        raise UserError(f"domains = {domains!r}: needs a single set, dataset = {settings.dataset!r}")
    listed, features_key = settings.features != "none", f"features = {settings.features!r}"
    if listed and set(names) & ALONE:
        raise UserError(f"{features_key}: must be 'none' with dataset = {settings.dataset!r}: no images")
    if listed and settings.image_size:
        raise UserError(f"image-size = {settings.image_size}: must be 0 with {features_key}")
    known: dict[str, Source] = {}
    first_label, num_classes = [], 0
    for name in names:
        found = load_sources(name, settings)
        if twice := known.keys() & found.keys():
            raise UserError(f"dataset = {settings.dataset!r}: {min(twice)!r} is in it twice")
        for part, source in found.items():
            if listed:
                source = replace(source, train=_pictures(source.train), test=_pictures(source.test))
            chosen = _choose(part, source, settings)
            known[part] = _with_features(part, chosen, settings) if listed else chosen
        first_label += [num_classes] * len(found)
        num_classes += next(iter(found.values())).num_classes
    sources = list(known.values())
    train, test = [source.train for source in sources], [source.test for source in sources]
    parts = _one_form([x for x, _ in train + test if isinstance(x, Tensor)], settings)
    splits = (parts[: len(sources)], parts[len(sources) :])
    train_x, test_x = (part[0] if len(part) == 1 else torch.cat(part) for part in splits)
    if train_x.ndim == 4:
        train_samples, test_samples = normalised(train_x, test_x, settings.normalise)
    else:
        train_samples, test_samples = Samples(train_x), Samples(test_x)
    task, train_y = task_of(settings.task), _labels(train, first_label)
    return own.dataset_of(
        settings.dataset,
        own.Split(train_samples, train_y, _groups(known, train)),
        own.Split(test_samples, _labels(test, first_label), _groups(known, test)),
        task,
        form_of(train_x, test_x, tokens=num_classes),
        task.output(train_y, num_classes),
        tuple(f"{name}: {note}" for name, source in known.items() for note in source.notes)
        + (features.notes(settings.features, settings.backbone_dir) if listed else ()),
        known,
    )


def _labels(splits: Sequence[Split], first_label: Sequence[int]) -> Tensor:
    """Return the labels of several sources; those of each begin behind the ones before."""
    return torch.cat([y + first for (_, y), first in zip(splits, first_label, strict=True)])


def _groups(names: Iterable[str], splits: Sequence[Split]) -> list[str]:
    """Return the source of each sample."""
    return [name for name, (_, y) in zip(names, splits, strict=True) for _ in range(len(y))]


def _pictures(split: Split) -> Split:
    """Return a split whose images are looked at one by one."""
    x, y = split
    return (x if isinstance(x, Pictures) else Pictures.all_of(x)), y


def _with_features(name: str, source: Source, settings: DataSettings) -> Source:
    def of(split: Split, random_crops: bool) -> Split:
        x, y = split
        assert isinstance(x, Pictures)
        return features.extracted(name, x, random_crops, settings.features, settings.backbone_dir), y

    return replace(source, train=of(source.train, name in features.CROPPED), test=of(source.test, False))


def _choose(name: str, source: Source, settings: DataSettings) -> Source:
    """Choose ``train_per_class`` and ``test_per_class`` images of a source."""
    (train_x, train_y), (test_x, test_y) = source.train, source.test
    if not (settings.train_per_class or settings.test_per_class):
        return source
    if train_y.ndim > 1 or train_y.is_floating_point():
        key = "train" if settings.train_per_class else "test"
        raise UserError(f"{key}-per-class = {getattr(settings, f'{key}_per_class')}: {name} has no classes; must be 0")
    notes = source.notes
    wanted = settings.test_per_class
    train = _per_class(name, "train", train_y, source.num_classes, settings.train_per_class, settings.seed)
    fewest = int(torch.bincount(test_y, minlength=source.num_classes).min())
    if wanted and wanted > fewest:
        left_over = torch.ones(len(train_y), dtype=torch.bool)
        left_over[train] = False
        test_x, test_y = train_x[left_over], train_y[left_over]
        note = f"all test images are training images left over by the choice ({fewest} a class in the test set)"
        notes += (f"{note}, {wanted} a class",)
    test = _per_class(name, "test", test_y, source.num_classes, wanted, settings.seed)
    train_x = train_x[train] if settings.train_per_class else train_x  # all of them: without a copy
    test_x = test_x[test] if wanted else test_x
    return replace(source, train=(train_x, train_y[train]), test=(test_x, test_y[test]), notes=notes)


def _per_class(name: str, split: str, labels: Tensor, num_classes: int, wanted: int | None, seed: int) -> Tensor:
    """Return the sorted indices of ``wanted`` random samples of every class, of all samples where it is None."""
    if wanted is None:
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=generator(seed, name, split, "per class"))
    chosen = [order[labels[order] == label][:wanted] for label in range(num_classes)]
    for label, indices in enumerate(chosen):
        if len(indices) < wanted:
            source = "train images" if split == "train" else "test images, not even among left-over train images"
            available = f"class {label} of {name} has {len(indices)} {source}"
            raise UserError(f"{split}-per-class = {wanted}: {available}; expected at most that, or 0 for all")
    return torch.cat(chosen).sort().values


def _one_form(parts: list[Tensor], settings: DataSettings) -> list[Tensor]:
    """Bring the sources' samples to one shape: float32, or images that are uint8 and have that shape stay so.

    :class:`UserError` where they would not fit into the memory.
    """
    shape = tuple(parts[0].shape[1:])
    if len(shape) == 3:
        channels, height, width = (max(part.shape[axis] for part in parts) for axis in (1, 2, 3))
        shape = (channels, settings.image_size or height, settings.image_size or width)
    same = all(part.dtype == torch.uint8 and part.shape[1:] == shape for part in parts)
    values, size = math.prod(shape), 1 if same else torch.float32.itemsize
    needed = size * values * sum(map(len, parts))
    check_memory(f"dataset = {settings.dataset!r}, samples of {values} values", needed)
    if len(shape) != 3 or same:
        return parts
    formed = []
    for part in parts:
        x = in_unit(part)
        if x.shape[2:] != shape[1:]:
            x = interpolate(x, size=list(shape[1:]), mode="bilinear", antialias=True)
        formed.append(x if x.shape[1] == shape[0] else x.repeat(1, shape[0], 1, 1))
    return formed
