"""CPU offload for PyTorch diffusion pipelines, as a plugin framework.

Weights wait in host memory and come to the device when they are needed; the images stay the same to the bit:

.. code-block:: python

    import sidestream

    with sidestream.offload(pipe, "model_level", device="cuda") as backend:
        image = pipe("a lighthouse at dusk").images[0]
        print(backend.report())
    # out here every weight is whole again, in host memory, and no hook is left

The second argument names a strategy, or says more: a mapping (`{"strategy": "model_level", "components":
["dit"]}`), the path of a file, or an :class:`OffloadConfig`. :func:`strategies` lists what is installed, and
`sidestream show NAME` in a shell what a strategy can be told. :func:`enable_offload` is for those who end it
themselves, with `disable()` of the backend that it returns.

To write a strategy, see :mod:`sidestream.hookspecs`. Importing this package loads neither torch nor a plugin.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestream.api import enable_offload, offload, strategies
    from sidestream.backend import BackendState, OffloadBackend, run_cleanup_steps
    from sidestream.config import DLOTransfer, OffloadConfig, OffloadStrategy
    from sidestream.errors import (
        BackendStateError,
        ConfigError,
        ConfigFileError,
        IncompatiblePluginError,
        OffloadError,
        OffloadWarning,
        PinError,
        PluginError,
        Problem,
        TransferError,
        UnknownStrategyError,
        UnsupportedModelError,
    )
    from sidestream.hookspecs import HOOKSPEC_VERSION, Strategy, hookimpl
    from sidestream.plan import (
        ComponentKind,
        OffloadPlan,
        SupportsComponentDiscovery,
        SupportsModelCpuOffload,
    )
    from sidestream.registry import StrategyInfo
    from sidestream.report import ComponentReport, OffloadReport, ResidentTensor
    from sidestream.structure import option, options_class

__all__ = [
    "HOOKSPEC_VERSION",
    "BackendState",
    "BackendStateError",
    "ComponentKind",
    "ComponentReport",
    "ConfigError",
    "ConfigFileError",
    "DLOTransfer",
    "IncompatiblePluginError",
    "OffloadBackend",
    "OffloadConfig",
    "OffloadError",
    "OffloadPlan",
    "OffloadReport",
    "OffloadStrategy",
    "OffloadWarning",
    "PinError",
    "PluginError",
    "Problem",
    "ResidentTensor",
    "Strategy",
    "StrategyInfo",
    "SupportsComponentDiscovery",
    "SupportsModelCpuOffload",
    "TransferError",
    "UnknownStrategyError",
    "UnsupportedModelError",
    "enable_offload",
    "hookimpl",
    "offload",
    "option",
    "options_class",
    "run_cleanup_steps",
    "strategies",
]

#: Where each public name lives; its module is imported when the name is first used.
_NAMES_BY_MODULE = MappingProxyType(
    {
        "api": ("enable_offload", "offload", "strategies"),
        "backend": ("BackendState", "OffloadBackend", "run_cleanup_steps"),
        "config": ("DLOTransfer", "OffloadConfig", "OffloadStrategy"),
        "errors": (
            "BackendStateError",
            "ConfigError",
            "ConfigFileError",
            "IncompatiblePluginError",
            "OffloadError",
            "OffloadWarning",
            "PinError",
            "PluginError",
            "Problem",
            "TransferError",
            "UnknownStrategyError",
            "UnsupportedModelError",
        ),
        "hookspecs": ("HOOKSPEC_VERSION", "Strategy", "hookimpl"),
        "plan": ("ComponentKind", "OffloadPlan", "SupportsComponentDiscovery", "SupportsModelCpuOffload"),
        "registry": ("StrategyInfo",),
        "report": ("ComponentReport", "OffloadReport", "ResidentTensor"),
        "structure": ("option", "options_class"),
    }
)
_HOMES = MappingProxyType({name: module for module, names in _NAMES_BY_MODULE.items() for name in names})


if not TYPE_CHECKING:  # a type checker that saw it would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # so that this function is asked once for each name
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
