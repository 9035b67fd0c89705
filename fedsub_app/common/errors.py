"""The one error class whose message is written for the user, and the functions that turn other errors into it."""

import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb


class UserError(Exception):
    """Bad input. The message is one line: what is wrong (key, client or file), its value, what is allowed.

    Any function may raise it. Control characters, which a terminal would obey, are escaped in names of unknown origin.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(escaped(str(message)))


def escaped(text: str) -> str:
    r"""Return a text with its unprintable characters as Python writes them: ``\x1b`` for an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, cut after 100 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__}, nested too deeply"
    return text if len(text) <= 100 else f"{text[:100]}…"


def misfit(value: object, kind: type) -> str:
    """Show what has another kind than ``kind`` in a mapping, or a value that is no mapping; "" if all is right."""
    wrong = {n: x for n, x in value.items() if not isinstance(x, kind)} if isinstance(value, Mapping) else value
    return shown(wrong) if wrong or not isinstance(value, Mapping) else ""


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def place_of(error: BaseException) -> str:
    """Return " (my_net.py:12)": the last line that an exception came through in code of a method or of the user."""
    others = ("<", str(Path(__file__).parents[1]), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")))
    lines = [line for line in extract_tb(error.__traceback__) if not line.filename.startswith(others)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


@contextmanager
def explained(what: str, limit: int | None = None) -> Iterator[None]:
    """Turn any exception of other people's code into a :class:`UserError`: ``what``, then the reason in brackets.

    The reason has at most ``limit`` characters; it follows the colon, without brackets, if ``what`` ends with one.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = one_line(error)[:limit]
        raise UserError(f"{what} {reason}" if what.endswith(":") else f"{what} ({reason})") from error


def printable(text: str, limit: int = 200) -> str:
    """Return a text of unknown origin as one line of at most ``limit`` printable characters."""
    cut = text[: limit + 1]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in cut).split())
    return line[: limit - 1] + "…" if len(line) > limit or len(text) > len(cut) else line
