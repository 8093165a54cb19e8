"""Whichever way a component is entered, left or broken off: the next call is right, and nothing is half done."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import BackendStateError, OffloadPlan, UnsupportedModelError
from sidestream.streaming import entry
from sidestream.testing import toys
from sidestream.testing.portrait import portrait

ALL = {"dit", "text_encoder", "vae"}

ERRORS = [RuntimeError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]


def raise_in(module: nn.Module, error: type[BaseException]) -> Callable[[], None]:
    """Have the next call of `module` raise; return what takes that away again."""

    def fail(*args: Any) -> None:
        raise error("planted")

    handle = module.register_forward_hook(fail)
    return handle.remove


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["text_encoder.layers.1", "transformer.blocks.1.low", "vae.decoder.1"])
def test_an_exception_anywhere_reaches_the_caller_and_the_next_call_is_right(
    start: Any, where: str, error: type[BaseException]
) -> None:
    """vllm-project/vllm-omni#7188, huggingface/diffusers#14328: one failed request made all later ones fail."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    masters = dict(pipe.named_parameters())
    backend, runtime = start(pipe, components=ALL)
    restore = raise_in(pipe.get_submodule(where), error)
    with pytest.raises(error, match="planted"):
        pipe(toys.prompt())
    restore()
    assert all(parameter is masters[name] for name, parameter in pipe.named_parameters())
    with torch.no_grad():
        for model in (pipe, reference):
            model.transformer.turned.weight.add_(0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("calls"):
                    buffer.zero_()
            model.vae.post_quant.reset_running_stats()
    for seed in range(2):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
    backend.disable()
    assert runtime.ledger.device_bytes == 0
    assert torch.equal(reference.transformer.turned.weight, pipe.transformer.turned.weight)


@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_in_a_module_that_was_called_directly(start: Any, error: type[BaseException]) -> None:
    """No hook is told of a KeyboardInterrupt; whoever comes next finds out."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, runtime = start(pipe, components=ALL)
    x = torch.randn(2, 16)
    block = pipe.transformer.blocks[0]
    restore = raise_in(block.low, error)
    with pytest.raises(error):
        block(x)
    restore()
    block.calls.zero_()
    pipe.transformer.turned.weight.add_(0.5)
    reference.transformer.turned.weight.add_(0.5)
    for seed in range(2):
        assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
    assert torch.equal(reference.transformer.turned.weight, pipe.transformer.turned.weight)
    assert not pipe.transformer.blocks[0]._forward_hooks
    backend.disable()
    assert runtime.ledger.device_bytes == 0


def test_every_way_in_is_seen(start: Any) -> None:
    """huggingface/diffusers#2285, #13417, InvokeAI#2596: hooks on `forward` alone leave weights on the host."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, _ = start(pipe, components=ALL)
    x, ids = torch.randn(2, 16), toys.prompt()
    ways: list[Callable[[toys.Pipeline], torch.Tensor]] = [
        lambda p: p.vae.decode(x),
        lambda p: p.vae.encode(x),
        lambda p: p.vae.decoder(x),
        lambda p: p.vae.decoder[0](x),
        lambda p: p.text_encoder.generate(ids),
        lambda p: p.text_encoder(ids),
        lambda p: p.text_encoder.embed_tokens(ids),
        lambda p: p.transformer(x, x),
        lambda p: p.transformer.forward(x, x, step=2),
        lambda p: p.transformer.blocks[1](x),
        lambda p: p.transformer.blocks[1].up(x),
    ]
    inside: list[bool] = []
    for module in (
        pipe.vae.decoder[0],
        pipe.text_encoder.embed_tokens,
        pipe.transformer.blocks[1].up,
        pipe.vae.encoder,
    ):
        mine = module.weight
        module.register_forward_pre_hook(lambda m, args, mine=mine: inside.append(m.weight is not mine))
    for way in (*ways, *reversed(ways), *random.Random(0).choices(ways, k=20)):
        count = len(inside)
        assert torch.equal(way(reference), way(pipe))
        assert all(inside[count:]), "computed with host weights"
    assert len(inside) > 30
    assert backend.report().fetches > 3


def test_a_component_without_weights_in_forward_order_reversed_and_nested(start: Any) -> None:
    """huggingface/diffusers#11375: order that differs from registration; one component inside another's forward."""
    pipe, reference = toys.pipeline(second=True), toys.pipeline(second=True)
    start(pipe, components=ALL)
    x, ids = torch.randn(2, 16), toys.prompt()
    for model in (pipe, reference):
        encoder = model.text_encoder
        model.transformer.blocks[1].register_forward_pre_hook(lambda m, args, e=encoder: (args[0] + e(ids),))

    def reversed_order(p: toys.Pipeline) -> list[torch.Tensor]:
        assert p.transformer_2 is not None
        return [
            p.vae.decode(x),
            p.transformer_2(x, x),
            p.transformer(x, x),
            p.text_encoder(ids),
            p.transformer(x, x),
        ]

    for _ in range(3):
        for expected, output in zip(reversed_order(reference), reversed_order(pipe), strict=True):
            assert torch.equal(expected, output)


def test_two_threads_and_a_third_that_ends_and_starts_it_are_serialised(start: Any) -> None:
    """huggingface/diffusers#7450, #3672: shared state gave black images."""
    pipe = toys.pipeline()
    pipe.vae.post_quant.eval()
    reference = toys.pipeline()
    reference.vae.post_quant.eval()
    expected = {seed: reference(toys.prompt(), seed=seed) for seed in range(4)}
    backend, _ = start(pipe, components=ALL)
    failures: list[BaseException] = []

    def use(offset: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(40):
                    seed = (turn + offset) % 4
                    assert torch.equal(expected[seed], pipe(toys.prompt(), seed=seed))
        except BaseException as error:
            failures.append(error)

    def toggle() -> None:
        try:
            for _ in range(15):
                backend.disable()
                backend.enable(pipe)
                backend.report()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=use, args=(0,)),
        threading.Thread(target=use, args=(1,)),
        threading.Thread(target=toggle),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
    assert backend.report().fetches > 0


def test_gradients_are_refused_as_soon_as_something_requires_them(start: Any) -> None:
    """kohya, OneTrainer#1306 and others: silently wrong gradients from weights that are gone."""
    pipe = toys.pipeline()
    start(pipe)
    with torch.enable_grad():
        pipe.transformer(torch.randn(2, 16), torch.randn(2, 16))
        with pytest.raises(UnsupportedModelError, match=r"transformer.*no_grad"):
            pipe.transformer(torch.randn(2, 16, requires_grad=True), torch.randn(2, 16))
        pipe.transformer.turned.weight.requires_grad_()
        with pytest.raises(UnsupportedModelError, match="inference only"):
            pipe.transformer(torch.randn(2, 16), torch.randn(2, 16))
    pipe(toys.prompt())


def test_a_declared_entry_method_is_guarded_and_a_missing_one_refused(start: Any) -> None:
    """A method that reads the root's own weights and is called nothing that could be guessed."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codebook = nn.Parameter(torch.ones(3), requires_grad=False)

        def look_up(self) -> torch.Tensor:
            return self.codebook * 1

    class Declared(nn.Module):
        _offload_plan = OffloadPlan(entry_methods={"vae": "look_up"})

        def __init__(self) -> None:
            super().__init__()
            self.vae = Odd()

    class Wrong(Declared):
        _offload_plan = OffloadPlan(entry_methods={"vae": "lookup"})

    pipe = Declared()
    backend, _ = start(pipe, components={"vae"})
    assert torch.equal(torch.ones(3), pipe.vae.look_up())
    assert backend.report().fetches == 1
    with pytest.raises(UnsupportedModelError, match="'lookup' is no method of Odd"):
        start(Wrong(), components={"vae"})


def test_a_component_that_is_none_is_ignored(start: Any) -> None:
    """vllm-project/vllm-omni#1392: an optional second DiT was assumed to be there."""
    pipe, reference = toys.pipeline(second=False), toys.pipeline(second=False)
    assert pipe.transformer_2 is None
    start(pipe, components={"dit"})
    assert torch.equal(reference(toys.prompt()), pipe(toys.prompt()))


def test_after_disable_calls_cost_nothing_and_refresh_is_refused(start: Any) -> None:
    """The error says what to do."""
    pipe = toys.pipeline()
    backend, _ = start(pipe)
    pipe(toys.prompt())
    backend.disable()
    report = backend.report()
    assert report.fetches == 2
    assert report.device_bytes == report.host_bytes == 0
    pipe(toys.prompt())
    assert backend.report() == report
    with pytest.raises(BackendStateError, match="call enable"):
        backend.refresh()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["whole", "root.compile", "block.compile"])
def test_compiled_models_give_the_same_bits_without_a_graph_for_every_call(start: Any, what: str, when: str) -> None:
    """pytorch/pytorch#150711, huggingface/diffusers#11584: closures became guards, and the recompile limit was hit."""
    torch._dynamo.reset()
    model, reference = toys.pipeline().transformer, toys.pipeline().transformer
    for net in (model, reference):
        for block in net.blocks:
            block.calls.zero_()
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def compile_it() -> Callable[..., torch.Tensor]:
        if what == "whole":
            return torch.compile(model, backend=counting)
        if what == "root.compile":
            model.compile(backend=counting)
        else:
            for block in model.blocks:
                block.compile(backend=counting)
        return model

    if when == "before":
        call = compile_it()
        backend, _ = start({"transformer": model})
    else:
        backend, _ = start({"transformer": model})
        call = compile_it()
    x, context = torch.randn(2, 16), torch.randn(2, 16)
    for step in range(4):
        assert torch.equal(reference(x, context), call(x, context)), step
    first = len(graphs)
    for _ in range(4):
        backend.release()
        assert torch.equal(reference(x, context), call(x, context))
    assert first <= 12
    assert len(graphs) == first, "a graph for each call"
    assert backend.report().fetches == 5
    torch._dynamo.reset()


def test_enabling_waits_for_a_forward_that_another_thread_is_inside(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving a weight under a running kernel would give it freed memory; who never comes out is named."""
    pipe = toys.pipeline()
    inside, leave, enabled = threading.Event(), threading.Event(), threading.Event()

    def hold(*args: Any) -> None:
        inside.set()
        assert leave.wait(30)

    hook = pipe.transformer.blocks[1].register_forward_hook(hold)
    x = torch.randn(2, 16)
    thread = threading.Thread(target=lambda: pipe.transformer(x, x))
    thread.start()
    assert inside.wait(30)

    def enable() -> None:
        start(pipe, components=ALL)
        enabled.set()

    second = threading.Thread(target=enable)
    second.start()
    assert not enabled.wait(0.2)
    leave.set()
    assert enabled.wait(30)
    for waited in (thread, second):
        waited.join(30)
    hook.remove()

    other = toys.pipeline()
    leave.clear()
    inside.clear()
    before = portrait(other)
    other.transformer.blocks[1].register_forward_hook(hold)
    third = threading.Thread(target=lambda: other.transformer(x, x))
    third.start()
    assert inside.wait(30)
    monkeypatch.setattr(entry.wait_until_idle, "__kwdefaults__", {"timeout": 0.1})
    with pytest.raises(BackendStateError, match="another thread has been inside component 'transformer'"):
        start(other)
    leave.set()
    third.join(30)
    other.transformer.blocks[1]._forward_hooks.clear()
    assert before == portrait(other)
