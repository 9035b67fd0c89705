"""The site: it builds, its links lead somewhere, every method and setting is on it."""

import logging
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from fedsub_app.config import describe
from fedsub_app.methods import METHODS

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
    menu = (site / "index.html").read_text()
    for page in pages:
        assert (site / page).is_file()
        assert f'href="{page}"' in menu, page


def test_every_method_and_every_setting_is_on_it(site: Path) -> None:
    for name in METHODS:
        assert f'<h1 id="{name}">' in (site / f"methods/{name}.html").read_text()
    text = (site / "settings.html").read_text()
    assert not [key for key in describe() if f"<code>{key}</code>" not in text]


def test_links_of_the_pages_lead_to_files_of_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#:?]+)["#?]', page.read_text()):
            if not link.startswith("/"):  # of the page "not found", which does not know where it is
                assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"
