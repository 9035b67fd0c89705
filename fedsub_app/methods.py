"""The register of methods: name → settings, strategy, client. One line a method.

FedProx and MOON are FedAvg with an objective that any method can take (``training/objectives.py``):

- Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
  https://arxiv.org/abs/1812.06127. Deviation: every client trains all its epochs (no partial work, no inexactness
  gamma).
- Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, https://arxiv.org/abs/2103.16257. Deviation: z is what
  enters the network's last linear layer; no projection head is added to the networks of the other methods.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from client_apps.apfl import APFLClient
from client_apps.base import Client
from client_apps.ditto import DittoClient
from client_apps.fedala import FedALAClient
from client_apps.fedbn import FedBNClient
from client_apps.feddst import FedDSTClient
from client_apps.fednova import FedNovaClient
from client_apps.fedpac import FedPACClient
from client_apps.fedpart import FedPartClient
from client_apps.fedpews import FedPeWSClient
from client_apps.fedpm import FedPMClient
from client_apps.fedselect import FedSelectClient
from client_apps.heterofl import HeteroFLClient
from client_apps.local import LocalClient
from client_apps.mtl import MTLClient
from client_apps.parts import FedBABUClient, FedRepClient, PartClient, TunedClient
from client_apps.perfedavg import PerFedAvgClient
from client_apps.pfedme import PFedMeClient
from client_apps.scaffold import ScaffoldClient
from client_apps.ssfl import SSFLClient
from client_apps.subfedavg import SubFedAvgClient
from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.section import Value
from fedsub_app.settings import MethodSettings
from strategies.apfl import APFL, APFLSettings
from strategies.base import SubnetStrategy
from strategies.ditto import Ditto, DittoSettings
from strategies.fedala import FedALA, FedALASettings
from strategies.fedbn import FedBN
from strategies.feddst import FedDST, FedDSTSettings
from strategies.fednova import FedNova, FedNovaSettings
from strategies.fedopt import FedAdagrad, FedAdagradSettings, FedAdam, FedAdamSettings, FedYogi
from strategies.fedpac import FedPAC, FedPACSettings
from strategies.fedpart import FedPart, FedPartSettings
from strategies.fedpews import FedPeWS, FedPeWSSettings
from strategies.fedpm import FedPM, FedPMSettings
from strategies.fedselect import FedSelect, FedSelectSettings
from strategies.heterofl import FedRolex, HeteroFL, HeteroFLSettings
from strategies.ist import IST, ISTSettings
from strategies.local import Local
from strategies.mtl import MTL, MTLSettings
from strategies.parts import (
    FedBABU,
    FedBABUSettings,
    FedRep,
    FedRepSettings,
    LGFedAvg,
    LGFedAvgSettings,
    PartSettings,
    SharedPart,
    Tuned,
    TuningSettings,
)
from strategies.perfedavg import PerFedAvg, PerFedAvgSettings
from strategies.pfedme import PFedMe, PFedMeSettings
from strategies.scaffold import Scaffold
from strategies.sparse import SparseSettings
from strategies.ssfl import SSFL
from strategies.subfedavg import SubFedAvg, SubFedAvgSettings


@dataclass(frozen=True)
class Method:
    """One method: a description, its own settings, its server side, its client side.

    ``preset``: general keys that make it this method; a run that sets them otherwise is refused. ``title``: its name
    as it is written, where the strategy's class has another one.
    """

    description: str
    settings: type[MethodSettings]
    strategy: type[SubnetStrategy]
    client: type[Client]
    preset: Mapping[str, Value] = field(default_factory=dict)
    title: str = ""


METHODS = {
    "fedavg": Method("McMahan et al. 2017", MethodSettings, SubnetStrategy, Client, title="FedAvg"),
    "fedprox": Method("Li et al. 2020", MethodSettings, SubnetStrategy, Client, {"objective": "prox"}, "FedProx"),
    "moon": Method("Li, He, Song 2021", MethodSettings, SubnetStrategy, Client, {"objective": "moon"}, "MOON"),
    "scaffold": Method("Karimireddy et al. 2020", MethodSettings, Scaffold, ScaffoldClient),
    "fednova": Method("Wang et al. 2020", FedNovaSettings, FedNova, FedNovaClient),
    "fedadam": Method("Reddi et al. 2021", FedAdamSettings, FedAdam, Client),
    "fedyogi": Method("Reddi et al. 2021", FedAdamSettings, FedYogi, Client),
    "fedadagrad": Method("Reddi et al. 2021", FedAdagradSettings, FedAdagrad, Client),
    "fedavg-ft": Method("FedAvg, fine-tuned by each client", TuningSettings, Tuned, TunedClient, title="FedAvgFT"),
    "ditto": Method("Li et al. 2021", DittoSettings, Ditto, DittoClient),
    "fedbn": Method("Li et al. 2021, local normalisation layers", MethodSettings, FedBN, FedBNClient),
    "apfl": Method("Deng, Kamani, Mahdavi 2020", APFLSettings, APFL, APFLClient),
    "fedala": Method("Zhang et al. 2023", FedALASettings, FedALA, FedALAClient),
    "per-fedavg": Method("Fallah, Mokhtari, Ozdaglar 2020", PerFedAvgSettings, PerFedAvg, PerFedAvgClient),
    "pfedme": Method("T Dinh, Tran, Nguyen 2020", PFedMeSettings, PFedMe, PFedMeClient, title="pFedMe"),
    "fedper": Method("Arivazhagan et al. 2019", PartSettings, SharedPart, PartClient, title="FedPer"),
    "fedrep": Method("Collins et al. 2021", FedRepSettings, FedRep, FedRepClient),
    "fedbabu": Method("Oh, Kim, Yun 2022", FedBABUSettings, FedBABU, FedBABUClient),
    "lg-fedavg": Method("Liang et al. 2020", LGFedAvgSettings, LGFedAvg, PartClient),
    "fedpac": Method("Xu, Tong, Huang 2023", FedPACSettings, FedPAC, FedPACClient),
    "fedselect": Method("FedSelect, Tamirisa et al. 2024", FedSelectSettings, FedSelect, FedSelectClient),
    "subfedavg": Method("Sub-FedAvg, Vahidian et al. 2021", SubFedAvgSettings, SubFedAvg, SubFedAvgClient),
    "fedpm": Method("Isik et al. 2023", FedPMSettings, FedPM, FedPMClient),
    "ssfl": Method("Ohib et al. 2024", SparseSettings, SSFL, SSFLClient),
    "feddst": Method("Bibikar et al. 2022", FedDSTSettings, FedDST, FedDSTClient),
    "mtl": Method("multi-task learning, regularised by the mean", MTLSettings, MTL, MTLClient),
    "local": Method("no federation: the floor", MethodSettings, Local, LocalClient),
    "ist": Method("IST, Yuan et al. 2022; vertical decomposition, Hu et al. 2023", ISTSettings, IST, Client),
    "istprox": Method("IST with FedProx's term", ISTSettings, IST, Client, {"objective": "prox"}, "ISTProx"),
    "heterofl": Method("HeteroFL, Diao, Ding, Tarokh 2021", HeteroFLSettings, HeteroFL, HeteroFLClient),
    "fedrolex": Method("FedRolex, Alam et al. 2022", HeteroFLSettings, FedRolex, HeteroFLClient),
    "fedpart": Method("FedPart, Wang et al. 2024, and momentum aggregation", FedPartSettings, FedPart, FedPartClient),
    "fedpews": Method("FedPeWS, Tastan et al. 2024", FedPeWSSettings, FedPeWS, FedPeWSClient),
}
BUILT_IN = frozenset(METHODS)  # without those that a program adds while it runs: `fedsub_app.register`


def reported(methods: Collection[str]) -> dict[str, Reported]:
    """Return the declared reports of these methods: key of a round's line -> its picture.

    Names that are not registered, such as that of a removed method, report nothing.
    """
    strategies = [METHODS[name].strategy for name in METHODS if name in methods]
    return {key: about for strategy in strategies for key, about in strategy.reports.items()}


def check_name(name: str) -> None:
    """Raise :class:`UserError` where a new method cannot have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"method {name!r}: must be lower-case letters and digits, in words joined by '-'")
    if name in BUILT_IN:
        raise UserError(f"method {name!r}: there is one of that name")
