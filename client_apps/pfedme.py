"""pFedMe, client side; the paper and deviations from it: ``strategies/pfedme.py``."""

from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.training.client import Training
from fedsub_app.training.objectives import Prox
from strategies.settings import PFedMeSettings


class PFedMeClient(Client):
    """Trains theta near w and moves w towards theta. Its state is theta."""

    options: PFedMeSettings

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
