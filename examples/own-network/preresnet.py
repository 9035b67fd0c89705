"""The pre-activation ResNet-18 of small images (He et al. 2016), as HeteroFL trains it; ``width``: of its first stage.

No layer's BatchNorm follows the addition, so that the residual stream is one group of units a stage.
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """BatchNorm, ReLU, convolution, twice, beside the input or a 1 x 1 convolution of it."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(before), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False) if before != width or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths."""
        out = torch.relu(self.bn1(x))
        beside = self.shortcut(out) if self.shortcut else x
        return self.conv2(torch.relu(self.bn2(self.conv1(out)))) + beside


class PreResNet18(nn.Module):
    """A 3 x 3 stem, four stages of two blocks, BatchNorm, mean and a Linear."""

    def __init__(self, in_shape: tuple[int, int, int], num_classes: int, width: int = 64) -> None:
        super().__init__()
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        strides = (1, 1, 2, 1, 2, 1, 2, 1)
        self.stem = nn.Conv2d(in_shape[0], width, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*map(Block, widths, widths[1:], strides))
        self.bn = nn.BatchNorm2d(8 * width)
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``[n, *in_shape]``."""
        out: Tensor = self.head(torch.relu(self.bn(self.blocks(self.stem(x)))).mean((2, 3)))
        return out
