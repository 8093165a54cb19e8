"""Who moves a component: one backend, the one that took it over from another, or the pipeline itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import (
    BackendStateError,
    OffloadPlan,
    OffloadWarning,
    SupportsComponentDiscovery,
    SupportsModelCpuOffload,
    UnsupportedModelError,
)
from sidestream.testing import toys
from sidestream.testing.portrait import portrait

ALL = {"dit", "text_encoder", "vae"}


def two_pipelines() -> tuple[toys.Pipeline, toys.Pipeline]:
    """Return two pipelines that share text encoder and VAE."""
    first, second = toys.pipeline(seed=0), toys.pipeline(seed=1)
    second.text_encoder, second.vae = first.text_encoder, first.vae
    first.vae.post_quant.eval()
    return first, second


@pytest.mark.parametrize("ends_first", ["owner", "guest"])
def test_two_pipelines_share_components_whoever_ends_first(start: Any, ends_first: str) -> None:
    """huggingface/diffusers#5281, #7448, #7891: hooks were a pipeline's, the module was shared."""
    first, second = two_pipelines()
    plain = two_pipelines()
    before = portrait(first), portrait(second)
    backends = [start(first, components=ALL)[0], start(second, components=ALL)[0]]
    guest_report = backends[1].report()
    assert {note.name for note in guest_report.resident} == {"text_encoder", "vae"}
    assert {component.name for component in guest_report.components} == {"transformer"}

    def both(seed: int) -> None:
        for mine, reference in zip((first, second), plain, strict=True):
            assert torch.equal(reference(toys.prompt(), seed=seed), mine(toys.prompt(), seed=seed))

    both(0)
    both(1)
    if ends_first == "owner":
        backends[0].disable()
        moved = backends[1].report().moved_bytes
        assert torch.equal(plain[1](toys.prompt(), seed=2), second(toys.prompt(), seed=2))
        report = backends[1].report()
        assert {component.name for component in report.components} == {"transformer", "text_encoder", "vae"}
        assert report.moved_bytes > moved, "the components it inherited were never moved"
    else:
        backends[1].disable()
        assert torch.equal(plain[0](toys.prompt(), seed=2), first(toys.prompt(), seed=2))
    backends[0].disable()
    backends[1].disable()
    assert before == (portrait(first), portrait(second))
    both(3)


def test_one_component_under_two_names_is_one(start: Any) -> None:
    """Counted, packed and moved once."""
    model = toys.pipeline().transformer
    backend, _ = start({"transformer": model, "transformer_2": model})
    model(torch.randn(2, 16), torch.randn(2, 16))
    assert [component.name for component in backend.report().components] == ["transformer"]


class SelfOffloading(toys.Pipeline):
    """A pipeline that moves itself; `fails` has its start fail half-way."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.fails = fails

    def enable_omni_model_cpu_offload(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)
        if self.fails:
            raise RuntimeError("no memory")

    def disable_omni_model_cpu_offload(self) -> None:
        self.calls.append("disabled")


@pytest.mark.parametrize("components", [None, {"dit"}])
def test_a_pipeline_that_owns_its_offload_is_only_told(start: Any, components: set[str] | None) -> None:
    """The selection is passed only if there is one: older implementers do not take it."""
    pipe = SelfOffloading()
    assert isinstance(pipe, SupportsModelCpuOffload)
    hooks = portrait(pipe)
    backend, _ = start(pipe, components=components, pin=False)
    expected: dict[str, Any] = {"device": torch.device("cpu"), "pin_memory": False, "use_hsdp": False}
    if components:
        expected["offload_components"] = components
    assert pipe.calls == [expected]
    assert hooks == portrait(pipe)
    assert backend.report().resident[0].name == "SelfOffloading"
    backend.disable()
    backend.disable()
    assert pipe.calls == [expected, "disabled"]


def test_a_pipelines_own_offload_that_fails_is_ended_and_its_error_comes_out(start: Any) -> None:
    """Its own failure, not one of the clean-up."""
    pipe = SelfOffloading(fails=True)
    with pytest.raises(RuntimeError, match="no memory"):
        start(pipe)
    assert pipe.calls[-1] == "disabled"


class OnDemand(nn.Module):
    """Moves its VAE itself."""

    _offload_plan = OffloadPlan(on_demand_component_paths="vae")

    def __init__(self) -> None:
        super().__init__()
        inner = toys.pipeline()
        self.transformer, self.vae = inner.transformer, inner.vae


def test_a_component_that_the_pipeline_moves_itself_is_left_alone(start: Any) -> None:
    """vllm-project/vllm-omni#6993, #7047: two managers of one VAE, or none."""
    pipe = OnDemand()
    before = portrait(pipe.vae)
    backend, _ = start(pipe)
    assert before == portrait(pipe.vae)
    assert [note.name for note in backend.report().resident] == ["vae"]
    backend.disable()
    with pytest.raises(UnsupportedModelError, match="moves it itself"):
        start(pipe, components={"vae", "dit"})


class Declared(toys.Pipeline, SupportsComponentDiscovery):
    """Says what is what, with a component that is missing and one that is None."""

    _dit_modules = ["transformer", "transformer_2", "transformer_3"]  # noqa: RUF012
    _encoder_modules = ["text_encoder"]  # noqa: RUF012
    _vae_modules = ["vae"]  # noqa: RUF012


def test_a_pipeline_that_declares_its_components_is_believed(start: Any) -> None:
    """A missing one is a warning, an optional one that is None is nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = Declared()
    reference = toys.pipeline()
    with pytest.warns(OffloadWarning, match="transformer_3") as caught:
        backend, _ = start(pipe.requires_grad_(False), components=ALL)
    assert len(caught) == 1
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))
    assert {component.name for component in backend.report().components} == {"transformer", "text_encoder", "vae"}


def test_a_plain_object_with_components_in_lists_and_nested_pipelines_works(start: Any) -> None:
    """vllm-project/vllm-omni#2560, #2935: odd names and nesting, and nothing was offloaded in silence."""
    plain = toys.pipeline(second=True)
    inner = toys.pipeline(second=True)
    pipe = SimpleNamespace(
        mllm=inner.text_encoder,
        stages=[SimpleNamespace(transformer=inner.transformer), SimpleNamespace(dit=inner.transformer_2)],
        decoders={"vae": inner.vae},
        scheduler=object(),
    )
    backend, _ = start(pipe, components=ALL)
    kinds = {component.name: component.kind for component in backend.report().components}
    assert kinds == {
        "mllm": "text_encoder",
        "stages.0.transformer": "dit",
        "stages.1.dit": "dit",
        "decoders.vae": "vae",
    }
    assert torch.equal(plain(toys.prompt()), inner(toys.prompt()))
    assert backend.report().fetches == 4


def test_weights_of_a_module_pipeline_itself_are_on_the_device_and_named(start: Any) -> None:
    """Beside its components a pipeline may hold parameters of its own."""
    pipe = toys.pipeline()
    pipe.register_parameter("guidance", nn.Parameter(torch.ones(7), requires_grad=False))
    pipe.extra = nn.Linear(3, 3)
    backend, runtime = start(pipe, components=ALL)
    resident = {note.name: note.bytes for note in backend.report().resident}
    assert resident == {"guidance": 28, "extra": 48}
    assert runtime.ledger.device_bytes == 76
    backend.disable()
    assert runtime.ledger.device_bytes == 0


def test_a_component_inside_another_has_one_owner(start: Any) -> None:
    """Both declared: refused by name."""

    class Nested(nn.Module):
        _dit_modules = ["transformer", "transformer.blocks.0"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.transformer = toys.pipeline().transformer

    with pytest.raises(UnsupportedModelError, match=r"'transformer\.blocks\.0' lies inside component 'transformer'"):
        start(Nested())


def test_an_owner_with_guests_cannot_be_taken_over_whole(start: Any) -> None:
    """A second backend on the same pipeline would own nothing."""
    pipe = toys.pipeline()
    start({"text_encoder": pipe.text_encoder})
    with pytest.raises(BackendStateError, match="every selected component"):
        start({"text_encoder": pipe.text_encoder})
