"""The audit log of a server: one line for each thing that real nodes were asked to do; it only grows.

``$FEDSUB_RUNS/audit.jsonl``. Each line is a JSON object with the SHA-256 of the line before it, so that a line that was
changed or taken out shows (:func:`verify`). Whoever can write the file can write all of it anew: copy the last hash to
another machine from time to time.
"""

import hashlib
import json
import os
import pwd
import time
from pathlib import Path

from filelock import FileLock

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import private, to_json
from fedsub_app.common.tensors import Json

START = "0" * 64  # stands for the hash before the first line


def append(path: Path, event: str, **about: object) -> None:
    """Write a line: the event, when and by whose account, the hash of the line before, and what else is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several servers may write at a time.
    with FileLock(path.with_suffix(".lock"), mode=0o600), open(path, "a+b", opener=private) as file:
        file.seek(0)
        before = file.read()
        if before and not before.endswith(b"\n"):  # a line that a full disk or a crash has torn, which `verify` names
            file.write(b"\n")
        last = (before.splitlines() or [b""])[-1]
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "account": _account()}
        text = to_json({**line, "event": event, **about, "before": _hash(last)})
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def verify(path: Path) -> list[Json]:
    """Return the lines of an audit log; :class:`UserError` names a line that is not the one that was written."""
    lines, before = [], START
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = {}
        if not isinstance(line, dict) or line.get("before") != before:
            raise UserError(f"{path}: line {number} or the one before it was changed, or a line was taken out")
        lines.append(line)
        before = _hash(text)
    return lines


def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # not as $LOGNAME says
    except KeyError:  # an id without an account, as in a container
        return f"uid {os.getuid()}"


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else START
