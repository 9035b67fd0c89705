"""Per-FedAvg, server side: FedAvg's.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948, Algorithm 1. A client minimises ``f(w - alpha grad f(w))``:
the loss after one gradient step of its own. A local step is
``w <- w - beta (I - alpha H(w; D'')) grad f(w - alpha grad f(w; D); D')`` on three mini-batches, H the Hessian.
``variant = "first-order"`` (FO) leaves H out; ``"hessian-free"`` (HF) takes the difference of two gradients for the
product of H and a vector u: ``(grad f(w + delta u) - grad f(w - delta u)) / (2 delta)``. The server takes the mean.

Deviations from the paper and points that it leaves open; its authors have published no code. Two versions were read as
well, both FO: pFedMe's authors' (userperavg.py) and PFLlib's (clientperavg.py).
- beta is the general ``lr``. D' are FedAvg's mini-batches. D and D'' come from a second pass, which has an order of its
  own and starts anew when it ends. So ``local-epochs`` counts passes over D', and with alpha 0 the method is FedAvg of
  the same ``weighting`` (``auto``: uniform here, by samples there), bit for bit. The two versions take D and D' in turn
  from one pass.
- the exact Hessian is not offered: HF is the paper's own replacement for it.
- momentum, Adam, weight decay, ``augment`` and ``objective`` act on the step of w; the inner step is plain gradient
  descent on the task's loss.
- BatchNorm uses the statistics of each mini-batch; the running ones are those of the adapted network on D'.
- a client is evaluated after ``tune-steps`` steps of size alpha from the global model (paper and PFLlib: one). pFedMe's
  version takes a step of size alpha and one of size beta, on test samples.
"""

from strategies.base import SubnetStrategy
from strategies.settings import PerFedAvgSettings


class PerFedAvg(SubnetStrategy):
    """FedAvg, whose clients train for the loss after a step of adaptation."""

    options: PerFedAvgSettings

    def max_samples(self, client: int) -> int:
        # A step of the Hessian-free variant has four gradients, and what an objective adds.
        more = 1 + (self.options.variant == "hessian-free")
        return super().max_samples(client) * more + self.options.tune_steps * self.settings.batch_size
