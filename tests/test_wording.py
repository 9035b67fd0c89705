"""Pages that are true and read once: the tests that they name are there; no sentence begins without its subject."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
ROOMS = ("fedsub_app", "strategies", "client_apps", "bench", "docs", "README.md", "CONTRIBUTING.md")
WITHOUT_SUBJECT = re.compile(r"(Who|What|Those|Of|So many)\b[^?]*$")
CODE, HEADER, HEADING = r"```.*?```", r"^\|[^\n]*\n\| ?-[^\n]*$", r"^#[^\n]*$"


def paragraphs(path: Path) -> Iterator[str]:
    """Yield a page's paragraphs, items and cells, or a module's paragraphs of docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from re.split(r"\n\s*\n|\n\s*- |\|", re.sub(f"{CODE}|{HEADER}|{HEADING}", "", text, flags=re.M | re.S))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from re.split(r"\n\s*\n|\n\s*- ", ast.get_docstring(node) or "")
    comments = (line.strip() for line in text.splitlines())
    yield from "\n".join(line.removeprefix("# ") if line.startswith("# ") else "\n" for line in comments).split("\n\n")


def test_no_sentence_begins_without_its_subject() -> None:
    names = subprocess.check_output(["git", "ls-files", *ROOMS], cwd=PROJECT, text=True).split()
    found = [
        f"{name}: {sentence[:80]}"
        for name in names
        if name.endswith((".md", ".py")) and not name.endswith("history.md")
        for paragraph in paragraphs(PROJECT / name)
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))
        if WITHOUT_SUBJECT.match(sentence)
    ]
    assert not found, "\n".join(found)


def test_every_test_that_a_page_names_is_there() -> None:
    """Its whole name, the beginning of it before "…", or its file."""
    files = list((PROJECT / "tests").rglob("*.py"))
    there = {name for path in files for name in (path.name, *re.findall(r"def (test_\w+)", path.read_text()))}
    for page in ("bad-input.md", "security.md"):
        for name, more in re.findall(r"`(test_[\w.]+)(…?)`", (PROJECT / "docs" / page).read_text()):
            found = any(each.startswith(name) for each in there) if more else name in there
            assert found, f"{page}: {name}{more}"


def test_every_extra_is_on_the_page_of_installation() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (PROJECT / "docs/install.md").read_text()
    assert not [name for name in extras if f"`{name}`" not in page and name != "dev"]
