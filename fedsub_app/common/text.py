"""Numbers and tables as text."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def human_bytes(count: float) -> str:
    """Return bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:  # which three digits make 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def three_digits(amount: float) -> str:
    """Return a number >= 0 with three digits, or with all digits before the point: ``0.0123``, ``1234``."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def link(path: Path) -> str:
    """Return a path as it is printed: on a terminal a URL, which most terminals open by a click."""
    return path.resolve().as_uri() if sys.stdout.isatty() else str(path)


def show(text: str) -> None:
    """Print Markdown: in a pipe as it is, on a terminal as rich renders it."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console  # on demand: most commands print plain lines
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (header, ("---",) * len(header), *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
