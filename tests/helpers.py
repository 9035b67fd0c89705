"""What the tests of whole runs share: `fedsub …` in a fresh process, and ways to kill it at a chosen moment.

A fresh process is forked from one that has imported everything and computed nothing: it costs no seconds of imports,
and nothing survives in it from one run to the next.
"""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsub_app.common.section import Value
from fedsub_app.common.tasks import Classification
from fedsub_app.common.tensors import Json
from fedsub_app.data import Dataset, Samples
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.wire import pack, read_update, unpack_reply, update_part
from fedsub_app.models import build_model
from fedsub_app.runs import config
from fedsub_app.runs.methods import METHODS, register_outside
from fedsub_app.subnets.norms import NormGuard
from fedsub_app.training.problem import Problem
from strategies.base import SubnetStrategy
from strategies.merging import Merging, Valid

TIMINGS = ("seconds", "compute-seconds", "merge-seconds", "evaluate-seconds")
# Messages hold the run directory's path and the clients' seconds as text.
SENT = ("bytes-down", "bytes-up")
CHECKSUM = ("crc32",)  # of the line with the above
SAME = 1e-2  # see away()
PATIENCE = 300  # seconds after which a process that should have ended is killed and its test fails

PRELOADED = [
    "fedsub_app.cli.main",
    "fedsub_app.client_app",
    "fedsub_app.federation.local_grid",
    "fedsub_app.deployment.engines",
    "fedsub_app.runs.loop",
    "flwr_datasets.partitioner",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "torch._dynamo",  # which the first optimizer imports
    "helpers",
]


@cache
def forked(_: str = "spawn") -> Any:
    """Stand in for ``get_context``: fresh processes that have imported their modules already, in place of 4 s each."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # where the server of processes finds this module
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ensure_running()
    return context


def problem_of(in_shape: tuple[int, ...], classes: int = 10) -> Problem:
    """A problem of one's own: one sample of this shape, and a network of one hidden layer."""
    x, y = Samples(torch.zeros(1, *in_shape)), torch.zeros(1, dtype=torch.int64)
    data = Dataset("own", x, y, y, x, y, y, classes, ("own",), (), in_shape)
    return Problem(data, lambda seed: build_model("feature-mlp", in_shape, classes, seed), Classification())


# Keys under which a run of three rounds goes through all phases of a method.
METHOD_KEYS: dict[str, dict[str, Value]] = {
    "fedavg": {"weighting": "examples"},
    "fedprox": {"prox_mu": 0.1},
    "moon": {"moon_mu": 2.0},
    "scaffold": {},
    "fednova": {"momentum": 0.9},
    "fedadam": {"server_lr": 0.5},
    "fedyogi": {},
    "fedadagrad": {},
    "fedselect": {"momentum": 0.0, "local_epochs": 2},
    "subfedavg": {
        "local_epochs": 2,
        "validation_fraction": 0.2,
        "subfedavg__score": 10.0,
        "subfedavg__distance": 0.0,
        "subfedavg__hybrid_distance": 0.0,
    },
    "mtl": {"mtl__lambda": 0.1},
    "fedavg-ft": {},
    "ditto": {},
    "fedpm": {"fedpm__reset_every": 2, "lr": 1.0},
    "ssfl": {},
    "feddst": {"feddst__every": 2},
    "prunefl": {"prunefl__every": 2},
    "fedtiny": {"fedtiny__every": 3, "fedtiny__blocks": 1, "fedtiny__candidates": 2},
    "fedrts": {"fedrts__every": 2},
    "fedbn": {},
    "apfl": {"apfl__adapt": "step"},
    "fedala": {"fedala__learn_passes": 3},
    "per-fedavg": {"per-fedavg__variant": "hessian-free"},
    "pfedme": {"pfedme__steps": 2, "pfedme__w_lr": 0.05},
    "fedpac": {},
    "fedper": {},
    "fedrep": {},
    "fedbabu": {},
    "lg-fedavg": {"lg-fedavg__warm_rounds": 1},
    "fedpart": {
        "optimizer": "adam",
        "momentum": 0.0,
        "fedpart__full_rounds": 1,
        "fedpart__rounds_per_group": 1,
        "fedpart__momentum": "similarity",
    },
    # Without adapters fedit, flexlora, ffa-lora and fedex-lora run the code of fedavg and of these three.
    "fedsa-lora": {},
    "flora": {"server_lr": 0.5},
    "hetlora": {"hetlora__gamma": 0.5},
    "ist": {"weighting": "examples"},
    "istprox": {"prox_mu": 0.1, "server_lr": 0.5},
    "heterofl": {"heterofl__widths": "0.5, 1"},
    "fedrolex": {"fedrolex__widths": "0.5, 1", "fedrolex__assignment": "dynamic", "momentum": 0.9},
    "feddrop": {"feddrop__widths": "0.5"},
    "fjord": {"fjord__widths": "0.5, 1", "fjord__distill": True},
    "fiarse": {"fiarse__widths": "0.25, 1"},
    "local": {},
    "fedpews": {"fedpews__warmup_rounds": 2},
}
if register_outside(OUTSIDE := os.environ.get("FEDSUB_TEST_METHOD", "")):  # `make test-method M=FILE.py:NAME`
    METHOD_KEYS[OUTSIDE] = {}


@dataclass(frozen=True)
class Finished:
    """A process that has ended: exit code (negative: the signal that killed it) and what it said."""

    code: int
    out: str
    err: str


def fedsub(
    scratch: Path, *arguments: str, die: tuple[str, int] | None = None, largest_file: int | None = None
) -> Finished:
    """Run ``fedsub <arguments>`` in a fresh process.

    ``die``: what happens to it (kill -9, mostly) at which moment of which round (``MOMENTS``). ``largest_file``: bytes
    beyond which the system lets it write no file, as on a full disk.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    files = scratch / "stdout.txt", scratch / "stderr.txt"
    target_arguments = (arguments, die, files, dict(os.environ), largest_file)
    process = forked().Process(target=_main, args=target_arguments)  # no daemon: it starts workers
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"fedsub {' '.join(arguments)}: still running after {PATIENCE} s")
    out, err = (file.read_text() for file in files)
    return Finished(process.exitcode, out, err)


def _main(
    arguments: tuple[str, ...],
    die: tuple[str, int] | None,
    files: tuple[Path, Path],
    variables: dict[str, str],
    largest_file: int | None,
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for file, stream in zip(files, (1, 2), strict=True):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    from fedsub_app.cli.main import main

    os.fsync = lambda _: None  # as in this process: conftest.py
    if die:
        moment, server_round = die
        MOMENTS[moment](server_round)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if die or largest_file is not None:
        arguments += ("--workers", "1")  # the process that this happens to is the run
    raise SystemExit(main(list(arguments)))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner: Any, name: str, before: Callable[..., bool] | None = None, after: Callable[..., bool] | None = None):
    """Kill this process when ``owner.name`` is called (or has returned) with arguments of which the condition holds."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before and before(*args, **kwargs):
            _kill()
        result = original(*args, **kwargs)
        if after and after(*args, **kwargs):
            _kill()
        return result

    setattr(owner, name, wrapper)


def _before_training(number: int) -> None:
    from strategies.base import SubnetStrategy

    _wrap(SubnetStrategy, "configure_train", before=lambda self, server_round, *_: server_round == number)


def _interrupted(number: int) -> None:
    """Ctrl-C."""
    from strategies.base import SubnetStrategy

    def interrupt(self: Any, server_round: int, *_: Any) -> bool:
        if server_round == number:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    _wrap(SubnetStrategy, "configure_train", before=interrupt)


def _directory_deleted(number: int) -> None:
    """Somebody deletes the run directory."""
    from fedsub_app.runs.directory import Run

    def delete(self: Any, line: Json) -> bool:
        if line["round"] == number:
            shutil.rmtree(self.folder)
        return False

    _wrap(Run, "log_round", before=delete)


def _while_a_client_trains(number: int) -> None:
    """In the third step of the second client: the first one has written its state."""
    from fedsub_app.training.client import Training

    _wrap(
        Training, "descend", before=lambda self, *_: (self.client.round, self.client.id, self.steps) == (number, 2, 2)
    )


def _client_state_half_written(number: int) -> None:
    _wrap(Path, "replace", before=lambda self, to: to.parent.name[:7] == "client-" and to.name == _file(number))


def _client_state_written(number: int) -> None:
    from fedsub_app.training.client_state import ClientState

    _wrap(ClientState, "save", after=lambda self, round_, *_: round_ == number)


def _line_written(number: int) -> None:
    from fedsub_app.runs.directory import Run

    _wrap(Run, "log_round", after=lambda self, line: line["round"] == number)


def _checkpoint_half_written(number: int) -> None:
    """The temporary file is there, the checkpoint is not."""
    _wrap(Path, "replace", before=lambda self, to: (to.parent.name, to.name) == ("checkpoints", _file(number)))


def _checkpoint_written(number: int) -> None:
    from fedsub_app.runs.directory import Run

    _wrap(Run, "checkpoint", after=lambda self, server_round, *_: server_round == number)


def _before_the_summary(number: int) -> None:
    from fedsub_app.runs.directory import Run

    _wrap(Run, "finish", before=lambda self, *_: self.lines[-1]["round"] == number)


def _summary_half_written(number: int) -> None:
    _wrap(Path, "replace", before=lambda self, to: to.name == "summary.json")


def _settings_written(number: int) -> None:
    from fedsub_app.runs import loop

    _wrap(loop, "open_run", after=lambda *_: True)


def _file(number: int) -> str:
    return f"round-{number:06d}.safetensors"


MOMENTS: dict[str, Callable[[int], None]] = {
    "settings written": _settings_written,
    "before training": _before_training,
    "interrupted": _interrupted,
    "directory deleted": _directory_deleted,
    "while a client trains": _while_a_client_trains,
    "client state half written": _client_state_half_written,
    "client state written": _client_state_written,
    "line written": _line_written,
    "checkpoint half written": _checkpoint_half_written,
    "checkpoint written": _checkpoint_written,
    "before the summary": _before_the_summary,
    "summary half written": _summary_half_written,
}


class Brightness(nn.Module):
    """Stands for a backbone where only what is kept matters: an image's mean, and how many images were seen by all."""

    seen = 0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        Brightness.seen += len(x)
        return x.mean((1, 2, 3))[:, None].expand(-1, self.size)


def rounds(folder: Path, without: tuple[str, ...] = TIMINGS + SENT + CHECKSUM) -> list[Json]:
    """The lines of a run, without what the clock and the length of paths decide."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in without} for line in lines]


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder and their content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def result(folder: Path) -> Json:
    """All that must be the same of two equal runs: weights bit for bit, client states, metrics, summary."""
    states = {name: data for name, data in tree(folder / "clients").items() if not Path(name).name.startswith(".")}
    summary = json.loads((folder / "summary.json").read_text())
    without = ["run-dir", *CHECKSUM, *(f"total-{key}" for key in TIMINGS + SENT)]
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "last checkpoint": {
            name: tensor.numpy().tobytes()
            for name, tensor in load_file(max((folder / "checkpoints").glob("round-*"))).items()
        },
        "client states": states,
        "rounds": rounds(folder),
        "summary": {key: value for key, value in summary.items() if key not in without},
    }


def read(strategy: SubnetStrategy, update: Update) -> Update:
    """An update as the server reads it off the wire."""
    expected = strategy.expected(update.client)
    _, (part,) = unpack_reply(pack({}, [update_part(update)]), {update.client: expected})
    return read_update(part, expected, strategy.metrics(update.client), strategy.examples(update.client))


def merge_round(strategy: SubnetStrategy, updates: list[Update], asked: Sequence[int] = ()) -> Json:
    """Merge valid updates as the base does it, and make the result current; returns what the method reports.

    ``asked``: the clients that a message was sent for; by default those that answered.
    """
    strategy.phase = Phase()
    strategy.phase.outbox.sent = [(None, list(asked) or [update.client for update in updates])]  # type: ignore[list-item]
    merging = Merging(strategy)
    for update in updates:
        contribution = strategy.contribution(update)
        merging.add(Valid(update, contribution, strategy.norms(update, contribution)))
    if not updates:
        return {}
    merged = merging.result()
    strategy.commit(merged, merging.updates)
    return merged.report


def forget(method: str) -> None:
    """Take a method that a test has registered out of the register."""
    METHODS.pop(method, None)
    for cached in (config.fields, config.defaults):
        cached.cache_clear()


def too_large(said: Sequence[Mapping[str, float]], most: float, model: float) -> dict[int, str]:
    """Which updates a guard refuses, and why; it gives them back in their order."""
    guard = NormGuard[int](most, model)
    decided = [found for k, norms in enumerate(said) for found in guard.add(k, norms)] + guard.rest()
    assert [k for k, _ in decided] == list(range(len(said)))
    return {k: reason for k, reason in decided if reason}


@torch.no_grad()
def away(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far the app's tensors are from those of a reference, as a fraction of how far training moved them.

    The largest over all tensors of ``|ours - expected| / (|expected - start| + |start| / 1000)``, with Euclidean norms;
    the second term is for tensors that training leaves where they are, a bias before a BatchNorm.

    The app trains in float32. What that rounds off differs between processors, BLAS and torch releases and is not small
    everywhere: a ReLU's input of 1e-8 may get the other sign, and Adam divides a gradient that is nothing but rounding
    by its own size. Either moves a few weights by as much as one step does, so no tolerance for single weights is both
    tight and safe. In the norm they are lost among the others, whereas a wrong line moves all of them: below ``SAME``
    it is rounding (one such ReLU is 1e-3 of a small bias vector), above it another algorithm.
    """
    assert ours.keys() == expected.keys()
    return max(
        float(
            (ours[name] - tensor).detach().norm()
            / ((tensor - start[name]).detach().norm() + start[name].detach().norm() / 1000)
        )
        for name, tensor in expected.items()
    )


def forgetful(folder: Path, client: int, after: int) -> type[LocalGrid]:
    """A grid whose node loses the state of a client once, when it is that of round ``after``; ``folder``: the run's."""
    state = folder / f"clients/client-{client:06d}"

    class Forgetful(LocalGrid):
        lost = False

        def push_messages(self, messages: Any) -> Any:
            if not self.lost and (state / _file(after)).exists():
                shutil.rmtree(state)
                self.lost = True
            return super().push_messages(messages)

    return Forgetful


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_flower(
    variables: dict[str, str], *arguments: str, project: Path = PROJECT
) -> "subprocess.CompletedProcess[str]":
    """Run ``fedsub run <arguments>`` of ``project`` with this environment; a run that hangs fails the test."""
    command = [sys.executable, "-m", "fedsub_app.cli", "run", *arguments]
    process = subprocess.Popen(
        command,
        cwd=project,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=3 * PATIENCE)  # Ray's start alone takes minutes on a busy machine
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)}: still running after {3 * PATIENCE} s\n{out[-3000:]}\n{err[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def install_method(site: Path) -> Path:
    """Put the package ``hsu``, whose method is the example's, into a folder; returns the file of its entry points."""
    about = site / "hsu-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hsu\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fedsub.methods]\nhsu = hsu:FedAvgM\nfedavg = hsu:FedAvgM\n")
    shutil.copyfile(PROJECT / "examples/own-method/fedavgm.py", site / "hsu.py")
    return about / "entry_points.txt"


def ends_as_if_never_stopped(run_local: Callable[..., Any], scratch: Path, keys: Mapping[str, Value]) -> None:
    """A run of four rounds that goes on after the second one has the rounds and the model of the whole run.

    ``run_local`` is the fixture, which runs in ``scratch``; the keys keep all checkpoints.
    """
    _, whole = run_local("whole", **keys)
    part = Path(shutil.copytree(whole, scratch / "part"))
    for name in ("summary.json", "checkpoints/round-000003.safetensors", "checkpoints/round-000004.safetensors"):
        (part / name).unlink()
    run_local("part", **keys, resume=True)
    assert rounds(part) == rounds(whole)
    assert (part / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def tokenizer_folder(folder: Path) -> None:
    """Save a tokenizer of four words in the form in which transformers saves one."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "film": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
