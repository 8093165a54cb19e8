"""Clauses on what offloading takes: bounded, its own, given back, and nothing that surprises others."""

from __future__ import annotations

import gc
import importlib
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from sidestream.backend import BackendState
from sidestream.errors import OffloadError, OffloadWarning, PinError
from sidestream.testing.conformance import models
from sidestream.testing.conformance.base import (
    Conformance,
    all_bytes,
    assert_same,
    assert_same_state,
    distinct,
    numbers,
    request,
)
from sidestream.testing.conformance.worlds import CpuPlace, Place, open_world

#: A little for Python itself, where host memory is measured.
NOISE = 24 << 20
#: Page-locked memory that a limited machine grants, in bytes: far less than a toy pipeline has.
LITTLE = 20_000


class ResourceClauses(Conformance):
    """Clauses 6, 9, 10 and 12."""

    # --- 6: bounded ---------------------------------------------------------------------------------------------------

    def test_clause_06_device_bytes_stay_within_the_limit_and_the_report_tells_them(self, cpu: CpuPlace) -> None:
        """The limit is computed from the model; the device's own count and the report agree."""
        pipe, reference = models.pipeline(), models.pipeline()
        limit = self.device_limit(pipe)
        backend = self.start(cpu, pipe)
        assert_same(request(cpu, reference), request(cpu, pipe), "request 0")
        for seed in (1, 2, 3):
            assert_same(request(cpu, reference, seed=seed), request(cpu, pipe, seed=seed), f"request {seed}")
            report = backend.report()
            if cpu.watches:
                assert (report.device_bytes, report.pinned_bytes) == (cpu.device_bytes, cpu.pinned_bytes)
                assert report.peak_device_bytes == cpu.peak_device_bytes
        self.assert_moved(cpu, backend)
        assert 0 < report.peak_device_bytes <= limit, (
            f"{report.peak_device_bytes} bytes of weights were on the device at worst, {limit} are allowed; the whole "
            f"model takes {all_bytes(pipe)}"
        )
        assert report.device_bytes <= report.peak_device_bytes
        assert report.host_bytes > 0

    def test_clause_06_the_limit_is_kept_on_a_device_that_has_no_more(self) -> None:
        """Where the device refuses one byte more, the same bits come out."""
        for name in ("cpu-eager", "cpu-lazy", "cpu-separate"):
            limit = self.device_limit(models.pipeline())
            with open_world(name, capacity=limit) as cpu:
                pipe, reference = models.pipeline(), models.pipeline()
                backend = self.start(cpu, pipe)
                for seed in range(3):
                    assert_same(request(cpu, reference, seed=seed), request(cpu, pipe, seed=seed), f"request {seed}")
                self.assert_moved(cpu, backend)
                self.end(cpu, backend)

    def test_clause_06_the_device_holds_between_requests_what_the_report_tells(self, sim: Place) -> None:
        """Seen from the device, which cannot be told stories."""
        pipe = models.lone(*[lambda: nn.Linear(256, 256)] * 3)
        sim.settle(collect=True)
        before = sim.device_bytes
        backend = self.start(sim, pipe)
        pipe(numbers(sim, 2, 256))
        self.assert_moved(sim, backend)
        sim.settle(collect=True)
        held, told = sim.device_bytes - before, backend.report().device_bytes
        # The device's allocator rounds each piece up to 512 bytes.
        rounding = 512 * len(distinct(pipe))
        assert told <= held <= told + rounding, f"the device holds {held} bytes, the report tells of {told}"

    @pytest.mark.parametrize("limit", [{"pin_limit": 4096}, {"pin_total": 0}, {"pin_total": LITTLE}], ids=str)
    def test_clause_06_a_pin_that_fails_is_one_warning_or_an_error_and_costs_no_bit(
        self, limit: dict[str, int]
    ) -> None:
        """One huge request fails, or a quota lies far below the memory: pageable memory does as well."""
        with open_world("cpu-eager", **limit) as cpu:
            pipe, reference = models.pipeline(), models.pipeline()
            before = [parameter.data_ptr() for parameter in pipe.parameters()]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    backend = self.start(cpu, pipe)
                except PinError:  # configured so
                    assert before == [parameter.data_ptr() for parameter in pipe.parameters()]
                    return
                outputs = [request(cpu, pipe, seed=seed) for seed in range(2)]
            for seed, output in enumerate(outputs):
                assert_same(request(cpu, reference, seed=seed), output, f"request {seed}")
            self.assert_moved(cpu, backend)
            told = [str(warning.message) for warning in caught if issubclass(warning.category, OffloadWarning)]
            assert cpu.pinned_bytes <= max(limit.get("pin_total", LITTLE), LITTLE)
            if cpu.pins:
                assert len(told) == 1, f"one warning was due: {told}"
            self.end(cpu, backend)

    def test_clause_06_without_pin_cpu_memory_nothing_is_pinned(self, cpu: CpuPlace) -> None:
        """A setting that one strategy ignores is a setting that nobody can rely on."""
        pipe, reference = models.pipeline(), models.pipeline()
        backend = self.start(cpu, pipe, pin_cpu_memory=False)
        for seed in range(2):
            assert_same(request(cpu, reference, seed=seed), request(cpu, pipe, seed=seed), f"request {seed}")
        assert (cpu.pins, cpu.pinned_bytes, backend.report().pinned_bytes) == (0, 0, 0)
        self.assert_moved(cpu, backend)

    @pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
    def test_clause_06_host_memory_grows_by_no_second_model(self, once: CpuPlace, pin: bool) -> None:
        """Doubling a model's memory to start offloading it ends in the kernel's out-of-memory killer."""
        if not Path("/proc/self/clear_refs").exists():
            pytest.skip("resident memory can be measured on Linux only")
        pipe = models.heavy()
        limit = self.host_limit(pipe)
        warm = self.start(once, models.pipeline())  # what it imports is not what it holds
        warm.disable()
        backend = self.make_backend(self.config_for(pipe, pin_cpu_memory=pin), once.device)
        once.backends.append(backend)
        with _Growth() as enabling:
            backend.enable(pipe)
        x = numbers(once, 1, 3072)
        pipe(x)
        self.assert_moved(once, backend)
        once.pinned_memory.clear()
        with _Growth() as disabling:
            backend.disable()
        for what, growth in (("enabling", enabling), ("disabling", disabling)):
            assert growth.bytes <= limit, (
                f"{what} took {growth.bytes >> 20} MiB more for {all_bytes(pipe) >> 20} MiB of weights; "
                f"{limit >> 20} are allowed"
            )

    # --- 9: its own ---------------------------------------------------------------------------------------------------

    def test_clause_09_two_backends_share_nothing(self, one: Place) -> None:
        """They compute in turns and inside each other; what one frees or ends is no business of the other's."""
        pipes = [models.small(seed=seed) for seed in range(2)]
        references = [one.resident(models.small(seed=seed)) for seed in range(2)]
        first, second = (self.start(one, pipe) for pipe in pipes)
        for pair in (pipes, references):
            inner = pair[1]
            pair[0].transformer.blocks[1].register_forward_pre_hook(
                lambda module, args, inner=inner: (args[0] + inner(one.to(models.words())),)
            )
        for seed in range(2):
            for pipe, reference in zip(pipes, references, strict=True):
                assert_same(request(one, reference, seed=seed), request(one, pipe, seed=seed), f"request {seed}")
        for backend in (first, second):
            self.assert_moved(one, backend)
        if isinstance(one, CpuPlace) and one.watches:
            assert len(one.runtimes) == 2, f"two backends opened {len(one.runtimes)} runtimes for themselves"
            assert len({id(stream) for stream in one.streams}) == len(one.streams) >= 2, "they share a stream"
        told = second.report()
        first.disable()
        assert second.report().pinned_bytes == told.pinned_bytes, "ending one freed the other's pinned memory"
        assert second.report().device_bytes == told.device_bytes, "ending one freed the other's device memory"
        assert_same(request(one, references[1], seed=7), request(one, pipes[1], seed=7), "the second, alone")
        second.disable()

    # --- 10: clean end ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("end", ["disable", "shutdown"])
    def test_clause_10_device_and_pinned_bytes_end_at_zero(self, one: Place, end: str) -> None:
        """And can be asked for again. After `shutdown` the weights are still readable."""
        threads = threading.active_count()
        one.settle(collect=True)
        before = one.device_bytes, one.pinned_bytes
        pipe = models.small()
        backend = self.start(one, pipe)
        request(one, pipe)
        self.assert_moved(one, backend)
        reference = models.small()
        for _ in range(2):
            getattr(backend, end)()
        one.settle(collect=True)
        report = backend.report()
        told = report.device_bytes, report.pinned_bytes
        assert told == (0, 0), f"after {end}() the report tells of {told[0]} device and {told[1]} pinned bytes"
        seen = one.device_bytes - before[0]
        assert seen == 0, f"after {end}() {seen} bytes are left on the device"
        assert threading.active_count() <= threads, "a thread was left behind"
        for name, parameter in reference.named_parameters():
            assert_same(parameter, pipe.get_parameter(name), f"{name} after {end}()")
        if end == "shutdown":
            assert backend.state is BackendState.SHUT_DOWN
            with pytest.raises(OffloadError, match="shut down"):
                backend.enable(pipe)
            # Nothing was copied, so page-locked memory goes when the weights in it go.
            del pipe, parameter
            one.settle(collect=True)
        assert one.pinned_bytes == before[1], f"{one.pinned_bytes - before[1]} pinned bytes are left"

    def test_clause_10_it_can_be_enabled_and_disabled_again_and_again(self, one: Place) -> None:
        """Without growing, and the same bits each time."""
        pipe, reference = models.small(), one.resident(models.small())
        backend = self.make_backend(self.config_for(pipe), one.device)
        one.backends.append(backend)
        for seed in range(3):
            backend.enable(pipe)
            assert_same(request(one, reference, seed=seed), request(one, pipe, seed=seed), f"round {seed}")
            self.assert_moved(one, backend)
            backend.disable()
        assert_same_state(reference, pipe, "after three rounds")

    def test_clause_10_shutdown_allocates_nothing_the_size_of_a_model(self, once: CpuPlace) -> None:
        """Rebuilding every weight at exit ran machines out of memory."""
        if not Path("/proc/self/clear_refs").exists():
            pytest.skip("resident memory can be measured on Linux only")
        pipe = models.heavy()
        backend = self.start(once, pipe)
        pipe(numbers(once, 1, 3072))
        self.assert_moved(once, backend)
        with _Growth() as growth:
            backend.shutdown()
        assert growth.bytes <= NOISE, f"shutdown() took {growth.bytes >> 20} MiB"
        assert float(pipe.transformer.blocks[1].weight[5, 5]) == pytest.approx(1e-4)  # type: ignore[union-attr, index]

    def test_clause_10_leaving_the_interpreter_while_offloaded_is_silent(self) -> None:
        """Neither `disable` nor `shutdown` was called, and the exit status is 0."""
        self._needs_an_installed_strategy()
        pipe = models.pipeline()
        settings = _plain(self.config_for(pipe))
        code = f"""
import json, torch, sidestream
from sidestream.testing.conformance import models
pipe = models.pipeline()
with torch.no_grad():
    backend = sidestream.enable_offload(pipe, json.loads({json.dumps(settings)!r}), device="cpu")
    pipe(models.words())
assert backend.report().moved_bytes > 0, "nothing was moved"
"""
        done = _python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    # --- 12: no surprise ----------------------------------------------------------------------------------------------

    def test_clause_12_nothing_global_is_patched(self, one: Place) -> None:
        """Neither torch's classes nor its global hooks, while it works and afterwards."""
        pipe, reference = models.pipeline(), one.resident(models.pipeline())
        importlib.import_module("torch._dynamo")  # replaces functions of torch's when it is imported
        before = _world()
        backend = self.start(one, pipe)
        assert_same(request(one, reference), request(one, pipe), "a request")
        self.assert_moved(one, backend)
        _assert_world(before, "while a model is offloaded")
        self.end(one, backend)
        _assert_world(before, "after disable()")

    def test_clause_12_making_a_backend_touches_no_device(self, one: Place) -> None:
        """A configuration can be checked on a machine whose device is somebody else's."""
        pipe = models.pipeline()
        opened = one.opened
        backend = self.make_backend(self.config_for(pipe), one.device)
        report = backend.report()
        assert one.opened == opened, "the device was opened before enable()"
        assert (report.device_bytes, report.pinned_bytes, report.moved_bytes, report.fetches) == (0, 0, 0, 0)
        assert not backend.is_enabled()
        backend.disable()  # nothing to do
        one.backends.append(backend)
        backend.enable(pipe)
        request(one, pipe)
        self.assert_moved(one, backend)

    def test_clause_12_listing_and_checking_load_no_torch(self) -> None:
        """What users do before anything heavy is needed."""
        self._needs_an_installed_strategy()
        settings = _plain(self.config_for(models.pipeline()))
        code = f"""
import json, sys, sidestream
from sidestream.api import resolve_config
assert {self.strategy!r} in [info.name for info in sidestream.strategies() if info.problem is None]
resolve_config(json.loads({json.dumps(settings)!r}))
assert "torch" not in sys.modules, "torch was loaded"
"""
        done = _python(code)
        assert (done.returncode, done.stderr) == (0, "")

    def _needs_an_installed_strategy(self) -> None:
        if type(self).make_backend is not Conformance.make_backend:
            pytest.skip("the suite makes its backend itself, which another process cannot")
        if not self.thorough:
            pytest.skip("another suite asks this of the strategy")


def _plain(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON types, without what is as by default."""
    changed = {
        field.name: getattr(config, field.name)
        for field in attrs.fields(type(config))
        if getattr(config, field.name) != field.default or field.name == "strategy"
    }
    changed.pop("dlo_transfers", None)  # derived
    plain: dict[str, Any] = json.loads(
        json.dumps(changed, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))
    )
    return {key: value for key, value in plain.items() if value not in (None, {})}


def _as_json(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


class _Growth:
    """By how much resident memory grew at worst inside the block, in bytes."""

    bytes = 0

    def __enter__(self) -> _Growth:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts afresh
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bytes = _status("VmHWM") - self._before


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _world() -> dict[str, Any]:
    hooks = nn.modules.module
    seen: dict[str, Any] = {
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "global forward pre-hooks": list(hooks._global_forward_pre_hooks),
        "global forward hooks": list(hooks._global_forward_hooks),
        "profiler": sys.getprofile(),
        "tracer": sys.gettrace(),
    }
    for cls in (nn.Module, nn.Parameter, torch.Tensor, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList):
        seen |= {f"{cls.__module__}.{cls.__name__}.{name}": id(value) for name, value in vars(cls).items()}
    for module in (torch, nn.functional):
        seen |= {f"{module.__name__}.{name}": id(value) for name, value in vars(module).items() if callable(value)}
    return seen


def _assert_world(before: dict[str, Any], when: str) -> None:
    after = _world()
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    # torch fills in its own lazy attributes at first use.
    changed = [key for key in changed if key in before]
    assert not changed, f"{when} these are not what they were: {', '.join(changed[:5])}"
