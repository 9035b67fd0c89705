"""Data of a user's own: tensors, or map-style data sets of torch or the package datasets, as a :class:`Dataset`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.inputs import Batch, Form, Inputs, Shape, form_of, joined, shape_shown
from fedsub_app.common.own_code import OWN
from fedsub_app.common.tasks import NextToken, Task, are_next
from fedsub_app.data.samples import AnySamples, Dataset, LazySamples, Samples, channels_last

Collate = Callable[[list[Any]], Any]  # items -> (x, y), or a mapping with "label" or "labels"
ALLOWED = "must be (x, y) of tensors, (x, y, groups), or a map-style data set of (x, y)"
LABELS = ("label", "labels")
IN_MEMORY = 2**30  # bytes of samples of a map-style data set that are kept; larger ones are read when they are used
INTEGERS = (torch.int64, torch.int32, torch.bool)  # of tokens and masks


class Split(NamedTuple):
    """Training or test samples: ``groups`` are names, one a sample, or empty."""

    x: AnySamples
    y: Tensor
    groups: Sequence[str] = ()
    largest: Batch | None = None  # of lazy samples: one, with the largest of all at each position


def own_dataset(
    data: object,
    task: Task,
    output_for: Callable[[Shape], tuple[int, ...]] | None = None,
    collate: Collate | None = None,
    name: str = OWN,
) -> Dataset:
    """Return a user's ``(train, test)`` as a data set.

    Each is ``(x, y)``, ``(x, y, groups)``, or a map-style data set whose items are pairs, or mappings with ``label``. x
    is a tensor of numbers or int64 tokens, or a tuple or mapping of tensors. y is what the task takes, ``groups`` are
    one value a sample. ``output_for``: form of a sample -> shape of the network's output for it, by default what y
    needs; ``collate``: makes a batch of items of a map-style data set, by default stacks each tensor.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        what = f"a {type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else shown(data)
        raise UserError(f"data = {what}: must be (train, test), each of which {ALLOWED}")
    train = _split(data[0], "train", collate)
    test = _split(data[1], "test", collate, train)
    if len(test.y) and bool(train.groups) != bool(test.groups):
        kinds = ("groups", "no groups") if test.groups else ("no groups", "groups")
        raise UserError(f"test: {kinds[0]}: the training samples have {kinds[1]}")
    first, second = (form_of(one.x[:1] if len(one.y) else train.x[:1]) for one in (train, test))
    if shape_shown(first) != shape_shown(second):
        raise UserError(f"test: samples of shape {shape_shown(second)}: the training samples' is {shape_shown(first)}")
    if isinstance(first, Form) != isinstance(second, Form):  # of one shape: one tensor each
        kinds = ("numbers", "integers") if isinstance(second, Form) else ("integers", "numbers")
        raise UserError(f"test: x of {kinds[1]}: the training samples' is of {kinds[0]}")
    every = [one.x[:] if one.largest is None else one.largest for one in (train, test)]
    form, output = form_of(*every), None
    if output_for:
        output = output_for(form)
    elif isinstance(task, NextToken) and isinstance(every[0], Tensor) and _are_next(train):
        # One vocabulary: a text's first token is no label, its last one no input.
        size = 1 + max(int(part.max()) for part in (*every, train.y, test.y) if isinstance(part, Tensor) and len(part))
        form, output = form_of(*every, tokens=size), task.output(train.y, size)
    return dataset_of(name, train, test, task, form, output)


def dataset_of(
    name: str,
    train: Split,
    test: Split,
    task: Task,
    form: Shape,
    output: tuple[int, ...] | None = None,
    notes: tuple[str, ...] = (),
    sources: Iterable[str] = (),
) -> Dataset:
    """Return the data set of two splits; ``output``: shape of an output; ``sources``: default the sorted groups."""
    where = "" if name == OWN else f"dataset = {name!r}, "
    targets, outputs = [], output[-1] if output else 0
    if not len(train.y):  # such as texts of one token each
        raise UserError(f"{where}train: no samples")
    for part, one in (("train", train), ("test", test)):
        try:
            outputs = outputs or max(map(task.outputs, (train.y, test.y)))
            output = output or task.output(train.y, outputs)
            targets.append(task.targets(one.y, output))
        except ValueError as error:
            raise UserError(f"{where}{part}: {error}") from None
    assert output
    names = tuple(sources) or tuple(sorted({*train.groups, *test.groups})) or (name,)
    numbers = {group: number for number, group in enumerate(names)}
    train_source, test_source = (
        torch.tensor([numbers[group] for group in one.groups]) if one.groups else torch.zeros(len(one.y)).long()
        for one in (train, test)
    )
    train_y, test_y = targets
    return Dataset(*(name, train.x, train_y, train_source, test.x, test_y, test_source), outputs, names, notes, form)


def _are_next(split: Split) -> bool:
    """Say whether the labels are the next tokens; the first samples tell it of those that are read one by one."""
    x = split.x[:] if split.largest is None else split.x[:10]
    return isinstance(x, Tensor) and are_next(x, split.y[: len(x)])


def _split(data: object, name: str, collate: Collate | None, like: Split | None = None) -> Split:
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        return _read(data, name, collate, like)
    x, y, groups = (*data, ())[:3]
    given = () if groups is None else groups.tolist() if hasattr(groups, "tolist") else [*groups]
    if any(isinstance(group, float) for group in given):
        raise UserError(f"{name}: groups of floats: must be names or integers; weights of samples are not taken")
    groups = [str(group) for group in given]
    if not isinstance(y, Tensor):
        raise UserError(f"{name} = ({type(x).__name__}, {type(y).__name__}): {ALLOWED}")
    stored = _inputs(x, name)
    _check_dense(y, f"{name}: y")
    _check_pairs(stored, y, name, axes=2)
    if groups and len(groups) != len(y):
        raise UserError(f"{name}: {len(groups)} groups for {len(y)} samples: must be one a sample")
    return Split(Samples(stored), y.detach(), groups)


def _check_pairs(x: Batch, y: Tensor, name: str, axes: int = 1) -> None:
    """Refuse x and y that are not of the same samples; ``axes``: the least number of x's, where it is one tensor."""
    sizes = {tensor.shape[:1] for tensor in (x.tensors if isinstance(x, Inputs) else (x,))}
    if y.ndim < 1 or sizes != {y.shape[:1]} or (isinstance(x, Tensor) and x.ndim < axes):
        found = f"x of shape {_shapes(x)}, y of shape {tuple(y.shape)}, {y.dtype}"
        raise UserError(f"{name}: {found}: must be [n, ...] and [n] or [n, ...]")


def _shapes(x: Batch) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else [tuple(tensor.shape) for tensor in x.tensors]


def _inputs(x: object, name: str) -> Batch:
    """Return x as one tensor or several, numbers as float32, tokens as int64."""
    if isinstance(x, Inputs):
        return x.map(lambda tensor: _tensor(tensor, name))
    if isinstance(x, Mapping) and x:
        return Inputs.of({str(key): _tensor(value, f"{name}: {key!r}") for key, value in x.items()})
    if isinstance(x, tuple | list) and x:
        return Inputs.of([_tensor(value, name) for value in x])
    return _tensor(x, name)


def _tensor(x: object, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise UserError(f"{name}: a sample is no tensor but {shown(x)[:60]} ({type(x).__name__}); {ALLOWED}")
    _check_dense(x, f"{name}: x")
    if x.is_floating_point():
        x = x.detach().float()
        if not bool(x.isfinite().all()):
            raise UserError(f"{name}: x: must be finite numbers")
        return channels_last(x) if x.ndim == 4 else x.contiguous()
    if x.dtype not in INTEGERS:
        raise UserError(f"{name}: x of dtype {x.dtype}: must be floating-point, or int64 or bool for tokens and masks")
    return x.detach() if x.dtype == torch.bool else x.detach().long()


def _check_dense(x: Tensor, what: str) -> None:
    """Refuse sparse and nested tensors, and those of the device "meta", which have no values."""
    if x.layout != torch.strided or x.is_nested or x.is_meta:
        kind = "nested" if x.is_nested else f"{x.layout} on {x.device}"
        raise UserError(f"{what}: is {kind}; must be a dense tensor with values")


# --- map-style data sets ----------------------------------------------------------------------------------------------


def _read(data: Any, name: str, collate: Collate | None, like: Split | None) -> Split:
    """Return a map-style data set: in memory where it is small, else read when it is used.

    ``like``: the form of its samples if it has none; ``None``: then it is refused.
    """
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | dict | Tensor):
        what = "a Tensor" if isinstance(data, Tensor) else shown(data)
        raise UserError(f"{name} = {what}: {ALLOWED}")
    if not len(data):
        if like:
            return Split(Samples(like.x[:1][:0]), like.y[:0])
        raise UserError(f"{name}: no samples")
    if hasattr(data, "with_format") and not data.format["type"]:  # the package datasets, without the user's own format
        data = data.with_format("torch", data.format["columns"])

    def batch(positions: list[int]) -> tuple[Batch, Tensor]:
        try:
            x, y = _pair((collate or default_collate)([data[position] for position in positions]), name)
            stored = _inputs(x, name)
            _check_pairs(stored, y, name)
            return stored, y
        except UserError:
            raise
        except Exception as error:  # code of others
            what = "collate" if collate else "an item"
            raise UserError(f"{name}: {what} of samples {positions[:3]}: {one_line(error)[:200]}; {ALLOWED}") from error

    first = largest = batch([0])[0]
    lazy = first.nbytes * len(data) > IN_MEMORY
    parts = []
    try:
        for x, y in (batch([k]) for k in range(len(data))):
            parts.append((first if lazy and _shapes(x) == _shapes(first) else x, y))
            largest = joined([largest, x], lambda two: torch.stack(two).amax(0)) if lazy else largest
        y = torch.cat([y for _, y in parts])
        if lazy:
            return Split(LazySamples(lambda positions: batch(positions)[0], torch.arange(len(data))), y, (), largest)
        return Split(Samples(_inputs(joined([x for x, _ in parts], torch.cat), name)), y)
    except ValueError as error:
        raise UserError(f"{name}: an item {error}") from None
    except RuntimeError:
        for part, every in (("x", [x[0] for x, _ in parts]), ("y", [y[0] for _, y in parts])):
            if len(shapes := sorted({str(_shapes(one)) for one in every})) > 1:
                raise UserError(f"{name}: {part} of shapes {' and '.join(shapes[:2])}: must be one shape") from None
        raise


def _pair(item: Any, name: str) -> tuple[Any, Tensor]:
    if isinstance(item, Mapping):
        key = next((key for key in LABELS if key in item), None)
        rest = {k: value for k, value in item.items() if k != key}
        if key is None or not rest:
            raise UserError(f"{name}: an item has {', '.join(map(str, item))}: must have label or labels, and others")
        return (next(iter(rest.values())) if len(rest) == 1 else rest), torch.as_tensor(item[key])
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(f"{name}: an item is no (x, y) but {shown(item)[:60]}; {ALLOWED}")
    return item[0], torch.as_tensor(item[1])
