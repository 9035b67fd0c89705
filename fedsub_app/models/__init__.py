"""Networks by name, their tensors by name, their structure (units, layers, head), and smaller copies of them."""

from typing import TYPE_CHECKING

from fedsub_app.common.late import late
from fedsub_app.models.names import model_names as model_names

if TYPE_CHECKING:
    from fedsub_app.models.frozen import *  # noqa: F403
    from fedsub_app.models.groups import *  # noqa: F403
    from fedsub_app.models.network import *  # noqa: F403
    from fedsub_app.models.networks import *  # noqa: F403
    from fedsub_app.models.sources import *  # noqa: F403
    from fedsub_app.models.units import *  # noqa: F403

__getattr__ = late(__name__, "groups", "networks", "units", "network", "sources", "frozen")
