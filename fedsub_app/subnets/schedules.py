"""The schedule of the layers that each round trains."""

from typing import Literal

import torch

from fedsub_app.common.seeds import generator

Order = Literal["shallow", "deep", "random"]


def scheduled_group(
    server_round: int, groups: int, full_rounds: int, rounds_per_group: int, order: Order, seed: int
) -> int | None:
    """Return the layer group that FedPart trains in a round, ``None`` for the full network.

    A cycle is ``full_rounds`` rounds of the full network, then ``rounds_per_group`` rounds for each group; cycles
    follow each other for as long as there are rounds (Wang et al., FedPart, 2024, Section 3.1).

    Parameters
    ----------
    server_round : from 1.
    groups : number of layer groups, numbered from shallow (0) to deep.
    order : shallow to deep, deep to shallow, or an order drawn anew for every cycle from ``seed``.
    """
    length = full_rounds + groups * rounds_per_group
    cycle, step = divmod(server_round - 1, length)
    if step < full_rounds:
        return None
    place = (step - full_rounds) // rounds_per_group
    if order == "random":
        return int(torch.randperm(groups, generator=generator(seed, cycle, "layers"))[place])
    return place if order == "shallow" else groups - 1 - place
