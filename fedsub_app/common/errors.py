"""The one error class whose message is written for the user, and how others are put into it."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong (key, client or file), its value, what is allowed."""


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def one_line(error: BaseException) -> str:
    """Return an exception as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def printable(text: str, most: int = 200) -> str:
    """Return a text of unknown origin as one line of at most ``most`` printable characters."""
    cut = text[: most + 1]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in cut).split())
    return line[: most - 1] + "…" if len(line) > most or len(text) > len(cut) else line


def between(option: str, value: int | None, most: int) -> int | None:
    """Return the value of a command's option, ``None`` for its default; it must be 1 to ``most``."""
    if value is not None and not 1 <= value <= most:
        raise UserError(f"{option} {value}: must be 1 to {most}")
    return value
