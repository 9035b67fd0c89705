"""The grid of this machine's cores: every node is a process, forked once data and model are loaded.

Where GPUs compute, the process is spawned instead, and sees one of them.

A message between processes is one file in memory, whose descriptor travels through a socket: nothing is pickled, and a
killed process leaves no file. A node has its messages in a queue. Where it dies, the message that it was working on is
answered by an error, and the others go to its replacement.
"""

import errno
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import Any, TypeAlias

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsub_app.common.device import seeing, visible_gpus
from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.failures import MachineFailed, gpu_lost, machine_failure
from fedsub_app.common.section import Value
from fedsub_app.federation.local_grid import CLIENT_FAILED, LocalGrid, answer, named
from fedsub_app.federation.wire import HEADER, TENSORS, unpack

LENGTH = 8  # bytes of the number, little-endian, of the JSON's bytes at the start of a file
MAPPED = 1 << 20  # bytes from which on a message is mapped, which uses a descriptor; a smaller one is read
PARENT_LOOK_S = 0.5

App: TypeAlias = str | ClientApp  # the module of ``app``, or one that forked processes inherit; it can ``prepare``


def local_grid(app: App, overrides: Mapping[str, Value], workers: int = 1, fork: bool = True) -> LocalGrid:
    """Return the grid of the local engine: in this process for one worker, else one process a worker.

    ``overrides`` is the run config as single keys. ``fork``: whether processes may be forked where the system can (not
    with CUDA); they then share data and model. :class:`UserError` for several workers where an app that cannot be
    imported allows one.
    """
    if workers == 1:
        return LocalGrid(_loaded(app), overrides)
    start = "fork" if fork and sys.platform == "linux" else "spawn"
    if start == "spawn" and not isinstance(app, str):
        raise UserError(f"workers = {workers}: must be 1 with model= or data=, but on Linux and without a GPU")
    return WorkerGrid(app, overrides, workers, start)


def _loaded(app: App) -> Any:
    return resolve_name(f"{app}:app") if isinstance(app, str) else app


@contextmanager
def _limits() -> Iterator[None]:
    """End the run, in one line, where the machine has no more files, memory or processes for the workers."""
    try:
        yield
    except OSError as error:
        raise MachineFailed(machine_failure(error) or f"worker processes: {one_line(error)}") from error


class WorkerGrid(LocalGrid):
    """A grid of ``workers`` nodes, each a process; :meth:`close` ends them. See :func:`local_grid`."""

    def __init__(self, app: App, overrides: Mapping[str, Value], workers: int, start: str) -> None:
        super().__init__(_loaded(app), overrides, workers)
        self._name = app
        self._start = start
        self._gpus = visible_gpus() if start == "spawn" else []
        self._workers: dict[int, WorkerProcess] = {}

    @_limits()
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send every message to its node's process; the roll call is answered here."""
        ids: list[str] = []
        for message in messages:
            if message.metadata.message_type == "query":
                ids += super().push_messages([message])
                continue
            ids.append(named(message))
            if not self._workers:
                if self._start == "fork":
                    with suppress(Exception):  # each node's reply will name the error
                        _loaded(self._name).prepare(message, self.contexts[message.metadata.dst_node_id])
                for node in self.contexts:
                    self._begin(node)
            self._workers[message.metadata.dst_node_id].send(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.wait(0)
        return super().pull_messages(message_ids)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _begin(self, node: int) -> None:
        others = [worker.socket for worker in self._workers.values()]
        gpu = self._gpus[(node - min(self.contexts)) % len(self._gpus)] if self._gpus else None
        self._workers[node] = WorkerProcess(self._name, node, len(self.contexts), self._start, others, gpu)

    @_limits()
    def wait(self, seconds: float) -> None:
        """Take the replies that have come; wait at most ``seconds`` for the first one."""
        node_of: dict[Any, int] = {worker.socket: node for node, worker in self._workers.items()}
        for ready in wait_for(list(node_of), seconds) if node_of else ():
            node = node_of[ready]
            worker = self._workers[node]
            reply: Message | None
            try:
                reply = worker.receive()
            except (EOFError, ConnectionError):
                worker.leaves = True
                lost = worker.waiting.popleft() if worker.waiting else None  # the message that it was working on
                reply = Message(Error(CLIENT_FAILED, worker.ended()), reply_to=lost) if lost else None
            if worker.leaves:
                self._replace(node)
            if reply:
                self._replies[reply.metadata.reply_to_message_id] = reply

    def _replace(self, node: int) -> None:
        """Start another process for a node; it gets the messages that the old process has not begun."""
        old = self._workers.pop(node)
        old.end()
        self._begin(node)
        for message in old.waiting:
            self._workers[node].send(message)


class WorkerProcess:
    """One process and the messages that it has not answered yet, in order; ``leaves``: it answers no more messages.

    ``others`` are the sockets that a forked process inherits, and closes; ``gpu`` is the GPU that it sees.
    """

    def __init__(
        self, app: App, node: int, nodes: int, start: str, others: list[socket.socket], gpu: str | None = None
    ) -> None:
        self.waiting: deque[Message] = deque()
        self.leaves = False
        self.socket, theirs = socket.socketpair()
        inherited = [self.socket, *others] if start == "fork" else []
        self.process: BaseProcess = get_context(start).Process(  # type: ignore[attr-defined]
            target=_serve, args=(app, node, nodes, theirs, inherited, os.getpid()), daemon=True
        )
        with seeing(gpu):
            self.process.start()
        theirs.close()

    def send(self, message: Message) -> None:
        """Queue a message; where the process is dead, :meth:`receive` raises."""
        self.waiting.append(message)
        sent = message.metadata
        about = {"type": sent.message_type, "id": sent.message_id, "group": sent.group_id}
        with suppress(ConnectionError):
            _send(self.socket, about, message.content)

    def receive(self) -> Message:
        """Return the next reply. EOFError, ConnectionError: the process is dead; OSError: no memory or descriptor."""
        about, content = _receive(self.socket)
        if about.get("errno"):
            raise OSError(about["errno"], os.strerror(about["errno"]))
        self.leaves = about["leaves"]
        message = self.waiting.popleft()
        if about["error"]:
            return Message(Error(CLIENT_FAILED, about["error"]), reply_to=message)
        return Message(content, reply_to=message)

    def end(self) -> None:
        """Kill the process, if it still runs, and wait for its end."""
        self.process.kill()
        self.process.join()
        self.socket.close()

    def ended(self) -> str:
        """Return in words how the process has ended, which has closed its socket."""
        self.process.join(1)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"worker process {self.process.pid} {how}"


def _serve(app: App, node: int, nodes: int, mine: socket.socket, inherited: list[socket.socket], parent: int) -> None:
    """Answer messages until the parent closes the socket or ends, or this process has lost its GPU."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this one
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    run = _loaded(app)
    context = LocalGrid(run, {}, nodes).contexts[node]
    with suppress(EOFError, ConnectionError):
        while True:
            try:
                _answer_next(mine, run, node, context)
            except ConnectionError:
                raise
            except OSError as error:  # no memory or no descriptor is left for the message, which ends the run
                _send(mine, {"errno": error.errno}, RecordDict())


def _answer_next(mine: socket.socket, run: ClientApp, node: int, context: Context) -> None:
    """Answer one message; message and reply, each up to a model, are freed before the next message is awaited."""
    about, content = _receive(mine)
    message = Message(content, node, about["type"], group_id=about["group"])
    message.metadata.__dict__["_message_id"] = about["id"]
    reply = answer(run, message, context)
    error = reply.error.reason if reply.has_error() else ""
    if lost := gpu_lost():  # another process will have it: only these clients fail, not the run
        error = error or str(unpack(reply.content)[0].get("error", "the GPU failed"))
    _send(mine, {"error": error, "leaves": lost}, RecordDict() if error else reply.content)
    if lost:
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os._exit(1)


def _send(to: socket.socket, about: dict[str, Any], content: RecordDict) -> None:
    """Write a message's content to a file in memory and send its descriptor."""
    records = content.array_records.get(TENSORS, ArrayRecord())
    sizes = [(key, array.dtype, array.shape, array.stype, len(array.data)) for key, array in records.items()]
    text = content.config_records[HEADER]["json"].decode("latin-1") if HEADER in content.config_records else ""  # type: ignore[union-attr]
    head = json.dumps({**about, "header": text, "arrays": sizes}).encode()
    memory = hasattr(os, "memfd_create")
    with open(os.memfd_create("fedsub"), "w+b") if memory else tempfile.TemporaryFile() as file:
        file.write(len(head).to_bytes(LENGTH, "little") + head)
        for array in records.values():
            file.write(array.data)
        file.flush()
        socket.send_fds(to, [b"m"], [file.fileno()])


def _receive(source: socket.socket) -> tuple[dict[str, Any], RecordDict]:
    """Return what :func:`_send` sent; the arrays share its bytes. EOFError: the other end is closed."""
    data, descriptors, *_ = socket.recv_fds(source, 1, 1)
    if not data:
        raise EOFError
    if not descriptors:  # the system drops one for which this process has no room
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with os.fdopen(descriptors[0], "rb") as file:
        number, size = file.fileno(), os.fstat(file.fileno()).st_size
        view = memoryview(os.pread(number, size, 0) if size < MAPPED else mmap.mmap(number, 0, access=mmap.ACCESS_READ))
    start = LENGTH + int.from_bytes(view[:LENGTH], "little")
    about = json.loads(bytes(view[LENGTH:start]))
    arrays = ArrayRecord({key: Array(dtype, (*shape,), stype, b"") for key, dtype, shape, stype, _ in about["arrays"]})
    for key, *_, size in about["arrays"]:
        arrays[key].data = view[start : start + size]  # type: ignore[assignment]  # Flower's constructor takes bytes only
        start += size
    return about, RecordDict({HEADER: ConfigRecord({"json": about["header"].encode("latin-1")}), TENSORS: arrays})
