"""The settings of what bounds a client's influence."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedsub_app.common.section import Count, CountOrZero, NonNegative
from fedsub_app.federation.settings import FederationSettings

MIN_NOISE = 0.01  # with less there is no privacy to be counted


class DefenceSettings(FederationSettings):
    """Bounds on one client's influence, and differential privacy."""

    robust: Literal["auto", "on", "off"] = "auto"
    """Bound each update by the others of its round, tensor by tensor; auto: where nodes are real.

    An update of more than five times the round's median norm is refused; each tensor's change is brought down to the
    median of the clients', of this round and the last five. Where the merged model is far worse on the server's test
    samples than the last ones, the updates that harm it are left out, or it is not kept. The server holds all updates
    of a round.
    """
    min_contributors: Count = 1
    """A position of the model that fewer clients of a round contribute to keeps its value."""
    clip_norm: NonNegative = 0.0
    """L2 norm to which each client's change of the model is scaled down before the mean; 0: no clipping.

    Choose it by ``update-norm`` in rounds.jsonl of an undisturbed run: it depends on network, learning rate and local
    steps. A larger change still counts, with less weight.
    """
    mean: Literal["average", "median", "trimmed", "krum"] = "average"
    """Aggregation: weighted mean; or median or trimmed mean of each position; or the update that Krum chooses.

    The last three count every client once, whatever its examples, and the server holds all updates of a round.
    """
    trim_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Fraction of a position's smallest and of its largest values that mean = "trimmed" leaves out."""
    byzantine_clients: CountOrZero = 1
    """Hostile clients of a round that mean = "krum" withstands: f of at least 2 f + 3."""
    dp_noise_multiplier: NonNegative = 0.0
    """Standard deviation of the Gaussian noise in the sum of the clients' changes, over clip-norm; 0: no privacy."""
    dp_noise_by: Literal["server", "clients"] = "server"
    """Where the noise is added: to the sum, or by each client to its clipped answer, a share of it, before it is sent.

    With ``clients`` the server sees noisy answers alone, and a round without all answers is abandoned.
    """
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """delta of the (epsilon, delta) that every round's line reports."""

    @property
    def server_noise(self) -> float:
        """The noise multiplier of the server, 0 where the clients add the noise."""
        return self.dp_noise_multiplier if self.dp_noise_by == "server" else 0.0

    @property
    def server_clip(self) -> float:
        """The norm to which the server clips changes, 0 where the clients do it, before their noise."""
        return self.clip_norm if self.dp_noise_by == "server" else 0.0

    @property
    def least_replies(self) -> int:
        """Least number of valid replies; a round with fewer is abandoned."""
        if self.dp_noise_by == "clients":  # the noise of one that is missing is missing as well
            return self.sample_size
        return max(self.min_replies, 2 * self.byzantine_clients + 3 if self.mean == "krum" else 1)

    @model_validator(mode="after")
    def _defences_agree(self) -> "DefenceSettings":
        if self.weighting == "examples" and (self.mean != "average" or self.dp_noise_multiplier):
            beside = f"mean = {self.mean!r}" if self.mean != "average" else "dp-noise-multiplier above 0"
            raise ValueError(f"weighting = {self.weighting!r}: must be 'uniform' with {beside}")
        if self.least_replies > self.sample_size:
            most = (self.sample_size - 3) // 2
            said = f"byzantine-clients = {self.byzantine_clients}:"
            if most < 0:
                least = f"needs at least {self.least_replies} clients a round"
                raise ValueError(f"{said} mean = 'krum' {least}, {self.sample_size} take part")
            beside = f"mean = 'krum' and the {self.sample_size} clients that take part in a round"
            raise ValueError(f"{said} at most {most} with {beside}")
        if self.robust == "on" and self.dp_noise_multiplier:
            raise ValueError(
                "robust = 'on': not with dp-noise-multiplier above 0: bounds by other clients are not private"
            )
        if self.min_contributors > self.sample_size:
            take_part = f"the {self.sample_size} clients that take part in a round"
            raise ValueError(f"min-contributors = {self.min_contributors}: at most {take_part}")
        if 0 < self.dp_noise_multiplier < MIN_NOISE:
            raise ValueError(f"dp-noise-multiplier = {self.dp_noise_multiplier}: must be 0 or at least {MIN_NOISE}")
        if self.dp_noise_multiplier and not self.clip_norm:
            raise ValueError("clip-norm = 0: must be above 0 with dp-noise-multiplier above 0")
        if self.dp_noise_by == "clients" and not self.dp_noise_multiplier:
            raise ValueError("dp-noise-by = 'clients': does nothing with dp-noise-multiplier = 0")
        if self.dp_noise_multiplier and self.oversample > 1:
            raise ValueError(f"oversample = {self.oversample:g}: must be 1 with dp-noise-multiplier above 0")
        if self.dp_noise_multiplier and self.mean != "average":
            raise ValueError(f"mean = {self.mean!r}: must be 'average' with dp-noise-multiplier above 0")
        return self
