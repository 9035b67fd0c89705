"""Readers of files of arrays: npz, npy, idx. Content is checked; pickles are never loaded.

Images are uint8 [n, channels, height, width] and labels int64 [n]; :class:`UserError` names the file and its fault.
"""

import gzip
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsub_app.common.errors import UserError, explained
from fedsub_app.common.machine import check_memory
from fedsub_app.data.names import NPZ_KEYS

Array = NDArray[np.generic]
Arrays = tuple[Tensor, Tensor]  # images and labels of a split

MAX_CLASSES = 10_000


def checked(file: Path, split: str, images: Array, labels: Array, classes: int = MAX_CLASSES) -> Arrays:
    """Return images [n, h, w] or [n, h, w, 1 or 3] and labels [n] or [n, 1] as tensors, or say what is wrong."""
    prefix = f"{file}: {split}"
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        actual = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{prefix} images are {actual}, expected uint8 [n, h, w] or [n, h, w, 1 or 3]")
    if 0 in images.shape:
        raise UserError(f"{prefix} images are empty: {list(images.shape)}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise UserError(f"{prefix} labels are {labels.dtype} {list(labels.shape)}, expected integers [n] or [n, 1]")
    if len(labels) != len(images):
        raise UserError(f"{prefix} has {len(labels)} labels for {len(images)} images")
    if not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(f"{prefix} labels from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    x = torch.from_numpy(images if images.ndim == 4 else images[..., None]).permute(0, 3, 1, 2).contiguous()
    return x, torch.from_numpy(labels.astype(np.int64))


def read_npz(path: Path) -> tuple[Arrays, Arrays]:
    """Read a file with the keys ``NPZ_KEYS``; other keys are ignored."""
    if not path.is_file():
        raise UserError(f"{path}: not a file")
    with explained(f"{path}: not a readable npz file"):
        with zipfile.ZipFile(path) as archive:  # what it holds is known before any of it is unpacked
            check_memory(str(path), sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays_of:
            keys = arrays_of.files
            arrays = [arrays_of[key] for key in NPZ_KEYS if key in keys]
    if missing := [key for key in NPZ_KEYS if key not in keys]:
        raise UserError(f"{path}: missing key {', '.join(missing)} (found {', '.join(keys) or 'none'})")
    return checked(path, "train", *arrays[:2]), checked(path, "test", *arrays[2:])


def read_npy(path: Path) -> Array:
    """Open one array without reading all of it."""
    with explained(f"{path}: not a readable npy file"):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not array.ndim:
            raise ValueError("a single number")
    return array


def read_idx(path: Path, dimensions: int) -> Array:
    """Read an idx file of unsigned bytes, or its ``.gz``: uint8 of this number of dimensions."""
    if not path.is_file():  # reading from a pipe would wait for ever
        raise UserError(f"{path}: not a file")
    opened = gzip.open if path.suffix == ".gz" else open
    with explained(f"{path}: not a readable gzip file"), opened(path, "rb") as file:
        header = file.read(4 + 4 * dimensions)
        if header[:4] != bytes((0, 0, 8, dimensions)) or len(header) < 4 + 4 * dimensions:
            raise UserError(f"{path}: not an idx file of unsigned bytes with {dimensions} dimensions")
        shape = [int(size) for size in np.frombuffer(header[4:], dtype=">u4")]
        count = math.prod(shape)
        check_memory(str(path), count)
        content = bytearray(file.read(count + 1))
    if not count:
        raise UserError(f"{path}: empty, its header is {shape}")
    if len(content) != count:
        found = "more" if len(content) > count else len(content)
        raise UserError(f"{path}: {found} bytes, its header {shape} needs {count}")
    return np.frombuffer(content, np.uint8).reshape(shape)
