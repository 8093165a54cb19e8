"""After `disable` nothing is left: the same objects, values, layouts and ties, in ordinary memory of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.testing import toys
from sidestream.testing.portrait import portrait

ALL = {"dit", "text_encoder", "vae"}


@pytest.mark.parametrize("ran", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("components", [None, ALL], ids=["default", "all"])
@pytest.mark.parametrize(
    ("pin", "separate"), [(True, False), (False, False), (True, True)], ids=["pinned", "pageable", "separate"]
)
def test_objects_layouts_ties_hooks_attributes_and_classes_are_as_before(
    start: Any, components: set[str] | None, pin: bool, separate: bool, ran: bool
) -> None:
    """vllm-project/vllm-omni#5988, sgl-project/sglang#22594: transposed and channels-last layouts got lost."""
    pipe = toys.pipeline(second=True)
    before, values = portrait(pipe), {k: v.clone() for k, v in pipe.state_dict().items()}
    backend, runtime = start(pipe, components=components, pin=pin, runtime={"separate": separate})
    if ran:
        reference = toys.pipeline(second=True)
        for seed in range(2):
            pipe(toys.prompt(), seed=seed)
            reference(toys.prompt(), seed=seed)
        values = reference.state_dict()
    backend.disable()
    assert before == portrait(pipe)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(values[name], tensor), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    assert pipe.transformer.head.weight is pipe.transformer.embed.weight
    assert runtime.ledger.device_bytes == runtime.ledger.pinned_bytes == 0


def test_buffers_that_a_forward_wrote_stay_written(start: Any) -> None:
    """Counters and running means; the latter are written by kernels that count no version."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, _ = start(pipe, components=ALL)
    for seed in range(3):
        pipe(toys.prompt(), seed=seed)
        reference(toys.prompt(), seed=seed)
    assert pipe.transformer.blocks[0].calls.item() == 9
    assert torch.equal(reference.vae.post_quant.running_mean, pipe.vae.post_quant.running_mean)
    backend.disable()
    assert torch.equal(reference.vae.post_quant.running_var, pipe.vae.post_quant.running_var)
    assert pipe.vae.post_quant.num_batches_tracked.item() == 3


def test_a_model_built_under_inference_mode_comes_back_as_it_was(start: Any) -> None:
    """`.data =` with a normal tensor would turn its parameters into normal ones."""
    with torch.inference_mode():
        pipe, reference = toys.pipeline(), toys.pipeline()
        for parameter in pipe.parameters():
            assert parameter.is_inference()
        expected = reference(toys.prompt())
    backend, runtime = start(pipe, components=ALL)
    with torch.inference_mode():
        assert torch.equal(expected, pipe(toys.prompt()))
    assert runtime.copied > 0
    backend.disable()
    assert all(parameter.is_inference() for parameter in pipe.parameters())


def test_what_a_user_assigned_while_enabled_stays_the_users(start: Any) -> None:
    """New Parameters, casts and replaced modules survive the end and take effect before it."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, _ = start(pipe, components=ALL)
    pipe(toys.prompt())
    reference(toys.prompt())
    torch.manual_seed(5)
    weight, linear = nn.Parameter(torch.randn(16, 16), requires_grad=False), nn.Linear(16, 16)
    for model in (pipe, reference):
        model.transformer.turned.weight = weight
        model.transformer.blocks[1] = copy.deepcopy(model.transformer.blocks[0])
        model.vae.encoder = linear
        model.text_encoder.layers[0].low = model.text_encoder.layers[0].low.to(torch.float32).to(torch.bfloat16)
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))
    backend.disable()
    assert not any(module._forward_pre_hooks for module in pipe.modules()), "a copied block kept a hook"
    assert pipe.transformer.turned.weight is weight
    assert pipe.vae.encoder is linear
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))


def test_weights_of_a_mapped_file_are_handed_back_untouched_without_pinning(start: Any, tmp_path: Any) -> None:
    """vladmandic/sdnext#5092: elsewhere the mapping's pages and a copy were both in memory."""
    file = tmp_path / "weights"
    content = torch.randn(64 * 64)
    content.numpy().tofile(file)
    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(torch.from_file(str(file), shared=True, size=64 * 64).view(64, 64), requires_grad=False)
    address, written = model.weight.data_ptr(), file.read_bytes()
    backend, runtime = start({"transformer": model}, pin=False)
    x = torch.randn(2, 64)
    assert torch.equal(nn.functional.linear(x, content.view(64, 64)), model(x))
    backend.disable()
    assert model.weight.data_ptr() == address
    assert runtime.read_back_bytes == 0
    assert runtime.copied > 0
    assert file.read_bytes() == written


@pytest.mark.parametrize("when", ["while", "after"])
def test_a_model_pickles_and_copies_while_offloaded_and_after(start: Any, when: str) -> None:
    """huggingface/accelerate#2843: closures left on instances cannot be pickled. A copy owns its weights."""
    pipe = toys.pipeline()
    expected = toys.pipeline()(toys.prompt())
    backend, _ = start(pipe, components=ALL)
    pipe(toys.prompt())
    pipe.vae.post_quant.reset_running_stats()
    if when == "after":
        backend.disable()
    fetches = backend.report().fetches
    for twin in (pickle.loads(pickle.dumps(pipe)), copy.deepcopy(pipe)):
        for block in twin.transformer.blocks:
            block.calls.zero_()
        assert torch.equal(expected, twin(toys.prompt()))
        assert twin.transformer.embed.weight is twin.transformer.head.weight
        assert twin.transformer.embed.weight.data_ptr() != pipe.transformer.embed.weight.data_ptr()
    assert backend.report().fetches == fetches, "the copy drove the original's backend"
    dumped = len(pickle.dumps(pipe.state_dict()))
    assert dumped < 2.5 * sum(tensor.nbytes for tensor in pipe.state_dict().values()) + 60_000


def test_signatures_and_types_are_unchanged_while_offloaded(start: Any) -> None:
    """vllm-project/vllm-omni#1786: a replaced forward hid its signature from another library."""
    import inspect

    pipe, plain = toys.pipeline(), toys.pipeline()
    start(pipe, components=ALL)
    for module, other in zip(pipe.modules(), plain.modules(), strict=True):
        assert inspect.signature(module.forward) == inspect.signature(other.forward)
        assert module.forward.__doc__ == other.forward.__doc__
        assert type(module) is type(other)
