"""Networks by name, their tensors by name, their structure (units, layers, head), and smaller copies of them."""

from typing import TYPE_CHECKING

from fedsub_app.common.late import late
from fedsub_app.models.names import is_sourced, model_names

if TYPE_CHECKING:
    from fedsub_app.models.groups import UnitGroup
    from fedsub_app.models.narrow import narrow_shapes, narrowed, widths_of
    from fedsub_app.models.network import Network, Output
    from fedsub_app.models.networks import build_model, load_tensors, mlp, tensors_of, trainable
    from fedsub_app.models.sources import (
        adopted,
        check_network,
        with_logits,
    )
    from fedsub_app.models.units import (
        head_names,
        layer_groups,
        output_names,
        part_names,
        unit_groups,
        with_head,
    )

__all__ = [
    "Network",
    "Output",
    "UnitGroup",
    "adopted",
    "build_model",
    "check_network",
    "head_names",
    "is_sourced",
    "layer_groups",
    "load_tensors",
    "mlp",
    "model_names",
    "narrow_shapes",
    "narrowed",
    "output_names",
    "part_names",
    "tensors_of",
    "trainable",
    "unit_groups",
    "widths_of",
    "with_head",
    "with_logits",
]
__getattr__ = late(
    __name__,
    {
        "groups": "UnitGroup",
        "narrow": "narrow_shapes narrowed widths_of",
        "network": "Network Output",
        "networks": "build_model load_tensors mlp tensors_of trainable",
        "sources": "adopted check_network with_logits",
        "units": "head_names layer_groups output_names part_names unit_groups with_head",
    },
)
