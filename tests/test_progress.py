"""What is shown on a terminal, here a pseudo-terminal, and that a pipe gets plain lines."""

import itertools
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import SMALL
from PIL import Image

from fedsub_app.common import progress
from fedsub_app.common.tensors import Json
from fedsub_app.data import DataSettings, load_dataset
from fedsub_app.engines import log, log_to_stdout
from fedsub_app.studies.batch import BatchProgress, Job

RunLocal = Callable[..., tuple[Json, Path]]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BACK = "\x1b[2K"  # the line is emptied, to be written over


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 200) -> Iterator[list[str]]:
    """Let stdout be a pseudo-terminal; afterwards the list holds what was written to it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    main, second = pty.openpty()
    written: list[str] = []
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(main, 4096):
                pieces.append(piece)
        except OSError:  # the other side is closed
            pass

    reader = Thread(target=read)
    reader.start()
    with os.fdopen(second, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield written
    reader.join()
    os.close(main)
    written.append(b"".join(pieces).decode())


def test_a_run_has_one_line_on_a_terminal(run_local: RunLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as written:
        log_to_stdout()
        run_local(num_rounds=4)
        log.info("the end")
        log.handlers[0].close()
    text = written[0]
    assert BACK in text
    shown = re.findall(
        r"round (\d)/4  left \d+ s  global ([\d.]+) %  train loss ([\d.]+)  clients",
        ESCAPES.sub("", text),
    )
    assert list(dict.fromkeys(number for number, *_ in shown)) == ["1", "2", "3", "4"]
    assert text.rstrip().endswith("the end")


def test_a_round_that_lost_a_reply_stays_above(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as written:
        log_to_stdout()
        log.info("round 2 dropped client 1: boom", extra={"done": 2, "total": 9, "stays": True})
        log.handlers[0].close()
    text = ESCAPES.sub("", written[0])
    assert "round 2 dropped client 1: boom\r\n" in text
    assert "━ round 2 dropped client 1: boom" in text


def test_a_pipe_gets_plain_lines(run_local: RunLocal, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stdout()
    run_local(num_rounds=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines if line.startswith("round")] == ["round 1/2", "round 2/2"]
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("kind", ["none", "resnet101-densenet121-random"])
def test_reading_and_features_are_shown(
    kind: Any, data_dir: Path, brightness: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, name, number in itertools.product(("train", "test"), ("cat", "dog"), range(3)):
        file = data_dir / f"pets/{split}/{name}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number,) * 3).save(file)
    settings = DataSettings(dataset="pets", features=kind)
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0.0)
    with terminal(monkeypatch) as written:
        log_to_stdout()
        load_dataset(settings)
        log.info("the next line")
        log.handlers[0].close()
    text = ESCAPES.sub("", written[0])
    assert "reading pets" in text
    shown = r"reading pets: (\d+) of 12 images" if kind == "none" else r"features of pets: (\d+) of 6 images"
    assert {int(done) for done in re.findall(shown, text)} == (set(range(1, 13)) if kind == "none" else {4, 6})
    assert text.rstrip().endswith("the next line")
    log_to_stdout()
    load_dataset(settings.model_copy(update={"normalise": "half"}))
    assert "reading" not in capsys.readouterr().out


def test_a_batch_shows_its_runs(run_local: RunLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = run_local(num_rounds=4)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:3]))
    begun = Job("half way", SMALL | {"num-rounds": 4}, folder)
    ended = Job("over", SMALL | {"num-rounds": 4}, folder.parent / "nothing")
    assert Job("another", SMALL | {"num-rounds": 2}, folder).last_line() == {
        "round": 0
    }  # what is there will be taken away
    with terminal(monkeypatch) as written, BatchProgress(3) as progress:
        progress.start(begun)
        progress.start(ended)
        progress.end(ended, failed=False)
        progress.look()
    text = ESCAPES.sub("", written[0])
    assert "done  over" in text
    assert "6 of 12 rounds, 2 runs to go" in text
    assert re.search(r"half way  round 2/4  global [\d.]+ %  train loss [\d.]+", text)
