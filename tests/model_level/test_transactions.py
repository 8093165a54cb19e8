"""`enable` does all or nothing, `disable` can be called until it succeeds, nobody owns a tensor twice."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import BackendState, BackendStateError, OffloadWarning, UnsupportedModelError
from sidestream.streaming import entry, image, pool, store
from sidestream.testing import toys
from sidestream.testing.portrait import portrait

ALL = {"dit", "text_encoder", "vae"}


class Broken(Exception):
    """The fault that a test plants."""


def break_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, error: type[BaseException]
) -> list[int]:
    """Have the `nth` call of `owner.name` raise; return a list that grows with each call."""
    original, calls = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise error("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


STEPS: list[tuple[Any, str]] = [
    (pool.Slab, "carve"),
    (pool.PinnedPool, "take"),
    (store.PinnedStore, "settle"),
    (entry.Gate, "attach"),
    (entry.Gate, "watch"),
    (image.Image, "__init__"),
    (image.Structure, "__init__"),
]


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
def test_an_enable_that_fails_half_way_leaves_the_model_as_it_was(
    start: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, error: type[BaseException]
) -> None:
    """vllm-project/vllm-omni#5929: some components were left as placeholders. A second try works."""
    pipe = toys.pipeline(second=True)
    expected = toys.pipeline(second=True)(toys.prompt())
    before = portrait(pipe)
    with monkeypatch.context() as patch:
        calls = break_call(patch, owner, name, nth, error)
        try:
            start(pipe, components=ALL)
        except error:
            assert len(calls) >= nth
        else:
            pytest.skip(f"only {len(calls)} calls")
    assert before == portrait(pipe)
    _, runtime = start(pipe, components=ALL)
    assert torch.equal(expected, pipe(toys.prompt()))
    assert runtime.copied > 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (entry.Gate, "detach"),
        (store.PinnedStore, "release"),
        (pool.PinnedPool, "give_back"),
        (image.Image, "forget_copies"),
    ],
)
def test_a_disable_that_fails_can_be_called_until_it_succeeds(
    start: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Nothing is forgotten before it is done."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    before = portrait(pipe)
    backend, runtime = start(pipe, components=ALL)
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))
    with monkeypatch.context() as patch:
        break_call(patch, owner, name, 1, Broken)
        with pytest.raises(Broken):
            backend.disable()
        assert backend.state is BackendState.UNDOING
        with pytest.raises(BackendStateError, match=r"disable\(\) until it succeeds"):
            backend.enable(pipe)
    backend.disable()
    assert before == portrait(pipe)
    assert runtime.ledger.device_bytes == runtime.ledger.pinned_bytes == 0
    assert torch.equal(reference(toys.prompt(), seed=3), pipe(toys.prompt(), seed=3))


def test_enabling_again_does_nothing_and_another_backend_is_refused(start: Any) -> None:
    """huggingface/diffusers#2907, #7448: elsewhere the second one takes offloaded weights for the original."""
    pipe = toys.pipeline()
    backend, _ = start(pipe)
    hooks = portrait(pipe)
    with pytest.warns(OffloadWarning, match="already"):
        backend.enable(pipe)
    assert hooks == portrait(pipe)
    with pytest.raises(BackendStateError, match="another backend"):
        start(pipe)
    with pytest.raises(BackendStateError, match="offloaded already"):
        start(pipe.transformer.blocks[0])
    with pytest.raises(BackendStateError, match="disable"):
        backend.enable(toys.pipeline())
    assert hooks == portrait(pipe)


def test_a_part_and_then_the_whole_is_refused_too(start: Any) -> None:
    """Two owners of one tensor, found from either side."""
    pipe = toys.pipeline()
    start({"transformer": pipe.transformer.blocks[0]})
    with pytest.raises(BackendStateError, match="offloaded already"):
        start(pipe)


def _meta(pipe: toys.Pipeline) -> str:
    pipe.transformer.turned = nn.Linear(16, 16, device="meta")
    return r"transformer\.turned\.weight.*meta"


def _foreign_forward(pipe: toys.Pipeline) -> str:
    forward = pipe.vae.forward
    pipe.vae.forward = lambda *args: forward(*args)
    return "forward of component 'vae' was replaced"


def _accelerate(pipe: toys.Pipeline) -> str:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.text_encoder.layers[0], ModelHook())
    return r"text_encoder\.layers\.0 carries an offloading hook of accelerate"


def _group_offload(pipe: toys.Pipeline) -> str:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        pipe.transformer,
        onload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    return "offloading hook of diffusers"


@pytest.mark.parametrize("damage", [_meta, _foreign_forward, _accelerate, _group_offload])
def test_what_cannot_be_taken_over_is_refused_by_name(start: Any, damage: Callable[[toys.Pipeline], str]) -> None:
    """huggingface/diffusers#8644, #5281: weights on meta, or somebody else's hooks."""
    pipe = toys.pipeline()
    text = damage(pipe)
    before = portrait(pipe)
    with pytest.raises(UnsupportedModelError, match=text):
        start(pipe)
    assert before == portrait(pipe)


@pytest.mark.parametrize(
    ("components", "text"), [({"image_encoder"}, "image_encoder.*none"), ({"dit", "image_encoder"}, "found")]
)
def test_a_selected_kind_that_is_not_there_is_an_error(start: Any, components: set[str], text: str) -> None:
    """vllm-project/vllm#56283 and others: the flag was accepted, and nothing was offloaded."""
    with pytest.raises(UnsupportedModelError, match=text):
        start(toys.pipeline(), components=components)


def test_a_default_that_finds_nothing_warns_and_reports_zero(start: Any) -> None:
    """Never silence."""
    with pytest.warns(OffloadWarning, match="nothing takes turns"):
        backend, _ = start({"vae": toys.Vae()})
    report = backend.report()
    assert report.moved_bytes == report.fetches == 0
    assert report.resident[0].name == "vae"


def test_no_module_at_all_is_an_error(start: Any) -> None:
    """The error says what to pass."""
    with pytest.raises(UnsupportedModelError, match="no module found"):
        start({"scheduler": object()})


def test_leaving_the_interpreter_while_offloaded_is_silent() -> None:
    """Neither disable nor shutdown was called; a worker thread has copied."""
    code = """
import torch, sidestream
from torch import nn
model = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200)).requires_grad_(False)
backend = sidestream.enable_offload({"transformer": model}, "model_level", device="cpu")
with torch.no_grad():
    model(torch.randn(2, 1200))
assert backend.report().moved_bytes > 4 << 20
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_shutdown_frees_the_device_and_keeps_the_weights_readable_without_copying_them(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm-omni#7581: rebuilding every weight at exit ran a machine out of memory."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, runtime = start(pipe, components=ALL)
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))
    addresses = [parameter.data_ptr() for parameter in pipe.parameters()]
    backend.shutdown()
    backend.shutdown()
    assert addresses == [parameter.data_ptr() for parameter in pipe.parameters()]
    assert runtime.ledger.device_bytes == runtime.ledger.pinned_bytes == 0
    assert torch.equal(reference(toys.prompt(), seed=1), pipe(toys.prompt(), seed=1))
    with pytest.raises(BackendStateError, match="shut down"):
        backend.enable(pipe)


def test_disable_inside_a_forward_is_refused(start: Any) -> None:
    """The weights are in use; the error names the component."""
    pipe = toys.pipeline()
    backend, _ = start(pipe)
    pipe.transformer.blocks[1].register_forward_hook(lambda *args: backend.disable())
    with pytest.raises(BackendStateError, match="inside a forward of component 'transformer'"):
        pipe(toys.prompt())
    pipe.transformer.blocks[1]._forward_hooks.clear()
    assert backend.enabled


def test_temporary_offloading_of_two_dits_leaves_no_trace(start: Any) -> None:
    """sgl-project/sglang#32743: a warm-up's temporary policy was taken for the component's own."""
    pipe, reference = toys.pipeline(second=True), toys.pipeline(second=True)
    before = portrait(pipe)
    for seed in range(2):
        backend, _ = start({"transformer": pipe.transformer, "transformer_2": pipe.transformer_2})
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
        backend.disable()
        assert before == portrait(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(reference(toys.prompt(), seed=7), pipe(toys.prompt(), seed=7))
