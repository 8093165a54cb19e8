"""Two backends share nothing, nothing global is patched, nothing is initialised before it is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sidestream
from sidestream import OffloadConfig
from sidestream.streaming.runtime import CpuRuntime
from sidestream.testing import toys
from sidestream_model_cpu.backend import ModelLevelBackend

ALL = {"dit", "text_encoder", "vae"}


def test_two_backends_share_no_stream_no_pool_and_no_count(start: Any) -> None:
    """What one frees or waits for is no business of the other."""
    pipes = [toys.pipeline(seed=seed) for seed in range(2)]
    (first, one), (second, two) = (start(pipe, components=ALL) for pipe in pipes)
    mine, other = first._parts()[1], second._parts()[1]
    assert mine._stream is not other._stream
    assert mine.pool is not other.pool
    assert one.ledger is not two.ledger
    slabs = {slab.memory.data_ptr() for slab in mine.pool.slabs}
    assert slabs
    assert not slabs & {slab.memory.data_ptr() for slab in other.pool.slabs}
    pipes[0](toys.prompt())
    assert (one.copied > 0, two.copied) == (True, 0)
    first.disable()
    assert one.ledger.pinned_bytes == 0 < two.ledger.pinned_bytes
    assert torch.equal(toys.pipeline(seed=1)(toys.prompt()), pipes[1](toys.prompt()))


def test_nothing_global_is_patched_or_registered(start: Any) -> None:
    """Not on torch's classes, not as a global hook, not in a mode."""

    def world() -> list[Any]:
        classes = (nn.Module, nn.Parameter, torch.Tensor, nn.Linear, nn.Embedding)
        hooks = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
        return [*(dict(vars(cls)) for cls in classes), *(dict(hook) for hook in hooks), torch.get_default_device()]

    before = world()
    pipe = toys.pipeline()
    backend, _ = start(pipe, components=ALL)
    pipe(toys.prompt())
    assert world() == before
    backend.disable()
    assert world() == before


def test_making_a_backend_opens_no_device() -> None:
    """A configuration can be checked on a machine that has none, or whose device is somebody else's."""
    opened: list[torch.device] = []

    def runtime(device: torch.device) -> CpuRuntime:
        opened.append(device)
        return CpuRuntime(device)

    backend = ModelLevelBackend(config=OffloadConfig("model_level"), device="cpu", runtime=runtime)
    backend.report()
    assert opened == []
    backend.enable(toys.pipeline())
    assert opened == [torch.device("cpu")]
    backend.disable()


def test_a_plain_tensor_attribute_is_named() -> None:
    """It does not move with a module, here or anywhere; whoever meets a device mismatch finds it in the report."""
    model = toys.pipeline().transformer
    model.blocks[0].table = torch.ones(3)
    with sidestream.offload({"transformer": model}, "model_level", device="cpu") as backend:
        notes = {note.name: note for note in backend.report().resident}
        assert notes["transformer.blocks.0.table"].bytes == 12
        assert "plain attribute" in notes["transformer.blocks.0.table"].reason
