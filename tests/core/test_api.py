"""From what a user writes to a backend at work, and back: `enable_offload`, `offload`, `strategies`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import sidestream
from sidestream.api import resolve_config
from sidestream.config import OffloadConfig
from sidestream.errors import (
    ConfigError,
    ConfigFileError,
    IncompatiblePluginError,
    PluginError,
    UnknownStrategyError,
    UnsupportedModelError,
)
from sidestream.registry import load_strategy

if TYPE_CHECKING:
    from tests.core.conftest import FakeSite

#: Offloads a dict by setting `where`; its hooks and its `create` leave notes, and it fails as it is told to.
TRAY_PLUGIN = """
    import sidestream

    notes, created = [], []

    @sidestream.options_class
    class Options:
        slots: int = sidestream.option(2, minimum=1, maximum=8, help="buffers")
        eager: bool = sidestream.option(False, help="copy early")

    class Backend(sidestream.OffloadBackend):
        disable_failures = 0

        def _enable(self, pipeline):
            self.target = pipeline
            pipeline["where"] = "host"
            if pipeline.get("broken"):
                raise sidestream.UnsupportedModelError("the pipeline is broken")

        def _disable(self):
            if self.disable_failures:
                self.disable_failures -= 1
                raise RuntimeError("no memory")
            self.target["where"] = "device"

        def _report(self):
            return sidestream.OffloadReport(strategy="tray", device=str(self.device))

    def create(config, device):
        created.append((config, device))
        return Backend(config=config, device=device)

    @sidestream.hookimpl
    def sidestream_strategies():
        return [sidestream.Strategy(name="tray", summary="trays", options=Options, create=create)]

    @sidestream.hookimpl
    def sidestream_enabled(backend):
        notes.append("plugin: enabled")

    @sidestream.hookimpl
    def sidestream_disabled(backend):
        notes.append("plugin: disabled")
"""


@pytest.fixture
def tray(site: FakeSite) -> Any:
    """The plugin of the strategy `tray`: a module."""
    site.add("tray-dist", {"tray": "tray_plugin"}, {"tray_plugin": TRAY_PLUGIN}, version="0.3")
    load_strategy("tray")
    return sys.modules["tray_plugin"]


@pytest.fixture
def pipe() -> dict[str, Any]:
    """A pipeline that is on the device."""
    return {"where": "device"}


def paths(error: ConfigError) -> list[str]:
    return [problem.path for problem in error.problems]


# --- What a configuration may be written as -----------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


SOURCES: dict[str, Callable[[Path], Any]] = {
    "mapping": lambda _: {"strategy": "tray", "options": {"slots": 3}},
    "configuration": lambda _: OffloadConfig("tray", options={"slots": 3}),
    "inline JSON": lambda _: '{"strategy": "tray", "options": {"slots": 3}}',
    "TOML": lambda tmp: write(tmp, "config.toml", 'strategy = "tray"\n[options]\nslots = 3\n'),
    "name of a JSON file": lambda tmp: str(write(tmp, "config.json", '{"strategy": "Tray", "options": {"slots": 3}}')),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_configuration_may_be_written_in_many_ways(
    kind: str, tray: Any, pipe: dict[str, Any], tmp_path: Path
) -> None:
    """All come out as the same configuration, with the options as an instance of the strategy's class."""
    backend = sidestream.enable_offload(pipe, SOURCES[kind](tmp_path))
    assert backend.enabled
    assert pipe["where"] == "host"
    assert backend.config == OffloadConfig("tray", options=tray.Options(slots=3))
    backend.disable()
    assert pipe["where"] == "device"


def test_a_name_alone_takes_all_defaults_and_any_spelling(tray: Any) -> None:
    """The configuration that comes out has the strategy's own spelling."""
    config, loaded = resolve_config("T-Ray")
    assert config.strategy == loaded.info.name == "tray"
    assert config.options == tray.Options()


def test_options_that_are_made_already_are_taken_as_they_are(tray: Any) -> None:
    """An instance of the strategy's class needs no second check; one of another class is an error."""
    options = tray.Options(slots=5)
    config, _ = resolve_config(OffloadConfig("tray", options=options))
    assert config.options is options
    again, _ = resolve_config(config)
    assert again == config
    stranger = sidestream.ComponentReport(name="", kind="", bytes=0, streamed_bytes=0, resident_bytes=0)
    with pytest.raises(ConfigError) as raised:
        resolve_config(OffloadConfig("tray", options=stranger))
    assert paths(raised.value) == ["options"]


# --- What is wrong with one ---------------------------------------------------------------------------------


def test_all_that_is_wrong_comes_in_one_error(tray: Any, pipe: dict[str, Any], tmp_path: Path) -> None:
    """Fields and options alike, each with its path, and the origin once; the pipeline is not touched."""
    wrong = {
        "strategy": "tray",
        "dp_size": 0,
        "pin_cpu_memry": True,
        "options": {"slots": 9, "eager": 1, "x": 2},
    }
    file = write(tmp_path, "wrong.json", json.dumps(wrong))
    for source, origin in ((wrong, None), (str(file), str(file)), (json.dumps(wrong), "inline JSON")):
        with pytest.raises(ConfigError) as raised:
            sidestream.enable_offload(pipe, source)
        assert not isinstance(raised.value, ConfigFileError)
        assert sorted(paths(raised.value)) == [
            "dp_size",
            "options.eager",
            "options.slots",
            "options.x",
            "pin_cpu_memry",
        ]
        assert raised.value.source == origin
    assert pipe == {"where": "device"}
    assert tray.created == []


def test_wrong_options_alone_name_the_file_too(tray: Any, tmp_path: Path) -> None:
    """The origin is part of the text whichever check finds the fault."""
    file = write(tmp_path, "wrong.toml", 'strategy = "tray"\noptions.slots = 9\n')
    with pytest.raises(ConfigError, match=r"wrong\.toml: options\.slots: 9 is out of bounds"):
        resolve_config(file)


def test_an_unknown_strategy_among_wrong_fields_is_one_problem_of_several() -> None:
    """Alone it is an `UnknownStrategyError`."""
    with pytest.raises(ConfigError) as raised:
        resolve_config({"strategy": "nobody_has_this", "dp_size": 0})
    assert paths(raised.value) == ["strategy", "dp_size"]
    assert "nobody_has_this" in raised.value.problems[0].message
    with pytest.raises(UnknownStrategyError, match="nobody_has_this"):
        resolve_config({"strategy": "nobody_has_this", "dp_size": 1})


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"strategy": 5},
        {"strategy": ""},
        "",
        {"strategy": None, "options": {"slots": 9}},
        7,
        None,
        b"tray",
    ],
    ids=repr,
)
def test_without_the_name_of_a_strategy_there_is_no_configuration(source: Any) -> None:
    """The error says what was given."""
    with pytest.raises(ConfigError):
        resolve_config(source)


@pytest.mark.parametrize("options", [5, "slots=3", [("slots", 3)], None], ids=repr)
def test_options_that_are_no_table_are_one_problem(options: Any, tray: Any) -> None:
    """It is reported once."""
    with pytest.raises(ConfigError) as raised:
        resolve_config({"strategy": "tray", "options": options})
    assert paths(raised.value) == ["options"]


def test_a_file_that_is_not_there_is_said_to_be_missing() -> None:
    """As an error of its own class, so that a caller can tell it from wrong values."""
    with pytest.raises(ConfigFileError, match=r"nowhere\.toml: there is no such file"):
        sidestream.enable_offload({}, "nowhere.toml")


def test_options_for_a_strategy_that_takes_none_are_errors() -> None:
    """Each by its name: nothing is swallowed."""
    with pytest.raises(ConfigError) as raised:
        resolve_config({"strategy": "none", "options": {"slots": 2, "eager": True}})
    assert paths(raised.value) == ["options.slots", "options.eager"]
    assert "takes no options" in str(raised.value)
    with pytest.raises(ConfigError):
        resolve_config(OffloadConfig("none", options={"slots": 2}))
    assert resolve_config({"strategy": "none", "options": {}})[0].options == {}


# --- Enabling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipe", [None, "model.safetensors", b"", Path("model"), 3, dict], ids=repr)
def test_what_can_be_no_pipeline_is_refused_whichever_the_strategy(pipe: Any) -> None:
    """With a text that says what to give instead."""
    with pytest.raises(UnsupportedModelError, match="no pipeline"):
        sidestream.enable_offload(pipe, "none")
    with pytest.raises(UnsupportedModelError, match="no pipeline"), sidestream.offload(pipe, "none"):
        pytest.fail("the block must not be entered")


def test_swapped_arguments_are_told_from_a_wrong_pipeline() -> None:
    """The pipeline comes first."""
    with pytest.raises(UnsupportedModelError, match="first"):
        sidestream.enable_offload(OffloadConfig("none"), "none")


@pytest.mark.parametrize("device", [None, "cuda:1", object()])
def test_the_device_reaches_the_strategy_as_it_was_given(device: Any, tray: Any, pipe: dict[str, Any]) -> None:
    """Only a strategy knows what to make of it."""
    sidestream.enable_offload(pipe, "tray", device=device).disable()
    [(config, given)] = tray.created
    assert given is device
    assert config.options == tray.Options()


def test_what_a_strategy_finds_wrong_with_a_pipeline_comes_out(tray: Any) -> None:
    """And the pipeline is as it was."""
    pipe = {"where": "device", "broken": True}
    with pytest.raises(UnsupportedModelError, match="broken"):
        sidestream.enable_offload(pipe, "tray")
    assert pipe["where"] == "device"


def test_a_backend_that_cannot_be_imported_is_the_plugins_fault(tray: Any, pipe: dict[str, Any]) -> None:
    """As when torch is not installed: the error names the distribution and keeps the cause."""
    cause = ModuleNotFoundError("No module named 'torch'")

    def create(config: OffloadConfig, device: Any) -> Any:
        raise cause

    tray.create = create
    with pytest.raises(PluginError, match=r"'tray' of tray-dist 0\.3.*No module named 'torch'") as raised:
        sidestream.enable_offload(pipe, "tray")
    assert raised.value.distribution == "tray-dist"
    assert raised.value.cause is raised.value.__cause__ is cause


def test_what_create_returns_must_be_a_backend(tray: Any, pipe: dict[str, Any]) -> None:
    """Anything else would fail later, and elsewhere."""
    tray.create = lambda config, device: {"not": "a backend"}
    with pytest.raises(IncompatiblePluginError, match="OffloadBackend") as raised:
        sidestream.enable_offload(pipe, "tray")
    assert raised.value.distribution == "tray-dist"


# --- The with block -----------------------------------------------------------------------------------------


def test_the_block_has_the_backend_and_its_end_gives_the_pipeline_back(tray: Any, pipe: dict[str, Any]) -> None:
    """The backend outlives the block, disabled."""
    with sidestream.offload(pipe, "tray", device="cpu") as backend:
        assert backend.enabled
        assert pipe["where"] == "host"
        assert backend.report().strategy == "tray"
    assert not backend.enabled
    assert pipe["where"] == "device"


@pytest.mark.parametrize("error", [ValueError("out of ideas"), KeyboardInterrupt(), SystemExit(2)], ids=repr)
def test_an_error_in_the_block_comes_out_and_the_pipeline_is_whole(
    error: BaseException, tray: Any, pipe: dict[str, Any]
) -> None:
    """Whatever the error."""
    with pytest.raises(type(error)) as raised, sidestream.offload(pipe, "tray"):
        raise error
    assert raised.value is error
    assert pipe["where"] == "device"


def test_a_failing_disable_at_the_end_comes_out(tray: Any, pipe: dict[str, Any]) -> None:
    """And can be tried again."""
    with pytest.raises(RuntimeError, match="no memory"), sidestream.offload(pipe, "tray") as backend:
        backend.disable_failures = 1  # type: ignore[attr-defined]
    assert pipe["where"] == "host"
    backend.disable()
    assert pipe["where"] == "device"


def test_a_failing_disable_does_not_mask_the_error_of_the_block(
    tray: Any, pipe: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and noted, and `disable` can be called until it succeeds."""
    tray.Backend.disable_failures = 1
    with (
        caplog.at_level(logging.ERROR, logger="sidestream"),
        pytest.raises(ValueError, match="out of ideas") as raised,
        sidestream.offload(pipe, "tray") as backend,
    ):
        raise ValueError("out of ideas")
    assert "no memory" in caplog.text
    if sys.version_info >= (3, 11):
        assert "disable()" in str(raised.value.__notes__)
    assert pipe["where"] == "host"
    backend.disable()
    assert pipe["where"] == "device"


@pytest.mark.parametrize("end", ["disable", "shutdown"])
def test_the_block_may_end_the_offload_itself(end: str, tray: Any, pipe: dict[str, Any]) -> None:
    """The end of the block then has nothing to do."""
    with sidestream.offload(pipe, "tray") as backend:
        getattr(backend, end)()
    assert pipe["where"] == "device"


# --- Observers ----------------------------------------------------------------------------------------------


class Watcher:
    """Notes what it hears in the list that it was given."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes = notes
        self.name = name

    @sidestream.hookimpl
    def sidestream_enabled(self, backend: Any, pipeline: Any) -> None:
        self.notes.append(f"{self.name}: {pipeline['where']}, {backend.enabled}")

    @sidestream.hookimpl
    def sidestream_disabled(self, backend: Any, pipeline: Any) -> None:
        self.notes.append(f"{self.name}: {pipeline['where']}, {backend.enabled}")


def test_the_plugin_and_then_the_observers_hear_of_both_ends(tray: Any, pipe: dict[str, Any]) -> None:
    """In the order in which they were given, each after the fact."""
    observers = [Watcher(tray.notes, "first"), Watcher(tray.notes, "second")]
    with sidestream.offload(pipe, "tray", observers=observers):
        assert tray.notes == ["plugin: enabled", "first: host, True", "second: host, True"]
        tray.notes.clear()
    assert tray.notes == ["plugin: disabled", "first: device, False", "second: device, False"]


def test_observers_of_one_offload_hear_nothing_of_another(tray: Any) -> None:
    """Nothing is remembered from call to call."""
    notes: list[str] = []
    with sidestream.offload({"where": "device"}, "tray", observers=[Watcher(notes, "only")]):
        notes.clear()
        with sidestream.offload({"where": "device"}, "tray"):
            pass
        assert notes == []


def test_a_failing_observer_stops_neither_the_offload_nor_the_others(
    tray: Any, pipe: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its name."""

    class Broken:
        @sidestream.hookimpl
        def sidestream_enabled(self) -> None:
            raise ZeroDivisionError("a broken dashboard")

        def __repr__(self) -> str:
            return "<the dashboard>"

    observers = [Broken(), Watcher(tray.notes, "after")]
    with caplog.at_level(logging.ERROR, logger="sidestream"):
        backend = sidestream.enable_offload(pipe, "tray", observers=observers)
    assert backend.enabled
    assert tray.notes[-1] == "after: host, True"
    assert "a broken dashboard" in caplog.text
    assert "<the dashboard>" in caplog.text
    backend.disable()


def test_an_observer_that_does_not_fit_is_refused_before_anything_is_touched(tray: Any, pipe: dict[str, Any]) -> None:
    """A typo in a hook's name must not mean silence."""

    class Mistyped:
        @sidestream.hookimpl
        def sidestream_enable(self, backend: Any) -> None: ...

    with pytest.raises(IncompatiblePluginError, match="sidestream_enable"):
        sidestream.enable_offload(pipe, "tray", observers=[Mistyped()])
    assert pipe == {"where": "device"}
    assert tray.created == []


# --- The strategy `none` ------------------------------------------------------------------------------------


def module(*devices: str) -> Any:
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=device) for device in devices]))


@pytest.mark.parametrize(
    ("pipe", "device"),
    [
        (module("cuda:0", "cpu"), "cuda:0"),
        ({"scheduler": object(), "dit": module(), "vae": module("cuda:1")}, "cuda:1"),
        (SimpleNamespace(components={"tokenizer": None, "text_encoder": module("cpu")}), "cpu"),
        (module(), "asked"),
        (SimpleNamespace(components=3), "asked"),
        (object(), "asked"),
    ],
)
def test_none_moves_nothing_and_reports_zeros(pipe: Any, device: str) -> None:
    """The reported device is where the pipeline is; without any weights, what was asked for."""
    with sidestream.offload(pipe, "none", device="asked") as backend:
        assert backend.enabled
        report = backend.report()
    assert report == sidestream.OffloadReport(strategy="none", device=device)
    assert all(not value for key, value in report.as_dict().items() if key not in ("strategy", "device"))


def test_none_without_a_device_and_without_weights() -> None:
    """There is nothing to say where it is."""
    with sidestream.offload({}, "none") as backend:
        assert backend.report().device == "unknown"


# --- The listing --------------------------------------------------------------------------------------------


def test_strategies_lists_what_is_installed(tray: Any) -> None:
    """Broken ones are the registry's concern; here a plugin and the built-in stand beside each other."""
    by_name = {info.name: info for info in sidestream.strategies()}
    assert by_name["tray"].summary == "trays"
    assert by_name["none"].distribution == "sidestream"
    assert [info.name for info in sidestream.strategies()] == sorted(by_name)
