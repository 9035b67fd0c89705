"""Samples in the form in which they are kept: images of bytes stay bytes until they are used.

Training uses float32. Storing all samples so would take four times the memory, in every process and on every GPU;
converting those of one client takes about as long as copying them.
"""

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedsub_app.data.settings import Normalise

WHITE = 255.0


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of a data set, all of one shape; indexing returns float32.

    Parameters
    ----------
    stored : float32 ``[n, ...]``, returned unchanged; or images as uint8 ``[n, channels, height, width]``.
    scale : white, mean and deviation of uint8 images, which are returned as ``(x / white - mean) / deviation``; each of
        the shape and memory layout of an image, so that a step is one pass over many images.
    """

    stored: Tensor
    scale: tuple[Tensor, ...] = ()
    _copies: "WeakValueDictionary[torch.device, Samples]" = field(default_factory=WeakValueDictionary, repr=False)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, chosen: Tensor | slice) -> Tensor:
        """Return some samples, float32: those at these positions (int64, on the samples' device), or of a slice."""
        x = self.stored[chosen]
        if not self.scale:
            return x
        white, mean, deviation = self.scale
        return x.float().div_(white).sub_(mean).div_(deviation)

    @property
    def shape(self) -> torch.Size:
        """Number of samples, and the shape of one."""
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the stored samples."""
        return self.stored.nbytes

    def darkest(self) -> Tensor:
        """Return the least value of each channel of images, float32 ``[channels]``."""
        least = self.stored.amin((0, 2, 3), keepdim=True).expand(1, *self.shape[1:])
        return Samples(least, self.scale)[:][0, :, 0, 0]

    def to(self, device: torch.device) -> "Samples":
        """Return them on a device. All callers get the same copy as long as one of them keeps it."""
        if self.stored.device == device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            copy = Samples(self.stored.to(device), tuple(part.to(device) for part in self.scale))
            self._copies[device] = copy
        return copy


def normalised(train: Tensor, test: Tensor, how: Normalise) -> tuple[Samples, Samples]:
    """Return images as clients train on them: channels-last in memory, and normalised when they are taken.

    Parameters
    ----------
    train, test : uint8, or float32 in [0, 1], ``[n, channels, height, width]``; float32 is changed in place.
    how : the setting ``normalise``.
    """
    mean, deviation = _statistics(train, how)
    if train.dtype == torch.uint8:
        channels, height, width = train.shape[1:]
        parts = (torch.tensor(WHITE), mean, deviation)
        scale = tuple(part.expand(height, width, channels).contiguous().permute(2, 0, 1) for part in parts)
        return Samples(_channels_last(train), scale), Samples(_channels_last(test), scale)
    for x in (train, test):
        x.sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))
    return Samples(_channels_last(train)), Samples(_channels_last(test))


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


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
