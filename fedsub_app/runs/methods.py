"""The register of methods: name → settings, strategy, client. One line a method.

Methods from outside are registered when they are named: ``"FILE.py:NAME"``, or the name of an entry point of an
installed package. Either is a :class:`Method`.

FedProx and MOON are FedAvg with an objective that any method can take (``training/objectives.py``):

- Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
  https://arxiv.org/abs/1812.06127. Deviation: every client trains all its epochs (no partial work, no inexactness
  gamma).
- Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, https://arxiv.org/abs/2103.16257. Deviation: z is what
  enters the network's last linear layer; no projection head is added to the networks of the other methods.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.own_code import named_code, section_of
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import near
from fedsub_app.settings import MethodSettings
from strategies import settings as keys
from strategies import sparse_settings as sparse_keys

if TYPE_CHECKING:  # torch takes seconds
    from client_apps.base import Client
    from strategies.base import SubnetStrategy

Class = TypeVar("Class")
log = logging.getLogger("fedsub")
PACKAGES = ("client_apps", "fedsub_app", "strategies")  # whose classes are checked where they are a method's own


class Late(Generic[Class]):
    """An attribute that is a class, or its place "module:Name" in a package, which is imported at the first look."""

    def __init__(self, package: str, default: object) -> None:
        self.package, self.default = package, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Class:
        if instance is None:  # the dataclass asks for the default
            return self.default  # type: ignore[return-value]
        value = vars(instance)[self.name]
        if isinstance(value, str):
            try:
                found = resolve_name(f"{self.package}.{value}")
            except (ImportError, AttributeError, ValueError) as error:  # only fedsub's own classes are given by a place
                raise UserError(f"Method: {self.name} = {value!r}: {one_line(error)}; give the class itself") from error
            value = vars(instance)[self.name] = self._checked(found)
        return value  # type: ignore[no-any-return]

    def __set__(self, instance: object, value: Class | str) -> None:
        vars(instance)[self.name] = value if isinstance(value, str) else self._checked(value)

    def _checked(self, found: Any) -> Any:
        """Return a class of this attribute's base; :class:`UserError` for anything else."""
        base: Any = resolve_name(f"{self.package}.{self.default}") if isinstance(self.default, str) else self.default
        if not isinstance(found, type) or not issubclass(found, base):
            named = found.__name__ if isinstance(found, type) else shown(found)
            raise UserError(f"Method: {self.name} = {named}: must be a class derived from {base.__name__}")
        if base not in (found, MethodSettings):
            check_hooks(found)
        return found


def check_hooks(found: type) -> None:
    """Warn of names of the class, or of the user's base of it, that are nearly names of its bases."""
    for place, each in enumerate(found.__mro__):
        if place and each.__module__.partition(".")[0] in PACKAGES:
            continue
        known = {name for base in found.__mro__[place + 1 :] for name in vars(base) if name[0] != "_"}
        for name in vars(each):
            if name[0] != "_" and name not in known and (hint := near(name, known, cutoff=0.8)):
                log.warning("%s.%s: not a hook; %s A helper's name may begin with '_'", each.__name__, name, hint)


@dataclass(frozen=True, eq=False)
class Method:
    """One method: a description, its own settings, its server side, its client side.

    The three classes may be given by their places, "module:Name" in strategies, strategies and client_apps; FedAvg's
    are the defaults.

    ``preset``: general keys that make it this method; a run that sets them otherwise is refused. ``title``: its name
    as it is written, where the strategy's class has another one. ``needs``: keys with which the quickstart runs it.
    """

    description: str
    settings: "Late[type[MethodSettings]]" = Late("strategies", MethodSettings)
    strategy: "Late[type[SubnetStrategy]]" = Late("strategies", "base:SubnetStrategy")
    client: "Late[type[Client]]" = Late("client_apps", "base:Client")
    preset: Mapping[str, Value] = field(default_factory=dict)
    title: str = ""
    needs: str = ""


METHODS = {
    "fedavg": Method("McMahan et al. 2017", title="FedAvg"),
    "fedprox": Method("Li et al. 2020", preset={"objective": "prox"}, title="FedProx"),
    "moon": Method("Li, He, Song 2021", preset={"objective": "moon"}, title="MOON"),
    "scaffold": Method("Karimireddy et al. 2020", MethodSettings, "scaffold:Scaffold", "scaffold:ScaffoldClient"),
    "fednova": Method("Wang et al. 2020", keys.FedNovaSettings, "fednova:FedNova"),
    "fedadam": Method("Reddi et al. 2021", keys.FedAdamSettings, "fedopt:FedAdam"),
    "fedyogi": Method("Reddi et al. 2021", keys.FedAdamSettings, "fedopt:FedYogi"),
    "fedadagrad": Method("Reddi et al. 2021", keys.FedAdagradSettings, "fedopt:FedAdagrad"),
    "fedavg-ft": Method("fine-tuned by each client", keys.TuningSettings, client="parts:TunedClient", title="FedAvgFT"),
    "ditto": Method("Li et al. 2021", keys.DittoSettings, "ditto:Ditto", "personal:DittoClient"),
    "fedbn": Method("Li et al. 2021, local normalisation layers", MethodSettings, "fedbn:FedBN", "parts:PartClient"),
    "apfl": Method("Deng, Kamani, Mahdavi 2020", keys.APFLSettings, "apfl:APFL", "personal:APFLClient"),
    "fedala": Method("Zhang et al. 2023", keys.FedALASettings, "fedala:FedALA", "personal:FedALAClient"),
    "per-fedavg": Method(
        "Fallah, Mokhtari, Ozdaglar 2020", keys.PerFedAvgSettings, "perfedavg:PerFedAvg", "personal:PerFedAvgClient"
    ),
    "pfedme": Method(
        "T Dinh, Tran, Nguyen 2020", keys.PFedMeSettings, "pfedme:PFedMe", "personal:PFedMeClient", title="pFedMe"
    ),
    "fedper": Method(
        "Arivazhagan et al. 2019", keys.PartSettings, "parts:SharedPart", "parts:PartClient", title="FedPer"
    ),
    "fedrep": Method("Collins et al. 2021", keys.FedRepSettings, "parts:FedRep", "parts:FedRepClient"),
    "fedbabu": Method(
        "Oh, Kim, Yun 2022", keys.FedBABUSettings, "parts:SharedPart", "parts:FedBABUClient", title="FedBABU"
    ),
    "lg-fedavg": Method("Liang et al. 2020", keys.LGFedAvgSettings, "parts:LGFedAvg", "parts:LGFedAvgClient"),
    "fedpac": Method("Xu, Tong, Huang 2023", keys.FedPACSettings, "fedpac:FedPAC", "fedpac:FedPACClient"),
    "fedselect": Method(
        "FedSelect, Tamirisa et al. 2024", keys.FedSelectSettings, "fedselect:FedSelect", "fedselect:FedSelectClient"
    ),
    "subfedavg": Method(
        "Sub-FedAvg, Vahidian et al. 2021",
        keys.SubFedAvgSettings,
        "subfedavg:SubFedAvg",
        "subfedavg:SubFedAvgClient",
        needs="local-epochs=2 validation-fraction=0.2",
    ),
    "fedpm": Method("Isik et al. 2023", sparse_keys.FedPMSettings, "fedpm:FedPM", "fedpm:FedPMClient"),
    "ssfl": Method("Ohib et al. 2024", sparse_keys.SparseSettings, "ssfl:SSFL", "sparse:SSFLClient"),
    "feddst": Method("Bibikar et al. 2022", sparse_keys.RegrownSettings, "feddst:FedDST", "sparse:FedDSTClient"),
    "prunefl": Method("Jiang et al. 2022", sparse_keys.PruneFLSettings, "asked:PruneFL", "sparse:PruneFLClient"),
    "fedtiny": Method("Huang et al. 2023", sparse_keys.FedTinySettings, "asked:FedTiny", "sparse:FedTinyClient"),
    "fedrts": Method("Huang et al. 2025", sparse_keys.FedRTSSettings, "asked:FedRTS", "sparse:FedRTSClient"),
    "fedit": Method("FedIT, Zhang et al. 2024: LoRA", MethodSettings, "lora:FedIT"),
    "ffa-lora": Method("Sun et al. 2024", MethodSettings, "lora:FFALoRA", "parts:FrozenPartClient"),
    "fedsa-lora": Method("Guo et al. 2025", MethodSettings, "lora:FedSALoRA", "parts:PartClient"),
    "flexlora": Method("Bai et al. 2024", keys.RankSettings, "lora:FlexLoRA"),
    "flora": Method("Wang et al. 2024: LoRA", keys.FLoRASettings, "lora:FLoRA", "lora:MovedBaseClient"),
    "fedex-lora": Method("Singhal et al. 2025", keys.FedExLoRASettings, "lora:FedExLoRA", "lora:MovedBaseClient"),
    "hetlora": Method("Cho et al. 2024", keys.HetLoRASettings, "lora:HetLoRA", "lora:HetLoRAClient"),
    "mtl": Method("multi-task learning, regularised by the mean", keys.MTLSettings, "mtl:MTL", "personal:MTLClient"),
    "local": Method("no federation: the floor", keys.LocalSettings, "local:Local", "personal:LocalClient"),
    "ist": Method("IST, Yuan et al. 2022; vertical decomposition, Hu et al. 2023", keys.ISTSettings, "ist:IST"),
    "istprox": Method(
        "IST with FedProx's term", keys.ISTSettings, "ist:IST", preset={"objective": "prox"}, title="ISTProx"
    ),
    "heterofl": Method("Diao et al. 2021", keys.HeteroFLSettings, "heterofl:HeteroFL", "heterofl:HeteroFLClient"),
    "fedrolex": Method("Alam et al. 2022", keys.HeteroFLSettings, "heterofl:FedRolex", "heterofl:HeteroFLClient"),
    "feddrop": Method(
        "Federated Dropout, Caldas et al. 2018", keys.HeteroFLSettings, "heterofl:FedDrop", "heterofl:HeteroFLClient"
    ),
    "fjord": Method("FjORD, Horváth et al. 2021", keys.FjORDSettings, "fjord:FjORD", "heterofl:FjORDClient"),
    "fiarse": Method("FIARSE, Wu et al. 2024", keys.FIARSESettings, "fiarse:FIARSE", "fiarse:FIARSEClient"),
    "fedpart": Method("Wang et al. 2024, momentum", keys.FedPartSettings, "fedpart:FedPart", "fedpart:FedPartClient"),
    "fedpews": Method("FedPeWS, Tastan et al. 2024", keys.FedPeWSSettings, "fedpews:FedPeWS", "fedpews:FedPeWSClient"),
}
BUILT_IN = frozenset(METHODS)  # without those that a program adds while it runs: `fedsub_app.register`
GROUP = "fedsub.methods"  # of the entry points of packages with methods


def installed() -> EntryPoints:
    """Return the entry points of the methods of installed packages; a method of this package has its name before."""
    return entry_points(group=GROUP)


def register_outside(name: str) -> bool:
    """Register the method from outside that a text names, if it is one; returns whether it is another one now."""
    if ":" in name:
        found = named_code("method", name, Method)
    elif name in METHODS or not (entries := [*installed().select(name=name)]):
        return False
    else:
        found = _loaded(entries[0])
    if METHODS.get(name) is found:
        return False
    check_name(section := section_of(name), name)
    for other, method in METHODS.items():
        if section_of(other) == section and other != name and method is not found:
            raise UserError(f"method = {name!r}: {section!r} is the name of {other!r} already")
    METHODS[name] = found
    return True


def _loaded(entry: EntryPoint) -> Method:
    try:
        found = entry.load()
    except Exception as error:  # code of others
        raise UserError(f"method = {entry.name!r}: {entry.value}: {one_line(error)[:300]}") from error
    if not isinstance(found, Method):
        raise UserError(f"method = {entry.name!r}: {entry.value} is {shown(found)}, must be a fedsub.Method")
    return found


def check_name(name: str, text: str = "") -> None:
    """Raise :class:`UserError` where a new method cannot have this name, which the setting ``text`` names."""
    said = f"method = {text!r}: {name!r}" if text else f"method {name!r}:"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{said} must be lower-case letters and digits, in words joined by '-'")
    if name in BUILT_IN:
        raise UserError(f"{said} {'is the name of a method of fedsub' if text else 'there is one of that name'}")
