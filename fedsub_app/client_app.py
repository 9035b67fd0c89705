"""The ClientApp, the same for all methods: Flower's door to a node (runs/node.py), which a message loads.

Flower starts Ray when it has imported this module: torch, imported here, would be two seconds of that.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsub_app.common.late import Late
from fedsub_app.common.machine import keep_freed_memory

if TYPE_CHECKING:
    from fedsub_app.runs.node import Source

torch, wire, node = Late("torch"), Late("fedsub_app.federation.wire"), Late("fedsub_app.runs.node")


class NodeApp(ClientApp):
    """A ClientApp that Ray's workers import from the bundle that it was loaded from.

    Ray puts the working directory of the process that starts its workers before all that is on their path. That is
    where the SuperLink was started once, maybe in another checkout, whose code would run.
    """

    def __init__(self, source: "Source", module: str) -> None:
        super().__init__()
        self.source, self.module = source, module
        self.query()(self._roll_call)
        for verb in (self.train(), self.evaluate(), self.query("measure"), self.query("test"), self.query("secure")):
            verb(self._answer)

    def prepare(self, message: Message, context: Context) -> None:
        """Load what a message's clients need before processes are forked: data, network and FLOPs are there once."""
        header, _ = wire.unpack(message.content)
        if settings := node.settings_of_run(header, context.node_config):
            place = self.source(settings, header, context)(0)
            place.training_flops(place.network)

    def _roll_call(self, message: Message, context: Context) -> Message:
        """Answer which partition this node is, and keep the settings of the run that asks."""
        header, _ = wire.unpack(message.content)
        return Message(wire.pack(node.roll_call(header, context, self.source), []), reply_to=message)

    def _answer(self, message: Message, context: Context) -> Message:
        torch.set_num_threads(1)  # one thread a worker: same results everywhere, and faster on small networks
        header, parts = wire.unpack(message.content)
        return Message(node.answer(header, parts, context, self.source), reply_to=message)

    def __reduce__(self) -> Any:
        """Send, in the place of an app of a module, a function that sets the worker's path and imports it."""
        module = sys.modules[self.module]
        name = next((name for name, value in vars(module).items() if value is self), "")
        file = getattr(module, "__file__", None)
        if not name or not file:  # of a notebook or a function
            return NodeApp, (self.source, self.module)
        root, of = str(Path(file).resolve().parents[self.module.count(".")]), self.module

        # Nested, so that Ray's pickler sends the function itself: by its name, the worker would import this module.
        def load() -> Any:
            if sys.path[0] != root:
                sys.path.insert(0, root)
            return getattr(import_module(of), name)

        return load, ()


app = NodeApp(lambda *arguments: node.named(*arguments), __name__)
keep_freed_memory()
