"""MOON, client side: FedAvg with the model-contrastive objective.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, https://arxiv.org/abs/2103.16257. Deviation: z is what
enters the network's last linear layer; no projection head is added to the networks of the other methods.
"""

from client_apps.base import Client


class MoonClient(Client):
    """``objective = "moon"``, whatever the settings say."""

    objective_name = "moon"
