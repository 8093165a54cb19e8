"""vLLM-Omni's configuration: each row says what goes in, and what comes out or is refused."""

from __future__ import annotations

import copy
import enum
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sidestream.config import COMPONENTS, DLOTransfer, OffloadConfig
from sidestream.errors import ConfigError

LOCAL, GATHER = DLOTransfer.RANK_LOCAL, DLOTransfer.ALLGATHER


class Mode(str, enum.Enum):
    LAYER = "layer"


class Transfer(str, enum.Enum):
    ALLGATHER = "allgather"


class Unrelated(enum.Enum):
    LAYER = "layer"


def layer(*components: str, **options: Any) -> dict[str, Any]:
    """Return an `od_config` that selects with mode 'layer'; the options are by component."""
    selector: dict[str, Any] = {"mode": "layer", "components": list(components)}
    return {"diffusion_offload_config": selector | ({"layer_options": options} if options else {})}


def module(*components: str, **more: Any) -> dict[str, Any]:
    return {"diffusion_offload_config": {"mode": "module", "components": list(components), **more}}


def selector(**changes: Any) -> dict[str, Any]:
    return {"diffusion_offload_config": {"mode": "layer", "components": ["dit"], **changes}}


GATHERED_DIT = {"weight_transfer": "allgather"}
DLO = {"enable_distributed_layerwise_offload": True}

RIGHT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # --- The older switches alone: the strategy's own topology ----------------------------------------------
    ("nothing is set", {}, {"strategy": "none", "components": None, "gathered": "dit"}),
    ("all is off", {"enable_cpu_offload": False, "diffusion_offload_config": None}, {"strategy": "none"}),
    ("the DiT's transfer alone", {"dlo_use_allgather": False}, {"strategy": "none", "gathered": ""}),
    (
        "cpu offload",
        {"enable_cpu_offload": True},
        {"strategy": "model_level", "components": None, "gathered": "dit"},
    ),
    (
        "layerwise",
        {"enable_layerwise_offload": True},
        {"strategy": "layer_wise", "components": None, "gathered": "dit"},
    ),
    ("distributed", DLO, {"strategy": "distributed_layer_wise", "components": None, "gathered": "dit"}),
    (
        "distributed, each rank by itself",
        DLO | {"dlo_use_allgather": False, "dlo_resident_layers": 3, "dlo_host_registration_limit_gib": 8},
        {
            "strategy": "distributed_layer_wise",
            "gathered": "",
            "dlo_resident_layers": 3,
            "dlo_host_registration_limit_gib": 8.0,
        },
    ),
    ("pinning off", {"pin_cpu_memory": False}, {"pin_cpu_memory": False}),
    # --- The selector ---------------------------------------------------------------------------------------
    ("module", module("dit"), {"strategy": "model_level", "components": {"dit"}, "gathered": ""}),
    (
        "module, several",
        module("dit", "text_encoder", "image_encoder", "vae"),
        {"strategy": "model_level", "components": set(COMPONENTS)},
    ),
    ("module, agreeing switch", module("dit") | {"enable_cpu_offload": True}, {"strategy": "model_level"}),
    ("layer", layer("dit"), {"strategy": "layer_wise", "components": {"dit"}, "gathered": ""}),
    ("layer, an encoder", layer("text_encoder"), {"strategy": "layer_wise", "components": {"text_encoder"}}),
    (
        "layer, rank-local in so many words",
        layer("dit", dit={"weight_transfer": "rank-local", "resident_layers": 0}),
        {"strategy": "layer_wise", "gathered": ""},
    ),
    ("layer, agreeing switch", layer("dit") | {"enable_layerwise_offload": True}, {"strategy": "layer_wise"}),
    (
        "layer, gathered",
        layer("dit", dit=GATHERED_DIT),
        {"strategy": "distributed_layer_wise", "components": {"dit"}, "gathered": "dit"},
    ),
    (
        "layer, only the encoder gathered",
        layer("dit", "text_encoder", text_encoder=GATHERED_DIT),
        {"strategy": "distributed_layer_wise", "gathered": "text_encoder"},
    ),
    (
        "layer, image encoder and vae gathered",
        layer("image_encoder", "vae", vae=GATHERED_DIT, image_encoder=GATHERED_DIT),
        {"strategy": "distributed_layer_wise", "gathered": "image_encoder vae"},
    ),
    (
        "layer, residents",
        layer("dit", dit={"resident_layers": 4}),
        {"strategy": "distributed_layer_wise", "gathered": "", "dlo_resident_layers": 4},
    ),
    (
        "layer, residents and a gathered encoder",
        layer("dit", "text_encoder", dit={"resident_layers": 4}, text_encoder=GATHERED_DIT),
        {"strategy": "distributed_layer_wise", "gathered": "text_encoder", "dlo_resident_layers": 4},
    ),
    (
        "distributed, agreeing switch",
        layer("dit", dit=GATHERED_DIT) | DLO,
        {"strategy": "distributed_layer_wise"},
    ),
    ("enumerations of strings", selector(mode=Mode.LAYER), {"strategy": "layer_wise"}),
    (
        "a transfer of an enumeration",
        layer("dit", dit={"weight_transfer": Transfer.ALLGATHER}),
        {"gathered": "dit"},
    ),
    ("components as a set", selector(components={"dit", "vae"}), {"components": {"dit", "vae"}}),
    ("components as a tuple", selector(components=("dit",)), {"components": {"dit"}}),
    ("pinning by the selector", module("dit", pin_memory=False), {"pin_cpu_memory": False}),
    ("pinning by default", module("dit"), {"pin_cpu_memory": True}),
    ("pinning left to the alias", module("dit") | {"pin_cpu_memory": False}, {"pin_cpu_memory": False}),
    ("pinning by both", module("dit", pin_memory=True) | {"pin_cpu_memory": False}, {"pin_cpu_memory": True}),
    (
        "defaults of the aliases beside the selector",
        module("dit")
        | {
            "dlo_use_allgather": True,
            "dlo_resident_layers": 0,
            "dlo_host_registration_limit_gib": 0,
            "host_weight_runtime_mode": "disabled",
        },
        {"strategy": "model_level"},
    ),
    # --- The group size -------------------------------------------------------------------------------------
    ("no parallel configuration", DLO | {"parallel_config": None}, {"dp_size": 1}),
    ("data parallel", DLO | {"parallel_config": {"data_parallel_size": 4}}, {"dp_size": 4}),
    ("sequence parallel", DLO | {"parallel_config": {"sequence_parallel_size": 8}}, {"dp_size": 8}),
    ("unset sequence parallel", DLO | {"parallel_config": {"sequence_parallel_size": None}}, {"dp_size": 1}),
    (
        "data before sequence parallel",
        DLO | {"parallel_config": {"data_parallel_size": 2, "sequence_parallel_size": 8}},
        {"dp_size": 2},
    ),
    ("never tensor parallel", DLO | {"parallel_config": {"tensor_parallel_size": 8}}, {"dp_size": 1}),
    (
        "HSDP: shards times replicas",
        DLO
        | {
            "dlo_use_allgather": False,
            "parallel_config": {
                "use_hsdp": True,
                "hsdp_shard_size": 4,
                "hsdp_replicate_size": 2,
                "data_parallel_size": 3,
            },
        },
        {"dp_size": 8, "use_hsdp": True},
    ),
    (
        "HSDP, shards chosen by the engine",
        {"parallel_config": {"use_hsdp": True, "hsdp_shard_size": -1, "data_parallel_size": 3}},
        {"dp_size": 3, "use_hsdp": True},
    ),
    (
        "HSDP that leaves one rank",
        {"parallel_config": {"use_hsdp": True, "hsdp_shard_size": 1, "sequence_parallel_size": 2}},
        {"dp_size": 2},
    ),
    (
        "shards without HSDP",
        {"parallel_config": {"hsdp_shard_size": 4, "data_parallel_size": 2}},
        {"dp_size": 2, "use_hsdp": False},
    ),
    (
        "HSDP without a gather",
        layer("dit", dit={"resident_layers": 1}) | {"parallel_config": {"use_hsdp": True}},
        {"strategy": "distributed_layer_wise", "use_hsdp": True},
    ),
    (
        "HSDP and model level",
        {"enable_cpu_offload": True, "parallel_config": {"use_hsdp": True}},
        {"strategy": "model_level", "use_hsdp": True},
    ),
    # --- Caches ---------------------------------------------------------------------------------------------
    ("a cache on one rank", DLO | {"cache_backend": "cache_dit"}, {"gathered": "dit"}),
    (
        "no cache on many ranks",
        DLO | {"cache_backend": "none", "parallel_config": {"data_parallel_size": 2}},
        {"gathered": "dit"},
    ),
    (
        "a cache, and nothing gathered",
        DLO
        | {
            "dlo_use_allgather": False,
            "cache_backend": "cache_dit",
            "parallel_config": {"data_parallel_size": 2},
        },
        {"gathered": ""},
    ),
    (
        "cached prompts, and only the DiT gathered",
        DLO | {"enable_prompt_embed_cache": True, "parallel_config": {"data_parallel_size": 2}},
        {"gathered": "dit"},
    ),
    (
        "a cache with another strategy",
        {
            "enable_layerwise_offload": True,
            "cache_backend": "x",
            "parallel_config": {"data_parallel_size": 2},
        },
        {"strategy": "layer_wise"},
    ),
]

SELECTOR = "diffusion_offload_config"
OPTIONS = f"{SELECTOR}.layer_options"

_NO_BOOLEANS: tuple[Any, ...] = (0, 1, "true", [])

#: What goes in, then path and words of each problem that comes out.
WRONG: list[tuple[str, Any, list[tuple[str, str]]]] = [
    # --- The selector's form --------------------------------------------------------------------------------
    ("text", {SELECTOR: "layer"}, [(SELECTOR, "'layer' is not a table")]),
    ("a list", {SELECTOR: []}, [(SELECTOR, "[] is not a table")]),
    ("a flag", {SELECTOR: False}, [(SELECTOR, "False is not a table")]),
    ("a number as key", {SELECTOR: selector()[SELECTOR] | {1: 2}}, [(f"{SELECTOR}.1", "unknown key")]),
    ("unknown field", selector(modes=1), [(f"{SELECTOR}.modes", "did you mean 'mode'?")]),
    ("no mode", {SELECTOR: {"components": ["dit"]}}, [(f"{SELECTOR}.mode", "missing")]),
    ("no components", {SELECTOR: {"mode": "layer"}}, [(f"{SELECTOR}.components", "missing")]),
    (
        "nothing in it",
        {SELECTOR: {}},
        [(f"{SELECTOR}.mode", "missing"), (f"{SELECTOR}.components", "missing")],
    ),
    ("unknown mode", selector(mode="block"), [(f"{SELECTOR}.mode", "'block' is not one of module, layer")]),
    ("a mode as a number", selector(mode=3), [(f"{SELECTOR}.mode", "3 is not one of module, layer")]),
    ("a mode that is no string", selector(mode=Unrelated.LAYER), [(f"{SELECTOR}.mode", "not one of module")]),
    ("components as text", selector(components="dit"), [(f"{SELECTOR}.components", "'dit' is not a list")]),
    (
        "components as a mapping",
        selector(components={"dit": 1}),
        [(f"{SELECTOR}.components", "is not a list of strings")],
    ),
    ("components as a number", selector(components=1), [(f"{SELECTOR}.components", "1 is not a list")]),
    ("no component", selector(components=[]), [(f"{SELECTOR}.components", "length at least 1")]),
    (
        "a component that is no text",
        selector(components=["dit", 2]),
        [(f"{SELECTOR}.components[1]", "2 is not one of dit, text_encoder, image_encoder, vae")],
    ),
    (
        "unknown component",
        selector(components=["dti"]),
        [(f"{SELECTOR}.components[0]", "'dti' is not one of dit, text_encoder, image_encoder, vae")],
    ),
    ("options as text", selector(layer_options="x"), [(OPTIONS, "'x' is not a table")]),
    ("options as none", selector(layer_options=None), [(OPTIONS, "None is not a table")]),
    ("one option as text", layer("dit", dit="allgather"), [(f"{OPTIONS}.dit", "'allgather' is not a table")]),
    ("unknown option", layer("dit", dit={"residents": 1}), [(f"{OPTIONS}.dit.residents", "unknown key")]),
    (
        "options of an unknown component",
        layer("dit", unet={}),
        [(f"{OPTIONS}.unet", "'unet' is not one of dit")],
    ),
    (
        "options of an unselected component",
        layer("dit", text_encoder={}),
        [(f"{OPTIONS}.text_encoder", "not among the selected components (dit)")],
    ),
    (
        "options with module",
        module("dit", layer_options={"dit": {}}),
        [(f"{OPTIONS}.dit", "need mode 'layer'")],
    ),
    (
        "unknown transfer",
        layer("dit", dit={"weight_transfer": "local"}),
        [(f"{OPTIONS}.dit.weight_transfer", "'local' is not one of allgather, rank-local")],
    ),
    (
        "transfer as a flag",
        layer("dit", dit={"weight_transfer": True}),
        [(f"{OPTIONS}.dit.weight_transfer", "True is not one of allgather, rank-local")],
    ),
    *(
        (
            f"resident layers {value!r}",
            layer("dit", dit={"resident_layers": value}),
            [(f"{OPTIONS}.dit.resident_layers", words)],
        )
        for value, words in [
            (True, "True is not an integer"),
            (2.0, "2.0 is not an integer"),
            ("2", "'2' is not an integer"),
            (None, "None is not an integer"),
            (-1, "-1 is out of bounds: at least 0"),
        ]
    ),
    (
        "residents of an encoder",
        layer("text_encoder", text_encoder={"resident_layers": 1}),
        [(f"{OPTIONS}.text_encoder.resident_layers", "only the dit can keep layers resident")],
    ),
    (
        "residents of a gathered DiT",
        layer("dit", dit={"resident_layers": 1, **GATHERED_DIT}),
        [(f"{OPTIONS}.dit.resident_layers", "need weight_transfer 'rank-local'")],
    ),
    *(
        (
            f"pin memory {value!r}",
            selector(pin_memory=value),
            [(f"{SELECTOR}.pin_memory", "is not a boolean")],
        )
        for value in _NO_BOOLEANS
    ),
    # --- Switches that contradict each other ----------------------------------------------------------------
    (
        "cpu and layerwise",
        {"enable_cpu_offload": True, "enable_layerwise_offload": True},
        [("enable_cpu_offload", "only one of enable_cpu_offload, enable_layerwise_offload can be set")],
    ),
    (
        "cpu and distributed",
        DLO | {"enable_cpu_offload": True},
        [("enable_cpu_offload", "enable_cpu_offload, enable_distributed_layerwise_offload can be set")],
    ),
    (
        "layerwise and distributed",
        DLO | {"enable_layerwise_offload": True},
        [("enable_layerwise_offload", "enable_layerwise_offload, enable_distributed_layerwise_offload can")],
    ),
    (
        "all three",
        DLO | {"enable_layerwise_offload": True, "enable_cpu_offload": True},
        [
            (
                "enable_cpu_offload",
                "enable_cpu_offload, enable_layerwise_offload, enable_distributed_layerwise_off",
            )
        ],
    ),
    (
        "two of them beside a selector that agrees with one",
        layer("dit") | {"enable_layerwise_offload": True, "enable_cpu_offload": True},
        [("enable_cpu_offload", "only one of")],
    ),
    *(
        (
            f"{name} against {mode}",
            {**config, name: True},
            [
                (
                    name,
                    f"asks for {asked}, but diffusion_offload_config (mode {mode!r}) asks for {chosen}",
                )
            ],
        )
        for name, asked, mode, chosen, config in [
            ("enable_cpu_offload", "model_level", "layer", "layer_wise", layer("dit")),
            ("enable_cpu_offload", "model_level", "layer", "distributed", layer("dit", dit=GATHERED_DIT)),
            ("enable_layerwise_offload", "layer_wise", "module", "model_level", module("dit")),
            (
                "enable_layerwise_offload",
                "layer_wise",
                "layer",
                "distributed",
                layer("dit", dit=GATHERED_DIT),
            ),
            (
                "enable_distributed_layerwise_offload",
                "distributed_layer_wise",
                "layer",
                "layer_wise",
                layer("dit"),
            ),
            (
                "enable_distributed_layerwise_offload",
                "distributed_layer_wise",
                "module",
                "model",
                module("dit"),
            ),
        ]
    ),
    *(
        (
            f"{name} beside the selector",
            layer("dit") | {name: value},
            [(name, f"{name} = {value!r} cannot be combined with diffusion_offload_config")],
        )
        for name, value in [
            ("host_weight_runtime_mode", "shared"),
            ("dlo_use_allgather", False),
            ("dlo_host_registration_limit_gib", 4.0),
        ]
    ),
    (
        "residents by the alias beside the selector",
        layer("dit") | {"dlo_resident_layers": 2, "dlo_use_allgather": False},
        [("dlo_use_allgather", "cannot be combined"), ("dlo_resident_layers", "= 2 cannot be combined")],
    ),
    # --- The aliases' form ----------------------------------------------------------------------------------
    (
        "a switch as text",
        {"enable_cpu_offload": "false"},
        [("enable_cpu_offload", "'false' is not a boolean")],
    ),
    (
        "a switch as a number",
        {"enable_layerwise_offload": 1},
        [("enable_layerwise_offload", "1 is not a boolean")],
    ),
    ("pinning as none", {"pin_cpu_memory": None}, [("pin_cpu_memory", "None is not a boolean")]),
    (
        "residents as a flag",
        DLO | {"dlo_resident_layers": True},
        [("dlo_resident_layers", "is not an integer")],
    ),
    ("residents below none", DLO | {"dlo_resident_layers": -1}, [("dlo_resident_layers", "at least 0")]),
    (
        "residents of a gathered DiT by the alias",
        DLO | {"dlo_resident_layers": 2},
        [("dlo_resident_layers", "2 resident layers need dlo_use_allgather to be false")],
    ),
    (
        "a ceiling that is no number",
        DLO | {"dlo_host_registration_limit_gib": float("nan")},
        [("dlo_host_registration_limit_gib", "nan is not a finite number")],
    ),
    # --- Parallelism ----------------------------------------------------------------------------------------
    (
        "no parallel object",
        {"parallel_config": "dp=2"},
        [("parallel_config", "is not a configuration object")],
    ),
    (
        "sizes that are none",
        {"parallel_config": {"data_parallel_size": 0, "sequence_parallel_size": "2", "use_hsdp": 1}},
        [
            ("parallel_config.data_parallel_size", "0 is out of bounds: at least 1"),
            ("parallel_config.sequence_parallel_size", "'2' is not an integer or none"),
            ("parallel_config.use_hsdp", "1 is not a boolean"),
        ],
    ),
    (
        "HSDP and a gathered DiT by the alias",
        DLO | {"parallel_config": {"use_hsdp": True}},
        [("use_hsdp", "sharded twice")],
    ),
    (
        "HSDP and a gathered encoder",
        layer("text_encoder", text_encoder=GATHERED_DIT) | {"parallel_config": {"use_hsdp": True}},
        [("use_hsdp", "allgather transfer of text_encoder")],
    ),
    (
        "a cache on many ranks",
        DLO | {"cache_backend": "cache_dit", "parallel_config": {"data_parallel_size": 2}},
        [("cache_backend", "'cache_dit' cannot be combined with the allgather transfer of dit")],
    ),
    (
        "cached prompts on many ranks",
        layer("text_encoder", text_encoder=GATHERED_DIT)
        | {"enable_prompt_embed_cache": True, "parallel_config": {"data_parallel_size": 2}},
        [("enable_prompt_embed_cache", "allgather transfer of text_encoder")],
    ),
    # --- All at once ----------------------------------------------------------------------------------------
    (
        "many problems",
        {
            "enable_cpu_offload": "yes",
            "parallel_config": {"data_parallel_size": -1},
            SELECTOR: {"mode": "layers", "components": "dit"},
        },
        [
            ("enable_cpu_offload", "'yes' is not a boolean"),
            ("parallel_config.data_parallel_size", "-1 is out of bounds"),
            (f"{SELECTOR}.mode", "'layers' is not one of module, layer; did you mean 'layer'?"),
            (f"{SELECTOR}.components", "'dit' is not a list of strings"),
        ],
    ),
    *(
        (f"the whole is {value!r}", value, [("", "is not a configuration object or mapping")])
        for value in (None, "layer_wise", 3, True, [("enable_cpu_offload", True)])
    ),
]


def as_object(od_config: Any) -> Any:
    """Return the same configuration as objects with attributes, as vLLM-Omni has it."""
    if not isinstance(od_config, dict):
        return od_config
    parallel = od_config.get("parallel_config")
    more = {"parallel_config": SimpleNamespace(**parallel)} if isinstance(parallel, dict) else {}
    return SimpleNamespace(**{**od_config, **more})


FORMS = pytest.mark.parametrize("form", [copy.deepcopy, as_object], ids=["mapping", "object"])


@FORMS
@pytest.mark.parametrize(("od_config", "expected"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_it_is_resolved_and_not_changed(form: Any, od_config: Any, expected: dict[str, Any]) -> None:
    given = form(od_config)
    before = copy.deepcopy(given)
    config = OffloadConfig.from_od_config(given)
    assert given == before
    expected = dict(expected)
    if "gathered" in expected:
        gathered = expected.pop("gathered").split()
        assert [component for component in COMPONENTS if config.uses_allgather(component)] == gathered
        assert config.dlo_use_allgather is ("dit" in gathered)
    assert {name: getattr(config, name) for name in expected} == expected
    assert OffloadConfig.from_mapping(config.to_mapping()) == config


@FORMS
@pytest.mark.parametrize(("od_config", "problems"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_it_is_refused_with_every_problem_named(form: Any, od_config: Any, problems: list[tuple[str, str]]) -> None:
    """Contradictions were accepted, or one side was ignored.

    vllm-project/vllm#29941, sgl-project/sglang#34736, sgl-project/sglang#26925.
    """
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_od_config(form(od_config))
    assert str(caught.value).startswith("vLLM-Omni configuration: ")
    assert [problem.path for problem in caught.value.problems] == [path for path, _ in problems]
    for problem, (_, words) in zip(caught.value.problems, problems, strict=True):
        assert words in problem.message
        assert "\n" not in str(problem)


def test_what_is_on_a_class_or_a_property_is_read_too() -> None:
    class Config:
        enable_cpu_offload = True

        @property
        def pin_cpu_memory(self) -> bool:
            return False

    config = OffloadConfig.from_od_config(Config())
    assert (config.strategy, config.pin_cpu_memory) == ("model_level", False)


def test_it_is_logged_when_every_rank_keeps_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidestream")
    OffloadConfig.from_od_config(DLO)
    assert not caplog.messages
    OffloadConfig.from_od_config(layer("dit", "vae", dit={"resident_layers": 1}))
    assert caplog.messages == ["each rank keeps all of dit, vae: no weight is gathered"]
