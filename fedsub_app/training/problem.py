"""The learning problem, independent of the method: data, network, loss and score."""

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedsub_app import models
from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.failures import machine_failure
from fedsub_app.common.inputs import Form, Shape
from fedsub_app.common.own_code import is_source, state_of
from fedsub_app.common.seeds import drawing
from fedsub_app.common.tasks import NextToken, Task, are_next, measured, task_of
from fedsub_app.common.tensors import CPU, Tensors
from fedsub_app.data import Collate, Dataset, in_data_folder, load_dataset, own_dataset, pooled
from fedsub_app.models.sources import answer, check_network, with_logits
from fedsub_app.settings import Settings

FIRST_SAMPLES = 32  # training samples whose loss is computed as a check before round 1
WHOLE = models.Trained()
Model = Callable[[], nn.Module]  # a network's class, or a function that makes one


@dataclass(frozen=True, eq=False)
class Problem:
    """One learning problem; frozen, and made once a process.

    ``build``: seed -> a fresh network, initialised from this seed and nothing else; ``seed``: of the initial global
    model; ``head``: name of the network's head, "": its last Linear; ``width``: fraction of each hidden layer's units;
    ``trained``: the part that is trained, the rest is a frozen base; ``name``: the setting ``model``;
    ``start``: the initial global model where the seed does not give it, named tensors.
    """

    data: Dataset
    build: Callable[[int], nn.Module]
    task: Task
    seed: int = 0
    head: str = ""
    width: float = 1.0
    trained: models.Trained = WHOLE
    name: str = ""
    start: Tensors | None = None

    @staticmethod
    def of(settings: Settings) -> "Problem":
        data = load_dataset(settings.data)
        data = pooled(data) if settings.client_test == "pooled" else data
        width = settings.options.hidden_width(settings)
        model = in_data_folder(settings.model, settings.data_dir)
        network = (model, width, settings.model_options, state_of(model))
        start = (settings.seed, settings.head, settings.model_width, trained_part(settings))
        return _named(data, (settings.task, settings.metrics), network, start)

    @staticmethod
    def own(
        model: Model,
        data: object,
        settings: Settings,
        task: Task | None = None,
        traced: bool = False,
        collate: Collate | None = None,
    ) -> "Problem":
        """Return the problem of a user's network and ``(train, test)``; ``task``: instead of the settings'.

        ``traced``: take layers and units from the network's graph. The server must see the same ones, but in a user's
        own Flower app it does not know the shape of an input.
        """
        if settings.options.hidden_width(settings):
            raise UserError(f"{settings.section}.width: must be 0 with a network of your own, whose width is its own")
        task = task or task_of(settings.task, settings.metrics)
        part, first = trained_part(settings), built(model)(settings.seed)
        dataset = own_dataset(data, task, partial(output_of, first, task), collate)
        dataset = pooled(dataset) if settings.client_test == "pooled" else dataset
        build = built(model, dataset.in_shape if traced else ())
        name, known = getattr(model, "__name__", type(model).__name__), {*models.trainable(first).values()}
        if shared := [n for n, p in models.trainable(build(settings.seed)).items() if p in known and not part.what]:
            what = "is one tensor in all networks that it returns; must make a new one in each call"
            raise UserError(f"model = {name!r}: {shared[0]!r} {what}")
        return Problem(dataset, build, task, settings.seed, settings.head, settings.model_width, part, name)

    def check_start(self) -> None:
        """Compute the loss of a few training samples before any training, as a step does."""
        some = slice(0, FIRST_SAMPLES)
        y, model = self.data.train_y[some], self.network()
        if not any(parameter.is_floating_point() for parameter in models.trainable(model).values()):
            raise UserError(f"model = {self.name!r}: has no parameters to train; allowed are floating-point ones")
        models.check_float32({**models.tensors_of(model), **models.trainable(model)}, f"model = {self.name!r}")
        x, shapes = self.data.train_x[some], {n: tuple(t.shape) for n, t in models.tensors_of(model).items()}
        copy_of_x = tree_map(torch.clone, x)
        try:
            with torch.random.fork_rng():  # dropout draws
                with torch.no_grad():
                    output = model.train(len(y) > 1)(copy_of_x)
                output = output.requires_grad_().clone() if isinstance(output, Tensor) else output
                found: object = self.task.loss(output, y)
            if isinstance(found, Tensor) and found.shape:
                raise ValueError(f"it has shape {tuple(found.shape)}, must be one number, ()")
            loss = float(found.detach() if isinstance(found, Tensor) else found)  # type: ignore[arg-type]
        except Exception as error:  # code of the user
            if machine_failure(error):
                raise
            raise UserError(f"the first {len(y)} training samples have no loss: {one_line(error)[:300]}") from error
        if not all(map(torch.equal, tree_leaves(x), tree_leaves(copy_of_x))):
            raise UserError(f"model = {self.name!r}: changes its inputs in place; must copy them first")
        after = {name: tuple(tensor.shape) for name, tensor in models.tensors_of(model).items()}
        if moved := [name for name, shape in shapes.items() if after.get(name) != shape]:
            was, now = shapes[moved[0]], after.get(moved[0])
            raise UserError(f"model = {self.name!r}: its buffer {moved[0]!r} has shape {was}, after a step {now}")
        if not isinstance(found, Tensor) or not found.requires_grad:
            raise UserError(f"the loss of the first {len(y)} training samples: must be a tensor with a gradient")
        if not math.isfinite(loss):
            raise UserError(f"the loss of the first {len(y)} training samples is {loss} before round 1: must be finite")
        measured(self.task, self.task.sums(output.detach(), y))
        form = self.data.in_shape
        if isinstance(self.task, NextToken) and isinstance(form, Form) and isinstance(x, Tensor) and are_next(x, y):
            self._check_causal(model.eval(), x, form.tokens)

    def _check_causal(self, model: nn.Module, x: Tensor, tokens: int) -> None:
        """Refuse a network whose outputs change with later tokens.

        Two texts that differ in their second half are a batch each, so that equal sums are rounded equally.
        """
        middle, other = x.shape[1] // 2, x[:1].clone()
        other[:, middle:] = (other[:, middle:] + 1) % tokens
        with torch.no_grad():
            outputs = []
            for text in (x[:1], other):
                with torch.random.fork_rng(devices=[]):
                    outputs.append(model(text)[:, :middle])
        if not torch.allclose(outputs[0], outputs[1], atol=1e-6):
            must = "must be a causal language model"
            raise UserError(f"model = {self.name!r}: reads the tokens that it predicts; {must}")

    def network(self, seed: int | None = None) -> nn.Module:
        """Return a fresh network on the CPU: the initial global model, or another seed's model on the same base."""
        if not self.trained.what:
            model = self.unfrozen(seed)
        elif seed is None or seed == self.seed:
            model = copy.deepcopy(self._frozen)  # which shares the base
        else:
            model = models.with_base_of(self._freshly_frozen(seed), self._frozen)
        if self.start and seed is None:
            models.load_tensors(model, self.start)
        return model

    def unfrozen(self, seed: int | None = None) -> nn.Module:
        """Return a fresh network without a frozen base or adapters."""
        model = self.build(self.seed if seed is None else seed)
        if self.width < 1:
            try:
                groups = models.unit_groups(model)
            except TypeError as error:  # no unit can be removed
                raise UserError(f"model-width = {self.width:g}: {error}") from None
            model = models.narrowed(model, groups, {group.name: group.kept(self.width) for group in groups})
        return models.with_head(model, self.head)

    def _freshly_frozen(self, seed: int) -> nn.Module:
        with drawing(CPU, seed, "adapters"):
            return models.freeze(self.unfrozen(seed), self.trained, self.name)

    @cached_property
    def _frozen(self) -> nn.Module:
        """The initial global model with its base, which this process has once."""
        return self._freshly_frozen(self.seed)


def trained_part(settings: Settings) -> models.Trained:
    lora = (settings.lora_rank, settings.lora_alpha, settings.lora_dropout, settings.lora_targets)
    moves_base, again = settings.options.moves_base, settings.gradient_checkpointing
    return models.Trained(settings.trainable, settings.base_dtype, *lora, moves_base, again)


def built(model: Model, in_shape: Shape = ()) -> Callable[[int], nn.Module]:
    """Return a function from a seed to a fresh network of a user's factory, on the CPU.

    The global generators are left as they were. With ``in_shape`` layers and units come from the network's graph,
    except for a Sequential that can be read like the listed networks.
    """

    wanted = "must be a class or a function that needs no argument; functools.partial(Net, …) makes one"
    if isinstance(model, nn.Module):
        raise UserError(f"model = {type(model).__name__}(…): is a network already; {wanted}")
    try:
        inspect.signature(model).bind()
    except ValueError:  # a builtin has none
        pass
    except TypeError as error:
        raise UserError(f"model = {shown(model)}: {error}; {wanted}") from None

    def build(seed: int) -> nn.Module:
        with drawing(CPU, seed, "model"):
            module = model()
        if not isinstance(module, nn.Module):
            raise UserError(f"model = {shown(model)}: returned a {type(module).__name__}, must be a torch.nn.Module")
        models.check_values(models.tensors_of(module), f"model = {type(module).__name__}")
        with suppress(TypeError):
            if not in_shape or (isinstance(module, nn.Sequential) and models.unit_groups(module)):
                return with_logits(module)
        return models.adopted(module, in_shape)

    return build


def output_of(module: nn.Module, task: Task, in_shape: Shape) -> tuple[int, ...]:
    """Return the shape of the output for one sample; :class:`UserError` where it has no axis of outputs."""
    who = f"model = {type(module).__name__}"
    output = answer(module, who, in_shape)
    if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != 2 or (task.classes and output.ndim > 2):
        what = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        allowed = "[2, classes]" if task.classes else "[2, …, outputs]"
        raise UserError(f"{who}: returns {what} for two samples, must be {allowed}")
    return tuple(output.shape[1:])


@lru_cache(maxsize=1)
def _named(
    data: Dataset,
    wanted: tuple[str, tuple[str, ...]],
    network: tuple[str, int | None, str, str],
    start: tuple[int, str, float, models.Trained],
) -> Problem:
    (model, hidden, options, _), task = network, task_of(*wanted)

    def build(of_seed: int) -> nn.Module:
        return models.build_model(model, data.in_shape, data.num_classes, of_seed, hidden, options)

    problem = Problem(data, build, task, *start, model)
    if is_source(model):
        check_network(problem.network(), model, data.in_shape, task.output(data.train_y, data.num_classes))
    return problem
