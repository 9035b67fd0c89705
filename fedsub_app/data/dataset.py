"""A data set as tensors: sources chosen per class, brought to one form, joined, normalised."""

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import form_of
from fedsub_app.common.memory import check_memory
from fedsub_app.common.progress import show_step
from fedsub_app.common.seeds import generator
from fedsub_app.data import features, synthetic
from fedsub_app.data.features import Pictures
from fedsub_app.data.known import Request, Source, Split
from fedsub_app.data.names import ALIASES, data_folder
from fedsub_app.data.samples import Dataset, Samples, in_unit, normalised
from fedsub_app.data.settings import DataSettings, is_source
from fedsub_app.data.sources import check_hidden, load_sources
from fedsub_app.data.tables import load_source
from fedsub_app.tasks import Task, task_of

ALONE = {*synthetic.NAMES, "diabetes", "python-sources"}  # sets without images


def load_dataset(settings: DataSettings) -> Dataset:
    """Return the data set, normalised, images channels-last; loaded once per process, so treat it as read-only."""
    # The folder is part of the key: the environment may change between calls.
    return _load(settings.model_copy(update={"data_dir": str(data_folder(settings.data_dir))}))


@lru_cache(maxsize=2)
def _load(settings: DataSettings) -> Dataset:
    show_step(f"reading {settings.dataset}")
    if is_source(settings.dataset):
        return load_source(settings, task_of(settings.task))
    for part in settings.dataset.split("+"):
        check_hidden(part, data_folder(settings.data_dir))
    names = "+".join(ALIASES.get(part, part) for part in settings.dataset.split("+")).split("+")
    if len(names) > 1 and set(names) & ALONE:
        raise UserError(f"dataset = {settings.dataset!r}: only image sets can be joined by '+', not synthetic ones")
    domains = settings.domains
    if len(set(domains)) < len(domains):
        raise UserError(f"domains = {', '.join(domains)!r}: one is named twice")
    if domains and len(names) > 1:
        raise UserError(f"domains = {', '.join(domains)!r}: needs a single set, dataset = {settings.dataset!r}")
    listed = settings.features != "none"
    if listed and set(names) & ALONE:
        raise UserError(
            f"features = {settings.features!r}: must be 'none' with dataset = {settings.dataset!r}: no images"
        )
    if listed and settings.image_size:
        raise UserError(f"image-size = {settings.image_size}: must be 0 with features = {settings.features!r}")
    known: dict[str, Source] = {}
    first_label, num_classes = [], 0
    for name in names:
        data = data_folder(settings.data_dir)
        found = load_sources(Request(name, data, settings.seed, settings.image_size, domains, listed))
        if twice := known.keys() & found.keys():
            raise UserError(f"dataset = {settings.dataset!r}: {min(twice)!r} is in it twice")
        for part, source in found.items():
            chosen = _choose(part, _pictures(source) if listed else source, settings)
            known[part] = _with_features(part, chosen, settings) if listed else chosen
        first_label += [num_classes] * len(found)
        num_classes += next(iter(found.values())).num_classes
    sources = list(known.values())
    train, test = [source.train for source in sources], [source.test for source in sources]
    all_x = [x for x, _ in train + test if isinstance(x, Tensor)]
    shape = _shape(all_x, settings.image_size)
    _check_size(all_x, shape, settings.dataset)
    train_x, test_x = _one_form(all_x, shape, len(sources))
    if len(shape) == 3:
        train_samples, test_samples = normalised(train_x, test_x, settings.normalise)
    else:
        train_samples, test_samples = Samples(train_x), Samples(test_x)
    return _as_the_task_takes_it(
        task_of(settings.task),
        Dataset(
            name=settings.dataset,
            train_x=train_samples,
            train_y=torch.cat([y + first for (_, y), first in zip(train, first_label, strict=True)]),
            train_source=torch.cat([torch.full((len(y),), i) for i, (_, y) in enumerate(train)]),
            test_x=test_samples,
            test_y=torch.cat([y + first for (_, y), first in zip(test, first_label, strict=True)]),
            test_source=torch.cat([torch.full((len(y),), i) for i, (_, y) in enumerate(test)]),
            num_classes=num_classes,
            sources=tuple(known),
            notes=tuple(f"{name}: {note}" for name, source in known.items() for note in source.notes)
            + (features.notes(settings.features, settings.backbone_dir) if listed else ()),
        ),
    )


def _as_the_task_takes_it(task: Task, data: Dataset) -> Dataset:
    """Return the data set with y checked; :class:`UserError` where it is not the task's."""
    try:
        output = task.output(data.train_y, data.num_classes)
        train_y, test_y = (task.targets(y, output) for y in (data.train_y, data.test_y))
    except ValueError as error:
        raise UserError(f"dataset = {data.name!r}: not with this task: {error}") from None
    stored = [torch.as_tensor(x.stored) for x in (data.train_x, data.test_x) if isinstance(x, Samples)]
    tokens = None if stored[0].dtype != torch.int64 else form_of(*stored, tokens=data.num_classes)
    return replace(data, train_y=train_y, test_y=test_y, form=tokens)


def _pictures(source: Source) -> Source:
    """Return a source whose images are looked at one by one."""

    def lazily(split: Split) -> Split:
        x, y = split
        return (x if isinstance(x, Pictures) else Pictures.all_of(x)), y

    return replace(source, train=lazily(source.train), test=lazily(source.test))


def _with_features(name: str, source: Source, settings: DataSettings) -> Source:
    """Return a source with the features of its images in their place."""

    def of(split: Split, random_crops: bool) -> Split:
        x, y = split
        assert isinstance(x, Pictures)
        return features.extracted(name, x, random_crops, settings.features, settings.backbone_dir), y

    return replace(source, train=of(source.train, source.random_crops), test=of(source.test, False))


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


def _shape(parts: list[Tensor], image_size: int | None) -> tuple[int, ...]:
    if parts[0].ndim != 4:
        return tuple(parts[0].shape[1:])
    channels, height, width = (max(part.shape[axis] for part in parts) for axis in (1, 2, 3))
    return (channels, image_size or height, image_size or width)


def _stay(parts: list[Tensor], shape: tuple[int, ...]) -> bool:
    """Say whether all samples are images of bytes that have this shape already: they stay so."""
    return all(part.dtype == torch.uint8 and part.shape[1:] == shape for part in parts)


def _check_size(parts: list[Tensor], shape: tuple[int, ...], name: str) -> None:
    """Raise :class:`UserError` where all samples in one form would not fit into the memory."""
    count, values = sum(len(part) for part in parts), math.prod(shape)
    size = 1 if _stay(parts, shape) else torch.float32.itemsize
    check_memory(f"dataset = {name!r}, samples of {values} values", size * values * count)


def _one_form(parts: list[Tensor], shape: tuple[int, ...], num_sources: int) -> tuple[Tensor, Tensor]:
    """Bring the sources' tensors (all training, then all test) to one shape: float32, or images that are uint8 stay."""
    if len(shape) == 3 and not _stay(parts, shape):
        channels, *size = shape
        for i, part in enumerate(parts):
            x = in_unit(part)
            if list(x.shape[2:]) != size:
                x = interpolate(x, size=size, mode="bilinear", antialias=True)
            parts[i] = x if x.shape[1] == channels else x.repeat(1, channels, 1, 1)
    train, test = parts[:num_sources], parts[num_sources:]
    return (train[0], test[0]) if num_sources == 1 else (torch.cat(train), torch.cat(test))
