"""Readers of image folders and archives of them, with the cache of decoded copies. Content is checked.

Every reader returns ``(train, test)``, each ``(images uint8 [n, channels, height, width], labels int64 [n])``, and
raises :class:`UserError` naming the file and its fault.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from platformdirs import user_cache_path
from torch import Tensor

from fedsub_app.common.errors import UserError, explained, one_line
from fedsub_app.common.files import write_atomic
from fedsub_app.common.machine import check_memory
from fedsub_app.common.progress import Progress
from fedsub_app.data.arrays import Array, read_npz
from fedsub_app.data.names import IMAGES, folder_form
from fedsub_app.data.settings import DataSettings

T = TypeVar("T")
Listed = tuple[tuple[str, ...], Path]  # (split, class, file name), and the file

FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")  # of IMAGES; Pillow reads others by programs, as EPS by gs
HOLD_OUT = 6  # of a set without a split every sixth sample of a class is for testing
READ = 16  # files whose content is hashed: bitmaps of two archives may have the same names, sizes and times
MAX_UNPACKED = 2**31  # bytes of an image in an archive


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images of one split of a data set, those at ``index``, int64, decoded when they are read.

    ``images``: all of the split: uint8 or float32 in [0, 1] ``[n, 1 or 3, height, width]``, or files.
    """

    images: Tensor | Sequence[Path]
    index: Tensor

    @classmethod
    def all_of(cls, images: Tensor | Sequence[Path]) -> "Pictures":
        return cls(images, torch.arange(len(images)))

    def __getitem__(self, chosen: Tensor | slice) -> "Pictures":
        """Return the images at some positions, or where a bool tensor is true."""
        return replace(self, index=self.index[chosen])

    def read(self, number: int) -> Image.Image:
        """Return one image of the split, RGB."""
        if isinstance(self.images, Tensor):
            pixels = self.images[number].permute(1, 2, 0).expand(-1, -1, 3)
            if pixels.is_floating_point():
                pixels = (pixels * 255).round().to(torch.uint8)
            return Image.fromarray(pixels.contiguous().numpy())
        with opened(self.images[number], str(self.images[number])) as image:
            return image.convert("RGB")

    @cached_property
    def digest(self) -> str:
        """Hash of the split's images, 16 hex digits; of files: names, sizes, times, and the content of some."""
        checksum = hashlib.sha256()
        if isinstance(self.images, Tensor):
            checksum.update(f"{self.images.dtype} {tuple(self.images.shape)}".encode())
            checksum.update(self.images.contiguous().numpy().tobytes())
        else:
            top = os.path.commonpath([file.parent for file in self.images])
            for file in self.images:
                stat = file.stat()
                name = file.relative_to(top).as_posix()
                checksum.update(f"{name}\0{stat.st_size}\0{int(stat.st_mtime)}\n".encode())
            for file in self.images[:: max(1, len(self.images) // READ)]:
                checksum.update(file.read_bytes())
        return checksum.hexdigest()[:16]


Split = tuple[Tensor | Pictures, Tensor]


def cache_folder() -> Path:
    """Return the folder of decoded and unpacked copies: ``$FEDSUB_CACHE``, or ``decoded`` in the user's cache."""
    return Path(os.environ.get("FEDSUB_CACHE") or user_cache_path("fedsub") / "decoded").expanduser()


def hold_out(labels: Tensor) -> Tensor:
    """Return which samples are for testing, bool [n]: every sixth of a class, in their order."""
    places = torch.zeros_like(labels)
    for label in labels.unique():
        of_class = labels == label
        places[of_class] = torch.arange(1, int(of_class.sum()) + 1)
    return places % HOLD_OUT == 0


def read_files(
    settings: DataSettings, path: Path, classes: Sequence[str] = (), listed: Sequence[Listed] | None = None
) -> tuple[Split, Split]:
    """Return the images of a folder, of an archive with ``{train,test}/<class>/`` at any depth, or ``listed`` files.

    Class numbers follow ``classes`` or else the sorted names of the training folders, images the sorted file names, as
    in torchvision's ImageFolder. Images are brought to ``image_size`` pixels a side (bilinear, antialiased), or must be
    of one size if it is None; grey images become RGB if others are RGB. Images are decoded once, then read from the
    cache until a file's size or time changes. If features are wanted, images stay files.
    """
    if listed is None and path.is_dir():
        listed = list_images(path)
    if listed is not None and settings.features != "none":
        train, test = _in_splits(path, dict(listed), classes).values()
        return (Pictures.all_of(train[0]), train[1]), (Pictures.all_of(test[0]), test[1])
    files = [path] if listed is None else [file for _, file in listed]
    how = f"{settings.image_size} {classes} {[parts for parts, _ in listed or ()]}"  # lists may give other classes
    cached = cache_folder() / f"{path.name}-{fingerprint(files, how)}.npz"
    if cached.exists():
        with suppress(UserError):  # damaged: decode again
            return read_npz(cached)
    encoded = _archived(path) if listed is None else ((parts, file.read_bytes()) for parts, file in listed)
    arrays = _stack(path, encoded, len(listed or ()), settings.image_size, classes)
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the images may be private ones of a node
        write_atomic(cached, lambda file: np.savez(file, allow_pickle=False, **arrays))
    except OSError as error:
        raise unwritable(cached, error) from error
    return read_npz(cached)


def list_images(path: Path) -> list[Listed]:
    """Return the images of a folder, ``{train,test}/<class>/`` or ``<class>/``, in the order of their paths.

    In the latter form every sixth image of a class is a test image (100 of Mini-ImageNet's 600 a class).
    """
    split = folder_form(path) == "split"
    files = sorted(f for f in path.glob("*/*/*" if split else "*/*") if f.is_file())
    if split:
        return [(place, f) for f in files if _is_image(place := f.relative_to(path).parts)]
    files = [file for file in files if _is_image(("train", *file.relative_to(path).parts))]
    numbers = {name: number for number, name in enumerate(sorted({file.parent.name for file in files}))}
    test = hold_out(torch.tensor([numbers[file.parent.name] for file in files]))
    parts = ("test" if held_out else "train" for held_out in test.tolist())
    return [((part, file.parent.name, file.name), file) for part, file in zip(parts, files, strict=True)]


def class_names(folder: Path) -> list[str]:
    """Return the names of the classes of a folder of images, of all its domains, in the order of their numbers."""
    if folder_form(folder) == "domains":
        domains = [path for path in folder.iterdir() if folder_form(path) == "classes"]
        return sorted({name for path in domains for name in class_names(path)})
    return sorted({name for (split, name, _), _ in list_images(folder) if split == "train"})


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error of a file or folder of the cache that cannot be written."""
    return UserError(f"{path}: cannot be written ({one_line(error)}); set FEDSUB_CACHE to a writable folder")


def fingerprint(files: Sequence[Path], more: str = "") -> str:
    """Return 16 hex digits that change with any file's path, size or time of change, and with ``more``."""
    digest = hashlib.sha256(more.encode())
    for file in files:
        stat = file.stat()
        digest.update(os.fsencode(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"))  # also not Unicode
    return digest.hexdigest()[:16]


def _archived(path: Path) -> Iterator[tuple[tuple[str, ...], bytes]]:
    # Read from the archive itself: no member is ever written to disk, so none can be written to a wrong place.
    with explained(f"{path}: not a readable archive"), tarfile.open(path, "r:*") as archive:
        for member in archive:
            parts = Path(member.name).parts[-3:]
            if member.isfile() and _is_image(parts) and (content := archive.extractfile(member)):
                if member.size > MAX_UNPACKED:
                    raise ValueError(f"{member.name!r} of {member.size} bytes")
                yield parts, content.read()


def read_pixels(files: Sequence[Path], shape: Sequence[int]) -> Tensor:
    """Return image files as uint8 ``[n, channels, height, width]`` of this shape, brought to a square's size."""
    channels, height, width = shape
    images = []
    for file in files:
        image = _decode(file.read_bytes(), str(file), height if height == width else None)
        if image.ndim == 3 and channels == 1:
            image = np.asarray(Image.fromarray(image).convert("L"))
        if image.ndim == 2:
            image = np.broadcast_to(image[..., None], (*image.shape, channels))
        if image.shape != (height, width, channels):
            raise UserError(f"{file}: {list(image.shape[1::-1])} pixels: must be {[width, height]}")
        images.append(torch.from_numpy(image.copy()).permute(2, 0, 1))
    return torch.stack(images)


def _is_image(parts: tuple[str, ...]) -> bool:
    hidden = parts[-1].startswith(".")
    return len(parts) == 3 and parts[0] in ("train", "test") and parts[2].lower().endswith(IMAGES) and not hidden


def _in_splits(
    path: Path, images: Mapping[tuple[str, ...], T], classes: Sequence[str]
) -> dict[str, tuple[list[T], Tensor]]:
    """Return the images of ``train`` and ``test`` in order, and their labels, int64; ``path``: where they are."""
    every = sorted(images)
    classes = classes or sorted({name for split, name, _ in every if split == "train"})
    splits = {}
    for split in ("train", "test"):
        keys = [parts for parts in every if parts[0] == split]
        if not keys and every and path.is_dir() and folder_form(path) == "classes":
            raise UserError(f"{path}: no class has {HOLD_OUT} images, of which every {HOLD_OUT}th is a test image")
        if not keys:
            raise UserError(f"{path}: no image in {split}/<class>/ (of type {', '.join(IMAGES)})")
        if unknown := sorted({name for _, name, _ in keys} - set(classes)):
            raise UserError(f"{path}: class {unknown[0]} is in {split}/ but not in train/")
        splits[split] = [images[key] for key in keys], torch.tensor([classes.index(name) for _, name, _ in keys])
    return splits


def _stack(
    path: Path, encoded: Iterator[tuple[tuple[str, ...], bytes]], total: int, side: int | None, classes: Sequence[str]
) -> dict[str, Array]:
    images: dict[tuple[str, ...], NDArray[np.uint8]] = {}
    size: tuple[int, int] | None = None
    pixels = 0
    progress = Progress(f"reading {path.name}", total)
    for parts, content in encoded:
        where = f"{path}: image {'/'.join(parts)}"
        if parts in images:
            raise UserError(f"{where} is in it twice: must be once, below one folder")
        images[parts] = _decode(content, where, side)
        pixels += images[parts].nbytes
        progress.update(len(images))
        check_memory(str(path), pixels)
        here = images[parts].shape[:2]
        size = size or here
        if here != size:
            raise UserError(f"{where} is {here}, the ones before are {size}: expected one size, or image-size")
    rgb = any(image.ndim == 3 for image in images.values())
    arrays: dict[str, Array] = {}
    for split, (found, labels) in _in_splits(path, images, classes).items():
        arrays[f"{split}_images"] = np.stack([np.stack([x] * 3, 2) if rgb and x.ndim == 2 else x for x in found])
        arrays[f"{split}_labels"] = labels.numpy()
    return arrays


@contextmanager
def opened(image: Path | BinaryIO, where: str) -> Iterator[Image.Image]:
    """Open an image, for work on its pixels; :class:`UserError` where they cannot be read, or not with 8 bits."""
    try:
        with Image.open(image, formats=FORMATS) as pixels:
            if pixels.mode[0] in "IF":
                raise ValueError(f"pixels of mode {pixels.mode}, expected 8 bits a channel")
            yield pixels
    except Exception as error:  # PIL's decoders raise many types on damaged bytes
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"must be an image: {', '.join(FORMATS)}" if unknown else one_line(error)
        raise UserError(f"{where} is not readable ({reason})") from error


def _decode(content: bytes, where: str, image_size: int | None) -> NDArray[np.uint8]:
    with opened(io.BytesIO(content), where) as image:
        converted = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
        size = (image_size, image_size) if image_size else converted.size
        return np.asarray(converted.resize(size, Image.Resampling.BILINEAR))
