"""A node: the settings, data and folders of the runs that it takes part in, and the clients that it hosts.

``header`` is a message's header (federation/wire.py); ``config`` is the node's own configuration, ``--node-config``.
Data and network come from a :data:`Source`: those that the settings name (:func:`named`), or a user's app's.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, MessageType, RecordDict
from torch import Tensor

from fedsub_app.common.code import code_digest, versions
from fedsub_app.common.errors import UserError, one_line, place_of, printable, shown
from fedsub_app.common.failures import MachineFailed, machine_failure
from fedsub_app.common.inputs import shape_shown
from fedsub_app.common.own_code import bundled
from fedsub_app.common.run_files import Config, initial_file, keep_settings, kept_settings, simulated, state_folder
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensor_files import write_tensors
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import READERS, SOURCES, data_folder, in_data_folder, private_name
from fedsub_app.data.text import TRAINED, vocabulary_digest
from fedsub_app.federation.blocks import block_parts
from fedsub_app.federation.protocol import MEASURE, SECURE, TEST, Update
from fedsub_app.federation.wire import INITIAL, NONCE, UNKNOWN_SETTINGS, pack, update_part
from fedsub_app.models import check_base
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import own_code
from fedsub_app.secure.client import SECRET, withheld
from fedsub_app.secure.client import answer as secure_answer
from fedsub_app.settings import Settings
from fedsub_app.subnets.privacy import noisy
from fedsub_app.training.client_state import ClientState, StateGone, flush_states
from fedsub_app.training.local import evaluation_batches, sums_of
from fedsub_app.training.problem import Problem
from fedsub_app.training.stacked import together
from fedsub_app.training.workplace import Workplace, workplace

log = logging.getLogger("fedsub")
Places = Callable[[int], Workplace]  # client -> its workplace
Source = Callable[[Settings, Json, Context], Places]  # the run's settings, a message's header, the node's context


def sees_gpu() -> bool:
    """Say whether this process may use a GPU: Ray hides a GPU from a node that has no share of it."""
    return torch.cuda.is_available()


def roll_call(header: Json, context: Context, source: Source) -> Json:
    """Return this node's partition, or the reason why it cannot take part; keep the settings of the run that asks.

    Where the run's network has a frozen base, this node loads its own weights and compares them.
    """
    config = context.node_config
    answer: Json = {"simulated": simulated()}
    if header["code"] != code_digest():
        return answer | {"error": _other_code(header["code"])}
    partition, count = config.get("partition-id"), config.get("num-partitions")
    if not isinstance(partition, int) or not isinstance(count, int):
        given = {key: config[key] for key in ("partition-id", "num-partitions") if key in config}  # paths stay here
        return answer | {"error": f"--node-config = {given}: needs partition-id=<int> num-partitions=<int>"}
    if not 0 <= partition < count:
        return answer | {"error": f"partition-id = {partition}: must be 0 to num-partitions - 1"}
    if "settings" in header:
        keep_settings(header, state_folder(header, config))
    if header.get("base") and not simulated():
        try:
            source(settings_from(header["settings"]), header, context)
        except UserError as error:
            return answer | {"error": str(error)}
    return answer | {"partition-id": partition, "num-partitions": count, "gpu": sees_gpu(), "versions": versions()}


def answer(header: Json, parts: Sequence[tuple[Json, Tensors]], context: Context, source: Source) -> RecordDict:
    """Run the clients of a message, one a part; returns the reply's content.

    ``error`` reports a failure of the message as a whole; ``fatal`` marks one of the machine, which ends the run.
    """
    stamp = {NONCE: header[NONCE]}
    try:
        content = _content(header, parts, stamp, context, source)
        flush_states()
        return content
    except UserError as error:
        return pack(stamp | {"error": _logged(str(error))}, [])
    except Exception as error:
        if simulated() and (failure := machine_failure(error)):
            return pack(stamp | {"error": printable(failure), "fatal": True}, [])
        raise


def _content(
    header: Json, parts: Sequence[tuple[Json, Tensors]], stamp: Json, context: Context, source: Source
) -> RecordDict:
    folder, settings = state_folder(header, context.node_config), settings_of_run(header, context.node_config)
    if not settings:
        return pack(UNKNOWN_SETTINGS | stamp, [])
    tasks = [(task, sent) for task, sent in parts if INITIAL not in task]
    for _, sent in parts[len(tasks) :]:
        write_tensors(initial_file(folder), sent)
    if header["phase"] == SECURE:
        updates = [_attempt(secure_answer, folder, header, task, sent) for task, sent in tasks]
        return pack(stamp, [update_part(update) for update in updates])
    places = source(settings, header, context)
    run = partial(_attempt, partial(_run, places, settings.num_clients), folder, header)
    given = tasks
    tasks = [(task, {name: x for name, x in sent.items() if not name.startswith(SECRET)}) for task, sent in given]
    if how := header.get("means"):
        blocks = [list(block) for _, block in groupby(tasks, key=lambda task: task[0]["block"])]
        return pack(stamp, [part for block in blocks for part in block_parts(run, block, how)])
    if header["phase"] == TEST:
        updates = _tested(places(0), tasks)
    elif settings.stack_clients and header["phase"] == MessageType.TRAIN:
        updates = together([partial(run, task, sent) for task, sent in tasks])
    else:
        updates = [run(task, sent) for task, sent in tasks]
    if header["phase"] == MessageType.TRAIN and settings.dp_noise_by == "clients":
        updates = [_noisy(settings, header, update, sent) for update, (_, sent) in zip(updates, tasks, strict=True)]
    if header["phase"] == MessageType.TRAIN and settings.secure_aggregation:
        done = zip(updates, given, strict=True)
        updates = [_attempt(withheld, folder, header, task, sent, update) for update, (task, sent) in done]
    return pack(stamp, [update_part(update) for update in updates])


def _noisy(settings: Settings, header: Json, update: Update, sent: Tensors) -> Update:
    """Return an update with its client's share of the noise; real nodes draw it from the system."""
    deviation = settings.dp_noise_multiplier * settings.clip_norm / math.sqrt(settings.sample_size)
    draws = generator(settings.seed, header["round"], update.client, "noise") if simulated() else None
    return replace(update, tensors=noisy(update.tensors, sent, settings.clip_norm, deviation, draws))


def _run(places: Places, count: int, folder: Path, header: Json, task: Json, sent: Tensors) -> Update:
    client = task["client"]
    if type(client) is not int or not 0 <= client < count:
        raise UserError(f"client = {client!r}: must be an integer from 0 to {count - 1}")
    place = places(client)
    store, merged = ClientState(folder, client), task.get("state", 0)
    state = store.load(merged)
    before = merged if state else 0
    worker = METHODS[place.settings.method].client(place, client, header["round"], state)
    worker.lr = header.get("lr", worker.lr)
    if header["phase"] == MessageType.EVALUATE:
        return replace(worker.run_evaluation(sent, task, header["evaluate"]), state=(before, before))
    if merged and not state and worker.irreplaceable:
        raise StateGone(f"client {client} has lost its state: {worker.irreplaceable}")
    if header["phase"] == MEASURE:
        return replace(worker.run_training(sent, task, measuring=True), state=(before, before))
    update = worker.run_training(sent, task)
    if worker.state:
        store.save(header["round"], worker.state, merged, header["checkpoints"])
    return replace(update, state=(before, update.state[1] or before))


def _attempt(work: Callable[..., Update], folder: Path, header: Json, task: Json, *rest: Any) -> Update:
    """Return a client's update; a failure is reported in it, but where a simulated node's machine failed, the run ends.

    It is also the run's machine, and the next client would fail as well. A real node is one of many machines.
    """
    try:
        return work(folder, header, task, *rest)
    except (Exception, SystemExit) as error:  # a client's failure must not affect the other clients of its node
        if simulated() and (failure := machine_failure(error)):
            raise MachineFailed(f"client {task['client']}: {failure}") from error
        place = "" if isinstance(error, UserError) else place_of(error)
        reason = _logged(printable(f"{type(error).__name__}: {error}", 200 - len(place)) + place)
        return Update(task["client"], error=reason, lost=isinstance(error, StateGone))


def _logged(reason: str) -> str:
    """Return the reason why the server gets no answer; it stands in a real node's own log too."""
    if not simulated():
        log.warning("no answer to the server: %s", reason)
    return reason


def _tested(place: Workplace, tasks: Sequence[tuple[Json, Tensors]]) -> list[Update]:
    """Return the sums of batches of the global test set as updates without tensors; a task has a batch's number."""
    place.network.load(tasks[0][1])  # all have the one global model
    model, task = place.network.module.eval(), place.problem.task
    batches = evaluation_batches(model, len(place.test_y), place.device)
    updates = []
    for number, batch in ((asked["client"], batches[asked["client"]]) for asked, _ in tasks):
        x, y = place.test_x[batch], place.test_y[batch]
        sums: Json = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in sums_of(task, model, x, y).items()}
        updates.append(Update(number, {}, sums, len(y)))
    return updates


# --- the workplace of a run's clients -------------------------------------------------------------------------------


def settings_of_run(header: Json, config: Config) -> Settings | None:
    """Return the settings of a message's run; ``None`` where this node lacks them."""
    if header.get("code", code_digest()) != code_digest():
        raise UserError(_other_code(header["code"]))
    folder = state_folder(header, config)
    if "settings" in header:
        keep_settings(header, folder)
    text = kept_settings(folder, header["digest"])
    return settings_from(text) if text else None


def named(settings: Settings, header: Json, context: Context, problem: Problem | None = None) -> Places:
    """Return the one workplace of all clients: of the data that the settings name, or of the node's private data.

    ``problem``: in the place of the named one; the run's partition shares out its samples to the clients.
    """
    private, folder = (str(context.node_config.get(key, "")) for key in ("private-data", "data-dir"))
    state = state_folder(header, context.node_config)
    if not problem and (settings.private_examples or private):
        place = _private_place(settings, private, header, state, folder)
    else:
        place = workplace(_read_here(settings, folder), problem, state, header.get("run", ""))
    check_base(settings.model, place.base, header.get("base", ""), "the server's")
    return lambda client: place


def _private_place(settings: Settings, path: str, header: Json, state: Path, folder: str = "") -> Workplace:
    """Return the workplace of a node's own data, which must be like the server's; ``folder``: its data folder."""
    if not path:
        setting = f"private-examples = {settings.private_examples}"
        raise UserError(f"--node-config: {setting} needs private-data=<path of an .npz file, image folder or table>")
    if not settings.private_examples:
        raise UserError(f"private-data = {path!r}: not used in a run with private-examples = 0")
    if Path(path).suffix[1:] in READERS and not settings.input:
        raise UserError(f"input = '': must name the columns with private-data = {path!r}: tables may order others")
    texts = isinstance(header["shape"], dict)
    shape = {n: tuple(s) for n, s in header["shape"].items()} if texts else tuple(header["shape"])
    if texts and settings.tokenizer in TRAINED:
        tokenizer = f"tokenizer = {settings.tokenizer!r}: differs between nodes"
        raise UserError(f"{tokenizer}; must be 'transformers:NAME' with private-data = {path!r}")
    square = len(shape) == 3 and not texts and shape[1] == shape[2]
    own = _private_settings(settings, path, folder, shape[1] if square else 0)
    place = workplace(own, state=state, run=header.get("run", ""))
    data = place.problem.data
    for what, have, wanted in (
        ("classes", data.num_classes, header["classes"]),
        ("samples", shape_shown(data.in_shape), shape),
        ("labels", data.labels, tuple(header.get("labels", ()))),
        ("vocabulary of SHA-256", vocabulary_digest(own.tokenizer), header.get("vocabulary", "")),
    ):
        if have != wanted and (what != "labels" or (have and wanted)):  # images in an npz file have no names of classes
            raise UserError(f"private-data = {path!r}: {what} {have}, the server's data set has {wanted}")
    return place


@lru_cache(maxsize=4)
def _private_settings(settings: Settings, path: str, folder: str, image_size: int) -> Settings:
    """Return a run's settings with all samples of this node's data set instead of the run's."""
    name = private_name(Path(path))
    private: dict[str, Value] = {"dataset": name, "data-dir": str(Path(path).parent), "domains": "", "experiment": ""}
    for key in ("model", "tokenizer"):  # of its data folder, which the data need not be in
        private[key] = in_data_folder(getattr(settings, key), folder or settings.data_dir)
    return resolve(settings.flat() | private | {"train-per-class": 0, "test-per-class": 0, "image-size": image_size})


@lru_cache(maxsize=4)
def settings_from(text: str) -> Settings:
    """Return the settings of a message, which are JSON."""
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"settings: not valid JSON ({one_line(error)})") from None
    if not isinstance(keys, dict):
        raise UserError(f"settings = {shown(keys)}: must be an object")
    keys["experiment"] = ""  # a file names no more keys
    for key, code in own_code(keys).items():
        # A server must not name code that this node is to run; that of the bundle is in the digest of all code.
        if not simulated() and not bundled(code).exists():
            raise UserError(f"{key} = {code!r}: a node runs code of the run's bundle or of known packages only")
    return resolve(keys)


def _read_here(settings: Settings, data_dir: str) -> Settings:
    """Return the settings with the node's own ``data-dir``, if it has one, and its table as a file of that folder.

    The server must not name other files of a real node.
    """
    settings = settings.model_copy(update={"data_dir": data_dir}) if data_dir else settings
    kind, _, name = settings.dataset.partition(":")
    if simulated() or kind not in SOURCES:
        return settings
    if kind == "hf" or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"dataset = {settings.dataset!r}: a node reads tables of its own data folder only")
    return settings.model_copy(update={"dataset": f"{kind}:{data_folder(data_dir) / name}"})


def _other_code(theirs: str) -> str:
    how = "stop the SuperLink or SuperNode that was started from another checkout"
    return f"this node runs other code (digest {code_digest()}) than the server ({theirs}): {how}"
