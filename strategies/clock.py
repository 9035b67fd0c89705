"""The devices' clock: the time that a phase would take the clients' devices, from bytes and FLOPs as they are counted.

A client takes its download, its training and its upload, each over its device's speed, by the papers' formula and the
FLOPs that it reports. A phase takes as long as the slowest reply that counts. A reply after ``deadline`` is dropped.
The server waits until the deadline for a reply that never comes; without a deadline it notices at once. In an
over-sampled round the replies that are first by this clock count, and the others are not waited for. No real time
enters: every engine has the same clock.
"""

from collections.abc import Collection
from math import inf

from fedsub_app.common.tensors import Json
from fedsub_app.federation.devices import Devices
from fedsub_app.federation.protocol import Update, formula_bytes
from strategies.hooks import Hooks


class Clock:
    """The clock of one phase.

    Attributes
    ----------
    arrivals : client -> seconds from the start of the phase to its reply, so far.
    """

    def __init__(self, strategy: Hooks, devices: Devices) -> None:
        self.devices, self.sent = devices, strategy.phase.outbox.formula_of
        self.deadline = strategy.settings.deadline or inf
        self.arrivals: dict[int, float] = {}

    def late(self, update: Update) -> str:
        """Note the time of a reply; returns the reason why it is late, "" where it is not."""
        device, client = self.devices.of(update.client), update.client
        down, up = self.sent[client], formula_bytes(update.tensors)
        self.arrivals[client] = seconds = device.seconds(down, update.metrics.get("flops", 0.0), up)
        late = f"late: {seconds:.4g} s on its device ({device.name}), deadline = {self.deadline:g}"
        return late if seconds > self.deadline else ""

    def report(self, counted: Collection[int], wanted: int) -> Json:
        """Return the seconds of the phase and, where a class has ``watts``, the joules of the replies."""
        seconds = max((self.arrivals[client] for client in counted), default=0.0)
        if len(counted) < wanted and self.deadline < inf:
            seconds = self.deadline
        power = [(self.devices.of(client).watts, min(at, self.deadline)) for client, at in self.arrivals.items()]
        joules = {"joules": sum(watts * at for watts, at in power)} if any(watts for watts, _ in power) else {}
        return {"device-seconds": seconds, **joules}
