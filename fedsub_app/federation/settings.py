"""The settings of the federation, of what bounds a client's influence, and of simulated attackers."""

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
    NonNegative,
    Positive,
    SeedSettings,
)
from fedsub_app.federation.devices import Devices, checked, devices_of

MIN_NOISE = 0.01  # with less there is no privacy to be counted


class FederationSettings(SeedSettings, ClientsSettings):
    """The clients of a round, their nodes, and the merge of their replies."""

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the clients that takes part in a round, at least one client."""
    clients_per_round: CountOrNone = None
    """Number of clients that take part in a round, at most num-clients; 0: by participation."""
    oversample: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Over-sampling factor: this many times clients-per-round are asked; 1.3: 13 clients where 10 take part.

    The round continues when clients-per-round valid replies are in; the others are ignored. Where all nodes are
    simulated, the server waits for all replies. It takes the clients that take part without this key, and for each
    invalid reply the client that was drawn next.
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
    nothing are left out. A median counts as at least a hundredth of the model's norm; fewer than three updates are
    compared with the model's norm. Other tensors that a method's server remembers, such as moments, have the same
    limit.
    """
    weighting: Literal["auto", "uniform", "examples"] = "auto"
    """A client's weight in a mean: the same for all clients, or its number of training samples.

    ``auto``: by samples for fedavg, fedprox, moon, fedala, ssfl, feddst, fedit, flexlora and flora, as in their papers;
    the same for all other methods, and with a robust mean or noise.
    """
    devices: Annotated[str, AfterValidator(checked)] = ""
    """Device classes of the clients: a preset's name, or a file of yours, "FILE.toml" (docs/devices.md); "": none."""
    deadline: AmountOrNone = None
    """Seconds of the devices' clock after which a round takes no reply, with devices; 0: none.

    With ``oversample`` the replies that are first by that clock count.
    """
    min_width: Fraction = 0.0
    """Clients whose device class has a smaller width never take part; 1: only clients with the whole network do."""
    held_out_clients: CountOrZero = 0
    """Clients, drawn from the seed, that never take part; their scores are reported apart."""
    placement: Literal["auto", "balanced", "pinned"] = "auto"
    """Place of the clients: spread evenly over the nodes, or client c on the node c mod num-partitions.

    ``auto``: balanced in a simulation, pinned on real nodes.
    """
    message_clients: Count = 128
    """Upper bound on the clients whose tasks a message to a node holds."""
    message_mb: Positive = 192.0
    """Upper bound in MiB on a message plus its reply; a message always holds at least one client's task."""
    min_nodes: CountOrNone = None
    """Nodes to wait for at the start; 0: as many as the nodes report as num-partitions."""
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
        without = f" without held-out-clients = {self.held_out_clients}" if self.held_out_clients else ""
        members = f"num-clients = {self.num_clients}{without}"
        if self.clients_per_round and self.clients_per_round > self.members:
            raise ValueError(f"clients-per-round = {self.clients_per_round}: at most {members}")
        if self.oversample > 1 and self.sample_size == self.members:
            raise ValueError(f"oversample = {self.oversample:g}: must be 1 where all {members} take part in a round")
        if self.min_replies > self.sample_size:
            most = f"the {self.sample_size} clients that take part in a round"
            raise ValueError(f"min-replies = {self.min_replies}: at most {most}")
        return self


class DefenceSettings(FederationSettings):
    """Bounds on one client's influence, and differential privacy."""

    robust: Literal["auto", "on", "off"] = "auto"
    """Bound each update by the others of its round, tensor by tensor; auto: where nodes are real.

    An update of more than five times the round's median norm is refused. Each tensor's change is cut to the median of
    the clients' changes in this round and the last five. Where the merged model is far worse on the server's test
    samples than the last models, harmful updates are left out, or the merged model is not kept. The server holds all
    updates of a round.
    """
    min_contributors: Count = 1
    """Least clients of a round that contribute to a position of the model; with fewer the position keeps its value.

    A round with fewer valid replies is abandoned.
    """
    clip_norm: NonNegative = 0.0
    """L2 norm to which each client's change of the model is scaled down before the mean; 0: no clipping.

    Choose it by ``update-norm`` in rounds.jsonl of an undisturbed run: it depends on network, learning rate and local
    steps. A larger change still counts, with less weight.
    """
    mean: Literal["average", "median", "trimmed", "krum"] = "average"
    """Aggregation: weighted mean; or median or trimmed mean of each position; or the update that Krum chooses.

    median, trimmed and krum count every client once, whatever its examples; the server then holds all updates of a
    round.
    """
    trim_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Fraction of a position's smallest and of its largest values that mean = "trimmed" leaves out."""
    byzantine_clients: CountOrZero = 1
    """Hostile clients f of a round that mean = "krum" withstands; a round needs at least 2 f + 3 replies."""
    dp_noise_multiplier: NonNegative = 0.0
    """Standard deviation, in units of clip-norm, of the Gaussian noise in the sum of changes; 0: no privacy."""
    dp_noise_by: Literal["server", "clients"] = "server"
    """Where the noise is added: to the sum; or each client adds its share to its clipped answer, before it sends.

    With ``clients`` the server sees noisy answers alone, and a round without all answers is abandoned.
    """
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """delta of the (epsilon, delta) that every round's line reports."""

    secure_aggregation: bool = False
    """The server gets the sum of the clients' updates, and no single update (SecAgg+; docs/security.md).

    ``max-update-norm`` does nothing then, ``robust = "on"`` is refused; each client clips its change to ``clip-norm``.
    """
    secure_dropouts: Annotated[float, Field(ge=0, lt=0.5)] = 0.3
    """Fraction of a client's neighbours that secure-aggregation may lose; with more lost the round is abandoned."""
    secure_corrupted: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Fraction of the clients that may collude with the server in secure-aggregation, in rounds of over 25 clients."""
    secure_masks: Literal["secret", "public"] = "secret"
    """Positions that clients choose: secure-aggregation counts them under masks, or they travel in the clear.

    Either way a position of fewer than ``min-contributors`` clients keeps its value.
    """
    secure_range: Positive = 8.0
    """Bound in secure-aggregation of a value's change, or of a value that is sent itself; larger ones are clipped.

    ``clipped-values`` in a round's line is the fraction of clipped values.
    """

    @property
    def server_noise(self) -> float:
        """The noise multiplier of the server, 0 where the clients add the noise."""
        return self.dp_noise_multiplier if self.dp_noise_by == "server" else 0.0

    @property
    def server_clip(self) -> float:
        """The norm to which the server clips changes, 0 where the clients do it, before their noise or their masks."""
        return self.clip_norm if self.dp_noise_by == "server" and not self.secure_aggregation else 0.0

    @property
    def least_replies(self) -> int:
        """Least number of valid replies; a round with fewer is abandoned."""
        if self.dp_noise_by == "clients":  # the noise of one that is missing is missing as well
            return self.sample_size
        krum = 2 * self.byzantine_clients + 3 if self.mean == "krum" else 1
        return max(self.min_replies, self.min_contributors, krum)

    @model_validator(mode="after")
    def _defences_agree(self) -> "DefenceSettings":
        if self.secure_aggregation:
            for key, value, needed in (
                ("mean", self.mean, "average"),
                ("robust", self.robust, "off"),
                ("dp-noise-by", self.dp_noise_by if self.dp_noise_multiplier else "clients", "clients"),
            ):
                if value not in (needed, "auto"):
                    raise ValueError(f"{key} = {value!r}: must be {needed!r} with secure-aggregation = true")
            if self.sample_size < 3:
                reason = f"at least 3 clients a round, {self.sample_size} take part"
                raise ValueError(f"secure-aggregation = true: needs {reason}")
        if self.weighting == "examples" and (self.mean != "average" or self.dp_noise_multiplier):
            beside = f"mean = {self.mean!r}" if self.mean != "average" else "dp-noise-multiplier above 0"
            raise ValueError(f"weighting = {self.weighting!r}: must be 'uniform' with {beside}")
        if self.min_contributors > self.sample_size:
            take_part = f"the {self.sample_size} clients that take part in a round"
            raise ValueError(f"min-contributors = {self.min_contributors}: at most {take_part}")
        if self.least_replies > self.sample_size:
            most = (self.sample_size - 3) // 2
            said = f"byzantine-clients = {self.byzantine_clients}:"
            if most < 0:
                least = f"needs at least {self.least_replies} clients a round"
                raise ValueError(f"{said} mean = 'krum' {least}, {self.sample_size} take part")
            beside = f"mean = 'krum' and the {self.sample_size} clients that take part in a round"
            raise ValueError(f"{said} at most {most} with {beside}")
        if 0 < self.dp_noise_multiplier < MIN_NOISE:
            raise ValueError(f"dp-noise-multiplier = {self.dp_noise_multiplier}: must be 0 or at least {MIN_NOISE}")
        if self.dp_noise_by == "clients" and not self.dp_noise_multiplier:
            raise ValueError("dp-noise-by = 'clients': does nothing with dp-noise-multiplier = 0")
        noise = "with dp-noise-multiplier above 0"
        for wrong, reason in (
            (self.robust == "on", f"robust = 'on': not {noise}: bounds by other clients are not private"),
            (not self.clip_norm, f"clip-norm = 0: must be above 0 {noise}"),
            (self.oversample > 1, f"oversample = {self.oversample:g}: must be 1 {noise}"),
            (self.mean != "average", f"mean = {self.mean!r}: must be 'average' {noise}"),
        ):
            if wrong and self.dp_noise_multiplier:
                raise ValueError(reason)
        return self


class AttackSettings(ClientsSettings):
    """Simulated attackers, for research."""

    attack: Literal["none", "sign-flip", "scale", "label-flip"] = "none"
    """Attack: send a negative or a positive multiple of the change, or train on labels counted from the last class.

    Attackers change trainable parameters, and with sign-flip FedPM's masks, alone; the rest of their replies and the
    models that they keep are honest.
    """
    attackers: CountOrZero = 1
    """Clients 0 to attackers - 1 attack."""
    attack_scale: Positive = 10.0
    """Factor of the change that attack = "scale" sends; "sign-flip" sends the change times minus this factor."""
