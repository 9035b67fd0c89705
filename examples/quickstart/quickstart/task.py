"""The network and the data of a client."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Sequential):
    """Two convolutions and two linear layers for images of 8 x 8 pixels."""

    def __init__(self):
        convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)
        linear = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        super().__init__(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *linear)


def load_data(partition_id, num_partitions):
    """Return a client's training and test images: every ``num_partitions``-th one, a fifth of them for the test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    own = TensorDataset(x[partition_id::num_partitions], torch.tensor(labels)[partition_id::num_partitions])
    size = len(own) * 4 // 5
    return TensorDataset(*own[:size]), TensorDataset(*own[size:])


def train(net, dataset, epochs, lr):
    """Train for some epochs; return the mean loss."""
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, dataset):
    """Return the mean loss and the accuracy."""
    x, y = dataset[:]
    net.eval()
    with torch.no_grad():
        logits = net(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
