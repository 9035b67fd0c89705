"""The printed lines of a run and its plan, worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from fedsub_app.runs.config import resolve
from fedsub_app.runs.console import opening, round_line, summary_table
from fedsub_app.runs.loop import prepare
from fedsub_app.runs.plan import plan

SMALL = {"model": "feature-mlp", "num-clients": 4, "partition": "iid", "train-per-class": 20, "num-rounds": 5}
SCORE = resolve({}).score
LINE: dict[str, Any] = {
    **{"round": 7, "clients": [0, 1, 2, 3, 4, 5], "status": "merged", "seconds": 0.254},
    **{"bytes-down": 1500, "bytes-up": 12},
}


def printed(seconds_left: float = 187.0, **more: Any) -> str:
    line = LINE | {key.replace("_", "-"): value for key, value in more.items()}
    return round_line(line, resolve({"num-rounds": 50}), SCORE, seconds_left)


def test_a_rounds_line() -> None:
    sent = "down 1.5 kB up 12 B  0.25 s"
    assert printed() == f"round  7/50  left 3:07 min  clients 6/6  {sent}"
    said = printed(stage="warm-up", global_accuracy=93.214, train_loss=0.12345, epsilon=1.234, partial="2 of 6 replies")
    assert said == (
        "round  7/50  left 3:07 min  warm-up  global 93.21 %  train loss 0.1235  clients 6/6  epsilon 1.23  "
        f"{sent}  partial: 2 of 6 replies"
    )
    assert "train loss 2.5e-07  clients" in printed(train_loss=2.5e-7), "as of a regression of small numbers"
    late = [{"client": client, "reason": "late"} for client in range(4)]
    said = printed(3720.0, status="abandoned", abandoned="why", dropped=late, not_waited_for=[5], partial="1 of 6")
    dropped = "  ".join(f"dropped client {client}: late" for client in range(3))
    assert said == (
        f"round  7/50  left 1:02 h  clients 1/6  {sent}  ABANDONED: why, the model stays  "
        f"{dropped}  and 1 more dropped  not waited for: clients 5"
    )
    said = printed(status="abandoned", abandoned="why", back_to_round=3, dropped=late[:3], lost_state=[1, 2])
    assert said.endswith(f"why, back to that of round 3  {dropped}  lost state: clients 1, 2")
    unevaluated = dropped.replace("dropped", "unevaluated")
    assert printed(not_evaluated=late).endswith(f"{sent}  {unevaluated}  and 1 more unevaluated")


def test_a_summary() -> None:
    summary = {
        **{"method": "fedavg", "dataset": "digits", "seed": 3, "rounds": 5, "abandoned-rounds": 1},
        **{"dropped-replies": 2, "final-global-accuracy": 90.0, "best-global-accuracy": 91.5, "rounds-to-target": None},
        **{"total-bytes-down": 1500, "total-formula-bytes-down": 1000, "total-bytes-up": 12},
        **{"total-formula-bytes-up": 10, "total-flops": 1.5e9, "total-subnet-flops": 5e8, "total-seconds": 187.0},
        "run-dir": "/runs/a",
    }
    more = {
        **{"rounds-to-target": 0, "epsilon": 1.234, "delta": 1e-5, "ended-by": "max-flops", "total-joules": 2.0},
        **{"total-device-seconds": 30.0, "served": {"global-accuracy": {"full": 90.0, "half": 80.0}}},
    }
    assert summary_table(summary, SCORE).splitlines() == [
        "",
        "method            fedavg on digits, seed 3",
        "global accuracy   90.00 % at the end, 91.50 % at best",
        "rounds to target  not reached",
        "rounds            5, 1 abandoned, 2 replies dropped",
        "bytes down        1.5 kB sent, 1 kB by the formula",
        "bytes up          12 B sent, 10 B by the formula",
        "training          1.5e+09 FLOPs, 5e+08 in sub-networks",
        "time              3:07 min in rounds",
        "results           /runs/a",
        "learning curve    /runs/a/curve.png",
    ]
    assert {
        "rounds to target  0",  # by the model that the run starts from
        "privacy           epsilon 1.23 at delta 1e-05, of one client",
        "ended by          max-flops; `fedsub run --resume /runs/a max-flops=…` goes on with another limit, 0 with "
        "none",
        "time              3:07 min in rounds, 30 s by the devices' clock, 2 J",
        "global by         full 90.00 %, half 80.00 %",
    } <= {*summary_table(summary | more, SCORE).splitlines()}


@pytest.mark.parametrize("trainable", ["", "lora"])
def test_a_plan_has_the_warning_of_the_run(trainable: str) -> None:
    said = plan(resolve(SMALL | {"method": "fedit", "trainable": trainable})).splitlines()
    warned = ["warning   trainable = '': without 'lora' fedit is FedAvg"]
    assert [line for line in said if line.startswith("warning")] == ([] if trainable else warned)


def test_a_plan_and_the_opening() -> None:
    """77,010 parameters, 10,010 of them the head's; 200 samples of 64 numbers for 4 clients; 316,000 FLOPs a sample.

    On the server: the data, four times the model and two messages of twice four models; all answers with a median. In a
    process: the data, the clients' samples as they train on them, a network, gradients, received model, and a message.
    """
    settings = resolve(SMALL | {"method": "lg-fedavg", "lg-fedavg.warm-rounds": 2})
    problem, partition, strategy = prepare(settings)
    assert opening(Path("x"), problem.data, strategy) == (
        "run x  lg-fedavg on digits  200 training and 359 test samples  feature-mlp, 77,010 parameters  "
        "4 clients, 4 a round  5 rounds, warm-up in rounds 1 to 2"
    )
    said = plan(settings).splitlines()
    rest = "of the whole network, without the method's own additions and savings"
    data, model = (200 + 359) * (64 * 4 + 8), 4 * 77_010
    worker = data + 3 * model + 200 * 64 * 4 + 2 * 4 * model
    assert said[1:8] == [
        "data              digits: 200 training and 359 test samples, 10 classes",
        "network           feature-mlp: 77,010 parameters, 308 kB",
        "rounds            warm-up: rounds 1 to 2; rounds 3 to 5",
        "round 1, warm-up  1.23 MB down, 1.23 MB up by the formula, 4 clients",
        "round 3           1.23 MB down, 160 kB up by the formula, 4 clients",
        f"training          0.0632 GFLOPs a round on average: local-epochs = 1 {rest}",
        f"memory            about {(data + 4 * model + 2 * 8 * model) / 1e6:.2f} MB of tensors on the server, "
        f"{worker / 1e6:.2f} MB in a process that trains",
    ]
    assert partition
    classes = ", ".join(f"{label}: {n}" for label, n in enumerate(partition.class_counts(problem.data)[0]))
    assert said[9:12] == [
        "| client | training | validation | test | classes: samples |",
        "| --- | --- | --- | --- | --- |",
        f"| 0 | 50 | 0 | 359 | {classes} |",
    ]
    robust = {"mean": "median", "local-steps": 3, "batch-size": 64, "message-clients": 2, "weighting": "uniform"}
    said = plan(resolve(SMALL | {"method": "fedavg", **robust})).splitlines()
    assert f"0.243 GFLOPs a round on average: local-steps = 3 {rest}" in said[5]
    assert f"{(data + 7 * model + 2 * 4 * model) / 1e6:.2f} MB of tensors on the server" in said[6]
    said = plan(resolve(SMALL | {"method": "fedpm", "secure-aggregation": True})).splitlines()
    protocol = "without the protocol's keys, shares and positions"
    assert f"1.23 MB down, 1.23 MB up by the formula, 4 clients, {protocol}" in said[4], "a vector for a mask"
    many = plan(resolve(SMALL | {"method": "fedavg", "num-clients": 25}))
    assert "\n25 clients: 8 to 8 training samples (median 8), " in many


def test_a_methods_own_settings_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are not the defaults, and nothing where all are."""
    with caplog.at_level("INFO", "fedsub"):
        for order in ("shallow", "deep"):
            keys = {"method": "fedpart", "fedpart.order": order, "fedpart.full-rounds": 2}
            prepare(resolve(SMALL | keys))[2].summary()
        keys = {"method": "heterofl", "heterofl.widths": "0.5", "devices": "phones"}
        prepare(resolve(SMALL | keys))[2].summary()
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert said == ["fedpart: order = 'deep'"]
