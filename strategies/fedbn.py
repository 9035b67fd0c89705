"""FedBN, server side: everything but the normalisation layers is shared.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
https://arxiv.org/abs/2102.07623. A client keeps its BatchNorm layers, with weights and running statistics; the other
layers are averaged as in FedAvg. Checked against the authors' code (https://github.com/med-air/FedBN,
federated/fed_digits.py, ``communication``): tensors with "bn" in their name, statistics among them, are neither
averaged nor replaced.

Deviations: the other normalisation layers (GroupNorm, LayerNorm, RMSNorm, InstanceNorm) stay with the client as well;
the paper has BatchNorm alone. The normalisation layers of the global model keep their initial values, so ``personal``
is the accuracy of the method. A network without such layers is trained as with FedAvg of the same ``weighting``
(``auto``: uniform here, by samples there), bit for bit.
"""

from fedsub_app.models import is_norm, tensors_of
from strategies.parts import SharedPart


class FedBN(SharedPart):
    """Shares all layers but the normalisation layers."""

    def setup(self) -> None:
        super().setup()
        if len(self.shared) == len(self.current):
            frozen = f" that trainable = {self.settings.trainable!r} trains" if self.settings.trainable else ""
            self.warning = f"model = {self.settings.model!r} has no normalisation layer{frozen}: fedbn is FedAvg"
        elif not self.shared:
            self.warning = "fedbn shares nothing: only normalisation layers are trained, and each client keeps its own"

    def personal_names(self) -> set[str]:
        layers = [(path, layer) for path, layer in self.model.named_modules() if is_norm(layer)]
        return {f"{path}.{name}" for path, layer in layers for name in tensors_of(layer)}
