"""Clauses on what a forward computes: the same bits, after any failure, in any order, on time, in any thread."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.errors import OffloadError
from sidestream.testing.conformance import models
from sidestream.testing.conformance.base import (
    Conformance,
    Fault,
    assert_same,
    assert_same_state,
    numbers,
    request,
)
from sidestream.testing.conformance.worlds import CpuPlace, HostWatch, Place

ERRORS: list[type[BaseException]] = [
    RuntimeError,
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
    GeneratorExit,
]

#: Seconds for which a thread may take; far more than it needs.
PATIENCE = 60.0


class ComputingClauses(Conformance):
    """Clauses 1, 4, 5, 8 and 11."""

    # --- 1: the same bits ---------------------------------------------------------------------------------------------

    def test_clause_01_same_bits_as_the_resident_model_for_several_requests(self, place: Place) -> None:
        """Two DiTs, an encoder and a VAE; freed memory is poisoned between the requests."""
        pipe, reference = models.pipeline(), place.resident(models.pipeline())
        backend = self.start(place, pipe)
        for seed in range(3 if isinstance(place, CpuPlace) else 2):
            assert_same(request(place, reference, seed=seed), request(place, pipe, seed=seed), f"request {seed}")
        self.assert_moved(place, backend)
        self.end(place, backend)
        if isinstance(place, CpuPlace):
            assert_same(request(place, reference, seed=9), request(place, pipe, seed=9), "after disable()")

    def test_clause_01_same_bits_under_inference_mode_and_no_grad_in_turn(self, one: Place) -> None:
        """A buffer that is born in inference mode refuses later writes."""
        one.needs("views in inference mode")
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        with torch.inference_mode():
            backend = self.start(one, pipe)
            assert_same(request(one, reference), request(one, pipe), "in inference mode")
        assert_same(request(one, reference, seed=1), request(one, pipe, seed=1), "under no_grad")
        with torch.inference_mode():
            assert_same(request(one, reference, seed=2), request(one, pipe, seed=2), "in inference mode again")
        self.assert_moved(one, backend)

    @pytest.mark.parametrize("kind", ["lstm", "gru", "attention", "every dtype"])
    def test_clause_01_same_bits_for_modules_with_habits_of_their_own(self, one: Place, kind: str) -> None:
        """Recurrent modules list their weights themselves; attention reads a child's weight without calling it."""
        if kind in ("lstm", "gru"):
            one.needs("recurrent kernels")
        attention = functools.partial(nn.TransformerDecoderLayer, models.WIDTH, 2, 32, batch_first=True, dropout=0.0)
        blocks: dict[str, list[Callable[[], nn.Module]]] = {
            "lstm": [functools.partial(models.Recurrent, nn.LSTM)] * 2,
            "gru": [functools.partial(models.Recurrent, nn.GRU)] * 2,
            "attention": [functools.partial(_SelfAttended, attention)] * 2,
            "every dtype": [models.Cabinet, models.Cabinet],
        }
        pipe, reference = models.lone(*blocks[kind]).eval(), one.resident(models.lone(*blocks[kind]).eval())
        backend = self.start(one, pipe)
        for seed in range(2):
            x = numbers(one, 3, 2, models.WIDTH, seed=seed)
            assert_same(reference(x), pipe(x), f"{kind}, call {seed}")
        self.assert_moved(one, backend)

    def test_clause_01_the_fused_path_of_an_encoder_layer_stays_on(self, once: Place) -> None:
        """torch leaves it as soon as a submodule has a hook, and computes other last bits."""
        make = functools.partial(nn.TransformerEncoderLayer, models.WIDTH, 2, 32, batch_first=True)
        pipe, reference = models.lone(make, make).eval(), once.resident(models.lone(make, make).eval())
        backend = self.start(once, pipe)
        x, counts = numbers(once, 2, 4, models.WIDTH), []
        for model in (reference, pipe):
            with _counting(torch, "_transformer_encoder_layer_fwd") as calls:
                output = model(x)
            counts.append((len(calls), output))
        assert_same(counts[0][1], counts[1][1], "an encoder of fused layers")
        assert counts[0][0] == counts[1][0] == 2, f"fused layers: resident {counts[0][0]}, offloaded {counts[1][0]}"
        self.assert_moved(once, backend)

    # --- 4: never half ------------------------------------------------------------------------------------------------

    def test_clause_04_an_exception_anywhere_leaves_weights_whole_and_the_next_call_right(self, one: Place) -> None:
        """One failed request must not make all later ones fail; nor what is read, saved or edited before them."""
        places = ["transformer.blocks.1.low", "transformer.turned", "text_encoder.layers.1", "vae.decoder.1"]
        for where in places if isinstance(one, CpuPlace) else places[:1]:
            pipe, reference = models.small(), one.resident(models.small())
            masters = dict(pipe.named_parameters())
            backend = self.start(one, pipe)
            held = dict(pipe.named_parameters())
            for error in ERRORS:
                for model in (reference, pipe):
                    take_away = Fault(where, error).plant(model)
                    with pytest.raises(error, match="planted"):
                        request(one, model)
                    take_away()
                self._assert_whole_after_a_failure(one, pipe, reference, held, f"{error.__name__} in {where}")
            self.assert_moved(one, backend)
            self.end(one, backend)
            assert all(parameter is masters[name] for name, parameter in pipe.named_parameters())

    def test_clause_04_an_exception_in_a_block_that_was_called_directly(self, one: Place) -> None:
        """No forward hook is told of a KeyboardInterrupt; whoever comes next finds out."""
        pipe, reference = models.small(), one.resident(models.small())
        backend = self.start(one, pipe)
        held = dict(pipe.named_parameters())
        hooks = _count_hooks(pipe)
        for error in ERRORS:
            for model in (reference, pipe):
                take_away = Fault("transformer.blocks.0.low", error).plant(model)
                with pytest.raises(error, match="planted"):
                    model.transformer.blocks[0](numbers(one))
                take_away()
            # The next call is what finds out here, so it comes before the weights are looked at.
            assert_same(request(one, reference), request(one, pipe), f"the call after {error.__name__}")
            self._assert_whole_after_a_failure(one, pipe, reference, held, f"{error.__name__} in a block")
            assert _count_hooks(pipe) == hooks, f"hooks were left behind by {error.__name__}"
        self.assert_moved(one, backend)
        self.end(one, backend)

    def _assert_whole_after_a_failure(
        self, place: Place, pipe: Any, reference: Any, held: dict[str, nn.Parameter], what: str
    ) -> None:
        changed = [name for name, parameter in pipe.named_parameters() if parameter is not held[name]]
        assert not changed, f"{what}: the model holds other objects than before, {changed[0]} among {len(changed)}"
        assert_same_state(reference, pipe, f"right after {what}")
        for model in (pipe, reference):
            model.transformer.turned.weight.add_(0.5)
        assert_same(request(place, reference), request(place, pipe), f"the request after {what} and an edit")

    # --- 5: order does not matter -------------------------------------------------------------------------------------

    def test_clause_05_blocks_skipped_repeated_and_out_of_order(self, place: Place) -> None:
        """Caches and feedback make a schedule's guess wrong; wrong guesses cost time, never bits."""
        pipe, reference = models.of(models.Wanderer), place.resident(models.of(models.Wanderer))
        backend = self.start(place, pipe)
        orders = [(0, 1, 2), (0, 2), (2, 1, 0), (1, 1, 1), (), (0, 1, 2, 0, 1), (1, 0)]
        for seed, order in enumerate(orders):
            x = numbers(place, seed=seed)
            with HostWatch(place, pipe, backend) as watch:
                output = pipe(x, x, order=order)
            assert_same(reference(x, x, order=order), output, f"blocks {order}")
            assert not watch.seen, f"blocks {order}: computed with weights in host memory: {watch.seen[:3]}"
        self.assert_moved(place, backend)

    def test_clause_05_every_way_in_is_seen_in_any_order(self, one: Place) -> None:
        """Hooks on `forward` alone leave weights on the host when `decode`, `generate` or a block is called."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        backend = self.start(one, pipe)
        x, ids = numbers(one), one.to(models.words())
        ways: list[tuple[str, Callable[[Any], torch.Tensor]]] = [
            ("vae.decode", lambda p: p.vae.decode(x)),
            ("vae.encode", lambda p: p.vae.encode(x)),
            ("vae.decoder", lambda p: p.vae.decoder(x)),
            ("vae.decoder.0", lambda p: p.vae.decoder[0](x)),
            ("text_encoder.generate", lambda p: p.text_encoder.generate(ids)),
            ("text_encoder", lambda p: p.text_encoder(ids)),
            ("text_encoder.embed_tokens", lambda p: p.text_encoder.embed_tokens(ids)),
            ("transformer", lambda p: p.transformer(x, x)),
            ("transformer.forward", lambda p: p.transformer.forward(x, x, step=2)),
            ("transformer_2", lambda p: p.transformer_2(x, x)),
            ("transformer.blocks.1", lambda p: p.transformer.blocks[1](x)),
            ("transformer.blocks.1.up", lambda p: p.transformer.blocks[1].up(x)),
        ]
        for name, way in (*ways, *reversed(ways), *random.Random(0).choices(ways, k=6)):
            with HostWatch(one, pipe, backend) as watch:
                output = way(pipe)
            assert_same(way(reference), output, name)
            assert not watch.seen, f"{name} computed with weights in host memory: {watch.seen[:3]}"
        self.assert_moved(one, backend)
        self.end(one, backend)

    def test_clause_05_one_component_is_called_inside_another(self, one: Place) -> None:
        """The inner one needs room while the outer one computes."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        backend = self.start(one, pipe)
        ids = one.to(models.words())
        for model in (pipe, reference):
            encoder = model.text_encoder
            model.transformer.blocks[1].register_forward_pre_hook(
                lambda module, args, encoder=encoder: (args[0] + encoder(ids),)
            )
        for seed in range(3):
            assert_same(request(one, reference, seed=seed), request(one, pipe, seed=seed), f"request {seed}")
        self.assert_moved(one, backend)

    # --- 8: ordered ---------------------------------------------------------------------------------------------------

    def test_clause_08_nothing_is_read_before_its_copy_or_written_before_its_last_reader(self, place: Place) -> None:
        """Copies run as late or as early as they may, in each of the device's orders; no copy meets a reader."""
        pipe, reference = models.pipeline(), place.resident(models.pipeline())
        backend = self.start(place, pipe)
        outputs = []
        for seed in range(2):
            # Nothing is read back in between: the second request is queued while the first one runs.
            outputs.append(pipe(place.to(models.words()), seed=seed))
        place.settle()
        for seed, output in enumerate(outputs):
            assert_same(request(place, reference, seed=seed), output, f"request {seed} in {place.name}")
        self.assert_moved(place, backend)
        self.end(place, backend)
        place.check()

    def test_clause_08_a_steady_forward_waits_for_no_stream_on_the_host(self, cpu: CpuPlace) -> None:
        """Waiting is the device's: by events, so that the host can run ahead."""
        pipe, reference = models.pipeline(), cpu.resident(models.pipeline())
        backend = self.start(cpu, pipe)
        for seed in range(2):
            request(cpu, pipe, seed=seed)
            request(cpu, reference, seed=seed)
        drains = cpu.drains
        with _counting(torch.accelerator, "synchronize") as synchronized:
            assert_same(request(cpu, reference, seed=2), request(cpu, pipe, seed=2), "a steady request")
        assert cpu.drains == drains, f"the host drained a stream {cpu.drains - drains} times in a steady request"
        assert not synchronized, "the host waited for the whole device"
        self.assert_moved(cpu, backend)

    # --- 11: one user at a time, or right for both --------------------------------------------------------------------

    def test_clause_11_a_second_thread_waits_or_is_refused_while_the_first_computes(self, cpu: CpuPlace) -> None:
        """The first is held in the middle of a DiT; the second wants the encoder, for which the DiT may have to go."""
        pipe, reference = models.pipeline(), models.pipeline()
        backend = self.start(cpu, pipe)
        x, ids = numbers(cpu), models.words()
        expected = reference.transformer(x, x), reference.text_encoder(ids)
        results: dict[str, Any] = {}

        def second() -> None:
            results["second"] = _attempt(lambda: pipe.text_encoder(ids))

        other = threading.Thread(target=second)

        def hold(*args: Any) -> None:
            if not other.ident:
                other.start()
            other.join(0.2)  # it comes this far only if it is let in

        hook = pipe.transformer.blocks[0].register_forward_hook(hold)

        def first() -> None:
            with HostWatch(cpu, pipe, backend) as watch:
                results["first"] = _attempt(lambda: pipe.transformer(x, x))
            results["seen"] = watch.seen

        _run(threading.Thread(target=first), other, started=1)
        hook.remove()
        assert not results["seen"], f"weights were taken away from a running forward: {results['seen'][:3]}"
        for name, wanted in zip(("first", "second"), expected, strict=True):
            if not isinstance(results[name], OffloadError):  # refused, with a clear error
                assert_same(wanted, results[name], f"the {name} thread's output")
        assert any(isinstance(results[name], torch.Tensor) for name in ("first", "second"))
        self.assert_moved(cpu, backend)

    def test_clause_11_two_threads_compute_while_a_third_ends_and_starts_it(self, cpu: CpuPlace) -> None:
        """Shared state gave black images elsewhere. Refusing is allowed, a wrong picture is not."""
        pipe, reference = models.pipeline(second=False), models.pipeline(second=False)
        for model in (pipe, reference):
            model.vae.post_quant.eval()
        expected = [request(cpu, reference, seed=seed) for seed in range(3)]
        backend = self.start(cpu, pipe)
        right = []

        def use(offset: int) -> BaseException | None:
            for turn in range(9):
                seed = (turn + offset) % 3
                output = _attempt(functools.partial(pipe, models.words(), seed=seed))
                if not isinstance(output, OffloadError):
                    assert_same(expected[seed], output, f"turn {turn}")
                    right.append(seed)
            return None

        def toggle() -> BaseException | None:
            for _ in range(5):
                if not isinstance(_attempt(backend.disable), OffloadError):
                    _attempt(lambda: backend.enable(pipe))
                backend.report()
            return None

        failures: list[BaseException] = []

        def guarded(work: Callable[[], Any]) -> None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                failures.append(error)

        works: list[Callable[[], Any]] = [functools.partial(use, 0), functools.partial(use, 1), toggle]
        _run(*(threading.Thread(target=guarded, args=(work,)) for work in works), started=3)
        if failures:
            raise failures[0]
        assert right, "every call was refused"
        if not backend.is_enabled():
            backend.enable(pipe)
        assert_same(expected[0], request(cpu, pipe), "the call after all threads")  # and the proof starts afresh
        self.assert_moved(cpu, backend)


class _SelfAttended(nn.Module):
    """A decoder layer that attends to itself, so that it is a block of one input."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, x)
        return out


class _counting:  # noqa: N801
    """Count the calls of an attribute inside the block."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.calls = owner, name, list[int]()

    def __enter__(self) -> list[int]:
        self.original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self._call)
        return self.calls

    def __exit__(self, *exception: object) -> None:
        setattr(self.owner, self.name, self.original)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(1)
        return self.original(*args, **kwargs)


def _count_hooks(model: nn.Module) -> int:
    # In the instance's own dict: reading the attribute would do as well, this says what is meant.
    return sum(
        len(value) for module in model.modules() for key, value in vars(module).items() if key.endswith("_hooks")
    )


def _attempt(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the error with which it was refused; gradients are off in this thread too."""
    try:
        with torch.no_grad():
            return call()
    except OffloadError as error:
        return error


def _run(*threads: threading.Thread, started: int) -> None:
    for thread in threads[:started]:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread never came back: a deadlock"
