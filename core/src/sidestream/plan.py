"""What a pipeline may declare about itself, so that nothing has to be guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import attrs

from sidestream.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch


class ComponentKind(str, Enum):
    """What a component is for. Strategies select by kind; `OTHER` cannot be selected and stays on the device."""

    DIT = "dit"
    TEXT_ENCODER = "text_encoder"
    IMAGE_ENCODER = "image_encoder"
    VAE = "vae"
    OTHER = "other"


def _names(value: Iterable[str]) -> frozenset[str]:
    return frozenset((value,)) if isinstance(value, str) else frozenset(value)


def _mapping(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


def _paths(value: Mapping[str, Iterable[str] | str]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({k: (v,) if isinstance(v, str) else tuple(v) for k, v in value.items()})


@attrs.frozen(kw_only=True)
class OffloadPlan:
    """Declared by a pipeline class as `_offload_plan`. Every path is dotted and relative to the pipeline.

    - `block_attrs`: component to the attributes that hold its blocks, in the order of execution.
    - `on_demand_component_paths`: components that move themselves (`load_to_device()`, `offload_to_cpu()`), called by
      the pipeline; no strategy touches them.
    - `offload_submodules`: large child of a DiT to the attribute of its own blocks (a nested ring).
    - `resident_dit_paths`: DiTs of which some blocks may stay on the device.
    - `encoder_component_types`: encoder to its kind, where its name does not tell (`text_encoder` or
      `image_encoder`; anything else is a :class:`ConfigError`).
    - `encoder_block_attrs`: encoder to the dotted paths of its block lists.
    - `encoder_dlo_weight_replication`: encoders whose weights are equal on all ranks.
    - `entry_methods`: component to the methods, other than `forward`, through which the pipeline enters it.
    """

    block_attrs: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_paths)
    on_demand_component_paths: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    offload_submodules: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    resident_dit_paths: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    encoder_component_types: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    encoder_block_attrs: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_paths)
    encoder_dlo_weight_replication: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    entry_methods: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_paths)

    def __attrs_post_init__(self) -> None:
        allowed = (ComponentKind.TEXT_ENCODER.value, ComponentKind.IMAGE_ENCODER.value)
        problems = [
            Problem(
                f"encoder_component_types.{path}",
                f"{kind!r} is not a kind of encoder; use {' or '.join(allowed)}",
                kind,
            )
            for path, kind in self.encoder_component_types.items()
            if kind not in allowed
        ]
        if problems:
            raise ConfigError(problems, source="OffloadPlan")


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline that lists its own components: class variables of dotted paths.

    A pipeline that inherits from this protocol need only set the lists it uses.
    """

    _dit_modules: ClassVar[list[str]] = []
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
    _resident_modules: ClassVar[list[str]] = []


@runtime_checkable
class SupportsModelCpuOffload(Protocol):
    """A pipeline that owns its model-level life cycle; `model_level` then only calls these two methods.

    Both must be idempotent, and the second must remove everything that the first put in place.
    """

    def enable_omni_model_cpu_offload(
        self, *, device: torch.device, pin_memory: bool, use_hsdp: bool, **kwargs: Any
    ) -> None:
        """Start offloading; `offload_components` (a set of kinds) is passed only for an explicit selection."""

    def disable_omni_model_cpu_offload(self) -> None:
        """Stop offloading and leave real tensors everywhere."""
