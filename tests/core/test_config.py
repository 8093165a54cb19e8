"""`OffloadConfig`: its meaning, its strictness, and what survives a round trip."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from sidestream.config import COMPONENTS, DLOTransfer, OffloadConfig, OffloadStrategy
from sidestream.errors import ConfigError, OffloadError, Problem
from sidestream.structure import option, options_class

LOCAL, GATHER = DLOTransfer.RANK_LOCAL, DLOTransfer.ALLGATHER


@options_class
class Options:
    strategy: str = option(default="greedy", help="a name that the configuration has too")
    slots: int = option(default=2, minimum=2, help="")


def error_of(call: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


def problems_of(call: Callable[[], object]) -> tuple[Problem, ...]:
    return error_of(call).problems


def test_the_defaults_are_as_documented() -> None:
    config = OffloadConfig("layer_wise")
    assert attrs.asdict(config, recurse=False) == {
        "strategy": "layer_wise",
        "components": None,
        "pin_cpu_memory": True,
        "use_hsdp": False,
        "dp_size": 1,
        "dlo_use_allgather": True,
        "dlo_resident_layers": 0,
        "dlo_transfers": {"dit": GATHER, "text_encoder": LOCAL, "image_encoder": LOCAL, "vae": LOCAL},
        "dlo_host_registration_limit_gib": 0.0,
        "options": {},
    }


@pytest.mark.parametrize("strategy", [*OffloadStrategy, "a_strangers_strategy", "with-dash"])
def test_any_name_of_a_strategy_is_taken_and_kept_as_plain_text(strategy: str) -> None:
    config = OffloadConfig(strategy)
    assert type(config.strategy) is str
    assert config == OffloadConfig(strategy=strategy) == OffloadConfig.from_source(strategy)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"strategy": ""}, "strategy", "'' is out of bounds: length at least 1"),
    ({"strategy": None}, "strategy", "None is not a string"),
    ({"strategy": ["layer_wise"]}, "strategy", "['layer_wise'] is not a string"),
    ({"components": "dit"}, "components", "'dit' is not a list of strings or none"),
    ({"components": {"dit": True}}, "components", "is not a list of strings or none"),
    ({"components": 4}, "components", "4 is not a list of strings or none"),
    ({"components": []}, "components", "[] is out of bounds: length at least 1"),
    ({"components": frozenset()}, "components", "out of bounds"),
    ({"components": ["dit", "text_encodr"]}, "components[1]", "did you mean 'text_encoder'?"),
    (
        {"components": ["other"]},
        "components[0]",
        "'other' is not one of dit, text_encoder, image_encoder, vae",
    ),
    ({"components": ["dit", 1]}, "components[1]", "1 is not one of dit"),
    ({"pin_cpu_memory": "false"}, "pin_cpu_memory", "'false' is not a boolean"),
    ({"pin_cpu_memory": None}, "pin_cpu_memory", "None is not a boolean"),
    ({"use_hsdp": 1}, "use_hsdp", "1 is not a boolean"),
    ({"dp_size": 0}, "dp_size", "0 is out of bounds: at least 1"),
    ({"dp_size": 1.9}, "dp_size", "1.9 is not an integer"),
    ({"dp_size": True}, "dp_size", "True is not an integer"),
    ({"dlo_use_allgather": "no"}, "dlo_use_allgather", "'no' is not a boolean"),
    ({"dlo_resident_layers": -1}, "dlo_resident_layers", "-1 is out of bounds: at least 0"),
    ({"dlo_resident_layers": True}, "dlo_resident_layers", "True is not an integer"),
    ({"dlo_transfers": "allgather"}, "dlo_transfers", "'allgather' is not a table"),
    ({"dlo_transfers": ["dit"]}, "dlo_transfers", "['dit'] is not a table"),
    ({"dlo_transfers": {"dlt": "allgather"}}, "dlo_transfers.dlt", "did you mean 'dit'?"),
    ({"dlo_transfers": {"dit": "all-gather"}}, "dlo_transfers.dit", "did you mean 'allgather'?"),
    ({"dlo_transfers": {"dit": True}}, "dlo_transfers.dit", "True is not one of allgather, rank-local"),
    ({"dlo_transfers": {"dit": None}}, "dlo_transfers.dit", "None is not one of allgather, rank-local"),
    ({"dlo_host_registration_limit_gib": -1}, "dlo_host_registration_limit_gib", "-1 is out of bounds"),
    (
        {"dlo_host_registration_limit_gib": float("nan")},
        "dlo_host_registration_limit_gib",
        "nan is not a finite",
    ),
    (
        {"dlo_host_registration_limit_gib": float("inf")},
        "dlo_host_registration_limit_gib",
        "inf is not a finite",
    ),
    (
        {"dlo_host_registration_limit_gib": "4"},
        "dlo_host_registration_limit_gib",
        "'4' is not a finite number",
    ),
    ({"options": [("slots", 2)]}, "options", "is not a table"),
    ({"options": "slots=2"}, "options", "'slots=2' is not a table"),
    ({"options": None}, "options", "None is not a table"),
    ({"options": {2: "slots"}}, "options.2", "key 2 is not a string"),
]


@pytest.mark.parametrize(("changes", "path", "words"), WRONG, ids=lambda item: str(item)[:40])
def test_a_wrong_value_is_refused_the_same_way_from_a_mapping_and_directly(
    changes: dict[str, Any], path: str, words: str
) -> None:
    """Coerced values, construction without checks.

    python-attrs/cattrs#294, python-attrs/cattrs#316, python-attrs/cattrs#601.
    """
    mapping = {"strategy": "layer_wise", **changes}
    direct, structured = (problems_of(call) for call in (lambda: OffloadConfig(**mapping), lambda: from_(mapping)))
    assert [str(problem) for problem in direct] == [str(problem) for problem in structured]
    (problem,) = direct
    assert problem.path == path
    assert words in problem.message


def from_(mapping: Any) -> OffloadConfig:
    return OffloadConfig.from_mapping(mapping)


@pytest.mark.parametrize("source", [None, 42, [], ["layer_wise"], b"layer_wise", {"layer_wise"}, object(), 1.0, True])
def test_what_is_no_source_is_refused_by_name(source: Any) -> None:
    """python-attrs/cattrs#101: a value of the wrong kind gave a configuration of defaults."""
    (problem,) = problems_of(lambda: OffloadConfig.from_source(source))
    assert "is not a strategy's name, a mapping, a file or an OffloadConfig" in problem.message
    (problem,) = problems_of(lambda: from_(source))
    assert "is not a table" in problem.message


def test_unknown_and_missing_keys_and_wrong_values_come_in_one_error() -> None:
    """python-attrs/cattrs#101: misspelt options were ignored."""
    mapping = {"stratgy": "x", "slots": 2, "dp_size": 0, "components": ["dit", "vea"], "options": 3}
    error = error_of(lambda: OffloadConfig.from_mapping(mapping, source="a.toml"))
    assert isinstance(error, ValueError)
    assert isinstance(error, OffloadError)
    assert [problem.path for problem in error.problems] == [
        "stratgy",
        "slots",
        "strategy",
        "components[1]",
        "dp_size",
        "options",
    ]
    assert "did you mean 'strategy'?" in error.problems[0].message
    assert "options" in error.problems[1].message
    assert str(error).startswith("a.toml: 6 problems")


def test_a_mapping_and_a_configuration_are_sources() -> None:
    config = OffloadConfig("layer_wise", components=["vae"])  # a list is as good as a set
    assert OffloadConfig.from_source(config) is config
    assert OffloadConfig.from_source({"strategy": "layer_wise", "components": ["vae"]}) == config
    assert OffloadConfig.from_source('{"strategy": "layer_wise", "components": ["vae"]}') == config
    assert config.components == frozenset({"vae"})


# --- Transfers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "flag", "dit", "text", "vae"),
    [
        (None, True, GATHER, LOCAL, LOCAL),
        (None, False, LOCAL, LOCAL, LOCAL),
        ({}, True, LOCAL, LOCAL, LOCAL),
        ({"dit": "allgather"}, False, GATHER, LOCAL, LOCAL),
        ({"dit": "rank-local"}, True, LOCAL, LOCAL, LOCAL),
        ({"text_encoder": GATHER}, True, LOCAL, GATHER, LOCAL),
        ({"dit": GATHER, "text_encoder": "allgather", "vae": "allgather"}, True, GATHER, GATHER, GATHER),
    ],
)
def test_transfers_are_resolved_for_every_kind_and_the_flag_follows_them(
    given: Mapping[str, Any] | None, flag: bool, dit: DLOTransfer, text: DLOTransfer, vae: DLOTransfer
) -> None:
    config = OffloadConfig("distributed_layer_wise", dlo_transfers=given, dlo_use_allgather=flag)
    assert config.dlo_transfers == {"dit": dit, "text_encoder": text, "image_encoder": LOCAL, "vae": vae}
    assert config.dlo_use_allgather is (dit is GATHER)
    for component, transfer in config.dlo_transfers.items():
        assert config.transfer_for(component) is transfer
        assert config.uses_allgather(component) is (transfer is GATHER)


def test_a_given_map_is_copied() -> None:
    given = {"dit": "rank-local"}
    config = OffloadConfig("distributed_layer_wise", dlo_transfers=given)
    given["dit"] = "allgather"
    assert config.transfer_for("dit") is LOCAL


@pytest.mark.parametrize("method", ["offloads", "transfer_for", "uses_allgather"])
@pytest.mark.parametrize("component", ["unet", "", None, 3, "DIT", []])
def test_an_unknown_component_is_a_value_error_that_lists_the_known_ones(method: str, component: Any) -> None:
    with pytest.raises(ValueError, match="known: dit, text_encoder, image_encoder, vae"):
        getattr(OffloadConfig("layer_wise"), method)(component)


@pytest.mark.parametrize(
    ("strategy", "components", "transfers", "refused"),
    [
        ("distributed_layer_wise", None, None, True),
        ("distributed_layer_wise", None, {"text_encoder": "allgather"}, True),
        ("distributed_layer_wise", ["dit"], {"dit": "allgather"}, True),
        ("distributed_layer_wise", ["text_encoder"], {"dit": "allgather"}, False),
        ("distributed_layer_wise", None, {}, False),
        ("layer_wise", None, None, False),
        ("model_level", ["dit"], None, False),
    ],
)
def test_hsdp_with_any_gathered_component_is_refused_with_the_reason(
    strategy: str, components: Any, transfers: Any, refused: bool
) -> None:
    mapping = {
        "strategy": strategy,
        "components": components,
        "dlo_transfers": transfers,
        "use_hsdp": True,
    }
    if refused:
        for call in (lambda: OffloadConfig(**mapping), lambda: from_(mapping)):
            (problem,) = problems_of(call)
            assert problem.path == "use_hsdp"
            assert "sharded twice" in problem.message
    else:
        assert from_(mapping).use_hsdp


# --- Components ---------------------------------------------------------------------------------------------


def test_with_no_selection_only_the_dit_is_offloaded_by_kind() -> None:
    config = OffloadConfig("layer_wise")
    assert [component for component in COMPONENTS if config.offloads(component)] == ["dit"]


def test_a_selection_is_just_what_it_says() -> None:
    config = OffloadConfig("layer_wise", components={"text_encoder", "vae"})
    assert [component for component in COMPONENTS if config.offloads(component)] == ["text_encoder", "vae"]


PLAN = SimpleNamespace(
    encoder_component_types={
        "mllm": "text_encoder",
        "my_text_encoder": "image_encoder",
        "vision": "image_encoder",
    }
)


@pytest.mark.parametrize(
    ("path", "plan", "kind"),
    [
        ("text_encoder", None, "text_encoder"),
        ("text_encoder_2", None, "text_encoder"),
        ("pipe.stage.t5_text_encoder", None, "text_encoder"),
        ("text_encoder.model", None, None),
        ("image_encoder", None, "image_encoder"),
        ("clip_image_encoder", None, "image_encoder"),
        ("my_text_encoder_2", None, None),
        ("mllm", None, None),
        ("mllm", PLAN, "text_encoder"),
        ("vision", PLAN, "image_encoder"),
        ("my_text_encoder", PLAN, "image_encoder"),
        ("text_encoder", PLAN, "text_encoder"),
        ("text_encoder", SimpleNamespace(), "text_encoder"),
        ("", None, None),
    ],
)
def test_an_encoder_is_selected_by_the_plan_or_else_by_its_name(path: str, plan: Any, kind: str | None) -> None:
    for selected in ("text_encoder", "image_encoder"):
        config = OffloadConfig("layer_wise", components=[selected])
        assert config.offloads_encoder(path, plan) is (kind == selected)
        assert config.should_offload_encoder(path, plan) is (kind == selected)
    unselected = OffloadConfig("layer_wise")
    assert unselected.offloads_encoder(path, plan) is False
    assert unselected.should_offload_encoder(path, plan) is True


# --- Round trips --------------------------------------------------------------------------------------------

CONFIGS = [
    OffloadConfig("none"),
    OffloadConfig("model_level", components=["dit", "text_encoder"], pin_cpu_memory=False),
    OffloadConfig("layer_wise", options={"slots": 3, "nested": {"a": [1, 2.5, None, "x"], "b": {}}}),
    OffloadConfig("distributed_layer_wise", use_hsdp=True, dp_size=8, dlo_use_allgather=False),
    OffloadConfig(
        "distributed_layer_wise",
        components=list(COMPONENTS),
        dlo_transfers={"text_encoder": "allgather"},
        dlo_resident_layers=4,
        dlo_host_registration_limit_gib=1.5,
    ),
    OffloadConfig("strangers", options={"strategy": "own", "components": "own too"}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.strategy)
def test_unstructure_then_structure_is_the_identity(config: OffloadConfig) -> None:
    """python-attrs/cattrs#402, python-attrs/cattrs#534, python-attrs/cattrs#483: strict keys against tags."""
    assert OffloadConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert OffloadConfig.from_source(json.dumps(config.to_mapping())) == config
    assert attrs.evolve(config) == config


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.strategy)
def test_it_pickles_and_copies(config: OffloadConfig) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(config, protocol)) == config
    assert copy.deepcopy(config) == copy.copy(config) == config


def test_options_can_be_replaced_by_an_instance_of_the_strategys_class() -> None:
    """python-attrs/cattrs#402: a plugin's option that is called `strategy` as well."""
    raw = OffloadConfig("greedy_offload", options={"strategy": "own", "slots": 3})
    resolved = raw.with_options(Options(strategy="own", slots=3))
    assert resolved.options.slots == 3
    assert resolved.options.strategy == "own"
    assert resolved.strategy == "greedy_offload"
    assert attrs.evolve(raw, options=resolved.options) == resolved
    assert resolved.to_mapping() == raw.to_mapping()
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    (problem,) = problems_of(lambda: raw.with_options(Options))
    assert problem.path == "options"


def test_it_cannot_be_changed_and_shares_nothing_with_what_it_was_made_from() -> None:
    options: dict[str, Any] = {"table": {"list": [1]}}
    config = OffloadConfig("layer_wise", options=options)
    options["table"]["list"].append(2)
    options["new"] = 1
    assert config.options == {"table": {"list": [1]}}
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.dp_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.options["new"] = 1
    with pytest.raises(TypeError):
        config.dlo_transfers["dit"] = LOCAL  # type: ignore[index]


def test_the_error_itself_pickles() -> None:
    error = error_of(lambda: OffloadConfig("x", dp_size=0))
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error)
