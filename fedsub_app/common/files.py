"""Writing files so that a crash leaves the old content or the new one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write so that ``path`` holds either all of ``content`` or what it held before, also after a power cut.

    Parameters
    ----------
    content : the bytes, or a function that writes them to the open file that it is given.

    Raises
    ------
    OSError
        The file cannot be written; no part of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}")  # several machines may write to one cache folder
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
