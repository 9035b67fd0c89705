"""Clients with a model of their own, beside the global one or in its place; papers: ``strategies/<method>.py``."""

from itertools import islice
from statistics import pstdev

import torch
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.section import MILLION
from fedsub_app.common.tensors import Json, Tensors, brought, prefixed, unprefixed
from fedsub_app.models import layer_groups
from fedsub_app.training.client import OWN, Training
from fedsub_app.training.objectives import Objective, Prox
from fedsub_app.training.optimizer import Optimizer
from strategies import settings as keys


class LocalClient(Client):
    """Trains its own model round after round."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        self.load(self.own or self.initial())
        self.fit()
        self.keep_own()
        return {}


class MTLClient(Client):
    """Trains its own model round after round, and sends it to the server."""

    options: keys.MTLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the client's own model on ``loss + c (||w||² + ||w - mean||²)``; return it."""
        self.load(self.own or self.initial())
        mean = self.network.like(sent)

        def pull(gradients: dict[str, Tensor]) -> None:
            for name, gradient in gradients.items():
                gradient.add_(2 * self.network.tensors[name].detach() - mean[name], alpha=2 * self.options.lambda_)

        self.fit(correct=pull)
        return self.keep_own()


class DittoClient(Client):
    """Trains the global model as FedAvg does, then its own, which never leaves it."""

    options: keys.DittoSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained global model; keep the personal one, trained on ``F(v) + lambda / 2 ||v - w||²``."""
        answer = super().train(sent, config)
        self.load(self.own or self.initial())  # v^0 is the initial model
        self.fit(objective=Prox(self.network.like(sent), self.options.lambda_), purpose="personal batches")
        self.keep_own()
        return answer


class APFLClient(Client):
    """Trains w as FedAvg does, and v through the mixture. Its state is v, with the mixture's statistics, and alpha."""

    options: keys.APFLSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained w; keep v and alpha (Algorithm 1, lines 4 to 7)."""
        self.load(sent)
        network, alpha = self.network, self.alpha.to(self.network.device)
        own = network.like(self.own or self.initial())
        v = {name: own[name] for name in network.parameters}
        personal = self.place.optimizer(self.settings, v, self.lr)

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            w = {name: tensor.detach() for name, tensor in network.parameters.items()}
            mixture = {name: torch.lerp(w[name], v[name], alpha).requires_grad_() for name in v}
            slopes = Optimizer(self.settings, mixture, 0).gradients(self.loss(network(x, own | mixture), y))
            own.update(network.assigned)
            training.spend(len(y), v)
            slope = sum(((v[name] - w[name]) * slopes[name]).sum() for name in v)
            trained = training.descend(x, y)
            personal.step({name: alpha * slopes[name] for name in v})
            if self.options.adapt == "step" or (self.options.adapt == "round" and training.steps == 1):
                alpha.sub_(personal.lr * slope).clamp_(0, 1)
            return trained

        self.fit(step=step)
        self.state |= prefixed(OWN, own) | {"alpha": alpha}
        return self.trained()

    @property
    def alpha(self) -> Tensor:
        return self.state.get("alpha", torch.tensor(self.options.alpha)).clone()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return ``alpha v + (1 - alpha) w`` with the global w; v is the initial model at first."""
        own = self.own or self.initial()
        return own | {name: torch.lerp(sent[name], own[name], self.alpha) for name in self.network.parameters}


WEIGHT = "merge/"  # prefix of W in the state
RECENT, CONVERGED = 10, 0.1  # passes, and the standard deviation of their losses below which W has converged


class FedALAClient(Client):
    """Merges the global model into its own last layers, then trains. Its state is these layers and W."""

    options: keys.FedALASettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the model that was trained from the merged one (Algorithm 1, lines 4 to 14)."""
        self.load(sent)
        self.network.load(self.merged(sent))
        self.fit()
        groups = layer_groups(self.network.module)
        last = {name for group in groups[len(groups) - self.options.layers :] for name in group}
        self.keep_own(last & self.network.parameters.keys())
        return self.trained()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the merged model, or the global one if the client has not trained."""
        self.load(sent)
        return self.merged(sent)

    def merged(self, sent: Tensors) -> Tensors:
        """Learn W; return ``own + (global - own) W`` in the last layers, and the global values elsewhere."""
        if not self.own:
            return sent
        network, known = self.network, unprefixed(WEIGHT, self.state)
        whole, own = network.like(sent), brought(self.own, network.device)  # learning moves the statistics in whole
        change = {name: whole[name] - own[name] for name in own}
        ones = {name: torch.ones_like(tensor) for name, tensor in own.items()}
        weights = {name: w.clone().requires_grad_() for name, w in brought(known or ones, network.device).items()}
        optimizer = Optimizer(self.settings, weights, self.options.merge_lr)

        def last() -> Tensors:
            return {name: torch.addcmul(own[name], change[name], w) for name, w in weights.items()}

        def learn(training: Training, x: Batch, y: Tensor) -> Tensor:
            loss = self.loss(network(x, whole | last()), y)
            training.spend(len(y), weights)
            for name, slope in optimizer.gradients(loss).items():
                weights[name].data.sub_(optimizer.lr * slope).clamp_(0, 1)
            return loss.detach()

        learning = Training(self, weights, step=learn, objective=Objective(), batch_statistics=True)
        losses: list[float] = []
        for batches in self.epochs(1 if known else self.options.learn_passes, "merge"):
            learning.run(batches[: max(1, int(len(batches) * self.options.percent / 100))])
            losses.append(self.metrics["train-loss"])
            if len(losses) > RECENT and pstdev(losses[-RECENT:]) < CONVERGED:
                break
        self.state |= prefixed(WEIGHT, {name: w.detach() for name, w in weights.items()})
        return sent | {name: tensor.detach() for name, tensor in last().items()}


class PFedMeClient(Client):
    """Trains theta near w and moves w towards theta. Its state is theta."""

    options: keys.PFedMeSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return w; keep theta (Algorithm 1, lines 5 to 9)."""
        self.load(sent)
        network, options = self.network, self.options
        local = network.like(sent)
        pull = Prox(local, options.lambda_)

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            loss, *_ = [training.descend(x, y) for _ in range(options.steps)]
            for name, theta in network.parameters.items():
                local[name].lerp_(theta.detach(), options.w_lr * options.lambda_)
            return loss

        self.fit(step=step, correct=lambda gradients: pull.correct(gradients, network.parameters))
        self.keep_own()
        network.load({**network.tensors, **{name: local[name] for name in network.parameters}})
        return self.trained()


class PerFedAvgClient(Client):
    """Trains the model for its loss after a gradient step."""

    options: keys.PerFedAvgSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained model (Algorithm 1, lines 5 to 9)."""
        self.load(sent)
        w, alpha, delta = self.network.parameters, self.options.alpha, self.options.delta
        others = self.batches(MILLION, "adaptation")  # D, D''

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            _, slopes = self.slopes(w, next(others))
            adapted = {name: tensor - alpha * slopes[name] for name, tensor in w.items()}
            return training.descend(x, y, lambda x, tensors: self.network(x, adapted if tensors is None else tensors))

        def correct(u: Tensors) -> None:
            batch = next(others)
            moved = ({name: x + shift * u[name] for name, x in w.items()} for shift in (delta, -delta))
            (_, above), (_, below) = (self.slopes(weights, batch) for weights in moved)
            for name in u:
                u[name].sub_(alpha / (2 * delta) * (above[name] - below[name]))

        hessian = self.options.variant == "hessian-free" and alpha
        self.fit(step=step if alpha else None, correct=correct if hessian else None)
        return self.trained()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the global model after gradient steps on the client's training data."""
        self.load(sent)
        self.network.training_mode()
        for batch in islice(self.batches(MILLION, "tuning"), self.options.tune_steps):
            for name, slope in self.slopes(self.network.parameters, batch)[1].items():
                self.network.parameters[name].data.sub_(self.options.alpha * slope)
        return self.network.copy()
