"""From the name of a strategy to the strategy: installed distributions, their entry points, their hooks.

The only room that knows importlib-metadata and pluggy's manager. Nothing is kept between calls: a plugin that
failed leaves no trace here, and one that was repaired or installed meanwhile is found at the next call.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import importlib_metadata
import pluggy

from sidestream import hookspecs
from sidestream.backend import OffloadBackend
from sidestream.errors import IncompatiblePluginError, PluginError, UnknownStrategyError
from sidestream.hookspecs import ENTRY_POINT_GROUP, HOOKSPEC_VERSION, PROJECT_NAME, Strategy
from sidestream.structure import describe

logger = logging.getLogger("sidestream")

#: The project's own strategies, and the only distribution that may offer each.
RESERVED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "none": "sidestream",
        "model_level": "sidestream-model-cpu",
        "layer_wise": "sidestream-layerwise",
        "distributed_layer_wise": "sidestream-distributed-dlo",
    }
)

_VERSIONED_GROUP = re.compile(r"sidestream\.backends\.v(\d+)")


@attrs.frozen(kw_only=True)
class StrategyInfo:
    """One strategy of one installed distribution, as listed.

    `contract_version` is the version of the plugin contract that it was written for. `problem` is None if it
    can be used, else the reason in one line; `summary` is then empty.
    """

    name: str
    summary: str
    distribution: str
    version: str
    contract_version: int
    problem: str | None = None


@attrs.frozen(kw_only=True)
class LifeHooks:
    """What one plugin or observer does when offloading of a pipeline starts or ends; without a hook, nothing.

    Whatever an implementation raises comes out: the caller decides.
    """

    owner: str
    relay: pluggy.HookRelay = attrs.field(repr=False)

    def enabled(self, backend: OffloadBackend, pipeline: Any) -> None:
        """Call the owner's `sidestream_enabled`."""
        self.relay.sidestream_enabled(backend=backend, pipeline=pipeline)

    def disabled(self, backend: OffloadBackend, pipeline: Any) -> None:
        """Call the owner's `sidestream_disabled`."""
        self.relay.sidestream_disabled(backend=backend, pipeline=pipeline)


@attrs.frozen(kw_only=True)
class LoadedStrategy:
    """A strategy ready for use, where it comes from, and the life hooks of its own plugin."""

    strategy: Strategy
    info: StrategyInfo
    hooks: LifeHooks


def find_strategies() -> tuple[StrategyInfo, ...]:
    """Return the strategies of all installed distributions, sorted by name; broken ones with their `problem`.

    Imports each plugin written for this version of the contract, one by one: nothing else shows whether it
    works. Whatever a plugin does wrong ends up in its `problem`; only KeyboardInterrupt comes out.
    """
    found = []
    for offer in _offers():
        try:
            found.append(_load(offer).info)
        except _UnusableError as unusable:
            found.append(_info(offer, problem=unusable.reason))
    return tuple(sorted(found, key=lambda info: (info.name, info.distribution, info.contract_version)))


def load_strategy(name: str) -> LoadedStrategy:
    """Import the one plugin that offers the strategy `name`, and no other.

    Names that differ only in case, dashes, underscores and dots are one name. Raises `UnknownStrategyError`
    if no distribution offers it, `IncompatiblePluginError` if it is written for another contract or does not
    keep this one, and `PluginError` if it cannot be imported or may not have the name.
    """
    offers = _offers()
    candidates = [offer for offer in offers if offer.key == _key(name)]
    if not candidates:
        raise UnknownStrategyError(_explain_unknown(name, offers))
    # Whoever has a right to the name comes first; failing that, one that was written for this contract.
    best = min(candidates, key=lambda offer: (offer.problem is not None, not offer.is_current))
    try:
        return _load(best)
    except _UnusableError as unusable:
        raise unusable.error_class(
            f"strategy {best.name!r} of {best.source} (entry point {best.declaration}) cannot be used: "
            f"{unusable.reason}",
            distribution=best.distribution,
            version=best.version,
            entry_point=best.name,
            cause=unusable.__cause__,
        ) from unusable.__cause__


def observer_hooks(observer: object) -> LifeHooks:
    """Return the life hooks of a user's observer: an object or module with functions marked by `hookimpl`.

    Raises `IncompatiblePluginError` if they do not fit the hook specifications, or if there are none.
    """
    try:
        if isinstance(observer, type):
            raise _UnusableError(f"it is a class; give an instance, {observer.__name__}()")
        relay = _register(observer)
        if not relay.sidestream_enabled.get_hookimpls() and not relay.sidestream_disabled.get_hookimpls():
            raise _UnusableError(f"nothing in it is marked with @sidestream.hookimpl; {_contract(relay)}")
    except _UnusableError as unusable:
        raise IncompatiblePluginError(
            f"{observer!r} cannot observe: {unusable.reason}", cause=unusable.__cause__
        ) from unusable.__cause__
    return LifeHooks(owner=repr(observer), relay=relay)


def core_version() -> str:
    """Return the version of the installed distribution `sidestream`; `unknown` if it was never installed."""
    versions = (dist.version for dist in _distributions() if _canonical(dist.name) == PROJECT_NAME)
    return next(versions, "unknown")


class _UnusableError(Exception):
    """A plugin cannot be used; `__cause__` is what it raised itself, if it did."""

    def __init__(self, reason: str, error_class: type[PluginError] = IncompatiblePluginError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error_class = error_class


# --- What is installed: nothing is imported here ------------------------------------------------------------


class _Readable(Protocol):
    def read_text(self, filename: str, /) -> str | None: ...


@attrs.frozen(kw_only=True)
class _Distribution:
    name: str
    version: str
    entry_points: tuple[importlib_metadata.EntryPoint, ...]


@attrs.frozen(kw_only=True)
class _Offer:
    """One entry point of one distribution; `problem` is what its name and version alone say against it."""

    entry_point: importlib_metadata.EntryPoint
    distribution: str
    version: str
    contract_version: int
    problem: str | None = None
    error_class: type[PluginError] = PluginError

    @property
    def name(self) -> str:
        return self.entry_point.name

    @property
    def key(self) -> str:
        return _key(self.name)

    @property
    def is_current(self) -> bool:
        return self.contract_version == HOOKSPEC_VERSION

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def declaration(self) -> str:
        return f"{self.entry_point.name} = {self.entry_point.value}"


def _key(name: str) -> str:
    """Return what all spellings of a strategy's name have in common."""
    return re.sub(r"[-_.]", "", name).lower()


def _canonical(distribution: str) -> str:
    """Return the one spelling of a distribution's name that package indexes use."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _distributions() -> Iterator[_Distribution]:
    """Yield every installed distribution once; the first on `sys.path` wins, as it does for imports.

    One may be met again on another path, or as an egg-info beside its dist-info. What an uninstallation left
    behind has no metadata and must not hide the real one.
    """
    seen = set()
    for dist in importlib_metadata.distributions():
        try:
            name, version = _name_and_version(dist)
            if not name or _canonical(name) in seen:
                continue
            entry_points = tuple(dist.entry_points)
        except Exception as error:
            # Anything may lie about in site-packages; none of it may stop us.
            logger.debug("skipped a distribution whose metadata cannot be read: %r", error)
            continue
        seen.add(_canonical(name))
        yield _Distribution(name=name, version=version or "unknown", entry_points=entry_points)


def _name_and_version(dist: _Readable) -> tuple[str | None, str | None]:
    # Parsing everybody's whole description, as `dist.metadata` does, takes ten times as long.
    files = (dist.read_text(file) for file in ("METADATA", "PKG-INFO", ""))
    head = next(filter(None, files), "").partition("\n\n")[0]
    name, version = (re.search(rf"^{field}: *(\S+)", head, re.MULTILINE) for field in ("Name", "Version"))
    return name and name[1], version and version[1]


def _offers() -> list[_Offer]:
    """Return all offers, for whatever version of the contract, each with its `problem`."""
    offers = {}
    for dist in _distributions():
        for entry_point in dist.entry_points:
            group = _VERSIONED_GROUP.fullmatch(entry_point.group)
            if group is None:
                continue
            offer = _Offer(
                entry_point=entry_point,
                distribution=dist.name,
                version=dist.version,
                contract_version=int(group[1]),
            )
            offers[dist.name, offer.contract_version, offer.declaration] = offer
    current = [offer for offer in offers.values() if offer.is_current]
    # A distribution that serves several versions of the core offers its strategy once all the same.
    served = {(offer.distribution, offer.key) for offer in current}
    others = [o for o in offers.values() if not o.is_current and (o.distribution, o.key) not in served]
    return [_judge(offer, current) for offer in current] + [_mark_incompatible(offer) for offer in others]


def _judge(offer: _Offer, current: Sequence[_Offer]) -> _Offer:
    """Say what speaks against an offer's name: it is reserved, or another distribution has it too."""
    if reserved := _usurped(offer):
        owner = RESERVED_NAMES[reserved]
        return attrs.evolve(
            offer,
            problem=f"the name {reserved!r} is reserved for {owner}; pip install {owner} instead of this one",
        )
    rivals = [rival for rival in current if rival.key == offer.key and not _usurped(rival)]
    if len(rivals) > 1:
        all_of_them = " and ".join(f"{rival.source} ({rival.declaration})" for rival in rivals)
        return attrs.evolve(offer, problem=f"the name is taken by {all_of_them}; uninstall all but one")
    return offer


def _usurped(offer: _Offer) -> str | None:
    """Return the reserved name that an offer has without right."""
    reserved = _reserved(offer.name)
    return reserved if reserved and _canonical(offer.distribution) != RESERVED_NAMES[reserved] else None


def _reserved(name: str) -> str | None:
    return next((reserved for reserved in RESERVED_NAMES if _key(reserved) == _key(name)), None)


def _mark_incompatible(offer: _Offer) -> _Offer:
    outdated = "sidestream" if offer.contract_version > HOOKSPEC_VERSION else offer.distribution
    reason = (
        f"it is written for version {offer.contract_version} of the contract ({offer.entry_point.group}), "
        f"the installed core has version {HOOKSPEC_VERSION} ({ENTRY_POINT_GROUP}); upgrade {outdated}"
    )
    return attrs.evolve(offer, problem=reason, error_class=IncompatiblePluginError)


def _explain_unknown(name: str, offers: Sequence[_Offer]) -> str:
    installed = {offer.key: offer for offer in offers if offer.problem is None}
    known = {_key(reserved): reserved for reserved in RESERVED_NAMES}
    known |= {key: offer.name for key, offer in installed.items()}
    text = f"strategy {name!r} is not installed"
    meant = _reserved(name)
    if meant is None:
        near = difflib.get_close_matches(_key(name), known, n=1, cutoff=0.7)
        meant = known[near[0]] if near else None
        text += f"; did you mean {meant!r}?" if meant else ""
    if meant is not None and meant in RESERVED_NAMES and _key(meant) not in installed:
        text += f" (for {meant!r}: pip install {RESERVED_NAMES[meant]})"
    listed = ", ".join(sorted(f"{offer.name} ({offer.source})" for offer in installed.values()))
    return f"{text} [installed: {listed or 'nothing'}]"


# --- Loading: one plugin, by itself -------------------------------------------------------------------------


def _load(offer: _Offer) -> LoadedStrategy:
    """Import the plugin of an offer and check it; raises `_UnusableError` for whatever is wrong with it."""
    if offer.problem is not None:
        raise _UnusableError(offer.problem, offer.error_class)
    try:
        plugin = offer.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that calls sys.exit() must not end the program either
        raise _UnusableError(f"importing {offer.entry_point.value} failed: {_describe(error)}", PluginError) from error
    relay = _register(plugin)
    strategy = _pick(relay, offer.name)
    return LoadedStrategy(
        strategy=strategy,
        info=_info(offer, summary=strategy.summary),
        hooks=LifeHooks(owner=offer.source, relay=relay),
    )


def _register(plugin: object) -> pluggy.HookRelay:
    """Hold a plugin's hooks against the specifications, in a manager that goes away with a failure."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    contract = _contract(manager.hook)
    try:
        manager.register(plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _UnusableError(f"its hooks do not fit: {_one_line(str(error))}; {contract}") from error
    except Exception as error:  # pluggy reads every attribute of the plugin, and reading one may fail
        raise _UnusableError(f"looking for its hooks failed: {_describe(error)}") from error
    return manager.hook


def _pick(relay: pluggy.HookRelay, name: str) -> Strategy:
    """Ask a plugin for its strategies and return the one that its entry point promises."""
    if not relay.sidestream_strategies.get_hookimpls():
        raise _UnusableError(f"it has no sidestream_strategies marked with @sidestream.hookimpl; {_contract(relay)}")
    try:
        offered = [strategy for result in relay.sidestream_strategies() for strategy in result]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _UnusableError(f"its sidestream_strategies failed: {_describe(error)}") from error
    faults = [fault for strategy in offered for fault in _faults(strategy)]
    if faults:
        raise _UnusableError(f"its sidestream_strategies must return Strategy objects: {'; '.join(faults)}")
    named: list[Strategy] = [strategy for strategy in offered if strategy.name == name]
    if len(named) != 1:
        names = ", ".join(repr(strategy.name) for strategy in offered) or "nothing"
        raise _UnusableError(
            f"its sidestream_strategies must return exactly one strategy of the entry point's name {name!r} "
            f"and returned {names}"
        )
    return named[0]


def _faults(strategy: object) -> Iterator[str]:
    if not isinstance(strategy, Strategy):
        yield f"one is {strategy!r}"
        return
    if not isinstance(strategy.name, str) or not isinstance(strategy.summary, str):
        yield f"name and summary of {strategy.name!r} are not both strings"
    if not callable(strategy.create):
        yield f"create of {strategy.name!r} cannot be called: {strategy.create!r}"
    options: object = strategy.options
    if options is None:
        return
    if not (isinstance(options, type) and attrs.has(options)):
        yield f"options of {strategy.name!r} is not an attrs class: {options!r}"
        return
    try:
        describe(options)
    except Exception as error:  # a type that cannot be resolved, or not be checked
        yield f"options of {strategy.name!r} cannot be used: {_describe(error)}"


def _contract(relay: pluggy.HookRelay) -> str:
    specs = [caller.spec for caller in vars(relay).values() if caller.spec is not None]
    offered = ", ".join(f"{spec.name}({', '.join(spec.argnames)})" for spec in specs)
    return f"version {HOOKSPEC_VERSION} of the contract offers {offered}"


def _info(offer: _Offer, *, summary: str = "", problem: str | None = None) -> StrategyInfo:
    return StrategyInfo(
        name=offer.name,
        summary=summary,
        distribution=offer.distribution,
        version=offer.version,
        contract_version=offer.contract_version,
        problem=problem,
    )


def _describe(error: BaseException) -> str:
    return _one_line(f"{type(error).__name__}: {error}").rstrip(": ")


def _one_line(text: str) -> str:
    return " ".join(text.split())
