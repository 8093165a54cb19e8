"""`model_level` on a real accelerator; left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import sidestream
from sidestream.testing import pipelines

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")

ALL = ["dit", "text_encoder", "vae"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("components", [None, ALL], ids=["default", "all"])
@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_the_bits_are_those_of_the_pipeline_resident_on_the_device(name: str, components: list[str] | None) -> None:
    """And everything is back on the host afterwards."""
    device = torch.accelerator.current_accelerator()
    resident = pipelines.build(name).to(device)
    expected = [pipelines.run(name, resident, seed=seed) for seed in (1, 2)]
    del resident
    pipe = pipelines.build(name)
    config = {"strategy": "model_level", "components": components}
    with sidestream.offload(pipe, config) as backend:
        for seed, output in zip((1, 2), expected, strict=True):
            assert torch.equal(output, pipelines.run(name, pipe, seed=seed))
        report = backend.report()
        assert report.moved_bytes > 0
        assert report.pinned_bytes > 0
        assert pipe.device.type == device.type
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_peak_memory_is_one_component_and_what_stays() -> None:
    """As torch counts it: two models of 256 MiB take turns."""
    models = {
        name: nn.Linear(8192, 8192, bias=False).requires_grad_(False) for name in ("transformer", "transformer_2")
    }
    size = 8192 * 8192 * 4
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with sidestream.offload(models, "model_level") as backend:
        x = torch.randn(4, 8192, device=backend.device)
        for _ in range(3):
            for model in models.values():
                x = model(x)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() - before < size * 1.1
    assert torch.accelerator.memory_allocated() - before < size * 0.1
