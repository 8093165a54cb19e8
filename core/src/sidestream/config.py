"""What a user asks for: the one configuration object, and all that it can be made from."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import attrs

from sidestream.errors import ConfigError, ConfigFileError, Problem
from sidestream.omni import COMPONENTS, resolve
from sidestream.structure import FrozenMapping, check, constraints, show, structure, suggest, unstructure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from typing import TypeAlias

    # Any to the type checker, so that a backend can read its own options without a cast.
    Options: TypeAlias = Any
else:
    Options = Mapping[str, Any] | attrs.AttrsInstance

__all__ = ["COMPONENTS", "DLOTransfer", "OffloadConfig", "OffloadStrategy"]


class OffloadStrategy(str, Enum):
    """The strategies that this project ships. `OffloadConfig.strategy` takes any other name as well."""

    NONE = "none"
    MODEL_LEVEL = "model_level"
    LAYER_WISE = "layer_wise"
    DISTRIBUTED_LAYER_WISE = "distributed_layer_wise"


class DLOTransfer(str, Enum):
    """How the weights of a component's next block reach the device in the distributed strategy."""

    ALLGATHER = "allgather"
    """Each rank holds a share on its host; the ranks exchange them. All ranks must run the same blocks."""
    RANK_LOCAL = "rank-local"
    """Each rank copies the whole block from its own host; ranks are independent."""


def _components(value: Collection[str] | None) -> frozenset[str] | None:
    """Tell the type checker what may be given; `check` makes it what it is to be."""
    return cast("frozenset[str] | None", value)


def _transfers(value: Mapping[str, DLOTransfer | str] | None) -> Mapping[str, DLOTransfer] | None:
    return cast("Mapping[str, DLOTransfer] | None", value)


@attrs.frozen
class OffloadConfig:
    """One offload, as asked for. Immutable, picklable, and checked whole whichever way it is made.

    Raises :class:`ConfigError`, a ValueError, with every problem at once. `components` may be given as any
    collection of names that is no string, and a transfer as a string. `dlo_transfers` holds all four kinds
    afterwards, and `dlo_use_allgather` what it says of the DiT: when a map is given, the map counts.
    """

    strategy: str = attrs.field(
        metadata=constraints(minimum=1, help="name of an installed strategy"),
    )
    components: frozenset[str] | None = attrs.field(
        default=None,
        kw_only=True,
        converter=_components,
        metadata=constraints(
            minimum=1,
            choices=COMPONENTS,
            help="kinds to offload, any problem an error; none: the strategy's choice, any problem a warning",
        ),
    )
    pin_cpu_memory: bool = attrs.field(default=True, kw_only=True, metadata=constraints(help="page-lock host masters"))
    use_hsdp: bool = attrs.field(
        default=False, kw_only=True, metadata=constraints(help="the parameters are FSDP2 DTensors")
    )
    dp_size: int = attrs.field(
        default=1,
        kw_only=True,
        metadata=constraints(minimum=1, help="ranks that share one copy of the weights"),
    )
    dlo_use_allgather: bool = attrs.field(
        default=True,
        kw_only=True,
        metadata=constraints(help="whether the DiT is gathered; follows dlo_transfers where that is given"),
    )
    dlo_resident_layers: int = attrs.field(
        default=0, kw_only=True, metadata=constraints(minimum=0, help="DiT blocks kept on the device")
    )
    dlo_transfers: Mapping[str, DLOTransfer] | None = attrs.field(
        default=None,
        kw_only=True,
        converter=_transfers,
        metadata=constraints(
            choices=COMPONENTS,
            help="transfer of each kind, rank-local where it is left out; none: the DiT by dlo_use_allgather",
        ),
    )
    dlo_host_registration_limit_gib: float = attrs.field(
        default=0.0,
        kw_only=True,
        metadata=constraints(minimum=0, help="GiB of a mapped checkpoint to page-lock at most; 0: no limit"),
    )
    options: Options = attrs.field(
        factory=dict, kw_only=True, metadata=constraints(help="what else the strategy takes")
    )

    def __attrs_post_init__(self) -> None:
        check(self)
        transfers = self._resolved_transfers()
        object.__setattr__(self, "dlo_transfers", FrozenMapping(transfers))
        object.__setattr__(self, "dlo_use_allgather", transfers["dit"] is DLOTransfer.ALLGATHER)

    def _resolved_transfers(self) -> dict[str, DLOTransfer]:
        given = self.dlo_transfers
        if given is None:
            given = {"dit": DLOTransfer.ALLGATHER} if self.dlo_use_allgather else {}
        return {component: given.get(component, DLOTransfer.RANK_LOCAL) for component in COMPONENTS}

    def validate(self) -> Iterator[Problem]:
        """Yield what is wrong with several fields together; called once when the configuration is made."""
        if not self.use_hsdp or self.strategy != OffloadStrategy.DISTRIBUTED_LAYER_WISE.value:
            return
        gathered = [
            component
            for component, transfer in self._resolved_transfers().items()
            if transfer is DLOTransfer.ALLGATHER and (self.components is None or component in self.components)
        ]
        if gathered:
            yield Problem(
                "use_hsdp",
                f"HSDP cannot be combined with the allgather transfer of {', '.join(gathered)}: HSDP has "
                "already sharded the weights, and they would be sharded twice; use rank-local",
                True,
            )

    # --- What it says of a component ------------------------------------------------------------------------

    def offloads(self, component: str) -> bool:
        """Return whether `component`, one of :data:`COMPONENTS`, is selected.

        With `components=None` the DiT alone is. An unknown component is a :class:`ConfigError`.
        """
        _check_component(component)
        return component in (("dit",) if self.components is None else self.components)

    def offloads_encoder(self, path: str, plan: Any = None) -> bool:
        """Return whether the encoder at `path` of the pipeline is selected.

        Its kind is what `plan`, an :class:`OffloadPlan` or None, declares in `encoder_component_types`;
        otherwise the last part of the path tells, if it starts or ends with `text_encoder` or
        `image_encoder`. An encoder of no known kind is never selected.
        """
        kind = _encoder_kind(path, plan)
        return kind is not None and self.offloads(kind)

    def should_offload_encoder(self, path: str, plan: Any = None) -> bool:
        """Return whether to offload the encoder at `path`: with `components=None` each, else the selected."""
        return self.components is None or self.offloads_encoder(path, plan)

    def transfer_for(self, component: str) -> DLOTransfer:
        """Return how `component` reaches the device; an unknown component is a :class:`ConfigError`."""
        _check_component(component)
        return self._resolved_transfers()[component]

    def uses_allgather(self, component: str) -> bool:
        """Return whether `component` is gathered; an unknown component is a :class:`ConfigError`."""
        return self.transfer_for(component) is DLOTransfer.ALLGATHER

    # --- Made from, and made into ---------------------------------------------------------------------------

    @classmethod
    def from_source(cls, source: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]) -> OffloadConfig:
        """Make one from whatever a user may write.

        A string that ends in `.toml` or `.json` or holds a path separator is a file, one that starts with `{`
        is JSON itself, and every other string is the name of a strategy, even if there is a file of that
        name. Raises :class:`ConfigFileError` for a file that cannot be read, :class:`ConfigError` for wrong
        settings."""
        if isinstance(source, OffloadConfig):
            return source
        mapping, origin = read_source(source)
        return cls.from_mapping(mapping, source=origin)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, source: str | None = None) -> OffloadConfig:
        """Make one from a mapping of field names to values; `source` names its origin in the error."""
        try:
            return structure(cls, mapping)
        except ConfigError as error:
            raise ConfigError(error.problems, source=source) from error.__cause__

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> OffloadConfig:
        """Read a TOML or JSON file, as its suffix says; raises as :meth:`from_source` does."""
        mapping, origin = _read_file(path)
        return cls.from_mapping(mapping, source=origin)

    @classmethod
    def from_od_config(cls, od_config: Any) -> OffloadConfig:
        """Make one from vLLM-Omni's diffusion configuration, an object or a mapping, which is only read.

        `diffusion_offload_config` selects; `enable_cpu_offload`, `enable_layerwise_offload`,
        `enable_distributed_layerwise_offload`, `pin_cpu_memory` and `dlo_*` are its older spellings, and
        `parallel_config` gives `dp_size` and `use_hsdp`. Raises :class:`ConfigError` with all problems;
        settings that contradict each other are among them.
        """
        source = "vLLM-Omni configuration"
        try:
            resolved = resolve(od_config)
        except ConfigError as error:
            raise ConfigError(error.problems, source=source) from error.__cause__
        return cls.from_mapping(resolved, source=source)

    def with_options(self, options: Any) -> OffloadConfig:
        """Return a copy with other `options`: a mapping, or an instance of an options class."""
        return attrs.evolve(self, options=options)

    def to_mapping(self) -> dict[str, Any]:
        """Return all fields in the types of JSON; :meth:`from_mapping` makes an equal configuration of it."""
        return unstructure(self)


def _check_component(component: object) -> None:
    if component not in COMPONENTS:
        known = ", ".join(COMPONENTS)
        raise ConfigError(f"{show(component)} is not a component; known: {known}{suggest(component, COMPONENTS)}")


def _encoder_kind(path: str, plan: Any) -> str | None:
    declared = getattr(plan, "encoder_component_types", None) or {}
    if path in declared:
        kind: str = declared[path]
        return kind
    name = path.rpartition(".")[2]
    kinds = ("text_encoder", "image_encoder")
    return next((kind for kind in kinds if name.startswith(kind) or name.endswith(kind)), None)


# --- Files --------------------------------------------------------------------------------------------------


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return the mapping that `source` stands for, unchecked, and its origin for errors.

    Which string is what, and what is raised, is said at :meth:`OffloadConfig.from_source`.
    """
    if isinstance(source, Mapping):
        return source, None
    if isinstance(source, os.PathLike):
        return _read_file(source)
    if not isinstance(source, str):
        message = f"{show(source)} is not a strategy's name, a mapping, a file or an OffloadConfig"
        raise ConfigError([Problem("", message, source)])
    text = str.__str__(source)
    if text.lstrip().startswith("{"):
        try:
            return _parse_json(text), "inline JSON"
        except _MalformedError as error:
            raise ConfigError(str(error), source="inline JSON") from error
    if text.lower().endswith((".toml", ".json")) or "/" in text or os.sep in text:
        return _read_file(text)
    return {"strategy": text}, None


def _read_file(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], str]:
    name = _printable(os.fspath(path))
    try:
        return _load(path), name
    except _MalformedError as error:
        raise ConfigFileError(str(error), source=name) from error


class _MalformedError(Exception):
    """Text or file that holds no table of settings; the message is one line without the file's name."""


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            raise _MalformedError("this is a directory, not a file")
        if not stat.S_ISREG(mode):
            raise _MalformedError("this is not a regular file")
        data = file.read_bytes()
    except FileNotFoundError:
        raise _MalformedError("there is no such file") from None
    except PermissionError:
        raise _MalformedError("there is no permission to read this file") from None
    except (OSError, ValueError) as error:
        raise _MalformedError(f"this file cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _MalformedError(f"this file is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None
    if not text.strip():
        raise _MalformedError("this file is empty")
    parse = {".toml": _parse_toml, ".json": _parse_json}.get(file.suffix.lower())
    if parse is None:
        raise _MalformedError("a configuration file ends in .toml or .json, which says how to read it")
    return parse(text)


def _parse_toml(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line, column = (found[1], found[2]) if found else (None, None)
        if line is None:
            lines = text.rstrip().splitlines() or [""]
            line, column = str(len(lines)), str(len(lines[-1]) + 1)
        what = message[: found.start()] if found else message
        raise _MalformedError(f"malformed TOML at line {line}, column {column}: {what}") from error
    except RecursionError:
        raise _MalformedError("malformed TOML: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise _MalformedError(f"malformed TOML: {error}") from error


def _parse_json(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _MalformedError(f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError:
        raise _MalformedError("malformed JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _MalformedError(f"malformed JSON: {error}") from error
    if not isinstance(value, dict):
        raise _MalformedError(f"the whole is not a table of settings but {show(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in table if keys.count(key) > 1)
        raise _MalformedError(f"malformed JSON: the key {twice!r} stands more than once in one object")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise _MalformedError(f"malformed JSON: {name} is not a value of JSON")
