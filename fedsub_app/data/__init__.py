"""Data sets and their partition over clients.

``load_dataset`` turns a name into tensors, ``make_partition`` shares the training samples out to clients; both are
computed once per process and their results are shared, so treat every tensor as read-only. docs/data.md lists names
and forms of files.

Files are looked for in ``data-dir`` and its direct subfolders; it may be read-only unless something must be downloaded.
Decoded images are cached in ``$FEDSUB_CACHE`` (default ``~/.cache/fedsub/decoded``), and so are the
features of images that pretrained networks extract (:mod:`fedsub_app.data.features`).
"""

from typing import TYPE_CHECKING

from fedsub_app.common.late import late
from fedsub_app.data.names import dataset_names as dataset_names
from fedsub_app.data.names import private_name as private_name
from fedsub_app.data.settings import DataSettings as DataSettings
from fedsub_app.data.settings import PartitionSettings as PartitionSettings

if TYPE_CHECKING:
    from fedsub_app.data.dataset import *  # noqa: F403
    from fedsub_app.data.own import *  # noqa: F403
    from fedsub_app.data.partition import *  # noqa: F403
    from fedsub_app.data.samples import *  # noqa: F403

__getattr__ = late(__name__, "samples", "own", "partition", "dataset")
