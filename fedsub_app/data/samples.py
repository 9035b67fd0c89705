"""Samples in the form in which they are kept: images of bytes stay bytes until they are used.

Training uses float32, which takes four times the memory; converting a client's samples is as fast as copying them.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch, Inputs, Shape
from fedsub_app.common.tensors import CPU
from fedsub_app.data.settings import Normalise

WHITE = 255.0


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of a data set, all of one shape; indexing returns float32.

    ``stored``: float32 ``[n, ...]``, tokens, or several tensors, returned unchanged; or images, uint8 ``[n, channels,
    height, width]``, returned as ``(x / white - mean) / deviation``. ``scale``: these three, each of the shape and
    memory layout of an image, so that a step is one pass over many images.
    """

    stored: Batch
    scale: tuple[Tensor, ...] = ()
    _copies: "WeakValueDictionary[torch.device, Samples]" = field(default_factory=WeakValueDictionary, repr=False)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, chosen: Tensor | slice) -> Batch:
        """Return some samples, float32: those at these positions (int64, on the samples' device), or of a slice."""
        x = self.stored[chosen]
        if not self.scale or isinstance(x, Inputs):
            return x
        white, mean, deviation = self.scale
        return x.float().div_(white).sub_(mean).div_(deviation)

    def part(self, chosen: Tensor) -> Batch:
        """Return the samples at these positions, such as a client's, to be taken from again and again."""
        return self[chosen]

    @property
    def tensor(self) -> Tensor:
        assert isinstance(self.stored, Tensor)
        return self.stored

    @property
    def shape(self) -> torch.Size:
        """Number of samples, and the shape of one; of several tensors those of the first."""
        return (self.stored.tensors[0] if isinstance(self.stored, Inputs) else self.stored).shape

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def darkest(self) -> Tensor:
        """Return the least value of each channel of images, float32 ``[channels]``."""
        least = self.tensor.amin((0, 2, 3), keepdim=True).expand(1, *self.shape[1:])
        return torch.as_tensor(Samples(least, self.scale)[:])[0, :, 0, 0]

    def to(self, device: torch.device) -> "Samples":
        """Return them on a device. All callers get the same copy as long as one of them keeps it."""
        if self.stored.device == device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            copy = Samples(self.stored.to(device), tuple(part.to(device) for part in self.scale))
            self._copies[device] = copy
        return copy


@dataclass(frozen=True, eq=False)
class LazySamples:
    """Samples that are read when they are indexed; they need not fit into memory.

    ``read``: positions -> the samples there, on the CPU. ``index``: position in the source of each sample, int64 [n].
    """

    read: Callable[[list[int]], Batch]
    index: Tensor
    device: torch.device = CPU
    nbytes = 0

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, chosen: Tensor | slice) -> Batch:
        """Return some samples: those at these positions (int64), or of a slice."""
        chosen = chosen.cpu() if isinstance(chosen, Tensor) else chosen
        return self.read(self.index[chosen].tolist()).to(self.device)

    def part(self, chosen: Tensor) -> "LazySamples":
        """Return the samples at these positions, still to be read."""
        return LazySamples(self.read, self.index[chosen.cpu()], self.device)

    def to(self, device: torch.device) -> "LazySamples":
        """Return them, to be taken on a device."""
        return LazySamples(self.read, self.index, device)

    def darkest(self) -> Tensor:
        """Raise :class:`UserError`: all samples would be read for it."""
        raise UserError("augment: not with samples that are read one by one; augment them as they are read")


AnySamples = Samples | LazySamples


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples: x [n, channels, height, width] or [n, features]; y and source int64 [n].

    ``source`` is the position in ``sources`` (the names joined by ``+``, the domains, or the values of the column
    ``group``). ``notes`` says, one line each, what is partial, lossy or substituted. ``num_classes`` is the number of a
    network's outputs. For tasks other than a classification y has the form that the task takes. ``labels`` are the
    classes of a table as they stand in it, or the names of image folders; () if classes are only numbers. ``in_shape``
    is the form of one sample, a network's input.
    """

    name: str
    train_x: AnySamples
    train_y: Tensor
    train_source: Tensor
    test_x: AnySamples
    test_y: Tensor
    test_source: Tensor
    num_classes: int
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    in_shape: Shape
    labels: tuple[str, ...] = ()

    @cached_property
    def has_classes(self) -> bool:
        """Whether a sample is of one class: counts and ranks, of a task of one's own, may be integers too."""
        if self.train_y.ndim > 1 or self.train_y.is_floating_point():
            return False
        every = (self.train_y, self.test_y)
        return all(int(y.min()) >= 0 and int(y.max()) < self.num_classes for y in every if len(y))

    @property
    def label_count(self) -> int:
        """Number of classes of samples, 1 where they have none."""
        return self.num_classes if self.has_classes else 1

    @property
    def digest(self) -> str:
        """Digest of the samples' number and form, and of integer y and x, such as pixels and tokens.

        Floats differ between processors and are left out, and so are lazy samples.
        """
        y = (self.train_y, self.test_y)
        checksum = hashlib.sha256(f"{self.in_shape} {[tuple(part.shape) for part in y]}".encode())
        stored = [x.stored for x in (self.train_x, self.test_x) if isinstance(x, Samples)]
        for tensor in (*y, *(part for x in stored for part in (x.tensors if isinstance(x, Inputs) else (x,)))):
            for rows in () if tensor.is_floating_point() else tensor.split(1000):
                checksum.update(rows.cpu().contiguous().numpy())
        return checksum.hexdigest()[:16]

    @cached_property
    def train_labels(self) -> Tensor:
        """Class of each training sample, int64 [n]; 0 where they have none."""
        return self.train_y if self.has_classes else torch.zeros(len(self.train_y), dtype=torch.int64)


@lru_cache(maxsize=1)
def pooled(data: Dataset) -> Dataset:
    """Return the data set with the test samples behind the training ones; :class:`UserError` where they are lazy."""
    train, test = data.train_x, data.test_x
    if not (isinstance(train, Samples) and isinstance(test, Samples) and isinstance(train.stored, Tensor)):
        raise UserError(f"client-test = 'pooled': {data.name} has samples that are no tensor; use 'holdout'")
    return replace(
        data,
        train_x=Samples(torch.cat((train.tensor, test.tensor)), train.scale),
        train_y=torch.cat((data.train_y, data.test_y)),
        train_source=torch.cat((data.train_source, data.test_source)),
    )


def normalised(train: Tensor, test: Tensor, how: Normalise) -> tuple[Samples, Samples]:
    """Return images as clients train on them: channels-last in memory, and normalised when they are taken.

    ``train``, ``test``: uint8, or float32 in [0, 1], ``[n, channels, height, width]``; float32 is changed in place.
    """
    mean, deviation = _statistics(train, how)
    if train.dtype == torch.uint8:
        channels, height, width = train.shape[1:]
        parts = (torch.tensor(WHITE), mean, deviation)
        scale = tuple(part.expand(height, width, channels).contiguous().permute(2, 0, 1) for part in parts)
        return Samples(channels_last(train), scale), Samples(channels_last(test), scale)
    for x in (train, test):
        x.sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))
    return Samples(channels_last(train)), Samples(channels_last(test))


def channels_last(x: Tensor) -> Tensor:
    """Return images channels-last in memory, the fastest layout in oneDNN.

    A grey image has both layouts at once, and ``contiguous`` leaves it the strides of the other layout. By these torch
    chose convolutions and pooling that took up to half as long again.
    """
    _, channels, height, width = x.shape
    last = x.contiguous(memory_format=torch.channels_last)
    return last.as_strided(x.shape, (channels * height * width, 1, width * channels, channels))


def in_unit(x: Tensor) -> Tensor:
    """Return images as float32 in [0, 1]."""
    return x.float().div_(WHITE) if x.dtype == torch.uint8 else x


def _statistics(train: Tensor, how: Normalise) -> tuple[Tensor, Tensor]:
    """Return mean and deviation by which images in [0, 1] are normalised, float32 ``[channels]``."""
    channels = train.shape[1]
    if how == "none":
        return torch.zeros(channels), torch.ones(channels)
    if how == "half":
        return torch.full((channels,), 0.5), torch.full((channels,), 0.5)
    # Summed in double precision: float32 sums differ with the number of threads, and so would the engines' results.
    total, squares = torch.zeros(2, channels, dtype=torch.float64)
    for chunk in train.split(256):  # fits the cache: 5 times faster than 1024
        pixels = in_unit(chunk).double().flatten(2)
        total += pixels.sum(2).sum(0)
        squares += pixels.square_().sum(2).sum(0)
    count = train[:, 0].numel()
    variance = (squares / count - (total / count) ** 2).clamp_min(0)
    mean, deviation = (total / count).float(), variance.sqrt().float()
    deviation[deviation < 1e-6] = 1.0  # a constant channel stays constant
    return mean, deviation
