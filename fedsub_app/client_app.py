"""The ClientApp, the same for all methods: one message → the clients hosted on this node → one reply."""

import json
import os
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedsub_app.common.code import code_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.config import resolve
from fedsub_app.federation.protocol import Update, pack, unpack, update_part
from fedsub_app.methods import METHODS
from fedsub_app.settings import Settings
from fedsub_app.training.client_state import ClientState
from fedsub_app.training.workplace import Workplace, workplace

app = ClientApp()

if Path(sys.argv[0]).name == "flwr-simulation":
    # Ray's workers import from the working directory of the process that starts them, which is where the SuperLink was
    # started once, maybe in another checkout; the code of this run is the bundle that this module came from.
    os.chdir(Path(__file__).resolve().parents[1])


def simulated() -> bool:
    """Say whether this process serves simulated nodes (Ray, in-process grid), which share one disk."""
    return Path(sys.argv[0]).name != "flwr-clientapp"


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Answer which partition this node is."""
    header, _ = unpack(message.content)
    node = context.node_config
    answer: Json = {"simulated": simulated()}
    if header["code"] != code_digest():
        answer["error"] = _other_code(header["code"])
    elif not isinstance(node.get("partition-id"), int) or not isinstance(node.get("num-partitions"), int):
        answer["error"] = f"--node-config = {dict(node)}: needs partition-id=<int> num-partitions=<int>"
    elif not 0 <= node["partition-id"] < node["num-partitions"]:  # type: ignore[operator]
        answer["error"] = f"partition-id = {node['partition-id']}: must be 0 to num-partitions - 1"
    else:
        answer |= {key: node[key] for key in ("partition-id", "num-partitions")}
    return Message(pack(answer, []), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the clients of a message."""
    return _answer(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the clients of a message."""
    return _answer(message, context)


def _answer(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # one thread a worker: same results everywhere, and faster on small networks
    header, parts = unpack(message.content)
    stamp = {key: header[key] for key in ("run", "round", "phase")}
    try:
        if header["code"] != code_digest():
            raise UserError(_other_code(header["code"]))
        place = workplace(_settings(json.dumps(header["settings"]), str(context.node_config.get("data-dir", ""))))
    except UserError as error:
        return Message(pack(stamp | {"error": str(error)}, []), reply_to=message)
    folder = _state_folder(header, context)
    updates = [_run(place, folder, header, config, tensors) for config, tensors in parts]
    return Message(pack(stamp, [update_part(update) for update in updates]), reply_to=message)


def _run(place: Workplace, folder: Path, header: Json, config: Json, sent: Tensors) -> Update:
    """Run one client's task; where it fails, only this client's update says so."""
    client = config["client"]
    store = ClientState(folder, client)
    try:
        before = header["round"] + (header["phase"] == MessageType.EVALUATE)
        kept, state = store.load(before)
        worker = METHODS[place.settings.method].client(place, client, header["round"], state)
        if header["phase"] == MessageType.EVALUATE:
            return replace(worker.run_evaluation(sent, config, header["evaluate"]), state=(kept, kept))
        update = worker.run_training(sent, config)
        if worker.state:
            store.save(header["round"], worker.state, header["committed"])
        return replace(update, state=(kept, header["round"] if worker.state else kept))
    except (Exception, SystemExit) as error:  # any client may fail without taking the others of its node along
        return Update(client, error=f"{type(error).__name__}: {error}"[:300])


@lru_cache(maxsize=4)
def _settings(text: str, data_dir: str) -> Settings:
    """Settings from a message; a node's own ``data-dir`` (node config) wins."""
    return resolve(json.loads(text) | ({"data-dir": data_dir} if data_dir else {}))


def _state_folder(header: Json, context: Context) -> Path:
    """Where client state lies: in the run directory on one machine, else in a folder of the node's own."""
    own = str(context.node_config.get("state-dir", ""))
    if simulated() and not own:
        return Path(header["state-dir"])
    root = own or os.environ.get("FEDSUB_STATE", "") or Path.home() / ".local/state/fedsub"
    return Path(root) / str(header["run"])


def _other_code(theirs: str) -> str:
    return (
        f"this node runs other code (digest {code_digest()}) than the server ({theirs}): "
        "stop the SuperLink or SuperNode that was started from another checkout"
    )
