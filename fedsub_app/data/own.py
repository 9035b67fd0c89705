"""Data of a user's own: pairs of tensors, or map-style torch data sets of (x, y), as a :class:`Dataset`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.data.dataset import Dataset
from fedsub_app.data.samples import Samples

NAME = "own"  # of such data, in the setting ``dataset``
ALLOWED = "must be (x, y) tensors or a map-style torch Dataset of (x, y)"


def own_dataset(data: object, classes_for: Callable[[tuple[int, ...]], int]) -> Dataset:
    """Return a user's ``(train, test)`` as a data set.

    Parameters
    ----------
    data : each of the two a pair of tensors, or a map-style ``torch.utils.data.Dataset`` whose items are pairs. x is
        floating-point; y are class labels from 0 on, integers.
    classes_for : shape of a sample -> number of classes that the network tells apart.

    Raises
    ------
    UserError
        One line: which of the two is wrong, what it is and what is allowed.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UserError(f"data = {shown(data)}: must be (train, test), each of which {ALLOWED}")
    (train_x, train_y), (test_x, test_y) = (_pair(one, name) for one, name in zip(data, ("train", "test"), strict=True))
    if train_x.shape[1:] != test_x.shape[1:]:
        raise UserError(f"test: samples of shape {tuple(test_x.shape[1:])}: the training samples' is {_shape(train_x)}")
    classes = classes_for(_shape(train_x))
    for name, y in (("train", train_y), ("test", test_y)):
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
            wrong = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise UserError(f"{name}: label {wrong}: must be 0 to {classes - 1}, the network has {classes} outputs")
    sources = [torch.zeros_like(y) for y in (train_y, test_y)]
    return Dataset(
        *(NAME, Samples(train_x), train_y, sources[0], Samples(test_x), test_y, sources[1]), classes, (NAME,), ()
    )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[1:])


def _pair(data: object, name: str) -> tuple[Tensor, Tensor]:
    x, y = data if isinstance(data, tuple | list) and len(data) == 2 else _stacked(data, name)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise UserError(f"{name} = ({type(x).__name__}, {type(y).__name__}): {ALLOWED}")
    if not x.is_floating_point():
        raise UserError(f"{name}: x of dtype {x.dtype}: must be floating-point")
    if y.is_floating_point() or y.ndim != 1 or len(y) != len(x) or x.ndim < 2:
        said = f"{name}: x of shape {tuple(x.shape)}, y of shape {tuple(y.shape)}, {y.dtype}"
        raise UserError(f"{said}: must be [n, ...] and [n], integers")
    # Images channels-last in memory, as all others: the fastest in oneDNN.
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return x.detach().float().contiguous(memory_format=layout), y.detach().long()


def _stacked(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the items of a map-style data set, one after the other."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | dict):
        raise UserError(f"{name} = {shown(data)}: {ALLOWED}")
    try:
        pairs = [(x, int(y)) for x, y in (data[k] for k in range(len(data)))]
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: an item is no (x, y) with an integer y ({one_line(error)}); {ALLOWED}") from None
    if not pairs:
        raise UserError(f"{name}: no samples")
    if not all(isinstance(x, Tensor) and x.shape == pairs[0][0].shape for x, _ in pairs):
        raise UserError(f"{name}: x must be a tensor of one shape in all items; ToTensor makes one of an image")
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
