"""From what a user writes to a backend at work: the way through all other rooms, in order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from sidestream.backend import OffloadBackend, run_cleanup_steps
from sidestream.config import OffloadConfig, read_source
from sidestream.errors import (
    ConfigError,
    IncompatiblePluginError,
    OffloadError,
    PluginError,
    Problem,
    UnsupportedModelError,
)
from sidestream.registry import LoadedStrategy, StrategyInfo, find_strategies, load_strategy, observer_hooks
from sidestream.structure import structure

if TYPE_CHECKING:
    import torch

#: A strategy's name, a mapping, the path of a file, inline JSON, or the configuration itself.
ConfigSource: TypeAlias = "OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]"


def strategies() -> tuple[StrategyInfo, ...]:
    """Return the strategies that are installed, sorted by name; broken ones say why in `problem`.

    Imports each strategy's plugin module, which is light; torch is not loaded.
    """
    return find_strategies()


def enable_offload(
    pipe: Any,
    config: ConfigSource,
    *,
    device: torch.device | str | None = None,
    observers: Iterable[object] = (),
) -> OffloadBackend:
    """Offload `pipe` as `config` says and return the backend at work; `disable()` of it ends the offload.

    `pipe` is an `nn.Module`, a pipeline with `components`, or a mapping of names to modules. `config` is a
    strategy's name, a mapping, the path of a file, or an :class:`OffloadConfig`. `device` computes; None is
    the current accelerator, else the CPU. `observers` are objects or modules with `sidestream_enabled` or
    `sidestream_disabled`, marked by `hookimpl`; one that fails is logged and changes nothing.

    Everything is checked before the pipeline is touched. Raises `ConfigError`, `UnknownStrategyError`,
    `PluginError`, `UnsupportedModelError` or what else the strategy finds wrong; the pipeline is then as it
    was.
    """
    _check_pipeline(pipe)
    resolved, loaded = resolve_config(config)
    hooks = [loaded.hooks, *(observer_hooks(observer) for observer in observers)]
    backend = _create(loaded, resolved, device)
    for life in hooks:
        backend.observe(enabled=life.enabled, disabled=life.disabled)
    backend.enable(pipe)
    return backend


@contextmanager
def offload(
    pipe: Any,
    config: ConfigSource,
    *,
    device: torch.device | str | None = None,
    observers: Iterable[object] = (),
) -> Iterator[OffloadBackend]:
    """Offload `pipe` inside a `with` block, and give it back whole at its end, however the block ends.

    Takes and raises what :func:`enable_offload` does. If giving back fails, that error comes out, unless the
    block raised one itself: then the second is logged, and `disable()` can be called again.
    """
    backend = enable_offload(pipe, config, device=device, observers=observers)
    try:
        yield backend
    except BaseException as error:
        failure = run_cleanup_steps([("disable the offload after an error", backend.disable)])
        if failure is not None and hasattr(error, "add_note"):
            error.add_note(f"disabling the offload failed too: {failure!r}; call disable() until it succeeds")
        raise
    backend.disable()


def resolve_config(source: ConfigSource) -> tuple[OffloadConfig, LoadedStrategy]:
    """Return the configuration that `source` stands for, its `options` of the strategy's own class.

    The strategy's name comes out as the strategy spells it. All problems, of the fields and of the options,
    come in one `ConfigError`; otherwise `UnknownStrategyError` or `PluginError` is raised if the strategy
    cannot be had, and `ConfigFileError` if the file cannot be read.
    """
    mapping: Mapping[str, Any]
    if isinstance(source, OffloadConfig):
        mapping, origin = {"strategy": source.strategy, "options": source.options}, None
    else:
        mapping, origin = read_source(source)
    problems: list[Problem] = []
    config = source if isinstance(source, OffloadConfig) else _collect(problems, OffloadConfig, mapping)
    # Wrong fields are no reason to keep silent about wrong options: go on with what was written.
    name = mapping.get("strategy") if config is None else config.strategy
    if not isinstance(name, str) or not name:
        raise ConfigError(problems, source=origin)
    try:
        loaded = load_strategy(name)
    except OffloadError as error:
        if not problems:
            raise
        raise ConfigError([Problem("strategy", str(error), name), *problems], source=origin) from error
    options = mapping.get("options", {}) if config is None else config.options
    if not any(problem.path.split(".")[0] == "options" for problem in problems):
        options = _resolve_options(problems, loaded, options)
    if config is None or problems:
        raise ConfigError(problems, source=origin)
    try:
        return attrs.evolve(config, strategy=loaded.strategy.name, options=options), loaded
    except ConfigError as error:
        raise ConfigError(error.problems, source=origin) from error


def _collect(problems: list[Problem], cls: type[Any], mapping: Any, path: str = "") -> Any:
    """Return an instance of `cls`, or None with what is wrong added to `problems`."""
    try:
        return structure(cls, mapping, path=path)
    except ConfigError as error:
        problems += error.problems
        return None


def _resolve_options(problems: list[Problem], loaded: LoadedStrategy, options: Any) -> Any:
    """Return `options` as an instance of the strategy's class, or as they are if it has none."""
    if loaded.strategy.options is not None:
        return _collect(problems, loaded.strategy.options, options, "options")
    message = f"strategy {loaded.strategy.name!r} takes no options"
    if isinstance(options, Mapping):
        problems += [Problem(f"options.{key}", message, value) for key, value in options.items()]
    else:
        problems.append(Problem("options", message, options))
    return options


def _create(loaded: LoadedStrategy, config: OffloadConfig, device: torch.device | str | None) -> OffloadBackend:
    info = loaded.info
    culprit = f"strategy {info.name!r} of {info.distribution} {info.version}"
    blame: dict[str, Any] = {
        "distribution": info.distribution,
        "version": info.version,
        "entry_point": info.name,
    }
    try:
        backend: object = loaded.strategy.create(config, device)
    except ImportError as error:  # here a plugin imports all that is heavy
        raise PluginError(
            f"{culprit} cannot make its backend: {type(error).__name__}: {error}", **blame, cause=error
        ) from error
    if not isinstance(backend, OffloadBackend):
        raise IncompatiblePluginError(f"create of {culprit} made no OffloadBackend but {backend!r}", **blame)
    return backend


def _check_pipeline(pipe: object) -> None:
    """Refuse what can be no pipeline, whichever the strategy."""
    if isinstance(pipe, OffloadConfig):
        raise UnsupportedModelError("the pipeline comes first and the configuration second")
    if pipe is None or isinstance(pipe, (str, bytes, int, float, os.PathLike, type)):
        raise UnsupportedModelError(
            f"{pipe!r} is no pipeline; give the loaded object itself: an nn.Module, a pipeline with "
            "components, or a mapping of names to modules"
        )
