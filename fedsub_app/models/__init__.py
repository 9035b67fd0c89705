"""Networks by name, their tensors by name, and their structure (units, layers, head)."""

from fedsub_app.models.network import Network, Output
from fedsub_app.models.networks import build_model, load_tensors, mlp, model_names, tensors_of
from fedsub_app.models.units import UnitGroup, head_names, layer_groups, part_names, unit_groups

__all__ = [
    "Network",
    "Output",
    "UnitGroup",
    "build_model",
    "head_names",
    "layer_groups",
    "load_tensors",
    "mlp",
    "model_names",
    "part_names",
    "tensors_of",
    "unit_groups",
]
