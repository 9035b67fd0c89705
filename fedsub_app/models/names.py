"""The names of the networks, and the settings that choose one as text; torch is not imported here."""

NETWORKS = {  # name → what it is; networks.py builds them
    "fedpews-mlp": "FedPeWS: MLP with hidden layers 32-64-128-32 (14,884 parameters for 5 inputs, 4 classes)",
    "fedpews-cnn": "FedPeWS, Table 5: 3 x (conv 3x3, ReLU, pool) with 32-64-128 channels, one linear layer",
    "lenet5": "Sub-FedAvg (Un), CIFAR: conv 6 and 16 of 5x5, linear 120-84 (62,006 parameters for 10 classes)",
    "lenet5-bn": "Sub-FedAvg (Hy), CIFAR: lenet5 with BatchNorm between convolution and ReLU",
    "mnist-cnn": "Sub-FedAvg, MNIST: conv 10 and 20 of 5x5, linear 50 (21,840 parameters for 10 classes)",
    "mnist-cnn-bn": "Sub-FedAvg (Hy), MNIST: mnist-cnn with BatchNorm between convolution and ReLU",
    "fedpart-cnn": "FedPart with momentum: conv 6 and 16 of 5x5, linear 180-160-140-120-84 (154,486 parameters)",
    "pfllib-cnn": "PFLlib: conv 32 and 64 of 5x5, linear 512 (582,026 parameters for 28 x 28 grey pixels, 10 classes)",
    "resnet18": "FedSelect, FedFull: torchvision's ResNet-18, random initialisation",
    "resnet18-imagenet": "FedSelect, Office-Home: the same with torchvision's ImageNet weights and a new output layer",
    "resnet18-gn": "resnet18 with GroupNorm of 32 groups: no running statistics of a client's data",
    "feature-mlp": "IST: linear 1000, BatchNorm on batch statistics, ReLU, linear, for extracted features",
    "feature-mlp2": "IST, two hidden layers (the authors' code): feature-mlp with a second 1000, BatchNorm, ReLU",
}


def model_names() -> dict[str, str]:
    return dict(NETWORKS)
