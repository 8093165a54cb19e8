"""Each clause of the kit can fail: for each there is a backend with one fault, and the test that finds it."""

from __future__ import annotations

import sys
import threading
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import nn

from sidestream import OffloadConfig
from sidestream.streaming.runtime import WaitMeter, open_runtime
from sidestream.testing.conformance import StrategyConformance, run_test
from sidestream.testing.conformance.base import all_bytes, kit_tests
from sidestream_model_cpu.backend import ModelLevelBackend
from sidestream_model_cpu.prefetch import Unit

#: torch's own, before a bad backend gets at it.
LINEAR = nn.Linear.forward


class Good(ModelLevelBackend):
    """No fault: what the others are derived from, so that a finding is of their fault alone."""


class OtherBits(Good):
    """Clause 1: rounds what it copies, as a conversion on the way would."""

    def _opened(self, unit: Unit, args: Any, kwargs: Any) -> None:
        super()._opened(unit, args, kwargs)
        for copy in unit.image._copies:
            if copy.dtype == torch.float32:
                copy.copy_(copy.to(torch.bfloat16).to(torch.float32))
        unit.image._written = tuple(part._version for part in unit.image._copy_parts)


class MovesNothing(Good):
    """Clause 1: right, for it does nothing at all."""

    def _enable(self, pipeline: Any) -> None:
        self._runtime = self._open_runtime(self.device)

    def _disable(self) -> None:
        self._runtime = None


class StaysPinned(Good):
    """Clause 2: gives weights back where they lie, in page-locked memory."""

    def _disable(self) -> None:
        self._end(keep_memory=True)


class NewObjects(Good):
    """Clause 2: gives copies back instead of the user's own objects, and so loses ties."""

    def _disable(self) -> None:
        pipeline = self._pipeline
        super()._disable()
        for module in pipeline.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone(), False)


class HalfEnabled(Good):
    """Clause 3: leaves what it did so far when enabling fails."""

    def _disable(self) -> None:
        if not self._starting:
            super()._disable()


class OnlyOnce(Good):
    """Clause 3: forgets what is left to do before it is done, so that a second disable does nothing."""

    def _disable(self) -> None:
        try:
            super()._disable()
        except Exception:
            self._clear()
            raise


class LeavesHalf(Good):
    """Clause 4: cleans up after a forward that returns, and not after one that raises."""

    def _closed(self, unit: Unit) -> None:
        if sys.exc_info()[0] is None:
            super()._closed(unit)


class FrontDoorOnly(Good):
    """Clause 5: sees calls of the component, and not those of the blocks inside it."""

    def _adopt(self, components: Any) -> None:
        super()._adopt(components)
        for unit in self._units.values():
            unit.gate._unhook()
            unit.gate.watch = lambda: None


class KeepsAll(Good):
    """Clause 6: nobody ever leaves the device."""

    def _adopt(self, components: Any) -> None:
        super()._adopt(components)
        self._schedule.leaving = lambda *args: []


class TellsLess(Good):
    """Clause 6: reports half of what it takes."""

    def _report(self) -> Any:
        report = super()._report()
        return attrs.evolve(report, device_bytes=report.device_bytes // 2)


class Doubles(Good):
    """Clause 6: copies the whole model before it lets go of the first weight."""

    def _adopt(self, components: Any) -> None:
        self.kept = [tensor.clone() for component in components for tensor in component.module.parameters()]
        super()._adopt(components)
        self.kept = []


class Stale(Good):
    """Clause 7: believes that nobody edits a weight."""

    def _opened(self, unit: Unit, args: Any, kwargs: Any) -> None:
        unit.image.unchanged = lambda: True
        self._schedule.leaving = lambda *args: []
        super()._opened(unit, args, kwargs)


class Emptied(Good):
    """Clause 7: what is on the device is gone from the host, and the model says so only when asked for a value."""

    def _closed(self, unit: Unit) -> None:
        super()._closed(unit)
        for held in unit.image.tensors:
            if held.master.dtype == torch.float32:
                held.master.data.zero_()


class Impatient(Good):
    """Clause 8: computes without waiting for the copy."""

    def _adopt(self, components: Any) -> None:
        prefetcher = self._parts()[1]
        runtime = prefetcher.runtime
        waiting = runtime.wait

        def wait(copy: Any, meter: WaitMeter) -> None:
            copy.pretended = True

        def take_back(buffer: Any, copy: Any = None) -> None:
            if copy is not None and not copy.waited:
                waiting(copy, WaitMeter())
            type(runtime).free(runtime, buffer, None)

        runtime.wait, runtime.free = wait, take_back
        super()._adopt(components)


class WaitsOnHost(Good):
    """Clause 8: drains its stream before each forward."""

    def _opened(self, unit: Unit, args: Any, kwargs: Any) -> None:
        super()._opened(unit, args, kwargs)
        self._parts()[1].drain()


class Shares(Good):
    """Clause 9: all backends have one stream and one pool."""

    shared: ClassVar[dict[Any, Any]] = {}

    def __init__(self, *, config: OffloadConfig, device: Any) -> None:
        super().__init__(config=config, device=device)
        self._open_runtime = self._runtime_of_all

    @classmethod
    def _runtime_of_all(cls, device: torch.device) -> Any:
        # One for each place that is open, as a module-level cache would be in one process.
        opened = open_runtime(device)
        place = getattr(opened, "place", None)
        if cls.shared.get("place") is not place:
            cls.shared.update(place=place, runtime=opened)
        else:
            place.runtimes.remove(opened)
        return cls.shared["runtime"]


class Leaks(Good):
    """Clause 10: keeps its buffers after the end."""

    def _bring_home(self, unit: Unit) -> None:
        unit.image.unbind(self._parts()[0])
        unit.buffer = unit.copy = None
        super()._bring_home(unit)


class LeavesThreads(Good):
    """Clause 10: leaves a thread behind."""

    def _disable(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(5,), daemon=True).start()
        super()._disable()


class RebuildsAtExit(Good):
    """Clause 10: has every weight twice when it shuts down."""

    def _shutdown(self) -> None:
        self.copies = [parameter.clone() for parameter in self._pipeline.parameters()]
        super()._shutdown()


class Unlocked(Good):
    """Clause 11: lets a second thread in, which takes the weights away from the first."""

    class NoLock:
        """A lock that holds nobody back."""

        def acquire(self, *args: Any) -> bool:
            return True

        def release(self) -> None:
            return None

        def __enter__(self) -> bool:
            return True

        def __exit__(self, *args: object) -> None:
            return None

    def __init__(self, *, config: OffloadConfig, device: Any) -> None:
        super().__init__(config=config, device=device)
        self._lock = self.NoLock()

    def _present(self) -> tuple[list[str], list[str]]:
        return super()._present()[0], []


class Patches(Good):
    """Clause 12: replaces a method of torch's for everybody."""

    def _enable(self, pipeline: Any) -> None:
        super()._enable(pipeline)
        nn.Linear.forward = lambda module, x: LINEAR(module, x)

    def _disable(self) -> None:
        nn.Linear.forward = LINEAR
        super()._disable()


class OpensEarly(Good):
    """Clause 12: opens the device when it is made."""

    def __init__(self, *, config: OffloadConfig, device: Any) -> None:
        super().__init__(config=config, device=device)
        self.early = open_runtime(self.device)
        self.early.empty(16)


def suite_of(backend: type[ModelLevelBackend], **settings: Any) -> type[StrategyConformance]:
    """Return the kit for a class of backend that no distribution offers."""

    class Suite(StrategyConformance):
        strategy = "model_level"

        def device_limit(self, pipe: nn.Module) -> int:
            return all_bytes(pipe.vae) + max(map(all_bytes, (child for child in pipe.children()))) + 4096

        def make_backend(self, config: OffloadConfig, device: torch.device) -> ModelLevelBackend:
            return backend(config=config, device=device)

    Suite.settings = settings
    Suite.__name__ = f"Suite[{backend.__name__}]"
    return Suite


#: Clause, backend, the test that finds its fault, and what the failure says.
TABLE: list[tuple[int, type[ModelLevelBackend], str, str]] = [
    (1, OtherBits, "test_clause_01_same_bits_as_the_resident_model_for_several_requests", "elements differ"),
    (1, MovesNothing, "test_clause_01_same_bits_as_the_resident_model_for_several_requests", "nothing was moved"),
    (2, StaysPinned, "test_clause_02_objects_layouts_ties_hooks_and_classes_are_as_before", "page-locked"),
    (2, NewObjects, "test_clause_02_objects_layouts_ties_hooks_and_classes_are_as_before", "not as before"),
    (3, HalfEnabled, "test_clause_03_an_enable_that_fails_anywhere_leaves_the_model_as_it_was", "not as before"),
    (3, OnlyOnce, "test_clause_03_a_disable_that_fails_can_be_called_until_it_succeeds", "not as before"),
    (
        4,
        LeavesHalf,
        "test_clause_04_an_exception_anywhere_leaves_weights_whole_and_the_next_call_right",
        "other objects",
    ),
    (5, FrontDoorOnly, "test_clause_05_every_way_in_is_seen_in_any_order", "in host memory"),
    (6, KeepsAll, "test_clause_06_device_bytes_stay_within_the_limit_and_the_report_tells_them", "are allowed"),
    (6, KeepsAll, "test_clause_06_the_limit_is_kept_on_a_device_that_has_no_more", "capacity"),
    (6, TellsLess, "test_clause_06_device_bytes_stay_within_the_limit_and_the_report_tells_them", "=="),
    (6, TellsLess, "test_clause_06_the_device_holds_between_requests_what_the_report_tells", "tells of"),
    (6, Doubles, "test_clause_06_host_memory_grows_by_no_second_model", "MiB"),
    (7, Stale, "test_clause_07_an_edit_between_calls_takes_effect_at_the_next_call_and_lasts", "elements differ"),
    (7, Emptied, "test_clause_07_between_calls_names_values_dtypes_and_files_are_the_plain_models", "elements differ"),
    (8, Impatient, "test_clause_08_nothing_is_read_before_its_copy_or_written_before_its_last_reader", "NaN"),
    (8, WaitsOnHost, "test_clause_08_a_steady_forward_waits_for_no_stream_on_the_host", "drained a stream"),
    (9, Shares, "test_clause_09_two_backends_share_nothing", "opened 1 runtimes"),
    (10, Leaks, "test_clause_10_device_and_pinned_bytes_end_at_zero", "left on the device"),
    (10, LeavesThreads, "test_clause_10_device_and_pinned_bytes_end_at_zero", "thread was left"),
    (10, RebuildsAtExit, "test_clause_10_shutdown_allocates_nothing_the_size_of_a_model", "MiB"),
    (11, Unlocked, "test_clause_11_a_second_thread_waits_or_is_refused_while_the_first_computes", "running forward"),
    (12, Patches, "test_clause_12_nothing_global_is_patched", "Linear.forward"),
    (12, OpensEarly, "test_clause_12_making_a_backend_touches_no_device", "before enable"),
]


@pytest.mark.sidestream_leaks_allowed("a fault of some of these backends is to leave something behind")
@pytest.mark.parametrize(
    ("clause", "backend", "test", "text"), TABLE, ids=[f"{clause}-{backend.__name__}" for clause, backend, *_ in TABLE]
)
def test_a_backend_with_one_fault_fails_the_test_that_is_there_for_it(
    clause: int, backend: type[ModelLevelBackend], test: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And says what is wrong; in the first world that shows it, whichever that is."""
    assert test.startswith(f"test_clause_{clause:02}_")
    found = None
    for outcome in run_test(suite_of(backend), test):
        if outcome.error is not None and text in str(outcome.error):
            found = outcome
            break
    caplog.clear()
    assert found is not None, f"{backend.__name__} passes {test}"


def test_every_clause_has_a_backend_that_fails_it() -> None:
    """Twelve clauses; and the tests that are named for one exist."""
    names = kit_tests(StrategyConformance)
    clauses = {int(name.split("_")[2]) for name in names if name.startswith("test_clause_")}
    assert clauses == {clause for clause, *_ in TABLE} == set(range(1, 13))
    assert {test for *_, test, _ in TABLE} <= set(names)


FOUND_BY = sorted({test for _, _, test, _ in TABLE})


@pytest.mark.parametrize("test", FOUND_BY)
def test_the_faultless_backend_passes_what_finds_the_faults(test: str) -> None:
    """Otherwise a finding would be of something else. The first case of each; the whole kit is run elsewhere."""
    outcome = next(run_test(suite_of(Good), test))
    assert outcome.error is None, outcome


def test_none_fails_the_proof_that_something_moved() -> None:
    """Equal outputs alone prove little: here they are equal, and nothing is proved."""

    class Nothing(StrategyConformance):
        strategy = "none"

    test = "test_clause_01_same_bits_as_the_resident_model_for_several_requests"
    outcomes = [outcome for outcome in run_test(Nothing, test) if outcome.case.startswith("cpu")]
    assert outcomes
    for outcome in outcomes:
        assert "nothing was moved, so equal outputs prove nothing" in str(outcome.error)
