"""A small residual network of one's own; its units are found in its graph."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class Net(nn.Module):
    """Images [n, channels, height, width] -> logits [n, num_classes]."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(in_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))
