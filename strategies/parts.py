"""Methods that share a part of the model and leave the rest with the clients, server side.

The setting ``personal`` names the personal part: ``head``, ``body`` or names of layers (``models.part_names``).

- FedPer, Arivazhagan et al., https://arxiv.org/abs/1912.00818: personal head, trained together with the body.
- FedRep, Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078: personal head first, then the body. While one
  part is trained, BatchNorm in the frozen one uses its running statistics (some published code: those of the batch).
- FedBABU, Oh, Kim, Yun, ICLR 2022, https://arxiv.org/abs/2106.06042: the head stays at its common start; each client
  fine-tunes a copy of the model for its evaluation.
- LG-FedAvg, Liang et al., https://arxiv.org/abs/2001.01523: personal body, shared head; with ``warm-rounds`` > 0 it
  starts with FedAvg on the whole model, as the original does from a checkpoint.
- FedAvg with fine-tuning: everything is shared; each client fine-tunes a copy for its evaluation.

All these methods average clients without weights by default (``weighting``), as FedSelect's comparison does. BatchNorm
belongs to the part that it stands in, statistics included.
"""

from collections.abc import Collection, Mapping

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.models import head_names, part_names
from strategies.base import Spec, SubnetStrategy, Task
from strategies.settings import LGFedAvgSettings


class SharedPart(SubnetStrategy):
    """Sends, receives and merges the shared part; the personal part of the global model keeps its initial values."""

    judged = False

    def setup(self) -> None:
        super().setup()
        personal = self.personal_names()
        self.shared = [name for name in self.current if name not in personal]
        if self.settings.objective == "moon" and not self.stage(1) and {*self.shared} <= {*head_names(self.model)}:
            raise UserError(f"objective = 'moon': {self.settings.method} shares the head alone; features are personal")

    def personal_names(self) -> Collection[str]:
        """Return the names of the tensors that stay with the clients."""
        personal: Collection[str] = ()
        for key in ("tune", "personal"):
            part = getattr(self.options, key, None)
            try:
                if part is not None and (key, part) != ("tune", "all"):
                    personal = part_names(self.model, part)
            except ValueError as error:
                raise UserError(f"{self.settings.section}.{key} = {part!r}: {error}") from None
        return personal

    def task(self, client: int) -> Task:
        """Send the tensors that the client's personal model needs; ask for the shared part, or all in a warm-up."""
        return Task(client, self.personal_download(client), {"answer": "all" if self.stage(self.round) else "part"})

    def expected(self, client: int) -> Mapping[str, Spec]:
        return self.specs if self.stage(self.round) else {name: self.specs[name] for name in self.shared}

    def personal_download(self, client: int) -> Tensors:
        return chosen(self.current, self.shared)


class FedRep(SharedPart):
    """Trains each part for epochs of its own."""

    def setup(self) -> None:
        super().setup()
        steps, epochs = self.settings.local_steps, self.settings.local_epochs
        if steps or epochs != 1:
            idle = f"local-steps = {steps}" if steps else f"local-epochs = {epochs}"
            self.warning = f"{idle}: does nothing with fedrep, which has personal-epochs and shared-epochs"


class LGFedAvg(SharedPart):
    """Shares everything in the first ``warm_rounds``; a client that lacks a body is sent the whole model."""

    options: LGFedAvgSettings

    def stage(self, server_round: int) -> str:
        return "warm-up" if server_round <= self.options.warm_rounds else ""

    def personal_download(self, client: int) -> Tensors:
        """Send the shared part. Send the whole model to a client that has not trained since the warm-up."""
        warm_rounds = self.options.warm_rounds
        has_body = not warm_rounds or bool(self.state_rounds[client] > warm_rounds)
        return super().personal_download(client) if has_body else self.current
