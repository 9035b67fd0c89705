"""Partitions: who holds what, as properties, and every impossible setting by its message."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import derive
from fedsub_app.data import DataSettings, Partition, PartitionSettings, load_dataset, make_partition, partition_summary
from fedsub_app.data.partition import deal_classes, whole_set
from fedsub_app.data.samples import Dataset, Samples, pooled
from fedsub_app.runs.config import resolve
from fedsub_app.training.problem import Problem

DIGITS = DataSettings(dataset="digits", normalise="none")
SAMPLES = 1438
BASE: dict[str, Any] = {"partition": "iid", "num_clients": 10, "classes_per_client": 2}


def make(data: DataSettings = DIGITS, **changes: Any) -> Partition:
    return make_partition(load_dataset(data), PartitionSettings(**BASE | changes))


def labels_of(partition: Partition, data: DataSettings = DIGITS) -> list[set[int]]:
    train_y = load_dataset(data).train_y
    return [set(train_y[indices].tolist()) for indices in partition.train]


def everything(partition: Partition) -> list[int]:
    parts = [*partition.train, *partition.validation]
    return torch.cat([*parts, *(partition.test if partition.test_pool == "train" else ())]).sort().values.tolist()


@settings(max_examples=15, deadline=None)
@given(
    partition=st.sampled_from(["iid", "quantity", "dirichlet", "classes", "lists"]),
    seed=st.integers(0, 2**31 - 1),
    validation=st.floats(0, 0.6),
    client_test=st.sampled_from(["labels", "holdout"]),
)
def test_covering_partitions_hold_every_sample_once(
    partition: str, seed: int, validation: float, client_test: str
) -> None:
    changes: dict[str, Any] = {
        "partition": partition,
        "num_clients": 5,
        "class_lists": "0 1 2, 2 3 4 5, 5 6, 7 8 2, 9 0",
        "validation_fraction": validation,
        "client_test": client_test,
        "seed": seed,
    }
    made = make(**changes)
    assert everything(made) == list(range(SAMPLES))
    for part in (*made.train, *made.validation, *made.test):
        assert part.dtype == torch.int64
        assert (part.diff() > 0).all()
    for i in range(5):
        held_out = len(made.test[i]) if client_test == "holdout" else 0
        own = len(made.train[i]) + len(made.validation[i]) + held_out
        assert held_out == (max(1, int(own * 0.2)) if client_test == "holdout" else 0)
        assert len(made.validation[i]) == int((own - held_out) * Fraction(str(validation)))
        assert len(made.train[i]) >= 1
    make_partition.cache_clear()
    again = make(**changes)
    assert again is not made
    for name in ("train", "validation", "test"):
        for one, other in zip(getattr(made, name), getattr(again, name), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "classes", "lists", "quantity"])
def test_another_seed_is_another_partition(partition: str) -> None:
    lists = "0 1 2 3 4 5 6 7 8 9, 0 1 2 3 4 5 6 7 8 9"
    one, other = (
        make(partition=partition, num_clients=2, classes_per_client=5, class_lists=lists, seed=seed) for seed in (0, 1)
    )
    assert one.train[0].tolist() != other.train[0].tolist()
    assert partition != "quantity" or len(one.train[0]) != len(other.train[0])


def of_pairs(**changes: Any) -> Partition:
    """A partition of 200 samples, in turn of class and source 0 and 1."""
    x, y = Samples(torch.zeros(200, 1)), torch.arange(200) % 2
    data = Dataset("a", x, y, y, x, y, y, 2, ("one", "two"), (), (1,))
    return make_partition(data, PartitionSettings(**BASE | {"num_clients": 4} | changes))


@pytest.mark.parametrize("partition", ["classes", "lists", "column"])
def test_each_class_and_each_group_has_a_draw_of_its_own(partition: str) -> None:
    """Else a client's samples of one class were those of the other, moved."""
    made = of_pairs(partition=partition, class_lists="0 1, 0 1, 0 1, 0 1")
    first, second = ({i // 2 for own in made.train[:2] for i in own.tolist() if i % 2 == kind} for kind in (0, 1))
    if partition == "column":  # two clients a group
        first, second = ({i // 2 for i in made.train[client].tolist()} for client in (0, 2))
    assert len(first) == len(second) == 50
    assert first != second


def test_the_classes_of_one_owner_more_differ_between_seeds() -> None:
    more = set()
    for seed in range(5):
        labels = labels_of(make(partition="classes", num_clients=4, classes_per_client=3, seed=seed))
        more.add(tuple(label for label in range(10) if sum(label in own for own in labels) == 2))
    assert len(more) > 1


def test_private_sets_of_one_size_have_validation_samples_of_their_own() -> None:
    keys = PartitionSettings(num_clients=3, validation_fraction=0.25)
    one, other = (whole_set(load_dataset(DIGITS), keys, client).validation[client].tolist() for client in (0, 1))
    assert one != other


def test_seeds_are_those_of_the_published_runs() -> None:
    """Another derivation would change every number."""
    assert derive(0, "partition") == 3072132262073344427
    assert derive("0", "partition") == 6168980762426664051


@settings(max_examples=20, deadline=None)
@given(clients=st.integers(1, 60), seed=st.integers(0, 2**31 - 1))
def test_iid_sizes_differ_by_at_most_one(clients: int, seed: int) -> None:
    sizes = [len(indices) for indices in make(num_clients=clients, seed=seed).train]
    assert sum(sizes) == SAMPLES
    assert max(sizes) - min(sizes) <= 1


def test_iid_sizes_are_those_of_flwr_datasets() -> None:
    from datasets import Dataset as Table
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = IidPartitioner(num_partitions=7)
    partitioner.dataset = Table.from_dict({"label": list(range(SAMPLES))})
    sizes = [len(partitioner.load_partition(client)) for client in range(7)]
    assert [len(indices) for indices in make(num_clients=7).train] == sizes


def test_dirichlet_is_less_even_for_a_smaller_alpha() -> None:
    def spread(alpha: float) -> float:
        made = make(partition="dirichlet", num_clients=6, dirichlet_alpha=alpha)
        return float(made.class_counts(load_dataset(DIGITS)).double().std())

    assert spread(0.1) > 1.5 * spread(1.0) > 1.5 * spread(100.0)


@pytest.mark.parametrize(("partition", "alpha"), [("iid", 1.0), ("dirichlet", 100.0), ("dirichlet", 0.01)])
def test_samples_drawn_with_replacement(partition: str, alpha: float) -> None:
    """Far more than there are; a client's classes are its own draw."""
    drawn = make(partition=partition, dirichlet_alpha=alpha, samples_per_client=500, num_clients=40)
    assert all(498 <= len(own) <= 505 for own in drawn.train)
    assert any(len(own.unique()) < len(own) for own in drawn.train)
    assert drawn.train[0].tolist() != drawn.train[1].tolist()
    largest = drawn.class_counts(load_dataset(DIGITS)).max(1).values.float().mean()
    assert (largest > 350) == (alpha == 0.01)
    assert (largest < 80) == (alpha != 0.01)


def test_shards_are_runs_of_the_label_order() -> None:
    made = make(partition="shards", num_clients=10, shards_per_client=2)
    train_y = load_dataset(DIGITS).train_y
    shard = torch.empty(SAMPLES, dtype=torch.int64)
    for number, rows in enumerate(train_y.argsort(stable=True).tensor_split(20)):
        shard[rows] = number
    seen: list[int] = []
    for indices in made.train:
        shards, counts = shard[indices].unique(return_counts=True)  # type: ignore[no-untyped-call]
        assert set(counts.tolist()) <= {SAMPLES // 20, SAMPLES // 20 + 1}
        seen += shards.tolist()
    assert sorted(seen) == list(range(20))
    assert everything(made) == list(range(SAMPLES))


def test_shards_of_one_size_are_those_of_flwr_datasets() -> None:
    from datasets import Dataset as Table
    from flwr_datasets.partitioner import ShardPartitioner

    labels = load_dataset(DIGITS).train_y.tolist()
    theirs = ShardPartitioner(2, "label", num_shards_per_partition=1, seed=derive(0, "partition"))
    theirs.dataset = Table.from_dict({"label": labels, "index": list(range(SAMPLES))})
    made = make(partition="shards", num_clients=2, shards_per_client=1)
    assert [sorted(theirs.load_partition(k)["index"]) for k in range(2)] == [own.tolist() for own in made.train]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.data(), st.integers(0, 2**31 - 1))
def test_dealt_classes_are_distinct_and_balanced(classes: int, clients: int, data: st.DataObject, seed: int) -> None:
    fits = [n for n in range(1, classes + 1) if clients * n % classes == 0]
    per_client = data.draw(st.sampled_from(fits))
    dealt = deal_classes(classes, PartitionSettings(num_clients=clients, classes_per_client=per_client, seed=seed))
    assert [len(set(labels)) for labels in dealt] == [per_client] * clients
    counts = np.bincount(np.concatenate(dealt), minlength=classes)
    assert set(counts.tolist()) == {clients * per_client // classes}


def test_classes_may_repeat_as_published() -> None:
    dealt = PartitionSettings(partition="classes", num_clients=10, classes_per_client=2, repeat_classes=True)
    hands = [deal_classes(10, dealt.model_copy(update={"seed": seed})) for seed in range(200)]
    for lists in hands:
        assert sorted(label for labels in lists for label in labels) == sorted([*range(10), *range(10)])
    twice = sum(any(len(set(labels)) < 2 for labels in lists) for lists in hands)
    assert 60 < twice < 105  # the probability is 0.41, by the note
    seed = next(seed for seed, lists in enumerate(hands) if any(len(set(labels)) < 2 for labels in lists))
    made = make_partition(load_dataset(DIGITS), dealt.model_copy(update={"seed": seed}))
    assert everything(made) == list(range(SAMPLES))  # two shards of one class, not one of them twice
    assert sorted(map(len, labels_of(made)))[0] == 1


def test_one_client_a_class_is_disjoint_and_covers_everything() -> None:
    for clients, per_client in ((5, 2), (10, 1), (2, 5)):
        made = make(partition="classes", num_clients=clients, classes_per_client=per_client)
        sets = labels_of(made)
        assert sorted(label for labels in sets for label in labels) == list(range(10))
        assert everything(made) == list(range(SAMPLES))


@pytest.mark.parametrize(("clients", "per_client", "owners"), [(7, 3, {2, 3}), (4, 3, {1, 2}), (3, 5, {1, 2})])
def test_uneven_classes_leave_none_out(clients: int, per_client: int, owners: set[int]) -> None:
    for seed in range(3):
        made = make(partition="classes", num_clients=clients, classes_per_client=per_client, seed=seed)
        assert [len(labels) for labels in labels_of(made)] == [per_client] * clients
        assert everything(made) == list(range(SAMPLES))
        assert {sum(label in labels for labels in labels_of(made)) for label in range(10)} == owners
    few = make(partition="classes", num_clients=3, classes_per_client=2)
    assert sorted(map(len, labels_of(few))) == [2, 2, 2]
    assert len(set.union(*labels_of(few))) == 6


def test_lists_give_the_classes_written_and_split_shared_ones_evenly() -> None:
    data = DataSettings(dataset="synthetic-3k")
    made = make(data, partition="lists", num_clients=3, class_lists="0 2, 1 3 ,3")
    counts = made.class_counts(load_dataset(data))
    assert counts.tolist() == [[800, 0, 800, 0], [0, 800, 0, 400], [0, 0, 0, 400]]
    test_y = load_dataset(data).test_y
    assert [set(test_y[indices].tolist()) for indices in made.test] == [{0, 2}, {1, 3}, {3}]
    assert [len(indices) for indices in made.test] == [3_200, 3_200, 1_600]


def test_source_is_one_client_a_source(tmp_path: Path) -> None:
    for name, size in (("one", 6), ("two", 9)):
        pixels, labels = np.zeros((size, 4, 4), np.uint8), np.arange(size) % 3
        np.savez(tmp_path / name, train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    data = DataSettings(dataset="one+two", data_dir=str(tmp_path))
    made = make(data, partition="source", num_clients=2)
    assert [indices.tolist() for indices in made.train] == [list(range(6)), list(range(6, 15))]
    assert [indices.tolist() for indices in made.test] == [list(range(6)), list(range(6, 15))]
    with pytest.raises(UserError, match=r"num-clients = 3: partition = 'source' expected .*2 \(one, two\)"):
        make(data, partition="source", num_clients=3)


def test_a_label_without_test_images_is_named(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    np.savez(
        tmp_path / "own", train_images=pixels, train_labels=[0, 0, 1, 1], test_images=pixels, test_labels=[0, 0, 0, 0]
    )
    data = DataSettings(dataset="own", data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"client-test = 'labels': .*client 1's labels \[1\] of own; use"):
        make(data, partition="lists", num_clients=2, class_lists="0, 1")


def test_a_group_without_test_samples_is_named(tmp_path: Path) -> None:
    """The test samples of its labels are of another group: every sixth row of a class is for testing."""
    rows = "".join(f"{k},{k % 2},{'north' if k % 3 else 'south'}\n" for k in range(60))
    (tmp_path / "t.csv").write_text(f"x,label,site\n{rows}")
    data = DataSettings(dataset="csv:t.csv", data_dir=str(tmp_path), group="site")
    with pytest.raises(UserError, match=r"no sample of client 1's labels \[0, 1\] of south; use 'holdout'$"):
        make(data, partition="column", num_clients=2)


def test_a_label_that_falls_into_validation_stays_in_the_test_set(tmp_path: Path) -> None:
    """Of four samples one, which is for validation in some of the seeds, is the only one of its label."""
    pixels = np.zeros((4, 4, 4), np.uint8)
    np.savez(
        tmp_path / "own", train_images=pixels, train_labels=[0, 0, 0, 1], test_images=pixels, test_labels=[0, 0, 1, 1]
    )
    data = DataSettings(dataset="own", data_dir=str(tmp_path))
    made = [make(data, num_clients=1, validation_fraction=0.25, seed=seed) for seed in range(8)]
    assert [3] in [each.validation[0].tolist() for each in made]
    assert all(each.test[0].tolist() == [0, 1, 2, 3] for each in made)


def test_label_tests_are_all_test_samples_of_the_clients_labels() -> None:
    made = make(partition="shards", num_clients=10)
    test_y = load_dataset(DIGITS).test_y
    assert made.test_pool == "test"
    for labels, indices in zip(labels_of(made), made.test, strict=True):
        assert indices.tolist() == [i for i, label in enumerate(test_y.tolist()) if label in labels]
    iid = make(num_clients=20)
    assert iid.test[0] is iid.test[1]


def test_quantity_skew_is_in_the_sizes_alone() -> None:
    """A small alpha is uneven, a large one even; the classes are those of random samples; none has too few."""
    sizes = {alpha: sorted(map(len, make(partition="quantity", dirichlet_alpha=alpha).train)) for alpha in (0.5, 1e5)}
    assert sizes[0.5][-1] > 3 * sizes[0.5][0]
    assert sizes[1e5][-1] - sizes[1e5][0] < 10
    largest = max(labels_of(make(partition="quantity")), key=len)
    assert len(largest) == 10
    for partition in ("quantity", "dirichlet"):
        kept = make(partition=partition, dirichlet_alpha=1.0, min_samples=30, client_test="holdout")
        assert all(len(x) + len(y) >= 30 for x, y in zip(kept.train, kept.test, strict=True))


def test_a_partitioner_of_sizes_of_flwr_datasets() -> None:
    linear = [len(x) for x in make(partition="flwr:LinearPartitioner", num_clients=4).train]
    assert linear == [143, 287, 431, 577]


@pytest.mark.parametrize("partition", ["dirichlet", "flwr:IidPartitioner", "flwr:LinearPartitioner"])
def test_runs_of_a_sorted_file_are_no_clients(partition: str) -> None:
    """Rows are sorted by source and class, as a folder's images are."""
    y = torch.arange(10).repeat_interleave(40)
    source, x = torch.arange(2).repeat_interleave(400), Samples(torch.zeros(800, 1))
    data = Dataset("a", x, y.repeat(2), source, x, y.repeat(2), source, 10, ("one", "two"), (), (1,))
    made = make_partition(data, PartitionSettings(partition=partition, num_clients=4, dirichlet_alpha=1000.0))
    assert everything(made) == list(range(800))
    assert int(made.class_counts(data).min()) > 0
    assert all(0.3 < float(source[own].double().mean()) < 0.7 for own in made.train)


def test_dirichlet_is_flwr_datasets_without_self_balancing() -> None:
    from datasets import Dataset as Table
    from flwr_datasets.partitioner import DirichletPartitioner

    theirs = DirichletPartitioner(
        6, "label", 0.1, min_partition_size=1, self_balancing=False, seed=derive(0, "partition")
    )
    theirs.dataset = Table.from_dict({"label": load_dataset(DIGITS).train_y.tolist(), "index": list(range(SAMPLES))})
    made = make(partition="dirichlet", num_clients=6, dirichlet_alpha=0.1)
    assert [sorted(theirs.load_partition(k)["index"]) for k in range(6)] == [own.tolist() for own in made.train]


def test_whole_groups_go_to_the_client_with_the_fewest_samples() -> None:
    """Groups of 5, 4, 3, 3 and 3 samples: the first has 5 + 3, the second 4 + 3 + 3."""
    source = torch.arange(5).repeat_interleave(torch.tensor([3, 5, 3, 4, 3]))
    x, y = Samples(torch.zeros(18, 1)), torch.zeros(18, dtype=torch.int64)
    data = Dataset("a", x, y, source, x, y, source, 1, tuple("abcde"), (), (1,))
    made = make_partition(data, PartitionSettings(partition="column", num_clients=2))
    assert [source[own].unique().tolist() for own in made.train] == [[1, 2], [0, 3, 4]]


def test_a_set_of_one_clients_own_is_divided_once() -> None:
    """As a node's private data: all for training or validation, and the whole test part."""
    made = whole_set(load_dataset(DIGITS), PartitionSettings(num_clients=3, validation_fraction=0.25), 1)
    assert (len(made.train[1]), len(made.validation[1])) == (1079, 359)
    assert torch.cat((made.train[1], made.validation[1])).sort().values.tolist() == list(range(SAMPLES))
    assert (made.test[1].tolist(), made.test_pool) == (list(range(359)), "test")


def test_a_fraction_is_rounded_down_exactly() -> None:
    made = make(DIGITS.model_copy(update={"train_per_class": 10}), num_clients=1, validation_fraction=0.29)
    assert (len(made.train[0]), len(made.validation[0])) == (71, 29)


def test_summary_is_json_and_adds_up() -> None:
    made = make(num_clients=4, validation_fraction=0.25, client_test="holdout")
    summary = json.loads(json.dumps(partition_summary(load_dataset(DIGITS), made)))
    assert (summary["clients"], summary["classes"], summary["test_pool"]) == (4, 10, "train")
    assert [sum(counts) for counts in summary["counts"]] == summary["train"]
    assert sum(summary["train"]) + sum(summary["validation"]) + sum(summary["test"]) == SAMPLES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"partition": "flwr:NaturalIdPartitioner", "partition_options": "partition_by='label'", "num_clients": 5},
            r"^num-clients = 5: partition = 'flwr:NaturalIdPartitioner' makes 10 parts, expected one a client$",
        ),
        (
            {"partition": "flwr:SizePartitioner", "partition_options": "partition_sizes=[700, 700]", "num_clients": 3},
            r"^num-clients = 3: partition = 'flwr:SizePartitioner' makes 2 parts, expected one a client$",
        ),
        (
            {"partition": "quantity", "dirichlet_alpha": 0.01, "min_samples": 20},
            r"^dirichlet-alpha = 0\.01: no partition of 1438 samples over num-clients = 10 with 20 or more each in 11",
        ),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 0.05, "min_samples": 140},
            r"^dirichlet-alpha = 0\.05: no partition of 1438 samples over num-clients = 10 with 140 or more each",
        ),
        (
            {"min_samples": 144},
            r"^min-samples = 144: a client has 143 samples with partition = 'iid'; lower it or num-clients$",
        ),
        ({"num_clients": 1439}, r"num-clients = 1439: expected 1 to 1438"),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 0.001, "num_clients": 300},
            r"dirichlet-alpha = 0\.001: no partition .*num-clients = 300",
        ),
        (
            {"partition": "shards", "samples_per_client": 5},
            r"samples-per-client = 5: must be 0 with partition = 'shards'; allowed are 'iid', 'dirichlet'",
        ),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 100.0, "samples_per_client": 4},
            r"^samples-per-client = 4: too few for 10 classes, the rounding moves [34] samples of client 0; raise",
        ),
        (
            {"partition": "iid", "samples_per_client": 5, "validation_fraction": 0.5},
            r"samples-per-client = 5: must be 0 with validation-fraction or holdout",
        ),
        (
            {"partition": "iid", "samples_per_client": 10**6, "num_clients": 10**5},
            r"samples-per-client = 1000000 of num-clients = 100000: 800 GB in memory, this machine has",
        ),
        ({"partition": "shards", "shards_per_client": 144}, r"shards-per-client = 144: expected 1 to 143"),
        ({"partition": "classes", "classes_per_client": 11}, r"classes-per-client = 11: expected 1 to 10"),
        ({"partition": "classes", "num_clients": 1433, "classes_per_client": 1}, r"client \d+ has no training sample"),
        ({"partition": "classes", "num_clients": 1430, "classes_per_client": 2}, r"client \d+ has no training sample"),
        ({"partition": "source-classes", "num_clients": 2}, r"num-clients = 2: partition = 'source-classes' expected"),
        (
            {"partition": "source-classes", "num_clients": 1, "repeat_classes": True},
            r"^repeat-classes = true: needs num-clients \* classes-per-client a multiple of 10, the number of classes$",
        ),
        ({"partition": "source", "num_clients": 2}, r"num-clients = 2: partition = 'source' expected .*1 \(digits\)"),
        ({"partition": "lists", "class_lists": "0, 1"}, r"class-lists = '0, 1': 2 lists for num-clients = 10"),
        ({"partition": "lists", "num_clients": 1, "class_lists": "10"}, r"unknown class 10, expected 0 to 9"),
        ({"partition": "lists", "num_clients": 1, "class_lists": "3 3"}, r"the list of client 0 names a class twice"),
        ({"num_clients": 1438, "client_test": "holdout"}, r"client 0 has no training sample .*; lower num-clients$"),
    ],
)
def test_impossible_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make(**changes)
    assert "\n" not in str(error.value)


def test_clients_of_one_class_too_many_are_named() -> None:
    data = DataSettings(dataset="digits", train_per_class=2)
    lists = "0, 0, 0"
    with pytest.raises(UserError, match="client 2 has no training sample with partition = 'lists'"):
        make(data, partition="lists", num_clients=3, class_lists=lists)


def test_pooled_samples_are_those_of_both_sets() -> None:
    """A quarter of each client's own is its test part; no sample is in two of them."""
    data = load_dataset(DIGITS)
    both = pooled(data)
    assert torch.equal(both.train_x[:], torch.cat((data.train_x[:], data.test_x[:])))
    assert torch.equal(both.train_y, torch.cat((data.train_y, data.test_y)))
    moved = pooled(replace(data, test_source=data.test_source + 1))
    assert torch.bincount(moved.train_source).tolist() == [1438, 359]
    made = make_partition(both, PartitionSettings(**BASE | {"client_test": "pooled", "holdout_fraction": 0.25}))
    assert made.test_pool == "train"
    assert everything(made) == list(range(1797))
    for train, test in zip(made.train, made.test, strict=True):
        assert len(test) == (len(train) + len(test)) // 4
    assert Problem.of(resolve({"client-test": "pooled", "evaluate": "personal"})).data.train_y.shape == (1797,)


def test_pooled_samples_leave_no_global_test_set() -> None:
    line = r"^client-test = 'pooled': leaves no global test set; evaluate must be without 'global'$"
    with pytest.raises(UserError, match=line):
        resolve({"client-test": "pooled", "evaluate": "personal, global"})
