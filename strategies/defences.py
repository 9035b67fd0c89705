"""The settings that bound what one client does to the model, and the methods that they do not protect."""

from typing import TYPE_CHECKING

from fedsub_app.common.errors import UserError
from fedsub_app.subnets.privacy import require_accountant

if TYPE_CHECKING:
    from strategies.base import SubnetStrategy

# Settings, and values of the setting ``mean``, that bound what one client's contribution does to the model.
DEFENCES = ("clip-norm", "median", "trimmed", "krum", "dp-noise-multiplier")
# Defences that a method refuses if its clients contribute to different positions, which the server learns.
WITHOUT_MASKS = {
    "krum": "its clients cover different positions, so that whole updates cannot be compared",
    "dp-noise-multiplier": "its clients cover different positions, by masks to which no noise is added",
}


def check_defences(strategy: "SubnetStrategy") -> None:
    """Refuse the defences that do not protect a method, before round 1.

    Raises
    ------
    UserError
        A defence does not protect the method. For privacy: the network has running statistics, or a package is missing.
    """
    settings = strategy.settings
    noise = settings.dp_noise_multiplier
    chosen = {
        "clip-norm": f"clip-norm = {settings.clip_norm:g}" if settings.clip_norm else "",
        settings.mean: f"mean = {settings.mean!r}",
        "oversample": f"oversample = {settings.oversample:g}" if settings.oversample > 1 else "",
        "dp-noise-multiplier": f"dp-noise-multiplier = {noise:g}" if noise else "",
    }
    measurement = strategy.measurement.refuses() if strategy.measurement else {}
    for name, reason in {**measurement, **strategy.refuses()}.items():
        if chosen.get(name):
            raise UserError(f"{chosen[name]}: not with method = {settings.method!r}: {reason}")
    if noise:
        buffers = [name for name, _ in strategy.model.named_buffers() if name in strategy.current]
        if buffers:
            reason = f"{buffers[0]!r} is a statistic, which noise would make negative"
            raise UserError(f"model = {settings.model!r}: not with dp-noise-multiplier above 0: {reason}")
        require_accountant()
