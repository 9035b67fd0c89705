"""Networks by name, their tensors by name, their structure (units, layers, head), and smaller copies of them."""

from typing import TYPE_CHECKING

from fedsub_app.common.late import late
from fedsub_app.models.names import is_sourced as is_sourced
from fedsub_app.models.names import model_names as model_names

if TYPE_CHECKING:
    from fedsub_app.models.frozen import Trained as Trained
    from fedsub_app.models.frozen import base_bytes as base_bytes
    from fedsub_app.models.frozen import base_digest as base_digest
    from fedsub_app.models.frozen import freeze as freeze
    from fedsub_app.models.frozen import other_base as other_base
    from fedsub_app.models.frozen import with_base_of as with_base_of
    from fedsub_app.models.groups import UnitGroup as UnitGroup
    from fedsub_app.models.lora import Adapter as Adapter
    from fedsub_app.models.lora import adapters as adapters
    from fedsub_app.models.lora import scale_of as scale_of
    from fedsub_app.models.narrow import narrowed as narrowed
    from fedsub_app.models.narrow import widths_of as widths_of
    from fedsub_app.models.network import Network as Network
    from fedsub_app.models.network import Output as Output
    from fedsub_app.models.networks import build_model as build_model
    from fedsub_app.models.networks import load_tensors as load_tensors
    from fedsub_app.models.networks import mlp as mlp
    from fedsub_app.models.networks import seeded as seeded
    from fedsub_app.models.networks import tensors_of as tensors_of
    from fedsub_app.models.networks import trainable as trainable
    from fedsub_app.models.sources import adopted as adopted
    from fedsub_app.models.sources import check_network as check_network
    from fedsub_app.models.sources import with_logits as with_logits
    from fedsub_app.models.units import head_names as head_names
    from fedsub_app.models.units import layer_groups as layer_groups
    from fedsub_app.models.units import output_names as output_names
    from fedsub_app.models.units import part_names as part_names
    from fedsub_app.models.units import unit_groups as unit_groups
    from fedsub_app.models.units import with_head as with_head

__getattr__ = late(__name__, "groups", "narrow", "networks", "units", "network", "sources", "lora", "frozen")
