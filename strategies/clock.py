"""The devices' clock: the time that a phase would take the clients' devices, the same for every engine.

A client takes its download, its training and its upload, each over its device's speed, by the papers' formula and the
FLOPs that it reports; keys and shares of secure aggregation are left out. A phase takes as long as the slowest reply
that counts; where a reply is refused, as the slowest reply that came. For a reply that never comes the server waits
until ``deadline``; without a deadline it notices at once. A reply after the deadline is dropped. In an over-sampled
round the replies that are first by this clock count.
"""

from collections.abc import Collection
from math import inf

from fedsub_app.common.tensors import Json
from fedsub_app.federation.devices import Devices
from fedsub_app.federation.protocol import Update, formula_bytes
from strategies.hooks import Hooks


class Clock:
    """The clock of one phase."""

    def __init__(self, strategy: Hooks, devices: Devices) -> None:
        self.devices, self.sent = devices, strategy.phase.outbox.formula_of
        self.deadline = strategy.settings.deadline or inf
        self.arrivals: dict[int, float] = {}  # client -> seconds from the start of the phase to its reply

    def late(self, update: Update, later: int = 0) -> str:
        """Note the time of a reply; returns the reason why it is late, "" where it is not.

        ``later``: bytes that the client uploads after its reply.
        """
        device, client = self.devices.of(update.client), update.client
        down, up = self.sent[client], formula_bytes(update.tensors) + later
        self.arrivals[client] = seconds = device.seconds(down, update.metrics.get("flops", 0.0), up)
        late = f"late: {seconds:.4g} s on its device ({device.name}), deadline = {self.deadline:g}"
        return late if seconds > self.deadline else ""

    def report(self, counted: Collection[int], wanted: int) -> Json:
        """Return the seconds of the phase and, where a class has ``watts``, the joules of the replies."""
        seconds = max((self.arrivals[client] for client in counted), default=0.0)
        if len(counted) < wanted:
            came = [at for at in self.arrivals.values() if at <= self.deadline]  # refused ones too: they are waited for
            seconds = self.deadline if len(came) < len(self.sent) and self.deadline < inf else max(came, default=0.0)
        power = [(self.devices.of(client).watts, min(at, self.deadline)) for client, at in self.arrivals.items()]
        joules = {"joules": sum(watts * at for watts, at in power)} if any(watts for watts, _ in power) else {}
        return {"device-seconds": seconds, **joules}
