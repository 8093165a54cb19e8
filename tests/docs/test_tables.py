"""The tables in docs say what the code says: fields, options, outcomes, hooks, methods, rules."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import sidestream
from sidestream import OffloadBackend, OffloadConfig, Strategy, errors, hookspecs
from sidestream.structure import OptionInfo, describe
from sidestream_model_cpu.options import ModelLevelOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one."""
    return re.split(r"^#+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the tables' rows, without the headers' rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def row(option: OptionInfo) -> list[str]:
    default = "none" if option.default is None else json.dumps(option.default)
    return [
        f"`{option.name}`",
        option.type,
        "required" if option.required else f"`{default}`",
        option.bounds,
        option.help,
    ]


@pytest.mark.parametrize(
    ("title", "cls"), [("The fields", OffloadConfig), ("Options of `model_level`", ModelLevelOptions)]
)
def test_fields_and_options_are_told_with_type_default_bounds_and_meaning(title: str, cls: type[Any]) -> None:
    """A row for each, and no other row."""
    assert [row(option) for option in describe(cls)] == rows(section(page("configuration.md"), title))[1:]


def _omni_rows() -> list[Any]:
    found = rows(section(page("configuration.md"), "vLLM-Omni's settings"))[1:]
    return [pytest.param(*cells, id=cells[0]) for cells in found]


@pytest.mark.parametrize(("settings", "outcome"), _omni_rows())
def test_vllm_omnis_settings_come_out_as_the_table_says(settings: str, outcome: str) -> None:
    """Each row is read from the page and tried."""
    od_config = json.loads(settings.strip("`"))
    if outcome.startswith("error: "):
        with pytest.raises(sidestream.ConfigError) as caught:
            OffloadConfig.from_od_config(od_config)
        assert outcome.removeprefix("error: ").strip("`") in str(caught.value)
        return
    resolved = OffloadConfig.from_od_config(od_config).to_mapping()
    expected = json.loads(outcome.strip("`"))
    assert expected == {name: resolved[name] for name in expected}


def test_the_table_of_vllm_omnis_settings_is_read() -> None:
    """Were the pattern wrong, nothing would be tried."""
    assert len(_omni_rows()) >= 20


def test_every_error_is_told_with_its_builtin() -> None:
    """The whole tree but its root, the warning, and what no user meets."""
    table = rows(section(page("configuration.md"), "Errors"))[1:]
    told = {cells[0].strip("`"): cells[1].strip("`") for cells in table}
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, errors.OffloadError) and cls is not errors.OffloadError
    }
    assert set(classes) == set(told)
    for name, also in told.items():
        assert not also or also in [base.__name__ for base in classes[name].__mro__], name


def _signature(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"`{function.__name__}({', '.join(names)})`"


def test_every_hook_is_told_with_its_arguments() -> None:
    """In the order of the contract."""
    specs = [value for name, value in vars(hookspecs).items() if name.startswith("sidestream_")]
    told = [cells[0] for cells in rows(section(page("writing-a-strategy.md"), "The hooks"))[1:]]
    assert [_signature(spec) for spec in specs] == told


def test_every_method_that_a_backend_may_fill_in_is_told() -> None:
    """Those that the public methods call and that have a docstring of their own."""
    names = ("_enable", "_disable", "_report", "_shutdown", "_refresh", "_check_not_running")
    told = [cells[0] for cells in rows(section(page("writing-a-strategy.md"), "What a backend fills in"))[1:]]
    assert [_signature(getattr(OffloadBackend, name)) for name in names] == told
    assert set(OffloadBackend.__abstractmethods__) <= set(names)


def test_every_field_of_a_strategy_is_told() -> None:
    """`create` with its arguments."""
    told = rows(section(page("writing-a-strategy.md"), "What `Strategy` says"))[1:]
    names = [re.sub(r"\W.*", "", cells[0].strip("`")) for cells in told]
    assert sorted(inspect.signature(Strategy).parameters) == sorted(names)


def test_the_rules_between_rooms_are_those_that_the_linter_keeps() -> None:
    """By name; the layers in their order."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = tools["importlinter"]["contracts"]
    text = " ".join(section(page("architecture.md"), "Who may know whom").split())
    assert [contract["name"] for contract in contracts] == [
        name.rstrip(".:") for name in re.findall(r"\d\. \*\*(.+?)\*\*", text)
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    told = ", ".join(f"`{layer.rpartition('.')[2]}`" for layer in layers)
    assert f"{told}. Each may import those after it" in text


def test_every_room_is_on_the_plan_of_the_house() -> None:
    """A module that is added has to be told what it is."""
    text = section(page("architecture.md"), "Rooms")
    told = set(re.findall(r"\b(\w+)\.py\b", text))
    for root in ("core/src/sidestream", "plugins/model_cpu/src/sidestream_model_cpu"):
        for path in (ROOT / root).rglob("*.py"):
            if path.parent.name != "testing" and not path.name.startswith("__"):
                assert path.stem in told, path
