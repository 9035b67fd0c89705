"""The mark of a frozen base (:mod:`fedsub_app.models.frozen`) on a network."""

from typing import Any

from torch import nn

BASE = "_fedsub_base"  # attribute of a module: names of its own tensors that belong to the base


class Base(nn.Parameter):
    """A parameter of the base: a copy of its network shares its storage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Base":
        copied = memo[id(self)] = Base(self.data, requires_grad=False)
        return copied


def base_names(model: nn.Module) -> set[str]:
    """Return the names of the tensors of a network's frozen base; most networks have none."""
    if not any(BASE in vars(module) for module in model.modules()):  # where tensors alone are known, paths are not
        return set()
    marked = [(path, vars(module).get(BASE, ())) for path, module in model.named_modules()]
    return {f"{path}.{leaf}" if path else leaf for path, leaves in marked for leaf in leaves}
