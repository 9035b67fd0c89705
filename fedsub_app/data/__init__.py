"""Data sets and their partition over clients.

``load_dataset`` turns a name into tensors, ``make_partition`` shares the training samples out to clients; both are
computed once per process and their results are shared, so treat every tensor as read-only. docs/data.md lists names
and forms of files. Decoded images and their features are cached in ``$FEDSUB_CACHE`` (``~/.cache/fedsub/decoded``).
"""

from typing import TYPE_CHECKING

from fedsub_app.common.late import late

if TYPE_CHECKING:
    from fedsub_app.data.dataset import *  # noqa: F403
    from fedsub_app.data.names import *  # noqa: F403
    from fedsub_app.data.own import *  # noqa: F403
    from fedsub_app.data.partition import *  # noqa: F403
    from fedsub_app.data.samples import *  # noqa: F403
    from fedsub_app.data.settings import *  # noqa: F403

__getattr__ = late(__name__, "settings", "names", "samples", "own", "partition", "dataset")
