"""The output is the one of the pipeline that is not offloaded, and something was moved to get it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sidestream.testing import toys
from sidestream.testing.runtimes import WatchfulRuntime

ALL = {"dit", "text_encoder", "vae"}


@pytest.mark.parametrize("runtime", [{}, {"lazy": True}, {"separate": True}], ids=["eager", "lazy", "separate"])
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("components", [None, ALL], ids=["default", "all"])
@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget_gib": 1.0}, {"device_budget_gib": 45e-6}, {"release_after_request": True}],
    ids=["turns", "room", "tight", "release"],
)
def test_a_pipeline_with_two_dits_gives_the_same_bits_for_several_requests(
    start: Any, options: dict[str, Any], components: set[str] | None, pin: bool, runtime: dict[str, Any]
) -> None:
    """Freed device memory is poisoned, and lazily run copies show a missing wait."""
    reference = toys.pipeline(second=True)
    pipe = toys.pipeline(second=True)
    backend, watched = start(pipe, components=components, pin=pin, runtime=runtime, **options)
    for seed in range(4):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
    assert backend.report().fetches >= 3
    assert watched.copied >= backend.report().moved_bytes > 0
    if options.get("device_budget_gib") != 1.0:
        assert watched.poisoned >= 4, "nothing was ever evicted"


def test_a_prefetched_component_is_ready_when_its_turn_comes(start: Any) -> None:
    """With room for two, the second request copies nothing late."""
    reference, pipe = toys.pipeline(second=True), toys.pipeline(second=True)
    backend, _ = start(pipe, components=ALL, device_budget_gib=45e-6)
    for seed in range(2):
        pipe(toys.prompt(), seed=seed)
        reference(toys.prompt(), seed=seed)
    before = backend.report()
    assert torch.equal(reference(toys.prompt(), seed=9), pipe(toys.prompt(), seed=9))
    after = backend.report()
    assert after.fetches > before.fetches
    assert after.late_fetches == before.late_fetches


def test_prefetch_can_be_turned_off(start: Any) -> None:
    """Without it every fetch is one that a forward had to start."""
    pipe = toys.pipeline(second=True)
    backend, _ = start(pipe, components=ALL, device_budget_gib=45e-6, prefetch=False)
    for seed in range(3):
        pipe(toys.prompt(), seed=seed)
    report = backend.report()
    assert report.late_fetches == report.fetches > 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_calls_in_turn_under_inference_mode_and_no_grad(start: Any, mode: Any) -> None:
    """sgl-project/sglang#33470, vllm-project/vllm#1968: a buffer born in inference mode refuses later writes."""
    reference, pipe = toys.pipeline(), toys.pipeline()
    with mode():
        start(pipe, components=ALL)
        first = pipe(toys.prompt())
        assert torch.equal(reference(toys.prompt()), first)
    with torch.inference_mode():
        assert torch.equal(reference(toys.prompt(), seed=1), pipe(toys.prompt(), seed=1))
    assert torch.equal(reference(toys.prompt(), seed=2), pipe(toys.prompt(), seed=2))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_compute_with_the_device_copies(start: Any, kind: type[nn.RNNBase]) -> None:
    """They keep a list of their weights that setting a registry does not reach."""
    torch.manual_seed(0)
    model = kind(8, 8, num_layers=2)
    reference = kind(8, 8, num_layers=2)
    reference.load_state_dict(model.state_dict())
    _, runtime = start({"text_encoder": model})
    x = torch.randn(3, 2, 8)
    assert torch.equal(reference(x)[0], model(x)[0])
    # A weight read from the list is the device's while computing: poison the masters' list and look again.
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module._flat_weights[0] is module.weight_ih_l0))
    model(x)
    assert seen == [True]
    assert runtime.copied > 0


def test_the_fused_path_of_a_transformer_encoder_layer_stays_on(start: Any) -> None:
    """torch leaves it as soon as a submodule has a hook; no hook is there while a component computes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 4, 16)
    expected = model(x)
    start({"transformer": model})
    hooks: list[int] = []
    original = torch._transformer_encoder_layer_fwd

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        hooks.append(1)
        return original(*args, **kwargs)

    torch._transformer_encoder_layer_fwd = counting
    try:
        assert torch.equal(expected, model(x))
    finally:
        torch._transformer_encoder_layer_fwd = original
    assert len(hooks) == 2


def test_the_poison_would_show(start: Any) -> None:
    """The proof of the proof: computing on freed device memory gives another output."""
    pipe = toys.pipeline()
    expected = pipe(toys.prompt())
    backend, runtime = start(pipe)
    unit = backend._units["transformer"]

    def free_too_early(buffer: torch.Tensor) -> torch.Tensor:
        WatchfulRuntime.free(runtime, buffer)
        runtime.ledger.device(buffer.nbytes)
        return buffer

    bind = unit.image.bind

    def bind_poisoned() -> None:
        bind()
        free_too_early(unit.buffer)

    unit.image.bind = bind_poisoned
    assert not torch.equal(expected, pipe(toys.prompt()))
