"""Whole diffusers pipelines, every component offloaded, beside themselves without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.testing import pipelines

ALL = {"dit", "text_encoder", "vae"}


def _tied(pipe: Any) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for component, module in pipe.components.items():
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(f"{component}.{name}")
    return [group for group in names.values() if len(group) > 1]


@pytest.mark.parametrize("components", [None, ALL], ids=["default", "all"])
@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_a_whole_pipeline_gives_the_same_bits_twice_and_is_whole_afterwards(
    start: Any, name: str, components: set[str] | None
) -> None:
    """Ties are the same objects before, while and after; `pipe.device` is the execution device."""
    pipe = pipelines.build(name)
    tied = _tied(pipe)
    values = {
        f"{key}.{inner}": (parameter, parameter.detach().clone())
        for key, module in pipe.components.items()
        if isinstance(module, nn.Module)
        for inner, parameter in module.named_parameters()
    }
    expected = [pipelines.run(name, pipe, seed=seed) for seed in (1, 2)]
    # Without components the VAE stays on the device; with them everything takes turns.
    backend, runtime = start(pipe, components=components, runtime={"lazy": True, "separate": components is None})
    for seed, output in zip((1, 2), expected, strict=True):
        assert torch.equal(output, pipelines.run(name, pipe, seed=seed))
    report = backend.report()
    moved = {component.name for component in report.components if component.fetches}
    selected = {"vae"} if components else set()
    wanted = {key for key, module in pipe.components.items() if isinstance(module, nn.Module)} - ({"vae"} - selected)
    assert moved == wanted
    assert runtime.poisoned >= 2
    assert tied == _tied(pipe)
    assert pipe.device == backend.device == pipe._execution_device
    backend.disable()
    assert tied == _tied(pipe)
    for key, module in pipe.components.items():
        if isinstance(module, nn.Module):
            for inner, parameter in module.named_parameters():
                original, value = values[f"{key}.{inner}"]
                assert parameter is original
                assert torch.equal(parameter, value)
    assert torch.equal(expected[0], pipelines.run(name, pipe, seed=1))


@pytest.mark.parametrize("name", ["flux", "wan22", "sd3"])
def test_save_pretrained_while_offloaded_writes_true_weights(start: Any, tmp_path: Path, name: str) -> None:
    """huggingface/accelerate#2817, #2156: others write placeholders, or fail."""
    pipe = pipelines.build(name)
    expected = {
        key: {inner: value.clone() for inner, value in module.state_dict().items()}
        for key, module in pipe.components.items()
        if isinstance(module, nn.Module)
    }
    start(pipe, components=ALL)
    pipelines.run(name, pipe)
    pipe.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    for key, state in expected.items():
        saved: dict[str, torch.Tensor] = {}
        for file in (tmp_path / key).glob("*.safetensors"):
            saved.update(load_file(file))
        assert saved, key
        for inner, value in saved.items():
            assert torch.equal(value, state[inner]), f"{key}.{inner}"


def test_a_lora_loaded_scaled_fused_and_removed_while_offloaded_takes_effect_each_time(start: Any) -> None:
    """huggingface/diffusers#11791, Zheng-Chong#245: elsewhere adapters stay behind, or a merge has no effect."""
    from peft import LoraConfig

    outputs = []
    for offloaded in (False, True):
        pipe = pipelines.build("flux")
        if offloaded:
            start(pipe, components=ALL, device_budget_gib=1.0)
        seen = [pipelines.run("flux", pipe)]
        torch.manual_seed(3)
        pipe.transformer.add_adapter(
            LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_k"])
        )
        seen.append(pipelines.run("flux", pipe))
        for module in pipe.transformer.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.25)
        seen.append(pipelines.run("flux", pipe))
        pipe.transformer.fuse_lora(lora_scale=1.0)
        seen.append(pipelines.run("flux", pipe))
        pipe.transformer.unfuse_lora()
        seen.append(pipelines.run("flux", pipe))
        pipe.transformer.delete_adapters("default")
        seen.append(pipelines.run("flux", pipe))
        outputs.append(seen)
    for step, (plain, streamed) in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(plain, streamed), f"step {step}"
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.equal(outputs[0][2], outputs[0][3])
