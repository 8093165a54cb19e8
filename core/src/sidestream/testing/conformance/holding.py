"""Clauses on what a model holds: whole afterwards, all or nothing, the truth between calls."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.backend import BackendState, OffloadBackend
from sidestream.errors import OffloadError, OffloadWarning
from sidestream.testing.conformance import models
from sidestream.testing.conformance.base import (
    Conformance,
    Planted,
    assert_same,
    assert_same_state,
    numbers,
    request,
)
from sidestream.testing.conformance.worlds import CpuPlace, Place
from sidestream.testing.portrait import portrait

#: At how many calls inside `enable` and `disable` a failure is planted.
POINTS = 7


class HoldingClauses(Conformance):
    """Clauses 2, 3 and 7."""

    # --- 2: whole again -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("requests", [0, 1])
    def test_clause_02_objects_layouts_ties_hooks_and_classes_are_as_before(self, one: Place, requests: int) -> None:
        """In ordinary memory of their own: a tensor that is saved carries its own bytes only."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        before = portrait(pipe)
        backend = self.start(one, pipe)
        for seed in range(requests):
            assert_same(request(one, reference, seed=seed), request(one, pipe, seed=seed), f"request {seed}")
        if requests:
            self.assert_moved(one, backend)
        backend.disable()
        one.settle()
        _assert_portrait(before, portrait(pipe), "after disable()")
        assert_same_state(reference, pipe, "after disable()")
        assert pipe.transformer.head.weight is pipe.transformer.embed.weight
        for name, tensor in pipe.state_dict().items():
            own = tensor.untyped_storage().nbytes()
            assert own == tensor.nbytes, f"{name} has {tensor.nbytes} bytes and drags {own} along"
            assert not one.holds_pinned(tensor), f"{name} still lies in page-locked memory"

    def test_clause_02_buffers_that_a_forward_wrote_stay_written(self, place: Place) -> None:
        """Counters, and running means, which are written by kernels that count no version."""
        pipe, reference = models.small(), place.resident(models.small())
        backend = self.start(place, pipe)
        for seed in range(2):
            request(place, pipe, seed=seed)
            request(place, reference, seed=seed)
        self.assert_moved(place, backend)
        for when in ("while offloaded", "after disable()"):
            for name, buffer in reference.named_buffers():
                assert_same(buffer, pipe.get_buffer(name), f"{name} {when}")
            backend.disable()
        assert int(pipe.get_buffer("vae.post_quant.num_batches_tracked")) == 2

    def test_clause_02_a_model_built_in_inference_mode_comes_back_as_it_was(self, host: CpuPlace) -> None:
        """Giving such a parameter other memory must not turn it into a normal one."""
        with torch.inference_mode():
            pipe, reference = models.pipeline(), models.pipeline()
        before = portrait(pipe)
        assert all(parameter.is_inference() for parameter in pipe.parameters())
        backend = self.start(host, pipe)
        with torch.inference_mode():
            assert_same(request(host, reference), request(host, pipe), "a model built in inference mode")
        self.assert_moved(host, backend)
        self.end(host, backend)
        _assert_portrait(before, portrait(pipe), "after disable()")

    def test_clause_02_what_a_user_put_in_meanwhile_stays_the_users(self, one: Place) -> None:
        """New parameters and replaced modules take effect, and are the same objects at the end."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        backend = self.start(one, pipe)
        request(one, pipe)
        request(one, reference)
        weight, module = models.pipeline(seed=5).transformer.turned.weight, models.pipeline(seed=6).vae.encoder
        pipe.transformer.turned.weight, pipe.vae.encoder = weight, module
        pipe.transformer.blocks[1] = copy.deepcopy(pipe.transformer.blocks[0])
        reference.transformer.turned.weight = one.resident(models.pipeline(seed=5)).transformer.turned.weight
        reference.vae.encoder = one.resident(models.pipeline(seed=6)).vae.encoder
        reference.transformer.blocks[1] = copy.deepcopy(reference.transformer.blocks[0])
        assert_same(request(one, reference, seed=1), request(one, pipe, seed=1), "with the user's weights")
        self.assert_moved(one, backend)
        self.end(one, backend)
        assert pipe.transformer.turned.weight is weight
        assert pipe.vae.encoder is module
        assert_same_state(reference, pipe, "after disable()")

    # --- 3: transactions ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("error", [Planted, KeyboardInterrupt], ids=lambda error: error.__name__)
    def test_clause_03_an_enable_that_fails_anywhere_leaves_the_model_as_it_was(
        self, host: CpuPlace, error: type[BaseException]
    ) -> None:
        """A failure is planted at one call after the other, all the way through; a second try works."""
        expected = request(host, models.pipeline())

        def attempt(pipe: Any, backend: OffloadBackend) -> None:
            backend.enable(pipe)

        for nth, where in self._planted(host, error, attempt, prepare=lambda pipe, backend: None):
            pipe, backend, before, raised = where
            if not raised:
                continue
            what = f"{error.__name__} at call {nth} of enable(), in {raised}"
            while backend.state is BackendState.UNDOING:
                backend.disable()
            assert not backend.enabled, what
            _assert_portrait(before, portrait(pipe), what)
            again = self.start(host, pipe)
            assert_same(expected, request(host, pipe), f"the next try after {what}")
            self.assert_moved(host, again)
            again.disable()

    def test_clause_03_a_disable_that_fails_can_be_called_until_it_succeeds(self, host: CpuPlace) -> None:
        """Nothing is forgotten before it is done."""

        def prepare(pipe: Any, backend: OffloadBackend) -> None:
            backend.enable(pipe)
            request(host, pipe)
            self.assert_moved(host, backend)

        def attempt(pipe: Any, backend: OffloadBackend) -> None:
            backend.disable()

        reference = models.pipeline()
        request(host, reference)
        for nth, where in self._planted(host, Planted, attempt, prepare=prepare):
            pipe, backend, before, raised = where
            what = f"a failure at call {nth} of disable(), in {raised}"
            for _ in range(3):
                if backend.state is BackendState.IDLE:
                    break
                _finish(backend, what)
            assert backend.state is BackendState.IDLE, f"{what}: it never ends"
            _assert_portrait(before, portrait(pipe), what)
            assert_same_state(reference, pipe, what)

    def _planted(
        self,
        place: Place,
        error: type[BaseException],
        attempt: Callable[[Any, OffloadBackend], None],
        *,
        prepare: Callable[[Any, OffloadBackend], None],
    ) -> Iterator[tuple[int, tuple[Any, OffloadBackend, dict[str, Any], str]]]:
        """Do something again and again, each time with a failure at a later call; yield how each time ended."""
        total, point = 0, 0
        while point <= POINTS:
            pipe = models.pipeline()
            before = portrait(pipe)
            backend = self.make_backend(self.config_for(pipe), place.device)
            place.backends.append(backend)
            prepare(pipe, backend)
            nth = 0 if not point else 1 + (point - 1) * total // POINTS
            with _failing_at(nth, error, _package_of(backend)) as calls:
                try:
                    attempt(pipe, backend)
                except error as caught:
                    if "planted" not in str(caught):
                        raise
            if point:
                yield nth, (pipe, backend, before, calls[-1] if len(calls) >= nth else "")
            else:
                total = len(calls)
                assert total, "no call of the strategy was seen"
                attempt_again = backend.state is BackendState.ENABLED
                if attempt_again:
                    backend.disable()
            point += 1

    def test_clause_03_enabling_twice_is_refused_or_does_nothing(self, one: Place) -> None:
        """A second owner would take offloaded weights for the original ones."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        backend = self.start(one, pipe)
        before = portrait(pipe)
        try:
            with pytest.warns(OffloadWarning):
                backend.enable(pipe)
        except OffloadError:
            assert backend.enabled
        _assert_portrait(before, portrait(pipe), "after enabling again")
        for part, name in ((pipe, "the same pipeline"), (models.Lone(pipe.transformer), "one of its components")):
            with pytest.raises(OffloadError):
                self.start(one, part)
            _assert_portrait(before, portrait(pipe), f"after a second backend was refused {name}")
        for seed in range(2):
            assert_same(request(one, reference, seed=seed), request(one, pipe, seed=seed), f"request {seed}")
        self.assert_moved(one, backend)

    @pytest.mark.parametrize("kind", ["weights without values", "a kind that is not there"])
    def test_clause_03_what_cannot_be_offloaded_is_refused_before_anything_changes(self, one: Place, kind: str) -> None:
        """The error names it."""
        pipe, changes, text = models.pipeline(), {}, "image_encoder"
        if kind == "weights without values":
            pipe.transformer.blocks[1] = models.pipeline().transformer.blocks[1].to("meta")
            text = r"transformer\.blocks\.1"
        else:
            changes = {"components": {"image_encoder"}}
        before = portrait(pipe)
        with pytest.raises(OffloadError, match=text):
            self.start(one, pipe, **changes)
        _assert_portrait(before, portrait(pipe), "after a refused enable()")

    # --- 7: truthful --------------------------------------------------------------------------------------------------

    def test_clause_07_between_calls_names_values_dtypes_and_files_are_the_plain_models(self, place: Place) -> None:
        """Also right after a request, while bytes are still on the device."""
        pipe, reference = models.small(), place.resident(models.small())
        backend = self.start(place, pipe)
        held = [id(parameter) for parameter in pipe.parameters()]
        names = [name for name, _ in models.small().named_parameters()]
        for seed in range(2):
            assert_same(request(place, reference, seed=seed), request(place, pipe, seed=seed), f"request {seed}")
            assert_same_state(reference, pipe, f"after request {seed}")
            assert [name for name, _ in pipe.named_parameters()] == names
            assert held == [id(parameter) for parameter in pipe.parameters()], "other objects than before the request"
        self.assert_moved(place, backend)
        for name, tensor in pipe.state_dict().items():
            if tensor.device.type == "cpu":
                own = tensor.untyped_storage().nbytes()
                assert own == tensor.nbytes, f"{name} has {tensor.nbytes} bytes and drags {own} along"
        saved, weight = io.BytesIO(), pipe.transformer.turned.weight
        if weight.device.type == "cpu":
            torch.save(weight, saved)
            assert saved.tell() < weight.nbytes + 2000, f"a saved weight of {weight.nbytes} bytes takes {saved.tell()}"

    @pytest.mark.parametrize("edit", sorted(models.EDITS))
    def test_clause_07_an_edit_between_calls_takes_effect_at_the_next_call_and_lasts(
        self, one: Place, edit: str
    ) -> None:
        """Whichever way it is made; `.data` moves no version counter, and a merge that vanishes is not noticed."""
        if edit in models.ASSIGN_DATA:
            one.needs("assignment to .data")
        pipe, reference = models.small(), one.resident(models.small())
        backend = self.start(one, pipe)
        request(one, pipe)
        request(one, reference)
        models.EDITS[edit](pipe, models.small(seed=8))
        models.EDITS[edit](reference, one.resident(models.small(seed=8)))
        for seed in (1, 2) if isinstance(one, CpuPlace) else (1,):
            assert_same(
                request(one, reference, seed=seed), request(one, pipe, seed=seed), f"request {seed} after {edit}"
            )
        self.assert_moved(one, backend)
        self.end(one, backend)
        assert_same_state(reference, pipe, f"after {edit} and disable()")

    def test_clause_07_refresh_takes_even_the_smallest_edit(self, one: Place) -> None:
        """One element through `.data` may slip between the samples of a block that stays on the device."""
        blocks = [lambda: nn.Linear(256, 256)] * 3
        pipe, reference = models.lone(*blocks), one.resident(models.lone(*blocks))
        backend = self.start(one, pipe)
        x = numbers(one, 2, 256)
        assert_same(reference(x), pipe(x), "before the edit")
        for model in (pipe, reference):
            model.get_parameter("transformer.blocks.1.weight").data[100, 100] += 1
        backend.refresh()
        assert_same(reference(x), pipe(x), "after refresh()")
        self.assert_moved(one, backend)

    @pytest.mark.parametrize("when", ["while", "after"])
    def test_clause_07_a_model_pickles_and_copies_while_offloaded_and_after(self, host: CpuPlace, when: str) -> None:
        """A copy owns its weights and drives nobody's backend."""
        pipe, reference = models.pipeline(), models.pipeline()
        backend = self.start(host, pipe)
        for model in (pipe, reference):
            request(host, model)
        self.assert_moved(host, backend)
        if when == "after":
            backend.disable()
        moved = host.copied_bytes
        for twin in (pickle.loads(pickle.dumps(pipe)), copy.deepcopy(pipe)):
            assert_same_state(reference, twin, "a copy of the model")
            assert_same(request(host, copy.deepcopy(reference)), request(host, twin), "a copy of the model")
            assert twin.transformer.embed.weight is twin.transformer.head.weight
            assert twin.transformer.embed.weight.data_ptr() != pipe.transformer.embed.weight.data_ptr()
        assert host.copied_bytes == moved, "the copy drove the original's backend"

    @pytest.mark.parametrize("kind", ["slice", "expanded", "shared memory"])
    def test_clause_07_a_tensor_that_cannot_move_stays_and_is_named_and_by_name_is_refused(
        self, one: Place, kind: str
    ) -> None:
        """Or it can be moved after all: then it is right."""
        pipe, reference = (_with_odd_tensor(models.of(models.Wanderer), kind) for _ in range(2))
        reference = one.resident(reference)
        backend = self.start(one, pipe, components=None)
        x = numbers(one)
        for _ in range(2):
            assert_same(reference(x, x), pipe(x, x), kind)
        self.assert_moved(one, backend)
        names = [tensor.name for tensor in backend.report().resident]
        stays = [name for name in names if name.startswith("transformer.blocks.1")]
        self.end(one, backend)
        if stays:
            before = portrait(pipe)
            with pytest.raises(OffloadError, match=r"transformer\.blocks\.1"):
                self.start(one, pipe, components={"dit"})
            _assert_portrait(before, portrait(pipe), "after a refused enable()")

    def test_clause_07_a_component_answers_with_the_device_that_computes(self, one: Place) -> None:
        """Noise was made on the host elsewhere, since `.device` said so; `parameter.device` is where it is."""
        pipe, reference = models.of(models.Answering), one.resident(models.of(models.Answering))
        backend = self.start(one, pipe)
        transformer: Any = pipe.transformer
        x = numbers(one)
        for _ in range(2):
            assert transformer.device == reference.transformer.device
            assert isinstance(transformer, models.Answering)
            assert_same(reference(x, x), pipe(x, x), "a DiT that answers for its device")
        self.assert_moved(one, backend)
        self.end(one, backend)
        assert transformer.device == torch.device("cpu")
        assert type(transformer) is models.Answering


def _with_odd_tensor(pipe: models.Lone, kind: str) -> models.Lone:
    up: Any = pipe.transformer.blocks[1].up  # type: ignore[union-attr, index]
    if kind == "slice":
        wide = torch.cat((up.weight, up.weight + 1), 1)
        up.weight = nn.Parameter(wide[:, : up.in_features], requires_grad=False)
    elif kind == "expanded":
        up.bias = nn.Parameter(up.bias[:1].clone().expand(up.out_features), requires_grad=False)
    else:
        up.register_buffer("turned", up.weight.data.t(), persistent=False)
    return pipe


def _assert_portrait(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """Compare two portraits; say what is missing, new or different."""
    missing, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    different = [key for key in before.keys() & after.keys() if before[key] != after[key]]
    if not (missing or new or different):
        return
    lines = [f"{what} the model is not as before:"]
    lines += [f"{key} is missing" for key in missing[:3]] + [f"{key} is new" for key in new[:3]]
    lines += [f"{key}: {_difference(before[key], after[key])}" for key in sorted(different)[:3]]
    count = len(missing) + len(new) + len(different)
    pytest.fail("\n".join([*lines, f"{count} differences in all"]))


#: What a portrait says of a tensor, in this order.
_OF_A_TENSOR = (
    "object", "class", "dtype", "shape", "stride", "requires_grad", "is_inference", "device", "attributes",
)  # fmt: skip


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, list) and isinstance(now, list):
        return f"lost {[item for item in was if item not in now]}, gained {[item for item in now if item not in was]}"
    if isinstance(was, tuple) and isinstance(now, tuple):
        fields = zip(_OF_A_TENSOR, was, now, strict=True)
        return ", ".join(
            "another object" if name == "object" else f"{name} was {old}, is {new}"
            for name, old, new in fields
            if old != new
        )
    return f"was {was}, is {now}"


def _finish(backend: OffloadBackend, what: str) -> None:
    try:
        backend.disable()
    except Exception as error:
        pytest.fail(f"{what}: calling disable() again fails too, {type(error).__name__}: {error}")


def _package_of(backend: OffloadBackend) -> str:
    return type(backend).__module__.partition(".")[0]


#: Rooms of the core that no strategy wrote and that no failure is planted in.
_NOT_THE_STRATEGYS = (
    "sidestream.api",
    "sidestream.backend",
    "sidestream.config",
    "sidestream.report",
    "sidestream.structure",
    "sidestream.testing",
)


@contextmanager
def _failing_at(nth: int, error: type[BaseException], package: str) -> Iterator[list[str]]:
    """Raise at the `nth` call of a function of the strategy or of streaming; 0: never. Yields the calls so far."""
    calls: list[str] = []
    before = sys.getprofile()

    def look(frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in (package, "sidestream") or module.startswith(_NOT_THE_STRATEGYS):
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # the first from Python 3.11 on
        calls.append(f"{module}.{name}")
        if len(calls) == nth:
            sys.setprofile(None)
            raise error("planted")

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)
