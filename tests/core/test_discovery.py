"""From pipelines of every make to components: names, kinds, entry methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import ComponentKind, OffloadPlan, OffloadWarning, UnsupportedModelError
from sidestream.discovery import discover, entry_methods, kind_of, loose_modules
from sidestream.testing import pipelines, toys

DIT, TEXT, IMAGE, VAE, OTHER = (
    ComponentKind.DIT,
    ComponentKind.TEXT_ENCODER,
    ComponentKind.IMAGE_ENCODER,
    ComponentKind.VAE,
    ComponentKind.OTHER,
)


def kinds(pipeline: Any) -> dict[str, str]:
    """Return kind by name."""
    return {component.name: component.kind.value for component in discover(pipeline)}


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_every_component_of_a_real_pipeline_has_its_kind(name: str) -> None:
    """By name, as the pipeline calls them, and by class alone."""
    pipe = pipelines.build(name)
    found = kinds(pipe)
    expected = {
        key: "vae" if key == "vae" else "text_encoder" if key.startswith("text_encoder") else "dit"
        for key, value in pipe.components.items()
        if isinstance(value, nn.Module)
    }
    assert found == expected
    for key, kind in expected.items():
        module = pipe.components[key]
        assert kind_of("x", module).value == kind
        lone = discover(module)
        assert [component.kind.value for component in lone] == [kind]
        assert lone[0].module is module


def test_a_vae_is_entered_by_decode_and_encode_and_an_encoder_perhaps_by_generate() -> None:
    """No VAE is entered by its `forward`."""
    for name in ("flux", "wan", "ltx"):
        vae = next(component for component in discover(pipelines.build(name)) if component.kind is VAE)
        assert {"forward", "decode", "encode"} <= set(vae.entry_methods)
    qwen = next(component for component in discover(pipelines.build("qwenimage")) if component.kind is TEXT)
    assert "generate" in qwen.entry_methods
    assert {"forward", "generate"} <= set(entry_methods(toys.TextEncoder()))


def test_methods_of_torch_and_of_model_base_classes_are_no_entries() -> None:
    """Wrapping `to` or `save_pretrained` would be an accident."""
    for name in ("flux", "sdxl"):
        for component in discover(pipelines.build(name)):
            for method in component.entry_methods:
                assert not hasattr(nn.Module, method) or method == "forward"
                assert "pretrained" not in method


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformer", DIT), ("transformer_2", DIT), ("unet", DIT), ("sr_dit", DIT), ("video_dit", DIT), ("dit", DIT),
        ("text_encoder", TEXT), ("text_encoder_3", TEXT), ("mllm", TEXT), ("t5_text_encoder", TEXT),
        ("image_encoder", IMAGE), ("vision_model", IMAGE), ("vae", VAE), ("audio_vae", VAE), ("vqvae", VAE),
        ("stage.1.transformer", DIT), ("projector", OTHER), ("prior", DIT), ("safety_checker", OTHER),
    ],
)  # fmt: skip
def test_a_name_tells_the_kind(name: str, kind: ComponentKind) -> None:
    """Its last segment, in the words that pipelines use."""
    assert kind_of(name, nn.Linear(1, 1)) is kind


def test_the_plan_overrules_name_and_class() -> None:
    """What is declared is not guessed."""
    plan = OffloadPlan(
        encoder_component_types={"projector": "image_encoder", "mllm": "text_encoder"},
        block_attrs={"generator": "blocks"},
        encoder_block_attrs={"reader": "layers"},
    )
    linear = nn.Linear(1, 1)
    assert kind_of("projector", linear, plan) is IMAGE
    assert kind_of("generator", linear, plan) is DIT
    assert kind_of("reader", linear, plan) is TEXT
    with pytest.raises(ValueError, match=r"encoder_component_types\.mllm.*'vae' is not a kind of encoder"):
        OffloadPlan(encoder_component_types={"mllm": "vae"})


def test_the_same_components_are_found_in_every_shape_of_pipeline() -> None:
    """A module, a mapping, a plain object, an object with `.components`, nested lists."""
    model = toys.pipeline(second=True)
    parts = dict(model.named_children())
    expected = {"text_encoder": "text_encoder", "transformer": "dit", "transformer_2": "dit", "vae": "vae"}
    assert kinds(model) == expected
    assert kinds(parts) == expected
    assert kinds(SimpleNamespace(**parts, scheduler=object(), steps=3)) == expected
    assert kinds(SimpleNamespace(components={**parts, "tokenizer": object(), "missing": None})) == expected
    nested = kinds({"main": parts, "extra": [parts["vae"]]})
    assert nested == {f"main.{name}": kind for name, kind in expected.items()}


def test_a_pipeline_that_points_back_at_itself_ends() -> None:
    """Wrappers hold references to what holds them."""
    inner = SimpleNamespace(transformer=toys.pipeline().transformer)
    inner.owner = SimpleNamespace(pipe=inner, vae=toys.Vae())
    assert set(kinds(inner)) >= {"transformer", "owner.vae"}


def test_a_lone_model_without_a_telling_class_is_a_dit() -> None:
    """Who passes one model wants it offloaded."""
    assert kinds(toys.Denoiser()) == {"model": "dit"}
    assert kinds(nn.Sequential(nn.Linear(2, 2))) == {"model": "dit"}


@pytest.mark.parametrize("pipeline", [{}, {"a": 1}, SimpleNamespace(), SimpleNamespace(components={"vae": None}), 7])
def test_a_pipeline_without_modules_is_an_error_that_says_what_to_pass(pipeline: Any) -> None:
    """vllm-project/vllm-omni#2935: nothing was found, and nothing said."""
    with pytest.raises(UnsupportedModelError, match=r"pass an nn\.Module"):
        discover(pipeline)


def test_declared_components_are_taken_and_the_rest_is_other() -> None:
    """With one warning for each that is missing or no module."""

    class Declared(nn.Module):
        _dit_modules = ["core.net"]  # noqa: RUF012
        _encoder_modules = ["reader", "gone"]  # noqa: RUF012
        _vae_modules = ["note"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Module()
            self.core.net = nn.Linear(2, 2)
            self.core.register_buffer("table", torch.zeros(2))
            self.reader, self.projector = nn.Linear(2, 2), nn.Linear(2, 2)
            self.note = "no module"

    pipe = Declared()
    with pytest.warns(OffloadWarning) as caught:
        components = discover(pipe)
    assert {component.name: component.kind for component in components} == {
        "core.net": DIT,
        "reader": TEXT,
        "projector": OTHER,
    }
    assert sorted(str(w.message).split("declares ")[1].split(" in ")[0] for w in caught) == ["'gone'", "'note'"]
    assert [name for name, _ in loose_modules(pipe, components)] == ["core"]


def test_a_plan_of_another_type_is_an_error() -> None:
    """A dict is not taken for one in silence."""

    class Wrong(toys.Pipeline):
        _offload_plan = {"block_attrs": {}}  # noqa: RUF012

    with pytest.raises(UnsupportedModelError, match=r"_offload_plan is a dict; it must be a sidestream\.OffloadPlan"):
        discover(Wrong())
