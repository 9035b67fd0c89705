"""The space of a sweep, values and ranges of settings, and its trials, an Optuna study in ``sweep.journal``."""

import hashlib
import itertools
import json
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState, create_trial

from fedsub_app.common.conf_files import is_file
from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.own_code import read_options, section_of
from fedsub_app.common.score import Score
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import derive
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.runs.config import applicable_keys, base_keys, check, defaults, is_list, read_experiment
from fedsub_app.studies.batch import Job

optuna.logging.set_verbosity(optuna.logging.WARNING)
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
SWEEP_KEYS = ("experiment", "run-dir", "resume")  # keys that the sweep sets itself

Values = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Values]


def read_space(pairs: Sequence[str], experiment: str = "") -> tuple[dict[str, Value], Space]:
    """Return the keys that have one value, and those to search: ``lr=0.1``; ``lr=0.01,0.1``, ``lr=0.01..0.1:log``.

    A comma belongs to the value of keys that are lists or options; several such values are a TOML array.
    The methods that ``experiment`` and pairs name are registered first: what a key takes is known from then on.
    """
    if experiment:
        applicable_keys({"experiment": experiment})
    named: Any = parse_pairs(pairs).get("method", "")
    for name in named if isinstance(named, list) else str(named).split(","):
        check({"method": str(name).strip()})
    fixed: dict[str, Value] = {}
    space: Space = {}
    for pair in pairs:
        ((key, value),) = parse_pairs([pair]).items()
        text = pair.partition("=")[2].strip()
        if key in SWEEP_KEYS:
            raise UserError(f"-s {key}: a sweep sets it itself; allowed are the other keys")
        for before in (fixed, space):  # of a key that is given twice the last one counts, as in a run
            before.pop(key, None)
        if key == "seed" and type(value) is not int:
            raise UserError(f"seed = {text}: must be one number, that of the first run; --seeds N runs N of them")
        if match := RANGE.fullmatch(text):
            space[key] = _range(f"{key} = {text}", defaults().get(key, 0.0), *match.groups())
            continue
        parsed: Any = value
        values: Sequence[Any] = parsed if isinstance(parsed, list) else [parsed]  # a TOML list
        if value == text and "," in text and not _is_one(key, text):  # text that is in no quotes
            values = [parse_pairs([f"{key}={word}"])[key] for word in text.split(",") if word.strip()]
        if not values and not is_list(key):
            raise UserError(f"{key} = {text}: no value")
        values = list(dict.fromkeys(values)) if all(isinstance(each, str | int | float) for each in values) else [value]
        if len(values) > 1:  # none: the empty list
            space[key] = CategoricalDistribution(values)
        else:
            fixed[key] = values[0] if values else value
    if not space:
        raise UserError("nothing to search: give a key several values, -s lr=0.01,0.1, or a range, -s lr=0.01..0.1:log")
    return fixed, space


def _is_one(key: str, text: str) -> bool:
    """Say whether a text with commas is one value: a list, or options such as ``width=32, depth=2``."""
    with suppress(ValueError):
        return is_list(key) or bool(read_options(text))
    return False


def _range(pair: str, default: Value, first: str, last: str, log: str | None) -> FloatDistribution | IntDistribution:
    """``default``: of the key; that of an unknown key, which is refused with the first trial, is any number."""
    low, high = float(first), float(last)
    if isinstance(default, bool | str):
        raise UserError(f"{pair}: only a number has a range; values to try stand with commas")
    if not low < high:
        raise UserError(f"{pair}: the first number must be below the second")
    if log and low <= 0:
        raise UserError(f"{pair}: must be above 0 on a logarithmic scale")
    if not isinstance(default, int):
        return FloatDistribution(low, high, log=bool(log))
    if not (low.is_integer() and high.is_integer()):
        raise UserError(f"{pair}: must be from one integer to another")
    return IntDistribution(int(low), int(high), log=bool(log))


def as_written(values: Values) -> Any:
    """Return the values of a list, or a range as it is written on the command line."""
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    return f"{values.low:g}..{values.high:g}" + ":log" * values.log


@dataclass(frozen=True)
class Search:
    """The settings that are tried: ``fixed`` in all trials, those of ``space`` searched by grid, random or optuna.

    ``trials``: how many settings to try, ``None`` for all points of a space without ranges.
    """

    experiment: str
    fixed: Mapping[str, Value]
    space: Space
    method: str
    trials: int | None = None

    @cached_property
    def seed(self) -> int:
        """Seed of the first run of a trial, on which the search depends as well."""
        return int(self.fixed.get("seed", base_keys(self.experiment, str(defaults()["method"]))["seed"]))

    @property
    def count(self) -> int:
        return len(self.points) if self.points is not None else self.trials or 0

    def overrides(self, keys: Mapping[str, Value]) -> dict[str, Value]:
        """Return the single keys of a trial without those of methods that it does not run."""
        experiment = {"experiment": self.experiment} if self.experiment else {}
        return applicable_keys({**experiment, **self.fixed, **keys})

    @cached_property
    def points(self) -> list[dict[str, Value]] | None:
        """Searched keys of the trials of a grid, or of random search in lists; ``None``: Optuna draws them."""
        lists = [values.choices for values in self.space.values() if isinstance(values, CategoricalDistribution)]
        if len(lists) < len(self.space) or self.method == "optuna":
            return None
        points: list[dict[str, Any]] = [dict(zip(self.space, row, strict=True)) for row in itertools.product(*lists)]
        # One trial is enough for points that differ in keys of methods that they do not run.
        grid = list({json.dumps(self.overrides(keys), sort_keys=True): keys for keys in points}.values())
        if self.method == "random":
            random.Random(derive(self.seed, "sweep")).shuffle(grid)
        return grid[: self.trials]

    def examples(self) -> list[dict[str, Value]]:
        """Return searched keys with each value of a list and both ends of each range, each key with its method."""
        values: dict[str, list[Any]] = {
            key: list(of.choices) if isinstance(of, CategoricalDistribution) else [of.low, of.high]
            for key, of in self.space.items()
        }
        examples = list(self.points or [])
        for key, tried in values.items():
            keys = {each: others[0] for each, others in values.items()}
            for method in values.get("method", ()):
                if key.startswith(f"{section_of(str(method))}."):
                    keys["method"] = method
            examples += [keys | {key: value} for value in tried]
        return examples

    def describe(self, metric: str) -> dict[str, Any]:
        """Return the identity of a sweep by ``metric``; the number of trials does not belong to it."""
        experiment = self.experiment
        if is_file(experiment):  # a file of this name in another folder, or edited keys, make another experiment
            digest = hashlib.sha256(json.dumps(read_experiment(experiment), sort_keys=True).encode()).hexdigest()
            experiment = f"{Path(experiment).resolve()} {digest[:12]}"
        return {
            "experiment": experiment,
            "set": dict(self.fixed),
            "space": {key: as_written(values) for key, values in self.space.items()},
            "search": self.method,
            "decides": metric if self.method == "optuna" else "",
        }


class Trial(NamedTuple):
    """Values of the searched keys, and the runs with them, one for each seed."""

    number: int
    keys: Mapping[str, Value]
    jobs: tuple[Job, ...]

    def values(self, metric: str) -> list[float]:
        """Return the final metric of every run; empty unless all runs are complete."""
        name = f"final-{metric}-{self.jobs[0].settings.score.name}"
        summaries = [job.summary() or {} for job in self.jobs]
        return [summary[name] for summary in summaries] if all(name in summary for summary in summaries) else []


@dataclass(frozen=True)
class Sweep:
    """A search with its trials and runs in ``out``, ranked by a final ``metric`` such as ``"personal-validation"``."""

    search: Search
    metric: str
    score: Score
    seeds: int
    out: Path

    @cached_property
    def study(self) -> optuna.Study:
        """The study, which is made, with the identity of the sweep, where the folder has none."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = str(self.out / "sweep.journal")
        lock = JournalFileOpenLock(path)
        _cut_torn_line(path, lock)
        direction: Literal["maximize", "minimize"] = "maximize" if self.score.high_is_good else "minimize"
        try:
            storage = JournalStorage(JournalFileBackend(path, lock))
            study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged ({one_line(error)}); delete it to begin the sweep anew") from None
        for key, value in self.search.describe(self.metric).items():
            if (other := study.user_attrs.get(key, value)) != value:
                raise UserError(f"--out {self.out}: has another sweep, with {key} = {shown(other)}")
            study.set_user_attr(key, value)
        return study

    def trial(self, number: int) -> Trial:
        """Return a trial; the next one is drawn first."""
        if number == self._begun:
            self._draw(number)
        keys = self.study.get_trials(deepcopy=False)[number].params
        jobs = []
        for seed in range(self.search.seed, self.search.seed + self.seeds):
            folder = (self.out / f"trial-{number:03d}-seed{seed}").resolve()
            name = f"trial {number}  {label(keys)}" + f"  seed {seed}" * (self.seeds > 1)
            jobs.append(Job(name, self.search.overrides(keys) | {"seed": seed, "run-dir": str(folder)}, folder))
        return Trial(number, keys, tuple(jobs))

    @property
    def _begun(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    def _draw(self, number: int) -> None:
        """Add a trial. It depends on the seed and the trials that have ended, not on when the sweep was continued."""
        if self.search.points is not None:
            # Not points[number]: the keys may have stood in another order on the command line.
            begun = [trial.params for trial in self.study.get_trials(deepcopy=False)]
            keys: dict[str, Any] = next(point for point in self.search.points if point not in begun)
            trial = create_trial(state=TrialState.RUNNING, params=keys, distributions={**self.search.space})
            self.study.add_trial(trial)
            return
        seed = derive(self.search.seed, "sweep", number) % 2**32
        self.study.sampler = RandomSampler(seed)
        if self.search.method == "optuna":
            self.study.sampler = TPESampler(seed=seed)
            self.tell()
        self.study.ask({**self.search.space})

    def tell(self) -> None:
        """Tell the study the results of the trials that are complete."""
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if values := self.trial(frozen.number).values(self.metric):
                self.study.tell(frozen.number, statistics.fmean(values))

    def started(self) -> list[Trial]:
        return [self.trial(number) for number in range(min(self._begun, self.search.count))]

    def jobs(self) -> Iterator[Job]:
        """Yield the runs that are not complete, trial by trial."""
        for number in range(self.search.count):
            yield from (job for job in self.trial(number).jobs if job.summary() is None)


def _cut_torn_line(path: str, lock: JournalFileOpenLock) -> None:
    """Take away a last line that a full disk or a power cut has torn, which Optuna could not read."""
    lock.acquire()
    try:
        with open(path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()


def label(keys: Mapping[str, Value]) -> str:
    return "  ".join(f"{key}={text_of(value)}" for key, value in keys.items())


def text_of(value: Value) -> str:
    """Return a searched value as tables and pictures show it: a number that was drawn with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
