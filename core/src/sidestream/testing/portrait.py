"""What must be as it was: everything about a model that offloading could have changed."""

from __future__ import annotations

from typing import Any

from torch import nn


def portrait(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that `disable` has to leave as it was."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        seen[f"{name}:class"] = type(module)
        seen[f"{name}:attributes"] = sorted(module.__dict__)
        seen[f"{name}:hooks"] = [
            (key, len(value))
            for key, value in sorted(module.__dict__.items())
            if key.endswith(("hooks", "hooks_with_kwargs", "called"))
        ]
        for registry in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, registry).items():
                seen[f"{name}.{key}"] = (
                    None
                    if tensor is None
                    else (
                        id(tensor),
                        type(tensor),
                        tensor.dtype,
                        tensor.shape,
                        tensor.stride(),
                        tensor.requires_grad,
                        tensor.is_inference(),
                        tensor.device,
                        dict(tensor.__dict__),
                    )
                )
    return seen
