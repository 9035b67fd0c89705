"""Data in a source: ``dataset = "csv:FILE"``, ``tsv:``, ``parquet:``, ``jsonl:``, ``hf:NAME`` or ``FILE.py:NAME``.

The columns of a table are numbers, vectors, texts or images: the keys ``input``, ``label`` and ``group`` name them.
"""

import inspect
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, explained, one_line, shown
from fedsub_app.common.inputs import Batch, Inputs, Shape, form_of
from fedsub_app.common.own_code import named_code
from fedsub_app.common.tasks import NextToken, Task
from fedsub_app.data.files import HOLD_OUT, hold_out
from fedsub_app.data.names import data_folder, in_data_folder, matching
from fedsub_app.data.own import Split, dataset_of, own_dataset
from fedsub_app.data.samples import AnySamples, Dataset, Samples, normalised
from fedsub_app.data.settings import READERS, SOURCES, DataSettings
from fedsub_app.data.text import next_tokens, padded, tokenizer_of

if TYPE_CHECKING:
    import pandas as pd

IDS = ("input_ids", "attention_mask")  # as transformers names them
SPLIT, FILE = "split", "file"  # column of "train" or "test"; column that is added: name of a row's file
LARGEST = float(torch.finfo(torch.float32).max)  # beyond it a number counts as infinite
NUMBERS = "biuf"  # kinds of NumPy's types
HELD_OUT = f"the table comes without a test part: every {HOLD_OUT}th sample of a class or group is one"


def load_source(wanted: DataSettings, task: Task) -> Dataset:
    if wanted.dataset.partition(":")[0] not in SOURCES:
        return _of_code(wanted, task)
    train, test, notes = _rows(wanted, task)
    data = _dataset(wanted, task, train, test, notes)
    if not task.classes:
        return data
    labels = _class_names(wanted, (train, test))
    if untaught := sorted({*data.test_y.tolist()} - {*data.train_y.tolist()}):
        notes = (*notes, f"no training sample of the class {', '.join(labels[number] for number in untaught)}")
    return replace(data, labels=labels, notes=notes)


def unseen_rows(wanted: DataSettings, task: Task, file: Path) -> tuple[AnySamples, list[str]]:
    """Return another file's rows as inputs, made like the training inputs, and the classes; ignore its labels."""
    train, test, notes = _rows(wanted, task)
    kind = file.suffix.removeprefix(".")
    if kind not in READERS:
        raise UserError(f"{file}: must end in .{', .'.join(READERS)}, as the run's data are rows of a table")
    rows = _read(kind, file, wanted)
    if not len(rows):
        raise UserError(f"dataset = {str(file)!r}: no rows")
    unseen = rows.assign(**{name: train[name].iloc[0] for name in (*wanted.label, wanted.group) if name})
    data = _dataset(wanted.model_copy(update={"dataset": str(file)}), task, train, unseen, notes)
    return data.test_x, [*(_class_names(wanted, (train, test)) if task.classes else wanted.label)]


def _rows(wanted: DataSettings, task: Task) -> "tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]":
    train, test, notes = _of_hub(wanted) if wanted.dataset.startswith("hf:") else _of_files(wanted)
    if task.classes and any(_mixed(rows, name) for rows in (train, test) for name in wanted.label):
        train, test = _in_words(train, wanted), None if test is None else _in_words(test, wanted)
    if test is None:
        held_out = _held_out(train, wanted, task)
        train, test, notes = train[~held_out], train[held_out], (*notes, HELD_OUT)
    for name, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"dataset = {wanted.dataset!r}: {'; '.join((f'no {name} samples', *notes))}")
    return train, test, notes


def _mixed(rows: "pd.DataFrame | None", name: str) -> bool:
    """Say whether a column mixes words and others, such as classes 0 and 1 of a file and 1 and "other" of another."""
    return rows is not None and name in rows and len({isinstance(value, str) for value in rows[name].dropna()}) > 1


def _in_words(rows: "pd.DataFrame", wanted: DataSettings) -> "pd.DataFrame":
    """Return a table whose labels are words: ``1`` and ``"1"`` are one class."""

    def word(value: Any) -> Any:
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value) if whole else value) if whole or isinstance(value, int) else value

    return rows.assign(**{name: rows[name].map(word) for name in wanted.label if name in rows})


# --- where rows come from ---------------------------------------------------------------------------------------------


def _of_code(wanted: DataSettings, task: Task) -> Dataset:
    """Call a function of the user, with ``seed`` and ``folder`` (the data folder) if its parameters name them."""
    load = named_code("dataset", wanted.dataset)
    known = {"seed": wanted.seed, "folder": data_folder(wanted.data_dir)}
    try:
        named = inspect.signature(load).parameters
        data = load(**{key: value for key, value in known.items() if key in named})
    except Exception as error:  # code of others
        raise UserError(f"dataset = {wanted.dataset!r}: {one_line(error)[:300]}") from error
    return own_dataset(data, task, name=wanted.dataset)


def _of_files(wanted: DataSettings) -> "tuple[pd.DataFrame, pd.DataFrame | None, tuple[str, ...]]":
    """Return training and test rows of files; a column ``split`` says which are which, else there are no test rows."""
    import pandas as pd

    kind, _, pattern = wanted.dataset.partition(":")
    data = data_folder(wanted.data_dir)
    files = matching(pattern, data)
    if not files:
        here = "" if Path(pattern).anchor else f" here or in {data}"
        raise UserError(f"dataset = {wanted.dataset!r}: no such file{here}")
    folder = os.path.commonpath([file.parent for file in files])
    alike = len({file.stem for file in files}) < len(files)  # north/ward1.csv and south/ward1.csv
    names = [str(file.relative_to(folder).with_suffix("")) if alike else file.stem for file in files]
    parts = [_read(kind, file, wanted, name) for file, name in zip(files, names, strict=True)]
    rows = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)  # columns of none have no types
    if SPLIT not in rows:
        return rows, None, ()
    if odd := set(rows[SPLIT]) - {"train", "test"}:
        raise UserError(f"{files[0]}: column {SPLIT!r} has {shown(min(map(str, odd)))}: must be 'train' or 'test'")
    test = rows[SPLIT] == "test"
    return rows[~test].drop(columns=SPLIT), rows[test].drop(columns=SPLIT), ()


def _read(kind: str, file: Path, wanted: DataSettings, name: str = "") -> "pd.DataFrame":
    """Return the table in a file; if a key names the column ``file`` and there is none, add it: the file's ``name``."""
    import pandas as pd

    reader, options = READERS[kind]
    with explained(f"{file}: not a readable {kind} file", 200):
        rows: pd.DataFrame = getattr(pd, reader)(file, **options)
    rows.columns = rows.columns.map(str)  # those of an array are integers
    made = FILE in (*wanted.input, *wanted.label, wanted.group) and FILE not in rows
    return rows.assign(**{FILE: name}) if made else rows


def _of_hub(wanted: DataSettings) -> "tuple[pd.DataFrame, pd.DataFrame | None, tuple[str, ...]]":
    """Return training and test rows of a data set of the package datasets, a folder's or the hub's, cached there."""
    from datasets import load_dataset

    name = os.path.expanduser(wanted.dataset.removeprefix("hf:"))
    with explained(f"dataset = {wanted.dataset!r}:", 300):  # no network, no such name, a script of theirs
        splits = load_dataset(name)
    other = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits:
        raise UserError(f"dataset = {wanted.dataset!r}: has {', '.join(splits)}; must have train")
    frames = [_frame(splits[split]) for split in ("train", other) if split]
    return frames[0], frames[1] if other else None, (f"tested on its {other} split",) * (other == "validation")


def _frame(rows: Any) -> "pd.DataFrame":
    """Return a split as a table, in which an image is an array."""
    import pandas as pd

    images = [name for name, kind in rows.features.items() if type(kind).__name__ == "Image"]
    table: pd.DataFrame = rows.remove_columns(images).to_pandas()
    table.attrs |= {name: kind.names for name, kind in rows.features.items() if type(kind).__name__ == "ClassLabel"}
    with explained(f"image column {', '.join(images)!r}:", 200):  # a file that is none
        return table.assign(**{name: [_pixels(image, name) for image in rows[name]] for name in images})


def _pixels(image: Any, column: str) -> Any:
    """Return an image as uint8 [height, width, 3]; 16 bits a channel would all be white."""
    if image is None:
        raise UserError(f"column {column!r} has empty values; must have none")
    if image.mode[0] in "IF":
        raise UserError(f"column {column!r}: pixels of mode {image.mode}, expected 8 bits a channel")
    return np.asarray(image.convert("RGB"))


def _held_out(rows: "pd.DataFrame", wanted: DataSettings, task: Task) -> "pd.Series[bool]":
    """Return which rows are for testing: every sixth of a class, or of a group where there are no classes."""
    import pandas as pd

    if task.classes:
        _classes(wanted, (rows,))
    by = wanted.label if task.classes else (wanted.group,) if wanted.group else ()
    kinds = pd.factorize(_column(rows, wanted, by[0]))[0] if by else np.zeros(len(rows), dtype=np.int64)
    return pd.Series(hold_out(torch.from_numpy(kinds.astype(np.int64))).numpy(), index=rows.index)


# --- columns ----------------------------------------------------------------------------------------------------------


def _dataset(
    wanted: DataSettings, task: Task, train: "pd.DataFrame", test: "pd.DataFrame", notes: tuple[str, ...]
) -> Dataset:
    both = (train, test)
    groups = [list(map(str, _column(rows, wanted, wanted.group))) if wanted.group else [] for rows in both]
    y = [] if isinstance(task, NextToken) else _labels(wanted, task, both)
    names = wanted.input or tuple(n for n in train.columns if n not in (*wanted.label, wanted.group))
    columns = [[_column(rows, wanted, name) for name in names] for rows in both]
    form: Shape | None = None
    output: tuple[int, ...] | None = None
    if not names:
        raise UserError(f"dataset = {wanted.dataset!r}: no column of inputs besides {', '.join(train.columns)}")
    if task.classes and (both_ways := {*names} & {*wanted.label}):
        raise UserError(f"input = {', '.join(names)!r}: {min(both_ways)!r} is the label; must be other columns")
    cell = columns[0][0].iloc[0]
    if getattr(cell, "ndim", 0) == 3 and len(names) == 1:
        x = _images(wanted, [part[0] for part in columns])
    elif all(c.dtype.kind in NUMBERS or isinstance(c.iloc[0], list | np.ndarray) for c in columns[0]):
        x = _numbers(wanted, columns)
    elif len(names) == 1 and isinstance(cell, str):
        texts = [[str(text) for text in part[0]] for part in columns]
        encode, size, pad = tokenizer_of(in_data_folder(wanted.tokenizer, wanted.data_dir), texts[0], wanted.vocabulary)
        stored: list[Batch]
        if isinstance(task, NextToken):
            parts = [next_tokens(encode(part), wanted.tokens) for part in texts]
            stored, y, output = [x for x, _, _ in parts], [y for _, y, _ in parts], (wanted.tokens, size)
            rows = [text.tolist() for _, _, text in parts]
            groups = [[of[n] for n in part] if of else [] for of, part in zip(groups, rows, strict=True)]
        else:
            ids = (padded(encode(part), wanted.tokens, pad) for part in texts)
            stored = [Inputs.of(dict(zip(IDS, part, strict=True))) for part in ids]
        x, form = [Samples(part) for part in stored], form_of(*stored, tokens=size)
    else:
        kinds = ", ".join(f"{name} ({column.dtype})" for name, column in zip(names, columns[0], strict=True))
        what = f"must be numbers or vectors, or one column of texts; they are {kinds}"
        raise UserError(f"input = {', '.join(names)!r}: {what}")
    if isinstance(task, NextToken) and not y:
        raise UserError(f"task = {wanted.task!r}: input = {', '.join(names)!r}: must be one column of texts")
    first, second = (Split(*split) for split in zip(x, y, groups, strict=True))
    return dataset_of(wanted.dataset, first, second, task, form or tuple(x[0].shape[1:]), output, notes)


def _column(rows: "pd.DataFrame", wanted: DataSettings, name: str) -> "pd.Series[Any]":
    """Return a column without empty or infinite values."""
    if name not in rows:
        allowed = ", ".join(map(str, rows.columns))
        raise UserError(f"dataset = {wanted.dataset!r}: no column {name!r}; allowed: {allowed}")
    column = rows[name]
    empty = column.isna()  # pandas' own types have empty values that isfinite does not know
    if bad := int((empty | (column.abs() > LARGEST) if column.dtype.kind == "f" else empty).sum()):
        what = f"column {name!r} has {bad} empty or infinite values"
        words = "; words such as NA, None and null count as empty" * wanted.dataset.startswith(("csv:", "tsv:"))
        raise UserError(f"dataset = {wanted.dataset!r}: {what}; must have none{words}")
    return column


def _images(wanted: DataSettings, columns: "Sequence[pd.Series[Any]]") -> list[Samples]:
    shapes = sorted({image.shape for column in columns for image in column})
    if len(shapes) > 1:
        raise UserError(f"dataset = {wanted.dataset!r}: images of {shapes[0]} and {shapes[-1]}: must be of one size")
    x = [torch.from_numpy(np.stack(list(column))).permute(0, 3, 1, 2).contiguous() for column in columns]
    return list(normalised(x[0], x[1], wanted.normalise))


def _numbers(wanted: DataSettings, columns: "Sequence[Sequence[pd.Series[Any]]]") -> list[Samples]:
    """Return columns of numbers and vectors, normalised by the training rows unless ``normalise`` is "none"."""
    every = [_wide(wanted, parts) for parts in zip(*columns, strict=True)]
    x = [torch.cat(part, 1) for part in zip(*every, strict=True)]
    if wanted.normalise != "none":
        mean, deviation = x[0].mean(0), x[0].std(0, correction=0)
        deviation[deviation <= 1e-14 * x[0].abs().amax(0)] = 1.0  # a constant column stays constant
        x = [(part - mean) / deviation for part in x]
    return [Samples(part.float()) for part in x]


def _wide(wanted: DataSettings, parts: "Sequence[pd.Series[Any]]") -> Sequence[Tensor]:
    """Return the training and the test part of a column of numbers or vectors, float64 ``[n, d]``."""
    if all(part.dtype.kind in NUMBERS for part in parts):
        return [torch.tensor(part.to_numpy(dtype=np.float64)[:, None]) for part in parts]
    with suppress(TypeError, ValueError):  # vectors of several lengths, or of words
        rows = torch.from_numpy(np.stack([np.asarray(row, np.float64) for part in parts for row in part]))
        if rows.ndim == 2 and (rows.abs() <= LARGEST).all():
            return [*rows.split([len(part) for part in parts])]
    what = "numbers, or vectors of one length, without infinite ones"
    raise UserError(f"dataset = {wanted.dataset!r}: column {parts[0].name!r}: must be {what}")


def _labels(wanted: DataSettings, task: Task, both: "Sequence[pd.DataFrame]") -> list[Tensor]:
    columns = [[_column(rows, wanted, name) for name in wanted.label] for rows in both]
    if not task.classes:
        try:
            parts = [[c.astype(object).to_numpy(np.float64) for c in part] for part in columns]  # as objects: no dates
            return [torch.from_numpy(np.stack(part, 1)).float() for part in parts]
        except (TypeError, ValueError) as error:
            raise UserError(f"label = {', '.join(wanted.label)!r}: must be numbers ({one_line(error)[:100]})") from None
    numbers = {value: number for number, value in enumerate(_classes(wanted, both))}
    return [torch.tensor([numbers[value] for value in part[0]]) for part in columns]


def _classes(wanted: DataSettings, both: "Sequence[pd.DataFrame]") -> list[Any]:
    """Return the values of the one column of labels, in the order of their numbers."""
    if len(wanted.label) != 1:
        raise UserError(f"label = {', '.join(wanted.label)!r}: must be one column with task = {wanted.task!r}")
    columns = [_column(rows, wanted, wanted.label[0]) for rows in both]
    odd = (list, dict, np.ndarray)
    for value in (value for column in columns for value in column):
        if isinstance(value, odd) or (isinstance(value, float) and value % 1):
            raise UserError(f"label = {wanted.label[0]!r}: {shown(value)} is no class; must be integers or words")
    values = {int(value) if isinstance(value, float) else value for column in columns for value in column}  # 1.0 is 1
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _class_names(wanted: DataSettings, both: "Sequence[pd.DataFrame]") -> tuple[str, ...]:
    """Return the classes as the data set names them, else as they stand in the column."""
    names = dict(enumerate(both[0].attrs.get(wanted.label[0], ())))
    return tuple(names.get(value, str(value)) for value in _classes(wanted, both))
