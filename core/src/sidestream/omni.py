"""vLLM-Omni's diffusion configuration, resolved to what `OffloadConfig` takes.

The canonical selector is the mapping `diffusion_offload_config`; the older switches (`enable_cpu_offload` and
so on) and the `dlo_*` values beside it are aliases. Where two of them contradict each other nothing wins in
silence: the error names both. One value has a rule instead: the selector's `pin_memory`, if given, is taken
rather than `pin_cpu_memory`, which is always there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import attrs

from sidestream.errors import ConfigError, Problem
from sidestream.structure import option, options_class, show, structure

T = TypeVar("T")

logger = logging.getLogger("sidestream")

#: The kinds of components that can be selected.
COMPONENTS = ("dit", "text_encoder", "image_encoder", "vae")

_ABSENT = object()


@options_class
class _LayerOptions:
    """How the layers of one component are moved."""

    weight_transfer: Literal["allgather", "rank-local"] = option(
        default="rank-local", help="how the weights of the next block reach the device"
    )
    resident_layers: int = option(default=0, minimum=0, help="blocks that stay on the device; DiT only")


@options_class
class _Selector:
    """The value of `diffusion_offload_config`."""

    mode: Literal["module", "layer"] = option(help="what is moved at a time")
    components: frozenset[str] = option(minimum=1, choices=COMPONENTS, help="the kinds that are offloaded")
    layer_options: Mapping[str, _LayerOptions] = option(
        factory=dict, choices=COMPONENTS, help="for each component, with mode 'layer'"
    )
    pin_memory: bool | None = option(default=None, help="page-lock host masters")

    def validate(self) -> Iterator[Problem]:
        for component, options in self.layer_options.items():
            path = f"layer_options.{component}"
            if self.mode == "module":
                yield Problem(path, "layer options need mode 'layer', and the mode is 'module'")
            if component not in self.components:
                selected = ", ".join(sorted(self.components))
                yield Problem(path, f"{component} is not among the selected components ({selected})")
            if not options.resident_layers:
                continue
            path, count = f"{path}.resident_layers", options.resident_layers
            if component != "dit":
                yield Problem(path, f"{count} is not 0: only the dit can keep layers resident", count)
            elif options.weight_transfer == "allgather":
                yield Problem(path, f"{count} resident layers need weight_transfer 'rank-local'", count)

    @property
    def strategy(self) -> str:
        if self.mode == "module":
            return "model_level"
        distributed = any(
            options.weight_transfer == "allgather" or options.resident_layers for options in self.layer_options.values()
        )
        return "distributed_layer_wise" if distributed else "layer_wise"

    @property
    def transfers(self) -> dict[str, str]:
        chosen = {component: options.weight_transfer for component, options in self.layer_options.items()}
        return {component: chosen.get(component, "rank-local") for component in COMPONENTS}

    @property
    def resident_layers(self) -> int:
        return self.layer_options["dit"].resident_layers if "dit" in self.layer_options else 0


@options_class
class _Engine:
    """What is read of the engine's configuration itself."""

    enable_cpu_offload: bool = option(default=False, help="model level")
    enable_layerwise_offload: bool = option(default=False, help="layer-wise")
    enable_distributed_layerwise_offload: bool = option(default=False, help="distributed layer-wise")
    pin_cpu_memory: bool = option(default=True, help="page-lock host masters")
    dlo_use_allgather: bool = option(default=True, help="the DiT's transfer")
    dlo_resident_layers: int = option(default=0, minimum=0, help="DiT blocks kept on the device")
    dlo_host_registration_limit_gib: float = option(default=0.0, minimum=0, help="GiB; 0: no ceiling")
    host_weight_runtime_mode: Any = option(default="disabled", help="vLLM-Omni's own host weight store")
    cache_backend: Any = option(default=None, help="a cache that skips parts of the DiT")
    enable_prompt_embed_cache: bool = option(default=False, help="a cache that skips the text encoders")

    @property
    def switches(self) -> dict[str, str]:
        """Name and strategy of each switch that is on."""
        strategies = {
            "enable_cpu_offload": "model_level",
            "enable_layerwise_offload": "layer_wise",
            "enable_distributed_layerwise_offload": "distributed_layer_wise",
        }
        return {name: strategy for name, strategy in strategies.items() if getattr(self, name)}

    @property
    def tuned(self) -> dict[str, Any]:
        """Name and value of what else only the older interface knows, if it is not at its default."""
        values = {
            "dlo_use_allgather": True,
            "dlo_resident_layers": 0,
            "dlo_host_registration_limit_gib": 0.0,
            "host_weight_runtime_mode": "disabled",
        }
        return {name: getattr(self, name) for name, default in values.items() if getattr(self, name) != default}

    def validate(self) -> Iterator[Problem]:
        switches = list(self.switches)
        if len(switches) > 1:
            yield Problem(switches[0], f"only one of {', '.join(switches)} can be set", True)
        if self.dlo_resident_layers and self.dlo_use_allgather:
            yield Problem(
                "dlo_resident_layers",
                f"{self.dlo_resident_layers} resident layers need dlo_use_allgather to be false",
                self.dlo_resident_layers,
            )


@options_class
class _Parallel:
    """What is read of `parallel_config`. Tensor parallelism is no axis to shard offloaded weights along."""

    data_parallel_size: int = option(default=1, minimum=1, help="ranks")
    sequence_parallel_size: int | None = option(default=None, minimum=1, help="ranks; none: 1")
    use_hsdp: bool = option(default=False, help="parameters are FSDP2 DTensors")
    hsdp_shard_size: int = option(default=-1, minimum=-1, help="ranks; -1 and 0: chosen by the engine")
    hsdp_replicate_size: int = option(default=1, minimum=1, help="replicas")

    @property
    def dp_size(self) -> int:
        """The number of ranks that share one copy of the weights."""
        size = self.data_parallel_size
        if self.use_hsdp and self.hsdp_shard_size > 0:
            size = self.hsdp_shard_size * self.hsdp_replicate_size
        return (self.sequence_parallel_size or 1) if size <= 1 else size


def resolve(od_config: Any) -> dict[str, Any]:
    """Return keyword arguments for `OffloadConfig` that say what `od_config` asks for.

    `od_config` is vLLM-Omni's configuration, an object or a mapping; it is only read, and what is missing has
    vLLM-Omni's default. Raises :class:`ConfigError` with all problems.
    """
    problems: list[Problem] = []
    engine = _take(_Engine, od_config, "", problems)
    parallel_config = _read(od_config, "parallel_config")
    parallel = (
        _Parallel()
        if parallel_config is None or parallel_config is _ABSENT
        else _take(_Parallel, parallel_config, "parallel_config", problems)
    )
    raw = _read(od_config, "diffusion_offload_config")
    selector = None
    if raw is not None and raw is not _ABSENT:
        try:
            selector = structure(_Selector, raw, path="diffusion_offload_config")
        except ConfigError as error:
            problems += error.problems
    if engine is not None and selector is not None:
        problems += _contradictions(engine, selector)
    if problems or engine is None or parallel is None:
        raise ConfigError(problems)

    if selector is not None:
        strategy, transfers = selector.strategy, selector.transfers
    else:
        strategy = next(iter(engine.switches.values()), "none")
        transfers = dict.fromkeys(COMPONENTS, "rank-local")
        transfers["dit"] = "allgather" if engine.dlo_use_allgather else "rank-local"
    selected = selector.components if selector is not None else frozenset(["dit"])
    gathered = {component for component in selected if transfers[component] == "allgather"}
    if strategy == "distributed_layer_wise":
        problems += _cache_problems(engine, parallel, gathered)
        if not gathered:
            logger.info("each rank keeps all of %s: no weight is gathered", ", ".join(sorted(selected)))
    if problems:
        raise ConfigError(problems)
    pin = None if selector is None else selector.pin_memory
    return {
        "strategy": strategy,
        "components": None if selector is None else selector.components,
        "pin_cpu_memory": engine.pin_cpu_memory if pin is None else pin,
        "use_hsdp": parallel.use_hsdp,
        "dp_size": parallel.dp_size,
        "dlo_use_allgather": transfers["dit"] == "allgather",
        "dlo_resident_layers": engine.dlo_resident_layers if selector is None else selector.resident_layers,
        "dlo_transfers": transfers,
        "dlo_host_registration_limit_gib": engine.dlo_host_registration_limit_gib,
    }


def _read(source: Any, name: str) -> Any:
    return source.get(name, _ABSENT) if isinstance(source, Mapping) else getattr(source, name, _ABSENT)


def _take(cls: type[T], source: Any, path: str, problems: list[Problem]) -> T | None:
    """Read the fields of `cls` from an object or a mapping; what is wrong is added to `problems`."""
    if source is None or isinstance(source, (str, bytes, int, float, list, tuple, set, frozenset)):
        # These have none of the attributes, which would look like a configuration in which all is off.
        problems.append(Problem(path, f"{show(source)} is not a configuration object or mapping", source))
        return None
    values = {field.name: _read(source, field.name) for field in attrs.fields(cls)}  # type: ignore[arg-type]
    try:
        return structure(cls, {n: value for n, value in values.items() if value is not _ABSENT}, path=path)
    except ConfigError as error:
        problems += error.problems
        return None


def _contradictions(engine: _Engine, selector: _Selector) -> Iterator[Problem]:
    for name, strategy in engine.switches.items():
        if strategy != selector.strategy:
            yield Problem(
                name,
                f"{name} asks for {strategy}, but diffusion_offload_config (mode {selector.mode!r}) asks for "
                f"{selector.strategy}: remove one of them",
                True,
            )
    for name, value in engine.tuned.items():
        yield Problem(name, f"{name} = {show(value)} cannot be combined with diffusion_offload_config", value)


def _cache_problems(engine: _Engine, parallel: _Parallel, gathered: set[str]) -> Iterator[Problem]:
    if parallel.data_parallel_size == 1:
        return
    why = "a rank that finds its result in the cache would not take part in the other ranks' gathers"
    if gathered and engine.cache_backend not in (None, "", "none"):
        yield Problem(
            "cache_backend",
            f"{show(engine.cache_backend)} cannot be combined with the allgather transfer of "
            f"{', '.join(sorted(gathered))} across data-parallel ranks: {why}",
            engine.cache_backend,
        )
    if "text_encoder" in gathered and engine.enable_prompt_embed_cache:
        yield Problem(
            "enable_prompt_embed_cache",
            f"cannot be combined with the allgather transfer of text_encoder across data-parallel ranks: {why}",
            True,
        )
