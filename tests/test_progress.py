"""A run and long work are plain lines, also on a terminal; a batch says how far its runs are."""

import itertools
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL
from PIL import Image

from fedsub_app.common import progress
from fedsub_app.common.tensors import Json
from fedsub_app.data import DataSettings, load_dataset
from fedsub_app.deployment.engines import log_lines
from fedsub_app.studies import batch
from fedsub_app.studies.batch import BatchProgress, Job

RunLocal = Callable[..., tuple[Json, Path]]


def test_a_round_is_a_line(run_local: RunLocal, capsys: pytest.CaptureFixture[str]) -> None:
    log_lines()
    run_local(num_rounds=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines if line.startswith("round")] == ["round 1/2", "round 2/2"]
    assert not any("\x1b" in line for line in lines)


def test_a_run_goes_on_without_the_reader_of_its_lines(
    run_local: RunLocal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``fedsub run | head`` printed a traceback for each line."""
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as nobody:  # when it is closed
        monkeypatch.setattr(sys, "stdout", nobody)
        log_lines()
        summary, folder = run_local(num_rounds=2)
    assert summary["rounds"] == 2
    assert (folder / "model.safetensors").exists()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["none", "resnet101-densenet121-random"])
def test_reading_and_features_are_shown_now_and_then(
    kind: Any, data_dir: Path, brightness: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, name, number in itertools.product(("train", "test"), ("cat", "dog"), range(3)):
        file = data_dir / f"pets/{split}/{name}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number,) * 3).save(file)
    settings = DataSettings(dataset="pets", features=kind)
    log_lines()
    with monkeypatch.context() as patch:
        patch.setattr(progress, "LINE_SECONDS", 0.0)
        load_dataset(settings)
    shown = r"reading pets: (\d+) of 12 images" if kind == "none" else r"features of pets: (\d+) of 6 images"
    said = capsys.readouterr().out
    assert {int(done) for done in re.findall(shown, said)} == (set(range(1, 13)) if kind == "none" else {4, 6})
    load_dataset(settings.model_copy(update={"normalise": "half"}))
    assert "reading" not in capsys.readouterr().out


def test_a_batch_shows_its_runs(
    run_local: RunLocal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = run_local(num_rounds=4)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:3]))
    begun = Job("half way", SMALL | {"num-rounds": 4}, folder)
    ended = Job("over", SMALL | {"num-rounds": 4}, folder.parent / "nothing")
    assert begun.last_round == 2
    assert Job("another", SMALL | {"num-rounds": 2}, folder).last_round == 0  # what is there will be taken away
    monkeypatch.setattr(batch, "LINE_SECONDS", 0.0)
    progress = BatchProgress(3)
    progress.start(begun)
    progress.start(ended)
    progress.end(ended, failed=False)
    progress.look()
    assert capsys.readouterr().out.startswith("done  over\n6 of 12 rounds, 2 runs to go, left ")
