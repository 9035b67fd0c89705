"""The settings of the data set and of its partition; torch is not imported here."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fedsub_app.common.own_code import is_source, readable
from fedsub_app.common.score import checked_task
from fedsub_app.common.section import (
    NONE_IS_ZERO,
    ZERO_IS_NONE,
    ClientsSettings,
    Count,
    CountOrNone,
    CountOrZero,
    Listed,
    Names,
    Positive,
    SeedSettings,
    TextOrNone,
)

Normalise = Literal["standard", "half", "none"]
Features = Literal["none", "resnet101-densenet121", "resnet101-densenet121-random", "efficientnet-lite0"]
ClassLists = Annotated[
    tuple[Annotated[tuple[CountOrZero, ...], Field(min_length=1)], ...],
    Listed(
        "must be class numbers, a comma between the lists of two clients, such as '0 2, 1 3'",
        read=lambda text: tuple(map(int, text.split())),
        write=lambda labels: " ".join(map(str, labels)),
    ),
]

KINDS = ("iid", "quantity", "dirichlet", "shards", "classes", "source", "source-classes", "lists", "column")
WITHOUT_CLASSES = ("iid", "quantity", "source", "column")  # partitions of samples that have no classes
FLWR = "flwr:"
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # kind of a table -> function of pandas, its options
    "csv": ("read_csv", {"low_memory": False}),  # else long files are read in parts, each with types of its own
    "tsv": ("read_csv", {"sep": "\t", "quoting": 3, "low_memory": False}),
    "parquet": ("read_parquet", {}),
    # Neither words such as "01" become numbers nor columns dates by their names.
    "jsonl": ("read_json", {"lines": True, "convert_dates": False, "dtype": False, "encoding": "utf-8-sig"}),
}
SOURCES = (*READERS, "hf")


def _named(text: str) -> str:
    if not is_source(text) and not all(0 < len(name) < 200 for name in text.split("+")):
        raise ValueError("must be the name of a data set, or names joined by +")
    return text


def _known(kind: str) -> str:
    if kind not in KINDS and not re.fullmatch(rf"{FLWR}[A-Z]\w*Partitioner", kind):
        raise ValueError(f"must be {', '.join(map(repr, KINDS))} or 'flwr:NAME'")
    return kind


class DataSettings(SeedSettings):
    """The data set, its size and form."""

    task: Annotated[str, AfterValidator(checked_task)] = "classification"
    """The task: classification, multi-label, regression, next-token, or "my_task.py:Task" (docs/own-data.md)."""
    metrics: Annotated[
        tuple[Literal["auc", "f1", "balanced-accuracy", "spread"], ...],
        Listed("allowed are auc, f1, balanced-accuracy, spread, comma-separated, or ''"),
    ] = ()
    """Further metrics of each evaluation: auc, f1 and balanced-accuracy for a classification, spread for any task.

    auc and f1 are means over the classes. spread: standard deviation, 10 % and 90 % quantile of each metric over the
    clients.
    """
    dataset: Annotated[str, AfterValidator(_named)] = "digits"
    """A name of `fedsub list datasets` or of your own images, image sets joined by +, or a source (docs/own-data.md).

    Sources: "csv:FILE", "tsv:FILE", "parquet:FILE", "jsonl:FILE", where a * in FILE names several files; "hf:NAME or
    folder", which needs the package datasets; "my_data.py:load", a function of yours.
    """
    input: Names = ()
    """Columns of a source's inputs: columns of numbers, or one column of texts or images; "": all other columns."""
    label: Names = ("label",)
    """Columns of a source's labels; next-token needs none."""
    group: str = ""
    """Column of a source's groups, the natural clients of partition = "column"; "file": the file's name; "": none."""
    tokenizer: str = "characters"
    """Tokens of texts: characters, words, bpe (of training texts), "transformers:FOLDER or name", "package:NAME"."""
    tokens: Count = 64
    """Tokens of a sample of text; a longer text is cut, and next-token makes further samples of the rest."""
    vocabulary: Annotated[int, Field(ge=3, le=1_000_000)] = 8_000
    """Greatest number of tokens of a tokenizer that is made of the training texts."""
    domains: Names = ()
    """Domains to use of a data set that has some: "fog, snow-3"; "": all."""
    data_dir: TextOrNone = None
    """Folder of the data; "": $FEDSUB_DATA, else ~/.cache/fedsub/data."""
    train_per_class: CountOrNone = None
    """Training images of each class and source, chosen at random; 0: all."""
    test_per_class: CountOrNone = None
    """Test images of each class and source, chosen at random; 0: all.

    Where a class of a source has fewer test images, all test images of the source are training images that
    ``train-per-class`` left over (a note says so).
    """
    image_size: Annotated[int | None, Field(ge=0, le=4096), ZERO_IS_NONE, NONE_IS_ZERO] = None
    """Height and width in pixels, bilinear with antialiasing; 0: the largest of the sources."""
    normalise: Normalise = "standard"
    """Scale each channel to mean 0 and deviation 1 over the training images, to (x - 0.5) / 0.5, or to [0, 1].

    Synthetic data and features are never normalised.
    """
    features: Features = "none"
    """Inputs: the images, 3,072 features of two networks that are trained on ImageNet or random, or 1,280 of one.

    Features are extracted once, on a GPU if there is one, and cached in $FEDSUB_CACHE (data/features.py). Images are
    resized to the networks' size, so ``image-size`` must be 0.
    """
    backbone_dir: TextOrNone = None
    """Folder of the weights for ``features``, in torchvision's files; "": torch's hub folder, downloaded if missing."""


class PartitionSettings(SeedSettings, ClientsSettings):
    """Partition of the samples over the clients."""

    partition: Annotated[str, AfterValidator(_known)] = "classes"
    """How the training samples are shared out to the clients.

    ``iid``: random, sizes differ by at most 1; ``quantity``: random, sizes by a Dirichlet draw; ``dirichlet``: each
    class by its own Dirichlet draw; ``shards``: shards of the data sorted by label, whose sizes differ by at most 1;
    ``classes``: some classes a client; ``source``: one client a source of a combined data set, or a domain;
    ``source-classes``: as ``source``, with some of its classes; ``lists``: classes as written in ``class-lists``;
    ``column``: whole groups of the column ``group``, or sources, one or more a client; where the clients are a multiple
    of the groups, each group is dealt over equally many clients; ``flwr:NAME``: a partitioner of flwr-datasets, such as
    flwr:LinearPartitioner, with ``partition-options``.
    """
    partition_options: Annotated[str, AfterValidator(readable)] = ""
    """Arguments of partition = "flwr:NAME": "alpha=0.3, partition_by='label'"; its columns are label and source."""
    dirichlet_alpha: Positive = 0.5
    """Concentration of partition = "dirichlet" or "quantity"; small is uneven."""
    min_samples: CountOrNone = None
    """Least samples of a client before its test and validation parts are set aside; 0: as few as a client needs.

    Where a client has fewer, dirichlet and quantity are drawn anew, up to ten times.
    """
    samples_per_client: CountOrNone = None
    """Samples that each client draws with replacement, with partition = "iid" or "dirichlet"; 0: share out all.

    dirichlet: each client draws the fractions of its classes, rounded to samples; iid: all samples are equally likely
    (IST). The last class takes what the rounding leaves, so that a client may have some more samples.
    """
    shards_per_client: Count = 2
    """Shards of each client with partition = "shards"."""
    classes_per_client: Count = 5
    """Classes of each client with partition = "classes" or "source-classes".

    Where all clients together have fewer classes than the data set, the other classes are left out.
    """
    repeat_classes: bool = False
    """Deal classes as FedSelect's code does: a client may be dealt a class twice and then has two parts of it."""
    class_lists: ClassLists = ()
    """The classes of each client with partition = "lists": "0 2, 1 3".

    A class in several lists is split evenly among the clients; a class in no list is not used.
    """
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a client's training samples set aside for validation, rounded down."""
    client_test: Literal["labels", "holdout", "pooled"] = "labels"
    """Test samples of a client: all test samples of its labels and sources, or a part of its own samples.

    pooled is PFLlib's protocol: training and test set are joined and divided over the clients; no global test set is
    left.
    """
    holdout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of a client's samples for its test, client-test = "holdout" or "pooled"; rounded down, at least one.

    The test part is taken before the validation part.
    """
