"""The loop over rounds, the same for every engine: settings → data, model, strategy, rounds, run directory."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsub_app.common.code import code_digest
from fedsub_app.common.device import pick_device, threads
from fedsub_app.common.errors import UserError
from fedsub_app.common.failures import machine_failure
from fedsub_app.common.inputs import Form, shape_shown, size_of
from fedsub_app.common.tensors import Json
from fedsub_app.common.text import human_bytes
from fedsub_app.data import Partition, in_data_folder, make_partition, partition_summary
from fedsub_app.data.settings import SOURCES
from fedsub_app.data.text import TRAINED, vocabulary_digest
from fedsub_app.federation.nodes import Federation, held_out, takes_part
from fedsub_app.federation.protocol import formula_bytes
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.models import Network, base_bytes, base_digest, fresh_names, is_pretrained
from fedsub_app.runs import console
from fedsub_app.runs.checkpoint import started
from fedsub_app.runs.directory import Run, open_run
from fedsub_app.runs.evaluation import GlobalTest
from fedsub_app.runs.methods import METHODS, check_hooks
from fedsub_app.runs.recorded import RunFailed, runs_folder
from fedsub_app.runs.rounds import ended_by, plateau_lr
from fedsub_app.runs.tracking import Tracking, check_tracker
from fedsub_app.settings import Settings
from fedsub_app.training.costs import training_flops
from fedsub_app.training.problem import Problem
from fedsub_app.training.stacked import unstackable
from strategies.base import SubnetStrategy
from strategies.evaluation import by_width, evaluation_due
from strategies.rounds import check_defences, check_widths
from strategies.server import Facts

log = logging.getLogger("fedsub")
Measure = Callable[[ArrayRecord], dict[str, float]]  # of the global model, for the round's line


def client_bytes(settings: Settings, network: int, samples: float) -> float:
    """Return the bytes of a client that trains: network, gradients, received model, optimizer state, samples."""
    state = {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 1}[settings.optimizer] + bool(settings.momentum)
    return (3 + state) * network + samples


def check_devices(strategy: SubnetStrategy, problem: Problem, partition: Partition | None) -> list[tuple[str, str]]:
    """Return each class of devices and, in words, its clients and what the one with most samples needs at most."""
    settings, method, rows = strategy.settings, strategy.settings.method, []
    check_widths(strategy)
    strategy.round = 0
    sizes = [len(indices) for indices in partition.train] if partition else [0] * settings.num_clients
    members = sorted({*range(settings.num_clients)} - held_out(settings))
    for device in strategy.devices.classes if strategy.devices else ():
        clients = [client for client in members if strategy.devices.of(client) is device]  # type: ignore[union-attr]
        named, needs = f"class {device.name} holds", "none takes part"
        if clients and device.width >= settings.min_width:
            largest = max(clients, key=sizes.__getitem__)
            network = formula_bytes(strategy.network_of(largest))
            samples = sizes[largest] * size_of(problem.data.in_shape)
            needed = client_bytes(settings, network, samples) + base_bytes(strategy.model)
            if device.memory_mb and needed > device.memory_mb * 1e6:
                less = f"memory-mb = {device.memory_mb:g}, a client of {method} needs {human_bytes(needed)}"
                raise UserError(f"devices: {named} {less}")
            needs = f"a network of {human_bytes(network)}, {human_bytes(needed)} in training"
        rows.append((device.name, f"{len(clients)} clients of width {device.width:g}, {needs}"))
    return rows


def prepare(settings: Settings, problem: Problem | None = None) -> tuple[Problem, Partition | None, SubnetStrategy]:
    """Return the problem, the partition of its data over the clients, and the method's server side.

    The partition is None where each node has private data. ``problem``: in the place of the named one.
    """
    own = problem is not None or ":" in settings.model + settings.dataset + settings.task
    problem = problem or Problem.of(settings)
    if settings.start_from:
        problem = started(problem, settings)
    if own:  # what this package has never seen
        problem.check_start()
    if settings.augment != "none" and (isinstance(problem.data.in_shape, Form) or len(problem.data.in_shape) != 3):
        raise UserError(f"augment = {settings.augment!r}: needs images; samples of {settings.dataset} have no height")
    if settings.augment != "none" and problem.data.train_y.ndim > 2:  # one class a pixel
        raise UserError(
            f"augment = {settings.augment!r}: moves images, but not labels of {settings.dataset}, one a pixel"
        )
    partition = None if settings.private_examples else make_partition(problem.data, settings.partitioning)
    least, able = max(settings.least_replies, 3 * settings.secure_aggregation), sum(takes_part(settings))
    if able < least:
        hold = f"{able} of {settings.members} clients hold that width"
        raise UserError(f"min-width = {settings.min_width:g}: {hold}, a round needs {least}")
    strategy = METHODS[settings.method].strategy(settings, problem.network())
    if strategy.measurement:
        check_hooks(type(strategy.measurement))
    check_devices(strategy, problem, partition)
    check_defences(strategy)
    check_tracker(settings.track)
    if settings.stack_clients and (reason := unstackable(settings, Network(strategy.model), problem)):
        raise UserError(f"stack-clients = true: not with {reason}")
    return problem, partition, strategy


@threads(1)  # as on the clients: the same numbers on every engine
def run_experiment(grid: Grid, settings: Settings, problem: Problem | None = None) -> Json:
    """Run all rounds on ``grid``; returns the summary. ``problem``: in the place of the one that the settings name.

    :class:`UserError`: bad input, before round 1.
    :class:`RunFailed`: all rounds, or ``max-abandoned`` in a row, were abandoned; files cannot be written; or, here or
    on a simulated node, the memory is used up or the GPU lost.
    """
    device = pick_device(settings.device, settings.gpu_exact)
    # Before the run directory exists: it may reject its settings.
    problem, partition, strategy = prepare(settings, problem)
    base = base_digest(strategy.model)
    dataset, run = problem.data, open_run(settings, device, base, problem.data.digest)
    with described_failures(run):
        run_settings = settings.flat() | {"experiment": "", "resume": False}
        header: Json = {"run": run.run_id, "state-dir": str(run.folder / "clients")} | ({"base": base} if base else {})
        if not partition:  # each node compares its own data with these
            header |= {"shape": shape_shown(dataset.in_shape), "classes": dataset.num_classes}
            header |= {"labels": dataset.labels} if dataset.labels else {}
            header["vocabulary"] = vocabulary_digest(in_data_folder(settings.tokenizer, settings.data_dir))
        global_test = GlobalTest(problem, device)
        sample_flops = training_flops(problem, strategy.model)
        private = [settings.private_examples] * settings.num_clients
        examples = [len(indices) for indices in partition.train] if partition else private
        evaluated = (*partition.validation, *partition.test) if partition else ()
        limit = max(map(len, evaluated), default=settings.private_examples)
        facts = Facts(examples, sample_flops, global_test.quick_loss, limit, exact=bool(partition))
        strategy.connect(Federation(settings, header, run_settings, device.type, problem.start), facts)
        if partition and device.type == "cpu":  # a GPU takes less time than it takes to ask for help
            global_test.share(strategy.federation, grid)
        if partition:
            run.write_json("partition.json", partition_summary(dataset, partition))  # also on resume: it may be damaged
        notes = dataset.notes
        if settings.compile_steps and device.type == "cpu":
            notes += ("compile-steps = true: no GPU here: steps are compiled, not captured as graphs",)
        if fresh := sorted(fresh_names(strategy.model) - {*(problem.start or ())}):
            notes += (f"model = {settings.model!r}: its weights lack {', '.join(fresh)}, which start at random",)
        kind, tokenizer = settings.dataset.partition(":")[0], settings.tokenizer
        texts = isinstance(dataset.in_shape, Form) and kind in (*SOURCES, "python-sources")
        if texts and tokenizer in TRAINED and is_pretrained(strategy.model):
            notes += (f"tokenizer = {tokenizer!r}: model = {settings.model!r} was trained with other tokens",)
        for note in notes:
            log.info("note: %s", note)
        log.info("%s", console.opening(run.folder, dataset, strategy))
        strategy.summary()
        return run_rounds(grid, strategy, run, global_test if "global" in settings.evaluations else None)


@contextmanager
def described_failures(run: Run) -> Iterator[None]:
    """Close the run at the end; an interruption and a failure of the machine say how the run is resumed."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"`{run.continuation}` goes on") from None
    except Exception as error:
        if failure := machine_failure(error):
            stacked = " or stack-clients = false" if run.settings.stack_clients else ""
            less = f"; fewer --workers or message-clients take less, in a new run a smaller batch-size{stacked}"
            how = less if "out of memory" in failure else ""
            raise RunFailed(f"{failure}{how}; `{run.continuation}` goes on", run.folder) from error
        raise
    finally:
        run.close()


def run_rounds(grid: Grid, strategy: SubnetStrategy, run: Run, global_test: Measure | None) -> Json:
    """Run the rounds after the last checkpoint: train, evaluate, write the line, checkpoint; returns the summary."""
    settings = run.settings
    checkpoint = run.restore()
    last, model, state, abandoned = checkpoint.round, checkpoint.model, checkpoint.state, checkpoint.abandoned
    if other := [n for n, tensor in strategy.current.items() if n in model and model[n].shape != tensor.shape]:
        shapes = f"{tuple(model[other[0]].shape)}, here {tuple(strategy.current[other[0]].shape)}"
        raise UserError(f"{run.folder}: its model is another network's: {other[0]!r} has shape {shapes}")
    # In the model's order, which a checkpoint does not keep: sums over tensors must not depend on a resume.
    arrays = to_arrays({name: model.get(name, tensor) for name, tensor in strategy.current.items()})
    if last:
        strategy.load_state(state)
        log.info("resumed after round %d of %d in %s", last, settings.num_rounds, run.folder)
    elif global_test:
        run.log_round({"round": 0, "status": "ok", **global_test(arrays)})
    strategy.federation.meet(grid)  # not part of the first round's seconds: Ray takes some to start
    real = partial(run.audit, runs_folder().absolute() / "audit.jsonl")
    audited: Callable[..., None] = (lambda event, **about: None) if strategy.federation.simulated else real
    nodes = sorted(strategy.federation.nodes)
    audited("run begins", code=code_digest(), settings=settings.digest(), nodes=nodes, round=last + 1)
    tracking = Tracking(settings.track, run.folder, run.run_id, settings.flat())
    run.at_close.callback(tracking.end, completed=False)
    tracking.follow(run.lines)
    began = time.perf_counter()
    over = ended_by(run.lines, settings)
    if last < settings.num_rounds and not over:
        run.reopen()
    number = last
    for number in () if over else range(last + 1, settings.num_rounds + 1):
        start = time.perf_counter()
        config = ConfigRecord({"checkpoints": run.checkpoint_rounds})
        if settings.lr_schedule == "plateau":
            config["lr"] = plateau_lr(run.lines, settings)
        phase, stage = strategy.configure_train(number, arrays, config, grid), strategy.stage(number)
        merged, _ = strategy.aggregate_train(number, strategy.federation.exchange(grid, phase))
        # The model of an abandoned round is that before it or, with robust, an earlier one.
        arrays, abandoned = (merged, 0) if merged is not None else (to_arrays(strategy.current), abandoned + 1)
        over = ended_by([*run.lines, strategy.phase.report], settings)
        config["last"] = over is not None  # its evaluation, for which a method may measure first, is due
        if strategy.measurement and (merged is not None or not _is_measured(run, strategy.phase.report)):
            arrays = strategy.measurement.run(number, arrays, config, grid)
        status = "ok" if merged is not None else "abandoned"
        about: Json = {"stage": stage} if stage else {}
        about |= {"lr": strategy.lr} if settings.lr_schedule != "step" else {}
        measured: Json = {"round": number, "status": status, **about, "seconds": time.perf_counter() - start}
        line = measured | strategy.phase.report | measured  # in this order; the server's values override the report's
        over = over or ended_by([*run.lines, line], settings)  # a measurement costs as well
        config["last"] = over is not None
        line |= _evaluate(grid, strategy, number, arrays, config, global_test)
        over = over or ended_by([*run.lines, line], settings)
        if strategy.robust and run.is_best(line):
            run.keep_best(to_tensors(arrays))
        run.log_round(line)
        if line.get("dropped") or status == "abandoned":
            audited("answers refused", round=number, dropped=line.get("dropped"), abandoned=line.get("abandoned"))
        tracking.follow(run.lines)
        if number % settings.checkpoint_every == 0 or number == settings.num_rounds or abandoned or over:
            run.checkpoint(number, to_tensors(arrays), strategy.state(), abandoned)
        left = (time.perf_counter() - began) / (number - last) * (settings.num_rounds - number)
        log.info("%s", console.round_line(line, settings, strategy.score, left))
        if over or abandoned >= settings.max_abandoned:
            break
    if over:
        log.info("round %d was the last one: %s = %s", number, over, settings.flat()[over])
    failure = _failure(run, number, abandoned, bool(global_test))
    status = "failed" if failure else "completed"
    summary = run.finish(status, to_tensors(arrays))
    audited(f"run {status}", round=number)
    tracking.end(completed=not failure)
    if failure:
        raise RunFailed(f"{failure}; checkpoint in {run.folder}", run.folder)
    return summary


def _failure(run: Run, number: int, abandoned: int, is_tested: bool) -> str:
    """Return why the run failed, "" if it did not; ``is_tested``: the server tests the global model."""
    most = run.settings.max_abandoned
    if abandoned and (abandoned == number or abandoned >= most):
        last = ([line for line in run.lines if "abandoned" in line] or [{"abandoned": "its line is gone"}])[-1]
        which = f"{abandoned} rounds in a row" if abandoned >= most else f"all {number} rounds"
        reasons = [last["abandoned"], *(drop["reason"] for drop in last.get("dropped", ())[:1])]
        return f"{which} were abandoned (max-abandoned = {most}); last reason: {'; '.join(reasons)}"
    reasons = [drop["reason"] for line in run.lines for drop in line.get("not-evaluated", ())]
    if not reasons or is_tested or any(line.get("evaluated") for line in run.lines):
        return ""
    return f"no client was evaluated in any round; last reason: {reasons[-1]}"


def _is_measured(run: Run, report: Json) -> bool:
    """Say whether the model that an abandoned round leaves, or goes back to, was measured since it was merged."""
    changes: list[tuple[int, bool]] = []  # rounds that have changed this model, and whether they have measured it
    for line in (*run.lines, report | {"round": 0}):
        if (good := line.get("back-to-round")) is not None:
            changes = [change for change in changes if change[0] <= good]
        measured = "abandoned" not in line.get("measurement", {"abandoned": ""})
        if line["round"] and (line["status"] == "ok" or measured):
            changes.append((line["round"], measured))
    return not changes or changes[-1][1]


def _evaluate(
    grid: Grid, strategy: SubnetStrategy, number: int, arrays: ArrayRecord, config: ConfigRecord, test: Measure | None
) -> Json:
    """Make the evaluations that are due after a round; returns their entries for the round's line."""
    if not evaluation_due(strategy, number, config):
        return {}
    start = time.perf_counter()
    metrics: Json = dict(test(arrays)) if test else {}
    if (phase := strategy.configure_evaluate(number, arrays, config, grid)).clients:
        strategy.aggregate_evaluate(number, strategy.federation.exchange(grid, phase))
        metrics = phase.report | metrics
    if isinstance(test, GlobalTest) and (widths := by_width(strategy, metrics, test.narrow)):
        metrics["served"] = widths | metrics.get("served", {})
    return metrics | {"evaluate-seconds": time.perf_counter() - start}
