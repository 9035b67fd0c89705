"""Differential privacy of a client: Gaussian noise in the mean of clipped changes, and its epsilon.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018,
https://arxiv.org/abs/1710.06963, with the fixed denominator (their f̃_f) and the noise added by the server, or in equal
parts by the clients. Two runs are neighbours if one has, and the other lacks, the contributions of one client.
"""

import secrets
from functools import lru_cache

import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors
from fedsub_app.subnets.averaging import Contribution, MaskedMean
from fedsub_app.subnets.norms import norm
from fedsub_app.subnets.robust import clipped


class NoisyMean(MaskedMean):
    """``old + (sum_i (x_i - old) + N(0, deviation² I)) / clients``, of contributions without masks and of weight 1.

    The denominator is the number of clients that are asked, so that a client can change only its own term of the sum,
    whose norm is clipped: a client without a reply counts as one that changes nothing. Noise is added to the tensors
    that all updates hold. ``draws`` generates it tensor by tensor; without ``draws`` :func:`secret_normal` does.
    """

    def __init__(self, old: Tensors, clients: int, deviation: float, draws: torch.Generator | None) -> None:
        super().__init__(old)
        self._clients, self._deviation, self._draws = clients, deviation, draws

    @torch.no_grad()
    def result(self, server_lr: float = 1.0) -> dict[str, Tensor]:
        """Return the noisy mean; ``server_lr`` is the step from the old model (0) to the mean (1)."""
        answered = float(self._total)
        names = list(self._sums)
        mean = super().result()
        for name in (name for name in mean if name in names):
            old = self._old[name].float()
            change = (mean[name] - old).mul_(answered).add_(_normal(old.shape, self._draws), alpha=self._deviation)
            mean[name] = torch.add(old, change, alpha=server_lr / self._clients)
        return mean


def noisy(x: Tensors, old: Tensors, limit: float, deviation: float, draws: torch.Generator | None) -> Tensors:
    """Return a client's tensors as it sends them: their change from ``old`` clipped, and noise in every position.

    ``limit`` > 0 is the L2 norm of the change of all tensors together; ``deviation`` and ``draws`` are
    :class:`NoisyMean`'s, of this client's share of the noise.
    """
    short = clipped(Contribution(x), old, norm(x[name] - old[name] for name in x), limit).tensors
    return {name: torch.add(value, _normal(value.shape, draws), alpha=deviation) for name, value in short.items()}


def _normal(shape: torch.Size, draws: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=draws) if draws else secret_normal(shape)


def secret_normal(shape: torch.Size) -> Tensor:
    """Return standard normal numbers, float32, from the system's cryptographic source: nobody can draw them again.

    They are the normal quantiles of uniform numbers of 52 bits, none of which is 0 or 1.
    """
    count = shape.numel()
    if not count:
        return torch.empty(shape)
    bits = torch.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=torch.int64)
    numbers: Tensor = torch.special.ndtri(((bits & (2**52 - 1)).double() + 0.5) / 2**52).float()
    return numbers.reshape(shape)


@lru_cache(maxsize=1024)
def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return epsilon at ``delta`` after ``rounds`` participations of one client, by Rényi differential privacy.

    Each participation is a Gaussian mechanism without amplification by sampling; ``noise_multiplier`` > 0 is its
    standard deviation divided by the clipping norm of a client's term. The epsilon is an upper bound.
    """
    if not rounds:  # with devices, whose clients may all be away
        return 0.0
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise_multiplier), rounds))
    return float(accountant.get_epsilon(delta))
