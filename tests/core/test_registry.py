"""Plugins are found, judged and loaded one by one; whatever one of them does, the others stay usable."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata
import pytest

import sidestream
from sidestream.errors import IncompatiblePluginError, PluginError, UnknownStrategyError
from sidestream.hookspecs import ENTRY_POINT_GROUP, HOOKSPEC_VERSION
from sidestream.registry import StrategyInfo, find_strategies, load_strategy, observer_hooks

if TYPE_CHECKING:
    from tests.core.conftest import FakeSite, MakeSite


def listed(name: str) -> list[StrategyInfo]:
    return [info for info in find_strategies() if info.name == name]


def assert_others_usable(name: str = "well") -> None:
    """The healthy neighbour is listed without a problem and loads, and so does the built-in."""
    for other in (name, "none"):
        assert [info.problem for info in listed(other) if info.problem is None] == [None]
        assert load_strategy(other).strategy.name == other


IMPORT_FAILURES = {
    "missing dependency": ("import a_module_that_nobody_has", "ModuleNotFoundError"),
    "broken import": ("from json import no_such_name", "ImportError"),
    "syntax error": ("def broken(:", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "runtime error": ("raise RuntimeError('no licence\\nfor this machine')", "RuntimeError"),
    "library that does not load": ("raise OSError('libcuda.so.1: cannot open shared object')", "OSError"),
    "base exception": ("class Odd(BaseException): pass\nraise Odd", "Odd"),
}


@pytest.mark.parametrize("kind", IMPORT_FAILURES)
def test_a_plugin_that_fails_at_import_is_listed_with_its_reason(kind: str, site: FakeSite) -> None:
    """It takes nobody down, asking for it gives the cause, and once mended it works.

    simonw/llm#1351, conda/conda#12460, pytest-dev/pytest#704, pytest-dev/pluggy#8.
    """
    source, cause = IMPORT_FAILURES[kind]
    site.add_healthy("well-dist", "well", "well_plugin")
    site.add("ill-dist", {"ill": "ill_plugin"}, {"ill_plugin": source}, version="2.5")

    [info] = listed("ill")
    assert (info.distribution, info.version, info.contract_version) == ("ill-dist", "2.5", HOOKSPEC_VERSION)
    assert info.summary == ""
    assert info.problem is not None
    assert cause in info.problem
    assert "\n" not in info.problem
    assert_others_usable()
    for _ in range(2):
        with pytest.raises(PluginError) as raised:
            load_strategy("ill")
        error = raised.value
        assert not isinstance(error, IncompatiblePluginError)
        assert (error.distribution, error.version, error.entry_point) == ("ill-dist", "2.5", "ill")
        assert type(error.cause).__name__ == cause
        assert error.__cause__ is error.cause
        for word in ("'ill'", "ill-dist 2.5", "ill = ill_plugin", cause):
            assert word in str(error)

    site.add_healthy("ill-dist", "ill", "ill_plugin", version="2.5")
    assert load_strategy("ill").info.problem is None


@pytest.mark.parametrize("value", ["ill_plugin:nothing", "ill_plugin:a.b", "no_such_module", "no module!", ""])
def test_an_entry_point_that_leads_nowhere_is_listed_with_its_reason(value: str, site: FakeSite) -> None:
    """A missing attribute, a missing module, a value that is no reference: the plugin's fault alone."""
    site.add_healthy("well-dist", "well", "well_plugin")
    site.add("ill-dist", {"ill": value}, {"ill_plugin": "a = 1"})
    [info] = listed("ill")
    assert info.problem
    assert_others_usable()
    with pytest.raises(PluginError, match=r"ill-dist 1\.0") as raised:
        load_strategy("ill")
    assert isinstance(raised.value.cause, Exception)
    assert raised.value.__cause__ is raised.value.cause


def test_an_interrupt_while_a_plugin_is_imported_is_the_users(site: FakeSite) -> None:
    """KeyboardInterrupt is no fault of the plugin's and comes out of listing and loading."""
    site.add("slow-dist", {"slow": "slow_plugin"}, {"slow_plugin": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        load_strategy("slow")
    with pytest.raises(KeyboardInterrupt):
        find_strategies()


STRATEGY = 'sidestream.Strategy(name="ill", summary="", create=print)'


def hooks(body: str) -> str:
    return f"import sidestream\nfrom sidestream import hookimpl\n{body}"


def strategies_returning(value: str) -> str:
    return hooks(f"@hookimpl\ndef sidestream_strategies():\n    return {value}\n")


#: The plugin's source, what of the specification is quoted, and what of the plugin.
HOOK_FAILURES = {
    "extra argument": (
        strategies_returning(f"[{STRATEGY}]") + "@hookimpl\ndef sidestream_enabled(backend, pipeline, colour): pass\n",
        ["sidestream_enabled(backend, pipeline)", "sidestream_enabled(backend, pipeline, colour)", "colour"],
    ),
    "lost argument": (
        strategies_returning(f"[{STRATEGY}]") + "@hookimpl\ndef sidestream_disabled(backend, model): pass\n",
        ["sidestream_disabled(backend, pipeline)", "model"],
    ),
    "unknown hook": (
        strategies_returning(f"[{STRATEGY}]") + "@hookimpl\ndef sidestream_enabeld(backend): pass\n",
        ["sidestream_enabled(backend, pipeline)", "sidestream_enabeld"],
    ),
    "no hook at all": ("", ["sidestream_strategies()", "@sidestream.hookimpl"]),
    "no mark": (
        "def sidestream_strategies(): return []",
        ["sidestream_strategies()", "@sidestream.hookimpl"],
    ),
    "raises": (
        hooks("@hookimpl\ndef sidestream_strategies(): raise LookupError('no chip')"),
        ["LookupError: no chip"],
    ),
    "exits": (hooks("@hookimpl\ndef sidestream_strategies(): raise SystemExit"), ["SystemExit"]),
    "breaks off": (
        hooks(f"@hookimpl\ndef sidestream_strategies():\n    yield {STRATEGY}\n    raise LookupError('no chip')"),
        ["LookupError: no chip"],
    ),
    "returns none": (strategies_returning("None"), ["exactly one", "'ill'", "nothing"]),
    "returns one alone": (strategies_returning(STRATEGY), ["TypeError", "Strategy"]),
    "returns names": (strategies_returning("['ill']"), ["Strategy objects", "'ill'"]),
    "returns another name": (
        strategies_returning(f"[{STRATEGY}]").replace('"ill"', '"sick"'),
        ["'ill'", "'sick'"],
    ),
    "returns the name twice": (strategies_returning(f"[{STRATEGY}] * 2"), ["exactly one", "'ill', 'ill'"]),
    "name is no string": (strategies_returning(f"[{STRATEGY}]").replace('"ill"', "7"), ["7", "string"]),
    "create is no function": (strategies_returning(f"[{STRATEGY}]").replace("print", "8"), ["create", "8"]),
    "options are no attrs class": (
        strategies_returning(f"[{STRATEGY}]").replace("print", "print, options=dict"),
        ["options", "dict", "attrs"],
    ),
    "options of an unknown type": (
        strategies_returning(f"[{STRATEGY}]").replace("print", "print, options=Options")
        + "@sidestream.options_class\nclass Options:\n    size: complex = sidestream.option(1j, help='')\n",
        ["Options.size", "complex"],
    ),
    "unreadable": (
        "class Plugin:\n    def __dir__(self): raise ZeroDivisionError('no list')\nplugin = Plugin()",
        ["ZeroDivisionError: no list"],
    ),
}


@pytest.mark.parametrize("kind", HOOK_FAILURES)
def test_a_plugin_that_does_not_keep_the_contract_is_listed_with_its_reason(kind: str, site: FakeSite) -> None:
    """The reason quotes the contract and the plugin; nobody else is hurt, and the name is free afterwards.

    pytest-dev/pytest#14651, pytest-dev/pluggy#694.
    """
    source, words = HOOK_FAILURES[kind]
    value = "ill_plugin:plugin" if "plugin = " in source else "ill_plugin"
    site.add_healthy("well-dist", "well", "well_plugin")
    site.add("ill-dist", {"ill": value}, {"ill_plugin": source})

    [info] = listed("ill")
    assert info.problem is not None
    assert "\n" not in info.problem
    assert_others_usable()
    with pytest.raises(IncompatiblePluginError) as raised:
        load_strategy("ill")
    assert (raised.value.distribution, raised.value.entry_point) == ("ill-dist", "ill")
    assert raised.value.__cause__ is raised.value.cause
    for word in (*words, "ill-dist 1.0"):
        assert word in str(raised.value)
    assert info.problem in str(raised.value)

    site.add_healthy("ill-dist", "ill", "ill_plugin")
    assert load_strategy("ill").info.problem is None


def test_a_hook_may_take_fewer_arguments_than_it_is_offered(site: FakeSite) -> None:
    """So a later version of the contract may offer more without breaking anybody."""
    source = strategies_returning(f"[{STRATEGY}]") + (
        "seen = []\n@hookimpl\ndef sidestream_enabled(pipeline): seen.append(pipeline)\n"
    )
    site.add("frugal-dist", {"ill": "frugal_plugin"}, {"frugal_plugin": source})
    backend: Any = object()
    loaded = load_strategy("ill")
    loaded.hooks.enabled(backend, "a pipeline")
    loaded.hooks.disabled(backend, "a pipeline")
    assert sys.modules["frugal_plugin"].seen == ["a pipeline"]


def test_loading_by_name_imports_that_plugin_alone(site: FakeSite) -> None:
    """However many others are installed."""
    site.add_healthy("well-dist", "well", "well_plugin")
    site.add_healthy("other-dist", "other", "other_plugin")
    load_strategy("well")
    assert "well_plugin" in sys.modules
    assert "other_plugin" not in sys.modules


def test_one_plugin_module_may_offer_several_strategies(site: FakeSite) -> None:
    """Each entry point stands for the strategy of its name."""
    both = ", ".join(STRATEGY.replace('"ill"', f'"{name}"') for name in ("red", "blue"))
    site.add("two-dist", {"red": "two", "blue": "two"}, {"two": strategies_returning(f"[{both}]")})
    assert [load_strategy(name).strategy.name for name in ("red", "blue")] == ["red", "blue"]
    assert [info.problem for name in ("red", "blue") for info in listed(name)] == [None, None]


# --- Other versions of the contract -------------------------------------------------------------------------


@pytest.mark.parametrize(("contract", "advice"), [(0, "upgrade far-dist"), (99, "upgrade sidestream")])
def test_a_plugin_for_another_version_of_the_contract_is_listed_and_never_imported(
    contract: int, advice: str, site: FakeSite
) -> None:
    """The reason names both versions and what to upgrade. pytest-dev/pytest#14651."""
    site.add_healthy("well-dist", "well", "well_plugin")
    site.add("far-dist", {"far": "far_plugin"}, {"far_plugin": "raise SystemExit"}, contract=contract)
    [info] = listed("far")
    assert info.contract_version == contract
    assert info.problem is not None
    assert_others_usable()
    with pytest.raises(IncompatiblePluginError) as raised:
        load_strategy("far")
    assert raised.value.cause is None
    for word in (f"sidestream.backends.v{contract}", ENTRY_POINT_GROUP, advice):
        assert word in info.problem
        assert word in str(raised.value)
    assert "far_plugin" not in sys.modules


def test_a_distribution_may_serve_two_versions_of_the_contract(site: FakeSite) -> None:
    """It is listed once, without a problem, and its entry point for the other version is left alone."""
    info = site.add_healthy("both-dist", "both", "both_plugin")
    with (info / "entry_points.txt").open("a") as file:
        file.write("\n[sidestream.backends.v99]\nboth = no_such_module\n")
    [listing] = listed("both")
    assert (listing.contract_version, listing.problem) == (HOOKSPEC_VERSION, None)
    assert load_strategy("both").info == listing


def test_an_incompatible_plugin_does_not_take_a_name_from_a_compatible_one(site: FakeSite) -> None:
    """Both are listed, and the name stands for the one that works."""
    site.add("far-dist", {"well": "far_plugin"}, {"far_plugin": "raise SystemExit"}, contract=99)
    site.add_healthy("well-dist", "well", "well_plugin")
    assert [(info.distribution, info.problem is None) for info in listed("well")] == [
        ("far-dist", False),
        ("well-dist", True),
    ]
    assert load_strategy("well").info.distribution == "well-dist"


# --- The same thing twice, and remains ----------------------------------------------------------------------


def test_one_distribution_met_twice_counts_once(
    make_site: MakeSite, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two paths, on one path twice, or as an egg-info beside its dist-info: listed once and no warning.

    python/importlib_metadata#410, #481, #413, pypa/setuptools#3649, #4170.
    """
    behind = make_site("behind")
    behind.add_healthy("twin-dist", "twin", "twin_plugin", version="1.0")
    front = make_site("front")
    front.add_healthy("Twin.Dist", "twin", "twin_plugin", version="2.0")
    egg = front.folder / "twin_dist.egg-info"
    shutil.copytree(behind.folder / "twin_dist-1.0.dist-info", egg)
    (egg / "METADATA").rename(egg / "PKG-INFO")
    monkeypatch.syspath_prepend(str(front.folder))
    [info] = listed("twin")
    assert info.problem is None
    assert load_strategy("twin").info == info
    assert not recwarn.list


def test_of_two_versions_on_the_path_the_first_counts_as_it_does_for_imports(make_site: MakeSite) -> None:
    """What is listed is what is imported."""
    make_site("behind").add_healthy("twin-dist", "twin", "twin_plugin", version="1.0")
    front = make_site("front")
    front.add_healthy("twin-dist", "twin", "twin_plugin", version="2.0")
    assert [info.version for info in listed("twin")] == ["2.0"]
    load_strategy("twin")
    assert Path(str(sys.modules["twin_plugin"].__file__)).parent == front.folder


def test_an_entry_point_declared_twice_counts_once(site: FakeSite) -> None:
    """Builders have been seen to write an entry twice."""
    info = site.add_healthy("stutter-dist", "stutter", "stutter_plugin")
    with (info / "entry_points.txt").open("a") as file:
        file.write("stutter = stutter_plugin\n")
    assert [listing.problem for listing in listed("stutter")] == [None]


def remains_empty(info: Path) -> None:
    info.mkdir()


def remains_without_metadata(info: Path) -> None:
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nghost = ghost_plugin\n")


def remains_without_name(info: Path) -> None:
    remains_without_metadata(info)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 1\n")


def remains_with_empty_metadata(info: Path) -> None:
    remains_without_metadata(info)
    (info / "METADATA").write_text("")


def remains_not_utf8(info: Path) -> None:
    remains_without_metadata(info)
    (info / "METADATA").write_bytes(b"Name: ghost-dist\nVersion: 1\nAuthor: \xff\xfe\n")


def remains_with_a_folder(info: Path) -> None:
    remains_without_metadata(info)
    (info / "METADATA").mkdir()


def remains_with_unreadable_entry_points(info: Path) -> None:
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost-dist\nVersion: 1\n")
    (info / "entry_points.txt").write_bytes(b"[sidestream.backends.v1]\nghost = \xff\xfe\n")


def remains_with_malformed_entry_points(info: Path) -> None:
    remains_with_unreadable_entry_points(info)
    (info / "entry_points.txt").write_text("[sidestream.backends.v1]\nno equals sign here\n")


REMAINS = [
    remains_empty,
    remains_without_metadata,
    remains_without_name,
    remains_with_empty_metadata,
    remains_not_utf8,
    remains_with_a_folder,
    remains_with_unreadable_entry_points,
    remains_with_malformed_entry_points,
]


@pytest.mark.parametrize("leave", REMAINS, ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("same_folder", [True, False])
def test_remains_of_a_distribution_do_not_hide_the_real_one(leave: Any, same_folder: bool, make_site: MakeSite) -> None:
    """The full one behind them is found, and nothing crashes. python/importlib_metadata#457, #534, #536."""
    behind = make_site("behind")
    front = behind if same_folder else make_site("front")
    leave(front.folder / "ghost_dist-1.dist-info")
    behind.add_healthy("ghost-dist", "ghost", "ghost_plugin", version="2")
    behind.add_healthy("well-dist", "well", "well_plugin")
    assert [(info.version, info.problem) for info in listed("ghost")] == [("2", None)]
    assert load_strategy("ghost").info.version == "2"
    assert_others_usable()


@pytest.mark.parametrize("leave", REMAINS, ids=lambda leave: leave.__name__)
def test_remains_alone_are_nothing(leave: Any, site: FakeSite) -> None:
    """They offer no strategy, and asking for it says that it is not installed."""
    leave(site.folder / "ghost_dist-1.dist-info")
    site.add_healthy("well-dist", "well", "well_plugin")
    assert listed("ghost") == []
    with pytest.raises(UnknownStrategyError):
        load_strategy("ghost")
    assert_others_usable()


# --- Names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("one-dist", "two-dist"), ("two-dist", "one-dist")])
def test_two_distributions_with_one_name_are_a_conflict_that_names_both(
    order: tuple[str, str], make_site: MakeSite
) -> None:
    """Neither wins, whichever comes first on the path, and neither is imported.

    PyCQA/flake8#1090 for winners that depend on the order of files.
    """
    for number, distribution in enumerate(order):
        site = make_site(f"site{number}")
        name = {"one-dist": "my_way", "two-dist": "My-Way"}[distribution]
        site.add(distribution, {name: f"plugin_{number}"}, {f"plugin_{number}": "raise SystemExit"})
    site.add_healthy("well-dist", "well", "well_plugin")
    for info in [*listed("my_way"), *listed("My-Way")]:
        assert info.problem is not None
        assert "one-dist 1.0" in info.problem
        assert "two-dist 1.0" in info.problem
    assert_others_usable()
    with pytest.raises(PluginError, match=r"one-dist 1\.0.*two-dist 1\.0|two-dist 1\.0.*one-dist 1\.0"):
        load_strategy("my_way")
    assert "plugin_0" not in sys.modules

    shutil.rmtree(site.folder / f"{order[1].replace('-', '_')}-1.0.dist-info")
    remaining = {"one-dist": "my_way", "two-dist": "My-Way"}[order[0]]
    with pytest.raises(PluginError, match="SystemExit"):
        load_strategy(remaining)


@pytest.mark.parametrize("asked", ["my_way.2", "my-way-2", "My.Way_2", "MYWAY2", "my_way2"])
def test_spellings_of_a_name_are_one_name(asked: str, site: FakeSite) -> None:
    """Case, dashes, underscores and dots do not count."""
    site.add_healthy("way-dist", "my_way.2", "way_plugin")
    assert load_strategy(asked).info.name == "my_way.2"
    assert load_strategy(asked).strategy.name == "my_way.2"


@pytest.mark.parametrize("name", ["none", "NONE", "model_level", "Model-Level", "layerwise", "layer.wise"])
def test_a_stranger_cannot_take_a_reserved_name(name: str, site: FakeSite) -> None:
    """In whatever spelling: it is listed with the reason, never imported, and never in the way."""
    site.add("strange-dist", {name: "strange_plugin"}, {"strange_plugin": "raise SystemExit"})
    site.add_healthy("well-dist", "well", "well_plugin")
    [info] = [info for info in listed(name) if info.distribution == "strange-dist"]
    assert info.problem is not None
    assert "reserved" in info.problem
    assert "pip install sidestream" in info.problem
    assert_others_usable()
    assert "strange_plugin" not in sys.modules


def test_a_reserved_name_whose_owner_is_not_installed_is_not_the_strangers_either(site: FakeSite) -> None:
    """Asking for it says who claims it and what to install instead; the owner, once installed, has it."""
    owner = "sidestream-distributed-dlo"
    site.add("strange-dist", {"distributed_layer_wise": "strange"}, {"strange": "raise SystemExit"})
    if not any(info.distribution == owner for info in find_strategies()):
        with pytest.raises(PluginError, match=f"strange-dist 1.0.*pip install {owner}"):
            load_strategy("distributed_layer_wise")
    site.add_healthy("Sidestream_Distributed.DLO", "distributed_layer_wise", "owner_plugin")
    assert load_strategy("distributed-layer-wise").info.distribution == "Sidestream_Distributed.DLO"


@pytest.fixture
def only_site(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """A site of which nothing outside is installed."""
    real = importlib_metadata.distributions
    monkeypatch.setattr(importlib_metadata, "distributions", lambda: real(path=[str(site.folder)]))
    return site


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("wel", ["'wel'", "did you mean 'well'?", "installed: well (well-dist 1.0)"]),
        ("quantum", ["'quantum'", "installed: well (well-dist 1.0)"]),
        ("layer_wise", ["'layer_wise'", "pip install sidestream-layerwise", "well (well-dist 1.0)"]),
        ("Layer-Wise", ["'Layer-Wise'", "pip install sidestream-layerwise"]),
        ("model_lvel", ["did you mean 'model_level'?", "pip install sidestream-model-cpu"]),
        ("none", ["pip install sidestream"]),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(asked: str, words: list[str], only_site: FakeSite) -> None:
    """What was asked, what is near, what is installed, and what to install."""
    only_site.add_healthy("well-dist", "well", "well_plugin")
    with pytest.raises(UnknownStrategyError) as raised:
        load_strategy(asked)
    assert isinstance(raised.value, LookupError)
    for word in words:
        assert word in str(raised.value)
    assert ("did you mean" in str(raised.value)) == any("did you mean" in word for word in words)
    assert "well_plugin" not in sys.modules


def test_an_unknown_name_where_nothing_is_installed(only_site: FakeSite) -> None:
    """The text says so."""
    assert find_strategies() == ()
    with pytest.raises(UnknownStrategyError, match="installed: nothing"):
        load_strategy("well")


def test_the_listing_is_sorted_by_name(only_site: FakeSite) -> None:
    """Whatever the order on the disk."""
    for name in ("pear", "apple", "fig"):
        only_site.add_healthy(f"{name}-dist", name, f"{name}_plugin")
    assert [info.name for info in find_strategies()] == ["apple", "fig", "pear"]


def test_the_listing_says_where_a_strategy_comes_from(site: FakeSite) -> None:
    """Name, summary, distribution, version, version of the contract, and that nothing is wrong."""
    site.add_healthy("well-dist", "well", "well_plugin", version="3.1")
    assert listed("well") == [
        StrategyInfo(
            name="well",
            summary="does what well does",
            distribution="well-dist",
            version="3.1",
            contract_version=HOOKSPEC_VERSION,
        )
    ]


# --- Observers ----------------------------------------------------------------------------------------------


class Watcher:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    @sidestream.hookimpl
    def sidestream_enabled(self, backend: Any, pipeline: Any) -> None:
        self.heard.append(("enabled", pipeline))


def test_an_observer_hears_what_it_has_hooks_for() -> None:
    """The other events pass it by."""
    watcher, backend = Watcher(), None
    life = observer_hooks(watcher)
    life.enabled(backend, 1)  # type: ignore[arg-type]
    life.disabled(backend, 1)  # type: ignore[arg-type]
    assert watcher.heard == [("enabled", 1)]


def test_a_module_can_observe() -> None:
    """So can anything with marked functions."""
    module, heard = types.ModuleType("dashboard"), []

    @sidestream.hookimpl
    def sidestream_disabled(pipeline: Any) -> None:
        heard.append(pipeline)

    module.sidestream_disabled = sidestream_disabled  # type: ignore[attr-defined]
    observer_hooks(module).disabled(None, 2)  # type: ignore[arg-type]
    assert heard == [2]


class WrongArgument:
    @sidestream.hookimpl
    def sidestream_enabled(self, backend: Any, colour: str) -> None: ...


class WrongName:
    @sidestream.hookimpl
    def sidestream_enabeld(self, backend: Any) -> None: ...


@pytest.mark.parametrize(
    ("observer", "word"),
    [
        (WrongArgument(), "colour"),
        (WrongName(), "sidestream_enabeld"),
        (object(), "@sidestream.hookimpl"),
        (print, "@sidestream.hookimpl"),
        (None, "@sidestream.hookimpl"),
        (Watcher, r"Watcher\(\)"),
    ],
    ids=["argument", "name", "object", "function", "none", "class"],
)
def test_what_cannot_observe_is_refused(observer: object, word: str) -> None:
    """A hook that would never be called, or not with what it wants, is an error at once."""
    with pytest.raises(IncompatiblePluginError, match=word):
        observer_hooks(observer)
