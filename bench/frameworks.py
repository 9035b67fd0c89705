"""FedAvg as others have it: BlazeFL 2.0.3, fluke 0.8.1, pfl 0.6.0, FL-bench and Flower 1.41; for ``bench/peers.py``.

The rest differs: BlazeFL and FL-bench draw batches by torch's DataLoader; pfl takes them in the data's order, cut
once; fluke copies the shuffled data in every epoch and a model for every message; Flower has a node and two messages a
client.
"""

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bench.baselines import CLASSES, LR, Data
from bench.cases import Case, Clock, Done
from bench.measures import BATCH, WORKERS
from fedsub_app.common.tensors import Json


class Selector:
    """BlazeFL's source of networks."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Return the network."""
        return self.case.model()


class Parts:
    """BlazeFL's data set: a client's samples."""

    def __init__(self, data: list[Data]) -> None:
        self.data = data

    def get_dataset(self, type_: object, cid: int | None) -> TensorDataset:
        """Return a client's samples."""
        return TensorDataset(*self.data[cid or 0])

    def get_dataloader(
        self, type_: object, cid: int | None, batch_size: int | None = None, generator: Any = None
    ) -> Any:
        """Return a client's mini-batches."""
        return DataLoader(self.get_dataset(type_, cid), batch_size=batch_size or BATCH, shuffle=True)


def blazefl(case: Case) -> Done:
    """The FedAvg of blazefl.contrib in one process."""
    from blazefl.contrib import fedavg  # type: ignore[import-not-found]

    about: Json = {
        "model_selector": Selector(case), "model_name": case.network, "dataset": Parts(case.data()),
        "device": case.device, "num_clients": case.clients, "batch_size": BATCH, "seed": 0,
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
    return clock.done(handler.model)


def fluke(case: Case) -> Done:
    """The FedAVG of fluke in one process, without evaluation."""
    from fluke import DDict, FlukeENV  # type: ignore[import-not-found]
    from fluke.algorithms.fedavg import FedAVG  # type: ignore[import-not-found]
    from fluke.client import Client  # type: ignore[import-not-found]
    from fluke.config import OptimizerConfigurator  # type: ignore[import-not-found]
    from fluke.data import FastDataLoader  # type: ignore[import-not-found]
    from fluke.server import Server  # type: ignore[import-not-found]

    FlukeENV().set_eval_cfg(server=False)
    FlukeENV().set_device(case.device)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=LR), DDict(name="StepLR", step_size=1, gamma=1))
    clients = [
        Client(
            index=number,
            train_set=FastDataLoader(x, y, num_labels=CLASSES, batch_size=BATCH, shuffle=True),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=1,
        )
        for number, (x, y) in enumerate(case.data())
    ]
    clock = Clock()
    server = Server(model=case.model(), test_set=None, clients=clients)
    federation = FedAVG(case.clients, None, None, clients, server)
    federation.attach(Listener(clock))
    clock.tick()
    federation.run(case.rounds + 1, 1.0)
    return clock.done(server.model)


class Listener:
    """Hears of the end of fluke's rounds."""

    def __init__(self, clock: Clock) -> None:
        self.end_round = clock.tick


def pfl(case: Case) -> Done:
    """The FederatedAveraging of pfl in one process; it evaluates in the first round, which does not count."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    network, clock = case.model(), Clock()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network.train()(x), y)

    def metrics(x: torch.Tensor, y: torch.Tensor) -> Json:
        with torch.no_grad():
            return {"loss": Weighted(F.cross_entropy(network.eval()(x), y, reduction="sum").item(), len(y))}

    class Rounds(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: object, **__: object) -> Any:
            clock.tick()
            return False, Metrics()

    network.loss, network.metrics = loss, metrics  # type: ignore[assignment]
    people = get_user_sampler("minimize_reuse", list(range(case.clients)))
    data = FederatedDataset.from_slices({number: list(each) for number, each in enumerate(case.data())}, people)
    clock.tick()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=case.rounds + 1, evaluation_frequency=1000, train_cohort_size=case.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, [WeightByDatapoints()]),
        model=PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Rounds()],
    )  # fmt: skip
    return clock.done(network)


def flbench(case: Case) -> Done:
    """The client of FL-bench's FedAvg, one after the other as its serial mode has them, and its server's mean."""
    from data.utils.datasets import BaseDataset  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from src.client.fedavg import FedAvgClient  # type: ignore[import-not-found]
    from src.server.fedavg import FedAvgServer  # type: ignore[import-not-found]

    common = {
        "batch_size": BATCH, "local_epoch": 1, "buffers": "global", "reset_optimizer_on_global_epoch": True,
        "client_side_evaluation": False, "test": {"client": dict.fromkeys(("train", "val", "test"), False)},
    }  # fmt: skip
    own, model = case.data(), case.model()
    places = torch.arange(case.clients * case.samples).split(case.samples)
    x, y = (torch.cat(each) for each in zip(*own, strict=True))
    dataset = BaseDataset(x.clone(), y, list(range(CLASSES)))
    dataset.data = x  # it takes values above 1 for bytes
    worker = FedAvgClient(
        model=case.model(),
        optimizer_cls=partial(torch.optim.SGD, lr=LR),
        lr_scheduler_cls=None,
        args=OmegaConf.create({"common": common}),
        dataset=dataset,
        data_indices=[{"train": each.tolist(), "val": [], "test": []} for each in places],
        device=torch.device(case.device),
        return_diff=False,
    )
    public = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    server = SimpleNamespace(return_diff=False, public_model_params=public, model=model)
    about = {"local_epoch": 1, "optimizer_state": {}, "personal_model_params": {}}
    clock = Clock()
    clock.tick()
    for _ in range(case.rounds + 1):
        sent = {"regular_model_params": server.public_model_params, **about}
        packages = {client: worker.train({"client_id": client, **sent}) for client in range(case.clients)}
        FedAvgServer.aggregate_client_updates(server, packages)
        clock.tick()
    return clock.done(model)


@cache
def held(network: str, clients: str, folder: str, device: str) -> tuple[Case, list[Data]]:
    """Return the case and its clients' samples, which a process of Flower's simulation reads once."""
    case = Case(network, int(clients), 0, Path(folder), device)
    return case, case.data()


def flower_train(message: Any, context: Any) -> Any:
    """Train one client; here, because what Ray cannot import it sends with each message."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    case, data = held(*message.content["config"]["case"])
    model = case.model().to(case.device)
    x, y = (part.to(case.device) for part in data[int(context.node_config["partition-id"])])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=LR), 0
    for index in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(y), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def flower(case: Case) -> Done:
    """Flower's own FedAvg and simulation, a node a client, with two workers."""
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    clock, client, server = Clock(), ClientApp(), ServerApp()
    client.train()(flower_train)
    last = case.model()
    steps: list[float] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=case.clients)
        about = ConfigRecord({"case": [case.network, str(case.clients), str(case.folder), case.device]})
        how: Json = {"num_rounds": case.rounds + 1, "train_config": about, "evaluate_fn": clock.tick}
        result = strategy.start(grid, ArrayRecord(last.state_dict()), **how)
        found = result.train_metrics_clientapp.values()  # clients that fail end no run
        steps.extend(float(each["steps"]) * case.clients for each in found)  # type: ignore[arg-type]
        last.load_state_dict(result.arrays.to_torch_state_dict())

    each = {"num_cpus": 1, "num_gpus": 1 / WORKERS if case.device == "cuda" else 0.0}
    backend: Json = {"client_resources": each, "init_args": {"num_cpus": WORKERS}}
    run_simulation(server, client, case.clients, backend_config=backend)
    done = round(sum(steps))
    return Done(clock.done(last).seconds, done, done * BATCH, last.state_dict())
