"""The ClientApp, the same for all methods: Flower's door to a node (node.py)."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsub_app import node
from fedsub_app.common.machine import keep_freed_memory
from fedsub_app.federation.wire import pack, unpack


class BundledApp(ClientApp):
    """A ClientApp that Ray's workers import from the bundle that it was loaded from.

    Ray puts the working directory of the process that starts its workers before all that is on their path. That is
    where the SuperLink was started once, maybe in another checkout, whose code would run.
    """

    def __reduce__(self) -> tuple[Callable[[], ClientApp], tuple[()]]:
        """Send, in the place of an object of this module, a function that sets the worker's path and imports it."""
        root = str(Path(__file__).resolve().parents[1])

        # Nested, so that Ray's pickler sends the function itself: by its name, the worker would import this module.
        def load() -> Any:
            if sys.path[0] != root:
                sys.path.insert(0, root)
            return import_module("fedsub_app.client_app").app

        return load, ()


app = BundledApp()
keep_freed_memory()


@app.query()
def roll_call(message: Message, context: Context) -> Message:
    """Answer which partition this node is, and keep the settings of the run that asks."""
    header, _ = unpack(message.content)
    return Message(pack(node.roll_call(header, context.node_config), []), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the clients in the message."""
    return _answer(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the clients in the message."""
    return _answer(message, context)


@app.query("measure")
def measure(message: Message, context: Context) -> Message:
    """Let the clients in the message answer on the merged model."""
    return _answer(message, context)


def prepare(message: Message, context: Context) -> None:
    """Load what a message's clients need before processes are forked: data, network and FLOPs are there once."""
    header, _ = unpack(message.content)
    if place := node.place_of(header, context.node_config):
        place.training_flops(place.network)


def _answer(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # one thread a worker: same results everywhere, and faster on small networks
    header, parts = unpack(message.content)
    return Message(node.answer(header, parts, context.node_config), reply_to=message)
