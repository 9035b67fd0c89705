"""The settings of the federation."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fedsub_app.common.section import (
    AmountOrNone,
    ClientsSettings,
    Count,
    CountOrNone,
    CountOrZero,
    Fraction,
    Positive,
    SeedSettings,
)
from fedsub_app.federation.devices import Devices, checked, devices_of


class FederationSettings(SeedSettings, ClientsSettings):
    """The clients of a round, their nodes, and the merge of their replies."""

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the clients that takes part in a round, at least one client."""
    clients_per_round: CountOrNone = None
    """Number of clients that take part in a round, at most num-clients; 0: by participation."""
    oversample: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Over-sampling factor: this many times clients-per-round are asked.

    The round continues when clients-per-round valid replies are in. 1.3: 13 clients are asked where 10 take part.
    The server does not wait for the other replies and ignores them. Where all nodes are simulated the server waits for
    all replies and takes the clients that were drawn first: the ones that take part without this key, and for each
    invalid reply the client that was drawn next. So a simulated run does not depend on the nodes' speed.
    """
    min_replies: Count = 1
    """A round with fewer valid replies is abandoned."""
    max_abandoned: Count = 3
    """Stop the run after this many abandoned rounds in a row."""
    server_lr: Positive = 1.0
    """Step from the global model towards the mean of the replies; 1: the mean."""
    max_update_norm: Positive = 100.0
    """Refuse an update whose norm exceeds this many times the median norm of the round's updates so far.

    Norms are Euclidean. Updates are compared in the order of the clients, the first eight together; updates that change
    nothing are left out. A median counts as at least a hundredth of the model's norm. Fewer than three updates are
    compared with the model's norm itself. The same bound holds for other tensors that a method's server remembers, such
    as moments and variates.
    """
    weighting: Literal["auto", "uniform", "examples"] = "auto"
    """A client's weight in a mean: the same for all clients, or its number of training samples.

    ``auto``: by samples for fedavg, fedprox, moon, fedala, ssfl and feddst, as in their papers, but with a robust mean
    or noise; the same for all other methods.
    """
    devices: Annotated[str, AfterValidator(checked)] = ""
    """Device classes of the clients: a preset's name, or a file of yours, "FILE.toml" (docs/devices.md); "": none."""
    deadline: AmountOrNone = None
    """Seconds of the devices' clock after which a round takes no reply, with devices; 0: none.

    With ``oversample`` the replies that are first by that clock count.
    """
    min_width: Fraction = 0.0
    """Clients whose device class has a smaller width never take part; 1: only those that hold the whole network."""
    held_out_clients: CountOrZero = 0
    """Clients, drawn from the seed, that never take part; their scores are reported apart."""
    placement: Literal["auto", "balanced", "pinned"] = "auto"
    """Clients are spread evenly over the nodes, or client c is on the node c mod num-partitions.

    ``auto``: balanced in a simulation, pinned on real nodes.
    """
    message_clients: Count = 128
    """Upper bound on the clients whose tasks a message to a node holds."""
    message_mb: Positive = 192.0
    """Upper bound in MiB on a message plus its reply.

    A message always holds at least one client's task.
    """
    min_nodes: CountOrNone = None
    """Nodes to wait for at the start; 0: the num-partitions that the nodes report."""
    node_timeout: Positive = 120.0
    """Seconds to wait for the nodes at the start."""
    round_timeout: Positive = 3600.0
    """Seconds after which a phase ends; replies already queued are still taken."""

    @property
    def sample_size(self) -> int:
        """Clients that take part in a round."""
        return self.clients_per_round or max(1, round(self.participation * self.members))

    @property
    def members(self) -> int:
        """Clients that are not held out."""
        return self.num_clients - self.held_out_clients

    @property
    def client_devices(self) -> Devices | None:
        """The clients' devices; None without the setting ``devices``."""
        return devices_of(self.devices, self.num_clients, self.seed) if self.devices else None

    @property
    def asked_size(self) -> int:
        """Clients that are asked in a round."""
        return min(self.members, math.ceil(round(self.oversample * self.sample_size, 6)))

    @property
    def spares(self) -> int:
        """Clients that are asked in addition to the ones that take part."""
        return self.asked_size - self.sample_size

    @model_validator(mode="after")
    def _check_counts(self) -> "FederationSettings":
        if self.held_out_clients >= self.num_clients:
            raise ValueError(f"held-out-clients = {self.held_out_clients}: below num-clients = {self.num_clients}")
        for key, given in (("deadline", self.deadline), ("min-width", self.min_width)):
            if given and not self.devices:
                raise ValueError(f"{key} = {given:g}: does nothing without devices")
        if self.clients_per_round and self.clients_per_round > self.members:
            without = f" without held-out-clients = {self.held_out_clients}" if self.held_out_clients else ""
            most = f"num-clients = {self.num_clients}{without}"
            raise ValueError(f"clients-per-round = {self.clients_per_round}: at most {most}")
        if self.oversample > 1 and self.sample_size == self.members:
            all_ = f"all num-clients = {self.num_clients} take part in a round"
            raise ValueError(f"oversample = {self.oversample:g}: must be 1 where {all_}")
        if self.min_replies > self.sample_size:
            raise ValueError(
                f"min-replies = {self.min_replies}: at most the {self.sample_size} clients that take part in a round"
            )
        return self
