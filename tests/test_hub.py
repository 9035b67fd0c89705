"""The app passes what Flower checks before it publishes an app on Flower Hub (`flwr app publish`)."""

import importlib
import shutil
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

import click
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

from fedsub_app.deployment.flower import PROJECT

publish = importlib.import_module("flwr.cli.app_cmd.publish")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """What git has of this checkout, in a folder of the app's name."""
    folder = tmp_path / "fedsub"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
    return folder


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="asks git for the files of the checkout")
def test_the_app_can_be_published(app: Path) -> None:
    config, warnings = load_and_validate(app / "pyproject.toml", check_module=False)
    assert warnings == []
    publish._validate_app_name(app.name, "Flower App directory name")
    publish._validate_description(config["project"]["description"])
    publish._validate_files(publish._collect_file_paths(app))
    metadata = normalize_and_validate_fab_format(config)
    assert (metadata.fab_format_version, metadata.flwr_version_min, metadata.flwr_version_target) == (
        1,
        "1.41.0",
        "1.41.0",
    )
    found = build_fab_from_disk(app)
    content = found[0] if isinstance(found, tuple) else found
    with zipfile.ZipFile(BytesIO(content)) as fab:
        assert {"LICENSE", "fedsub_app/server_app.py", "conf/fedpews/digits.toml"} <= set(fab.namelist())
    (app / "LICENSE").unlink()
    with pytest.raises(click.ClickException, match="LICENSE"):
        publish._collect_file_paths(app)


def test_no_module_is_named_as_a_test() -> None:
    """Flower leaves ``test_*.py`` and ``*_test.py`` out of a bundle, wherever they lie."""
    packages = ("fedsub", "fedsub_app", "strategies", "client_apps")
    modules = [path for package in packages for path in (PROJECT / package).rglob("*.py")]
    assert modules
    assert not [path for path in modules if path.name.startswith("test_") or path.name.endswith("_test.py")]
