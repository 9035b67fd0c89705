"""Rounds of FedAvg by other frameworks and by fedsub: seconds of a round, over those of a plain torch loop.

``python -m bench.peers [--only NAME…] [--clients 10] [--samples 500] [--rounds 4] [--repeats 3]``: LeNet-5 on random
images of CIFAR's shape, batches of 10, one epoch, SGD, one thread a process, no evaluation. Each repetition is a
process of its own; the peers take turns, and the first round of each does not count. Minima are compared.

The peers are no dependencies of fedsub. They go into a folder of their own, which this process sees::

    .venv/bin/pip install --no-deps --ignore-requires-python --target peers blazefl==2.0.3   # it asks for Python 3.12
    PYTHONPATH=peers .venv/bin/python -m bench.peers

A peer that is not installed is named and left out. The loop and the pool are those of ``bench/baselines.py``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.baselines import CLASSES, IMAGE, LR, IdealPool, PlainClients, loop_rounds
from bench.measures import BATCH, WORKERS, apart, counted, experiment, run_local, worker_grid, write_images
from fedsub_app.common.tensors import Json
from fedsub_app.models import build_model


class Case(NamedTuple):
    """The size of a run; ``rounds`` are the counted ones."""

    clients: int
    samples: int
    rounds: int


class Clock:
    """The seconds between calls of :meth:`tick`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def tick(self, *_: object, **__: object) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def rounds(self) -> list[float]:
        """Return the seconds of the rounds after the first one."""
        return [end - begin for begin, end in zip(self.times[1:], self.times[2:], strict=False)]


def loop(case: Case) -> list[float]:
    """One client after the other in one process."""
    return loop_rounds(PlainClients(case.clients, case.samples, 1, BATCH, "cpu"), case.rounds + 1)[1:]


def pool(case: Case) -> list[float]:
    """Two processes that have their clients' data, and nothing to check."""
    with IdealPool(WORKERS, case.clients, case.samples, 1, BATCH, "cpu") as ideal:
        return ideal.rounds(case.rounds)


def fedsub(case: Case, workers: int) -> list[float]:
    """The local engine."""
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), case.clients * case.samples)
        settings = experiment(Path(folder), case.clients, 1, case.rounds + 1, "cpu")
        lines, grid = run_local(settings, worker_grid, workers)
        grid.close()
        return [line["seconds"] for line in counted(lines, skip=1)]


def network() -> torch.nn.Module:
    """Return the LeNet-5 of all peers."""
    return build_model("lenet5", IMAGE, CLASSES, 0)


def data_of(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples and labels of each client."""
    torch.set_num_threads(1)
    return PlainClients(case.clients, case.samples, 1, BATCH, "cpu").data


class Selector:
    """BlazeFL's source of networks."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Return the network."""
        return network()


class Parts:
    """BlazeFL's data set: a client's samples."""

    def __init__(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.data = data

    def get_dataset(self, type_: object, cid: int | None) -> TensorDataset:
        """Return a client's samples."""
        return TensorDataset(*self.data[cid or 0])

    def get_dataloader(
        self, type_: object, cid: int | None, batch_size: int | None = None, generator: Any = None
    ) -> Any:
        """Return a client's mini-batches."""
        return DataLoader(self.get_dataset(type_, cid), batch_size=batch_size or BATCH, shuffle=True)


def blazefl(case: Case) -> list[float]:
    """The FedAvg of blazefl.contrib in one process."""
    from blazefl.contrib import fedavg  # type: ignore[import-not-found]

    about: Json = {
        "model_selector": Selector(), "model_name": "lenet5", "dataset": Parts(data_of(case)), "device": "cpu",
        "num_clients": case.clients, "batch_size": BATCH, "seed": 0,
    }  # fmt: skip
    handler = fedavg.FedAvgBaseServerHandler(global_round=case.rounds + 1, sample_ratio=1.0, **about)
    trainer = fedavg.FedAvgBaseClientTrainer(**about, epochs=1, lr=LR)
    clock = Clock()
    clock.tick()
    while not handler.if_stop():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        clock.tick()
    return clock.rounds()


def flower(case: Case) -> list[float]:
    """Flower's own FedAvg and simulation, a node a client, with two workers."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    data, clock, client, server = data_of(case), Clock(), ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model, (x, y) = network(), data[int(context.node_config["partition-id"])]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for index in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=case.clients)
        configured = strategy.configure_train

        def configure(*arguments: Any, **keywords: Any) -> Any:
            clock.tick()
            return configured(*arguments, **keywords)

        strategy.configure_train = configure  # type: ignore[method-assign]
        result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=case.rounds + 2)
        if len(result.train_metrics_clientapp) < case.rounds + 2:  # clients that fail end no run
            raise RuntimeError("Flower's clients have failed")

    backend: Json = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": WORKERS}}
    run_simulation(server, client, case.clients, backend_config=backend)
    return clock.rounds()


PEERS: dict[str, Callable[[Case], list[float]]] = {
    "loop": loop,
    "fedsub": partial(fedsub, workers=1),
    "BlazeFL": blazefl,
    "pool of two": pool,
    "fedsub, two workers": partial(fedsub, workers=WORKERS),
    "Flower's FedAvg, two workers": flower,
}


@contextmanager
def _left_out(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"{name}: not installed: {error}", file=sys.stderr)


def main() -> int:
    """Measure and print a table; its last line is the JSON of all seconds."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    for option, default in (("clients", 10), ("samples", 500), ("rounds", 4), ("repeats", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    case = Case(options.clients, options.samples, options.rounds)
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name in dict.fromkeys(["loop", *options.only]):
            with _left_out(name):
                seconds.setdefault(name, []).extend(apart(PEERS[name], case))
    best = {name: min(each) for name, each in seconds.items() if each}
    print("| | seconds a round, minimum | over the loop |\n|---|---|---|")
    for name, least in best.items():
        print(f"| {name} | {least:.3f} | {least / best['loop']:.2f} |")
    versions = {}
    for package in ("torch", "flwr", "blazefl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    print(json.dumps({"case": case._asdict(), "versions": versions, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    from bench.peers import main as importable  # Ray's processes find what is in a module

    sys.exit(importable())
