"""Writing files so that a crash leaves the old content or the new one, and JSON that every reader takes."""

import ctypes
import json
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from fedsub_app.common.errors import UserError

Json = dict[str, Any]
CHECKSUM = "crc32"
private = partial(os.open, mode=0o600)  # opener of files that their owner alone may read
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; below a folder that only its owner may use, they are private as well."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o777 & _mode(folder.parent), exist_ok=True)


def _mode(folder: Path) -> int:
    """Return 0o700 for a folder that only its owner may use, else 0o777, which the umask then restricts."""
    return 0o777 if folder.stat().st_mode & 0o077 else 0o700


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], object], wait: bool = True) -> None:
    """Write so that ``path`` holds either all of ``content`` or what it held before, also after a power cut.

    In a folder that only its owner may use (0700), such as a run's, the file is private too (0600). ``content``: the
    bytes, or a function that writes them to the open file. After an OSError no part of them is left. ``wait``: return
    when they are on disk; otherwise a power cut before the next :func:`flush` may leave a part of the file.
    """
    make_folder(path.parent)
    mode = 0o666 & _mode(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}")  # several machines may write to one cache folder
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            if wait:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if wait:
        _with_folder(path.parent, os.fsync)


def flush(folder: Path) -> None:
    """Wait until all that was written to the file system of a folder is on disk.

    For the files of 200 clients this takes a fortieth of the time of waiting for each file.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)  # of Linux
    if syncfs is None:
        os.sync()
    elif _with_folder(folder, syncfs):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def _with_folder(folder: Path, use: Callable[[int], int | None]) -> int | None:
    """Call a function with the descriptor of a folder; return what it returns."""
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        return use(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete the temporary files that killed writers left below a folder; nobody may write there now."""
    for path in folder.rglob(".*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def to_json(content: object, indent: int | None = None) -> str:
    """Return JSON text; numbers that are not finite, which JSON does not have, are null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent, allow_nan=False)


def write_json(path: Path, content: Json) -> None:
    text = to_json(content | {CHECKSUM: checksum(content)}, indent=2)
    write_atomic(path, f"{text}\n".encode())


def read_json(path: Path) -> Json:
    """Return the JSON object in a file, without the checksum of :func:`write_json`; files of 0.1.0 have none."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    if content.pop(CHECKSUM, None) not in (None, checksum(content)):
        raise UserError(f"{path}: damaged, or changed by hand: its checksum is of other content")
    return content


def checksum(content: Json) -> str:
    """Return the CRC-32 of an object's JSON text, 8 hexadecimal digits; an object read from the text has the same."""
    return f"{zlib.crc32(to_json(content).encode()):08x}"
