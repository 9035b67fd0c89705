"""The site: it builds, its links lead somewhere, every method and setting is on it."""

import logging
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from fedsub_app.cli.main import GROUPS
from fedsub_app.runs.config import describe
from fedsub_app.runs.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert not warnings
    return folder


def test_every_page_of_docs_is_on_the_site_and_in_its_menu(site: Path) -> None:
    files = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages = {(f.with_name("index.md") if f.name == "README.md" else f).with_suffix(".html").as_posix() for f in files}
    pages |= {f"methods/{name}.html" for name in METHODS}
    menus = {page: page.read_text() for page in site.rglob("*.html")}
    linked = {
        (page.parent / link).resolve()
        for page, text in menus.items()
        for link in re.findall(r'<a href="([^"#:?]+)" class="md-nav__link', text)
    }
    for page in pages:
        assert (site / page).is_file()
        assert (site / page).resolve() in linked, page


def test_every_method_and_every_setting_is_on_it(site: Path) -> None:
    for name in METHODS:
        text = (site / f"methods/{name}.html").read_text()
        assert f"fedsub run quickstart/digits method={name}" in text
        assert ("% of FedAvg" in text) == (name != "subfedavg"), name  # what is sent, as a picture
        assert ("The quickstart does not run it" in text) == (name == "subfedavg")  # it needs two epochs
    text = (site / "settings.html").read_text()
    assert not [key for key in describe() if f'<code id="{key}">{key}</code>' not in text]


def test_the_public_api_comes_first(site: Path) -> None:
    """Each function of docs/python.md is on the page, and no role of a docstring is left as text."""
    text = (site / "api.html").read_text()
    for name in re.findall(r"(?m)^from (fedsub_app\S+) import (.+)$", (ROOT / "docs/python.md").read_text()):
        for function in name[1].split(", "):
            assert function in text, name
    for page in (text, (site / "internals.html").read_text()):
        assert not re.findall(r":(?:meth|func|class|mod):", page)


def test_every_command_is_on_it(site: Path) -> None:
    text = (site / "commands.html").read_text()
    for names in GROUPS.values():
        assert all(f"fedsub {name}" in text for name in names)
    assert "fedsub federation up" in text


def test_links_of_the_pages_lead_to_files_of_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#:?]+)["#?]', page.read_text()):
            if not link.startswith("/"):  # of the page "not found", which does not know where it is
                assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


def test_pictures_can_be_shown() -> None:
    """A browser shows no SVG that is not well-formed XML."""
    pictures = [*(ROOT / "docs").rglob("*.svg")]
    assert pictures
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
