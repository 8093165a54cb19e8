"""`leaf_wise` at work: masters stay on the host, device copies live for one call of their module."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

import sidestream
from acme_offload.units import Unit, divide
from sidestream import BackendStateError, ComponentKind, OffloadReport, ResidentTensor, UnsupportedModelError
from sidestream.discovery import Component, discover, entry_methods, loose_modules
from sidestream.streaming.entry import Gate, execution_is_differentiable, gates_within, wait_until_idle
from sidestream.streaming.image import Held, Image, Structure, collect, split_packable
from sidestream.streaming.placement import Resident, answer_device, answer_no_more
from sidestream.streaming.runtime import DeviceRuntime, MemoryLedger, WaitMeter, open_runtime, resolve_device


class LeafWise(sidestream.OffloadBackend):
    """Modules take turns on the device, one by one."""

    _runtime: DeviceRuntime

    def __init__(self, *, config: sidestream.OffloadConfig, device: torch.device | str | None) -> None:
        super().__init__(config=config, device=resolve_device(device))
        self._stream: Any = None
        self._units: dict[int, Unit] = {}  # by the `id` of the module
        self._residents: list[Resident] = []
        self._fetches, self._moved_bytes, self._meter, self._ledger = 0, 0, WaitMeter(), MemoryLedger()

    # --- Beginning ----------------------------------------------------------------------------------------------------

    def _enable(self, pipeline: Any) -> None:
        components = discover(pipeline)
        moving = [component for component in components if self._moves(component)]
        missing = (self.config.components or frozenset()) - {component.kind.value for component in moving}
        if missing:
            raise UnsupportedModelError(f"no {' or '.join(sorted(missing))} with weights to offload")
        runtime = open_runtime(self.device)
        for component in components:
            _check(component, moves=component in moving, strict=self.config.components is not None)
        # Everything is checked. From here on things change, and `_disable` can undo them at any point.
        self._runtime, self._ledger, self._stream = runtime, runtime.ledger, runtime.new_stream()
        for component in moving:
            self._attach(component.module, component.name, component.entry_methods)
        wait_until_idle(self._units[id(component.module)].gate for component in moving)
        for component in components:
            if component not in moving and not component.on_demand:
                for held in collect(component.module, component.name):
                    self._keep(held, "its component does not move")
        for name, module in loose_modules(pipeline, components):
            for held in Unit(name, module, members=[module]).tensors(self._there()):
                self._keep(held, "it belongs to no component")
        for component in moving:
            self._place(self._units[id(component.module)])

    def _moves(self, component: Component) -> bool:
        if component.on_demand or component.kind is ComponentKind.OTHER or not collect(component.module):
            return False
        return self.config.components is None or component.kind.value in self.config.components

    def _attach(self, root: torch.nn.Module, name: str, methods: Iterable[str]) -> None:
        """Guard each module that can be called and has tensors inside. What was added since gets a unit, too."""
        for path, module, reader, can_be_called in divide(root, name, self.config.options.whole):
            if can_be_called and id(module) not in self._units and collect(module):
                unit = Unit(path, module)
                unit.gate = Gate(
                    module,
                    name=path,
                    owner=self,
                    # Hooks run in `_call_impl`, and some of them read weights, as weight_norm's does.
                    methods=(*(methods if module is root else entry_methods(module)), "_call_impl"),
                    opened=partial(self._opened, unit),
                    closed=partial(self._closed, unit),
                    lock=self._lock,
                )
                self._units[id(module)] = unit
                unit.gate.attach(watch=False)
            if (found := self._units.get(id(module))) is not None and not found.inside:
                found.members = []
                found.outer = None if module is root else self._units[id(root if reader is module else reader)]
            if (home := self._units.get(id(reader))) is not None:
                home.members.append(module)

    def _place(self, root: Unit) -> None:
        """Put on the device what of a component stays there. All else moves."""
        for resident in [one for one in self._residents if one.replaced or one.carried_off(self._runtime)]:
            (resident.forget if resident.replaced else resident.restore)(self._runtime)
            self._residents.remove(resident)
        there, first = self._there(), next(root.module.parameters(), None)
        tensors = [held for held in collect(root.module, root.name) if id(held.master) not in there]
        # A tied parameter moves with each of its modules; of a tied buffer one could write what another has read.
        tied = [held.master for held in tensors if len(held.places) > 1]
        stay = {id(one): "several modules hold this buffer" for one in tied if not isinstance(one, torch.nn.Parameter)}
        if self._runtime.separate:
            stay[id(first)] = "it says which device computes"
        stay.update((id(held.master), reason) for held, reason in split_packable(tensors)[1])
        for held in tensors:
            if id(held.master) in stay:
                self._keep(held, stay[id(held.master)])
        for unit in self._units.values():
            if unit.buffer is None:
                unit.image = None
            if self._runtime.separate:
                answer_device(unit.module, self._runtime.device)
        root.structure = Structure(root.module)

    def _keep(self, held: Held, reason: str) -> None:
        self._residents.append(Resident(held, reason))
        self._residents[-1].place(self._runtime)

    def _there(self) -> set[int]:
        return {id(resident.current) for resident in self._residents}

    # --- Computing ----------------------------------------------------------------------------------------------------

    def _opened(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module's weights are used. If this raises, the gate calls `_closed`."""
        trained = torch.is_grad_enabled() and any(one.requires_grad for one in unit.module.parameters())
        if trained or execution_is_differentiable((*args, *kwargs.values())):
            raise UnsupportedModelError(f"{unit.name} is for inference only: call it under torch.no_grad()")
        if unit.outer is not None:
            unit.outer.gate.enter((), {})
            unit.inside = True
        elif not unit.structure.same() or any(one.carried_off(self._runtime) for one in self._residents):
            self._attach(unit.module, unit.name, ())
            self._place(unit)
        if unit.image is None or not unit.image.fits():
            packable, rest = split_packable(unit.tensors(self._there()))
            for held, reason in rest:
                self._keep(held, reason)
            unit.image = Image(packable)
        if unit.image.tensors:
            unit.buffer = self._runtime.empty(unit.image.nbytes)
            unit.copy = self._runtime.copy(self._stream, unit.image.pairs(unit.buffer))
            self._fetches, self._moved_bytes = self._fetches + 1, self._moved_bytes + unit.copy.nbytes
            self._runtime.wait(unit.copy, self._meter)
            unit.image.see_in(unit.buffer)
            unit.image.bind()

    def _closed(self, unit: Unit) -> None:
        """After a module's weights were used, or half-way through `_opened`. Idempotent."""
        try:
            if unit.image is not None:
                if unit.image.bound:
                    unit.image.unbind(self._runtime)
                unit.image.forget_copies()
            buffer, copy, unit.buffer, unit.copy = unit.buffer, unit.copy, None, None
            if buffer is not None:
                self._runtime.free(buffer, copy)
        finally:
            if unit.outer is not None and unit.inside:
                unit.inside = False
                unit.outer.gate.leave()

    # --- Ending -------------------------------------------------------------------------------------------------------

    def _disable(self) -> None:
        steps = [(f"close {unit.name}", unit.gate.close_left_open) for unit in self._units.values()]
        steps += [(f"take {one.held.name} off", partial(one.restore, self._runtime)) for one in self._residents]
        # The gates go last: a forward in another thread must not begin while weights are still on the way.
        steps += [(f"have {unit.name} answer", partial(answer_no_more, unit.module)) for unit in self._units.values()]
        steps += [(f"open {unit.name} to everybody", unit.gate.detach) for unit in self._units.values()]
        failure = sidestream.run_cleanup_steps(steps)
        if failure is not None:
            raise failure
        if self._stream is not None:
            self._runtime.drain(self._stream)
            self._runtime.close(self._stream)
        self._units, self._residents, self._stream = {}, [], None

    def _check_not_running(self, verb: str) -> None:
        for unit in list(self._units.values()):
            if unit.gate.running:
                raise BackendStateError(f"{verb}() inside a forward of {unit.name}: call it when that has returned")

    def _report(self) -> OffloadReport:
        roots = [unit.module for unit in list(self._units.values()) if unit.outer is None]
        stays = [(one.held.name, one.reason, one.nbytes) for one in list(self._residents)]
        return OffloadReport(
            strategy="leaf_wise",
            device=str(self.device),
            device_bytes=self._ledger.device_bytes,
            peak_device_bytes=self._ledger.peak_device_bytes,
            host_bytes=sum(held.nbytes for root in roots for held in collect(root)),
            moved_bytes=self._moved_bytes,
            fetches=self._fetches,
            late_fetches=self._fetches,  # nothing is copied ahead
            wait_seconds=self._meter.seconds(),
            resident=tuple(ResidentTensor(name=name, reason=reason, bytes=size) for name, reason, size in stays),
        )


def _check(component: Component, *, moves: bool, strict: bool) -> None:
    """Raise for what cannot be offloaded; nothing has been touched yet."""
    for gate in gates_within(component.module):
        raise BackendStateError(f"{component.name} is offloaded already, as {gate.name}: disable that backend first")
    for name, module in component.module.named_modules(prefix=component.name):
        if moves and not {"forward", "_call_impl"}.isdisjoint(vars(module)):  # as others do that move weights
            raise UnsupportedModelError(f"{name}.forward was replaced on the instance: undo that first")
    for held, reason in split_packable(collect(component.module, component.name))[1]:
        if held.master.is_meta or (moves and (strict or held.master.device.type != "cpu")):
            raise UnsupportedModelError(f"{held.name} cannot be offloaded: {reason}")
