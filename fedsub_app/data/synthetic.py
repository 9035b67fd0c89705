"""Synthetic data of FedPeWS: four classes, each of four 2-D Gaussian clusters that interleave with the others'.

The paper states neither centres nor covariances. Here: a 4 x 4 grid of centres around the origin, isotropic sigma of a
tenth of the spacing, every point (x, y) lifted to [x, y, x^2, y^2, x*y], features not standardised.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedsub_app.common.seeds import generator

TEST_POINTS = 6_400


class Layout(NamedTuple):
    """``classes[row][column]`` is the class of the centre at ((column - 1.5) * spacing, (row - 1.5) * spacing)."""

    classes: tuple[tuple[int, ...], ...]
    spacing: float


LAYOUTS = {
    "synthetic": Layout(((0, 1, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0), (1, 0, 3, 2)), spacing=1.0),
    "synthetic-cyclic": Layout(((0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)), spacing=3.0),
}
TRAIN_POINTS = {"": 32_000, "-3k": 3_200}
NAMES = tuple(layout + size for layout in LAYOUTS for size in TRAIN_POINTS)


def sample(layout: Layout, num_points: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``num_points / 16`` points around every centre, in random order; ``num_points`` is a multiple of 16.

    Features x, y, x^2, y^2, x*y are float32 [num_points, 5], labels int64 [num_points], 0..3, a quarter each.
    """
    axis = (torch.arange(4, dtype=torch.float64) - 1.5) * layout.spacing
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    centres = torch.stack((columns.flatten(), rows.flatten()), dim=1)
    cell = torch.arange(16).repeat(num_points // 16)[torch.randperm(num_points, generator=random)]
    noise = torch.randn(num_points, 2, dtype=torch.float64, generator=random) * (layout.spacing / 10)
    x, y = (centres[cell] + noise).unbind(dim=1)
    return torch.stack((x, y, x * x, y * y, x * y), dim=1).float(), torch.tensor(layout.classes).flatten()[cell]


def generate(name: str, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ``(train, test)``, each ``(features, labels)`` of :func:`sample`; ``name`` is one of ``NAMES``.

    Both sizes of a layout share their 6,400 test points, which come from another seed than the training points.
    """
    layout = name.removesuffix("-3k")
    train_points = TRAIN_POINTS[name.removeprefix(layout)]
    return (
        sample(LAYOUTS[layout], train_points, generator(seed, name, "train")),
        sample(LAYOUTS[layout], TEST_POINTS, generator(seed, layout, "test")),
    )
