"""The settings of the federation."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedsub_app.common.section import ClientsSettings, Count, CountOrNone, Positive, SeedSettings


class FederationSettings(SeedSettings, ClientsSettings):
    """Who takes part in a round, on which nodes, and how the answers become the next model."""

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the clients that takes part in a round, at least one client."""
    clients_per_round: CountOrNone = None
    """Number of clients that take part in a round, at most num-clients; 0: by participation."""
    oversample: Annotated[float, Field(ge=1, le=10)] = 1.0
    """So many times the clients that take part in a round are asked; it goes on with the first valid replies.

    1.3: 13 clients are asked where 10 take part, and the round goes on when 10 valid replies are in. Nobody waits for
    the others: their answers do not count. Where all nodes are simulated all answers come, and the clients count that
    were drawn first, so that a run does not depend on who was fast: those that take part without this key, and in the
    place of each whose answer does not count the next one drawn.
    """
    min_replies: Count = 1
    """A round with fewer valid replies is abandoned."""
    max_abandoned: Count = 3
    """So many abandoned rounds in a row stop the run."""
    server_lr: Positive = 1.0
    """Step from the global model towards the mean of the answers; 1: the mean."""
    max_update_norm: Positive = 100.0
    """An update that changes the model by more than so many times the median of its round so far is refused.

    Euclidean norms, in the order of the clients, the first eight together, of updates that change anything. A median
    counts as at least a hundredth of the norm of the model itself, and of fewer than three updates that norm does. Also
    of what else a method's server remembers, such as moments and variates.
    """
    weighting: Literal["uniform", "examples"] = "uniform"
    """What a client counts in a mean: all alike, or by its training samples."""
    placement: Literal["auto", "balanced", "pinned"] = "auto"
    """Clients spread evenly over the nodes, or client c on the node c mod num-partitions.

    ``auto``: balanced in a simulation, pinned on real nodes.
    """
    message_clients: Count = 128
    """A message to a node holds the tasks of at most so many clients."""
    message_mb: Positive = 192.0
    """And so many MiB, what is sent and what is answered together, but at least one client."""
    min_nodes: CountOrNone = None
    """Nodes to wait for at the start; 0: as many as the first node says there are."""
    node_timeout: Positive = 120.0
    """Seconds to wait for the nodes at the start."""
    round_timeout: Positive = 3600.0
    """After so many seconds a phase ends at the first look without a reply."""

    @property
    def sample_size(self) -> int:
        """Clients that take part in a round."""
        return self.clients_per_round or max(1, round(self.participation * self.num_clients))

    @property
    def asked_size(self) -> int:
        """Clients that are asked in a round."""
        return min(self.num_clients, math.ceil(round(self.oversample * self.sample_size, 6)))

    @property
    def spares(self) -> int:
        """Clients that are asked beside those that take part."""
        return self.asked_size - self.sample_size

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> "FederationSettings":
        if self.clients_per_round and self.clients_per_round > self.num_clients:
            raise ValueError(f"clients-per-round = {self.clients_per_round}: at most num-clients = {self.num_clients}")
        if self.oversample > 1 and self.sample_size == self.num_clients:
            all_ = f"all num-clients = {self.num_clients} take part in a round"
            raise ValueError(f"oversample = {self.oversample:g}: must be 1 where {all_}")
        if self.min_replies > self.sample_size:
            raise ValueError(
                f"min-replies = {self.min_replies}: at most the {self.sample_size} clients that take part in a round"
            )
        return self
