"""Flower's Grid in this process: the same strategy and the same ClientApp, without Ray and SuperLink.

Messages are packed and unpacked as on the wire. One node hosts all clients, so a round is two messages.
"""

import time
import traceback
from collections.abc import Iterable, Mapping
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from fedsub_app.common.section import Value

RUN_ID = SERVER_ID = 1
CLIENT_FAILED = 9  # Flower's code for a ClientApp that raised


def named(message: Message) -> str:
    """Give a message an id, as a SuperLink would; returns the id."""
    message.metadata.__dict__["_message_id"] = message_id = str(uuid4())
    return message_id


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """Return the app's reply; where the app raises, an error reply, as a node would."""
    try:
        return app(message=message, context=context)
    except Exception:
        return Message(Error(CLIENT_FAILED, traceback.format_exc()), reply_to=message)


class LocalGrid(Grid):
    """A grid of ``num_nodes`` nodes that answer a message as soon as it is pushed."""

    def __init__(self, app: ClientApp, overrides: Mapping[str, Value], num_nodes: int = 1) -> None:
        # A Message asks who sends it, which Flower's own processes set at their start.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN_ID, RUN_ID, SERVER_ID
        self.app = app
        self._run = FlowerRun.create_empty(RUN_ID)
        self._run.override_config = dict(overrides)
        self.contexts = {}
        for node in range(num_nodes):
            config: UserConfig = {"partition-id": node, "num-partitions": num_nodes}
            self.contexts[node + 2] = Context(RUN_ID, node + 2, config, RecordDict(), {})
        self._replies: dict[str, Message] = {}

    def set_run(self, run: FlowerRun) -> None:
        self._run = run

    @property
    def run(self) -> FlowerRun:
        """The run's details; ``override_config`` holds its single keys."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer every message; returns their ids."""
        ids = []
        for message in messages:
            ids.append(named(message))
            self._replies[ids[-1]] = answer(self.app, message, self.contexts[message.metadata.dst_node_id])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def wait(self, seconds: float) -> None:
        """Wait for replies, at most so long."""
        time.sleep(seconds)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def close(self) -> None:
        """End the grid's processes: none here."""
