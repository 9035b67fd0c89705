"""The keys of the methods, a class a method; torch is not imported here: names and keys are there at once."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsub_app.common.section import (
    Count,
    CountOrNone,
    CountOrZero,
    Epochs,
    Finite,
    Fraction,
    Listed,
    NonNegative,
    Positive,
    TextOrNone,
)
from fedsub_app.settings import MethodSettings, Settings

Decay = Annotated[float, Field(ge=0, lt=1)]
Widths = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1)], ...],
    Field(min_length=1),
    Listed("must be numbers above 0, at most 1, such as '1, 0.5, 0.25'", read=float),
]
Shares = Annotated[
    tuple[Positive, ...], Listed("must be positive numbers that add up to 1, one a client, or ''", read=float)
]


class FedNovaSettings(MethodSettings):
    normalisation: Literal["paper", "authors"] = "paper"
    """Divisor and factor of the clients' changes: as in the paper, or as in the authors' code."""


class FedAdagradSettings(MethodSettings):
    lr: Positive = 0.01
    """eta, the server's learning rate."""
    beta1: Decay = 0.0
    """Decay of the first moment m; 0: none."""
    tau: Positive = 0.01
    """Constant that is added to the root of v; a larger one adapts less."""


class FedAdamSettings(FedAdagradSettings):
    """Keys of FedAdam and FedYogi."""

    beta1: Decay = 0.9
    beta2: Decay = 0.99
    """Decay of the second moment v."""


class TuningSettings(MethodSettings):
    tune_epochs: Epochs = 3
    """Epochs of fine-tuning on a client's own data before its evaluation."""


class PartSettings(MethodSettings):
    personal: str = "head"
    """Part that stays with the client: head, body or names of layers, "conv1, layer4.1"."""


class FedRepSettings(PartSettings):
    personal_epochs: Epochs = 2
    """Epochs of the personal part, instead of local-epochs."""
    shared_epochs: Epochs = 1
    """Epochs of the shared part after it, instead of local-epochs."""


class FedBABUSettings(PartSettings):
    personal: str = "head"
    """Part that stays at its common start: head, body or names of layers, "conv1, layer4.1"."""
    tune: str = "all"
    """Part that is fine-tuned before a client's evaluation: all, head, body or names of layers."""
    tune_epochs: Epochs = 3
    """Epochs of fine-tuning before a client's evaluation."""


class LGFedAvgSettings(PartSettings):
    personal: str = "body"
    """Part that stays with the client: head, body or names of layers, "conv1, layer4.1"."""
    warm_rounds: CountOrZero = 0
    """Rounds of FedAvg on the whole model first."""


class DittoSettings(MethodSettings):
    lambda_: NonNegative = 0.5
    """Pull of the personal model towards the global one."""


class FedPACSettings(MethodSettings):
    lambda_: NonNegative = 1.0
    """Weight of the feature alignment."""
    head_lr: Positive = 0.1
    """Learning rate of the head's own training."""
    head_epochs: Epochs = 1
    """Epochs of the head's own training, before the body's."""


class FedSelectSettings(MethodSettings):
    """Keys of FedSelect; ``choose`` and ``layer`` are the ablations of Table 3, the keys after them are readings."""

    alpha: Fraction = 0.3
    """Fraction of the parameters that becomes personal."""
    share: Fraction = 0.25
    """p, fraction of the global positions that becomes personal at a time."""
    choose: Literal["most", "least", "random"] = "most"
    """Positions that become personal: the ones that moved most, that moved least, or random ones."""
    layer: TextOrNone = None
    """Only this layer can become personal: "layer4"; "": all."""
    alpha_test: Literal["below", "at-most"] = "below"
    """A layer grows while its personal fraction is below alpha, or at most alpha."""
    movement: Literal["round", "since-growth"] = "round"
    """Movement that counts: of this round's training, or since the last growth."""
    grow_every: Count = 1
    """Rounds from one growth to the next; with 3, masks grow in rounds 4, 7, 10 and so on."""
    bn_batch: Literal["always", "first-round"] = "always"
    """Rounds in which training uses the batch's statistics; in the others it uses the running ones."""


class SubFedAvgSettings(MethodSettings):
    pruning: Literal["unstructured", "structured", "hybrid"] = "unstructured"
    """Pruned are weights of all layers, channels by their BatchNorm, or channels and the linear layers' weights."""
    target: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """p, pruned fraction of the parameters from which weights are no longer pruned; 0: nothing is ever pruned."""
    share: Fraction = 0.1
    """r_us, fraction of a layer's remaining weights that one event prunes."""
    distance: NonNegative = 0.0001
    """Weights are pruned if their masks after the first and last epoch differ by more than this."""
    hybrid_distance: NonNegative = 0.0005
    """distance of the linear layers with pruning = "hybrid"."""
    channel_share: Annotated[float, Field(ge=0, lt=1)] = 0.45
    """r_s, fraction of a layer's channels that one event prunes, besides one more channel."""
    channel_floor: Fraction = 0.5
    """Lower bound on a layer's channels, a fraction of its original ones, rounded down and at least 1."""
    channel_distance: NonNegative = 0.01
    """Channels are pruned if their masks after the first and last epoch differ by more than this fraction."""
    score: Finite = 50.0
    """Score, an accuracy in percent; unless the pruned network beats it on gate-data, the pruning is undone."""
    gate_data: Literal["validation", "test"] = "validation"
    """The client's samples on which the score is measured; test, as published, lets the test set choose the network."""


class LocalSettings(MethodSettings):
    objectives: ClassVar = ("none", "prox")  # both models of MOON would be the client's own last one


class MTLSettings(LocalSettings):
    lambda_: NonNegative = 1e-6
    """c, weight of a model's squared norm and squared distance to the mean; published for 10^4-10^5 weights: 1e-6."""


class ISTSettings(MethodSettings):
    objectives: ClassVar = ("none", "prox")  # MOON's previous model would be of other units

    width: CountOrNone = None
    """Units of every hidden layer for each client of a round, 300 in the paper; 0: the model's own units are dealt.

    The global network has this number times the clients of a round; for multi-layer perceptrons only.
    """

    def hidden_width(self, settings: Settings) -> int | None:
        return self.width and self.width * settings.sample_size


class WidthSettings(MethodSettings):
    """Keys of all methods whose clients train networks of different widths."""

    objectives: ClassVar = ("none", "prox")  # MOON's previous model may be of other units

    widths: Widths = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Fractions of every hidden layer's units that clients train; the papers' levels a to e."""
    assignment: Literal["fixed", "dynamic"] = "fixed"
    """Width of client i: always the (i mod number of widths)-th; or drawn anew in each round."""


class HeteroFLSettings(WidthSettings):
    """Keys of HeteroFL, FedRolex and Federated Dropout."""

    scaler: bool = True
    """Divide the outputs of narrow layers by the client's width in training."""
    masked_loss: bool = True
    """In training set logits of classes that a client lacks to 0; leave the client out of the mean of their rows."""


class FjORDSettings(WidthSettings):
    widths: Widths = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Fractions of every hidden layer's units: the clients' widths, and the widths from which a mini-batch draws."""
    distill: bool = False
    """The client's whole network teaches the narrower one that is drawn."""


class FIARSESettings(WidthSettings):
    widths: Widths = (1.0, 0.25, 0.0625, 0.015625)
    """Fractions of the weights of convolutions and linear layers that clients train."""
    threshold: Literal["model", "layer"] = "model"
    """Clients train the largest weights of the whole model, or of each layer; "model" may leave a layer none."""


class FedPartSettings(MethodSettings):
    """Keys of FedPart and of momentum aggregation."""

    full_rounds: CountOrZero = 2
    """Rounds of the full network at the start of every cycle."""
    rounds_per_group: Count = 2
    """Rounds for which a layer group is trained."""
    order: Literal["shallow", "deep", "random"] = "shallow"
    """Order of a cycle's groups: shallow to deep, deep to shallow, or drawn anew for each cycle."""
    momentum: Literal["none", "mean", "similarity"] = "none"
    """Merge of Adam's moments: none are shared, their mean, or a mean weighted by the clients' similarity."""
    stale: Literal["full-first", "faithful", "sync-all"] = "full-first"
    """Tensors for a client that missed rounds: a full model if it has none, the last group, or all outdated groups."""

    def check(self, settings: Settings) -> None:
        if self.momentum != "none" and settings.optimizer != "adam":
            raise ValueError(f"optimizer = {settings.optimizer!r}: fedpart.momentum = {self.momentum!r} needs 'adam'")
        if self.momentum != "none" and not (settings.local_epochs or settings.local_steps):
            raise ValueError(f"local-epochs = 0: fedpart.momentum = {self.momentum!r} needs a step's moments")


class FedPeWSSettings(MethodSettings):
    """Keys of FedPeWS; the last three are readings of points that the paper leaves open."""

    masks: Literal["learned", "fixed"] = "learned"
    """Masks that the clients learn, or that the server fixes at the start."""
    shares: Shares = ()
    """Each client's share of every hidden layer with masks = "fixed": "0.25, 0.75"; "": equal shares (C.4)."""
    warmup_rounds: CountOrZero = 10
    """W, rounds of the warm-up; num-rounds or more: all rounds."""
    lambda_: NonNegative = 1.0
    """Weight of the mask diversity."""
    mask_lr: Positive = 0.1
    """eta_s, learning rate of the mask scores."""
    others: Literal["masks", "mean", "highest"] = "masks"
    """theta of the other clients: the mean of their last masks, or the mean or the highest of their probabilities."""
    score_spread: NonNegative = 0.0
    """Standard deviation of each client's initial mask scores around s_g^0 = 0."""
    mask_gradient: Literal["weights", "activations"] = "weights"
    """Gradient of the loss in the mask: of f(x ∘ m), 0 for units that are off; or of outputs times m, for all units."""

    def check(self, settings: Settings) -> None:
        if self.shares and self.masks != "fixed":
            raise ValueError(f"fedpews.shares = {self.toml()['shares']!r}: allowed with fedpews.masks = 'fixed' only")
        self.share_list(settings.num_clients)

    def share_list(self, num_clients: int) -> list[float]:
        """Return every client's share, equal ones where ``shares`` is empty."""
        shares = self.shares or (1 / num_clients,) * num_clients
        if len(shares) != num_clients or abs(sum(shares) - 1) > 1e-6:
            allowed = f"num-clients = {num_clients} positive numbers that add up to 1"
            raise ValueError(f"fedpews.shares = {self.toml()['shares']!r}: must be {allowed}")
        return list(shares)


class APFLSettings(MethodSettings):
    alpha: Fraction = 0.5
    """Weight of the client's own model v in its personal model; adaptation starts from it."""
    adapt: Literal["round", "step", "never"] = "round"
    """alpha is adapted in the first step of a round, in every step, or never."""


class FedALASettings(MethodSettings):
    layers: CountOrZero = 1
    """p, number of last layers in which the global model is merged into the client's own; 0: none, FedAvg."""
    percent: Annotated[float, Field(gt=0, le=100)] = 80.0
    """s, percentage of the client's mini-batches on which a pass learns the merge."""
    merge_lr: NonNegative = 1.0
    """eta, learning rate of the merge's weights W."""
    learn_passes: Epochs = 50
    """Upper bound on the passes that learn a client's first merge; later merges learn in one pass."""


class PerFedAvgSettings(MethodSettings):
    alpha: NonNegative = 0.01
    """Size of the gradient step by which a client adapts the model; 0: FedAvg."""
    variant: Literal["first-order", "hessian-free"] = "first-order"
    """Hessian in a local step: left out, or approximated by the difference of two gradients."""
    delta: Positive = 0.001
    """Distance of hessian-free's two gradients from w, as a multiple of the vector that multiplies the Hessian."""
    tune_steps: CountOrZero = 1
    """Steps of size alpha from the global model before a client's evaluation."""


class PFedMeSettings(MethodSettings):
    lambda_: NonNegative = 15.0
    """Pull of theta towards w."""
    steps: Count = 5
    """K, gradient steps of theta on each mini-batch."""
    w_lr: NonNegative = 0.005
    """eta: after each mini-batch w moves towards theta by eta times lambda times their distance."""


class RankSettings(MethodSettings):
    """Keys of FlexLoRA."""

    widths: Widths = (1.0,)
    """Fractions of lora-rank, rounded up, that clients train; client i has the i-th fraction, modulo their number."""


class FLoRASettings(RankSettings):
    moves_base = True


class FedExLoRASettings(MethodSettings):
    moves_base = True


class HetLoRASettings(RankSettings):
    objectives = ("none", "prox")
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Fraction of its ranks, rounded down, that a client keeps where it prunes; 1: none are pruned."""
    lambda_: NonNegative = 0.005
    """Weight of the penalty on the ranks that may be pruned."""

    def pruned(self, rank: int) -> int:
        """Return how many of its ``rank`` ranks a client keeps, at least 1."""
        return max(1, int(round(self.gamma * rank, 6)))  # 0.57 of 100 is 57
