"""`leaf_wise` at work: masters stay on the host, device copies live for one call of their module."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch

import sidestream
from acme_offload.plugin import Options
from acme_offload.units import Group, Unit, divide
from sidestream import BackendStateError, ComponentKind, ComponentReport, ResidentTensor, UnsupportedModelError
from sidestream.discovery import Component, discover, entry_methods, loose_modules
from sidestream.streaming.entry import Gate, execution_is_differentiable, gates_within, wait_until_idle
from sidestream.streaming.image import Held, Image, Structure, collect, split_packable
from sidestream.streaming.placement import Resident, answer_device, answer_no_more
from sidestream.streaming.pool import PinnedPool
from sidestream.streaming.runtime import DeviceRuntime, open_runtime, resolve_device
from sidestream.streaming.store import PinnedStore

#: A component's first parameter stays on the device if it is no larger than this (bytes): it is asked where to compute.
ANCHOR_BYTES = 64 << 20


class LeafWise(sidestream.OffloadBackend):
    """Modules take turns on the device, one by one."""

    _runtime: DeviceRuntime
    _store: PinnedStore

    def __init__(self, *, config: sidestream.OffloadConfig, device: torch.device | str | None) -> None:
        super().__init__(config=config, device=resolve_device(device))
        self._options = config.options if isinstance(config.options, Options) else Options(**config.options)
        self._last = sidestream.OffloadReport(strategy="leaf_wise", device=str(self.device))
        self._groups: list[Group] = []
        self._units: dict[int, Unit] = {}
        self._stream: Any = None
        self._starting = False

    def _enable(self, pipeline: Any) -> None:
        components, chosen = discover(pipeline), self.config.components
        groups = [self._group(component) for component in components]
        moving = [group for group in groups if not group.reason]
        missing = (chosen or set()) - {group.component.kind.value for group in moving if group.component}
        if missing:
            raise UnsupportedModelError(f"no {' or '.join(sorted(missing))} with weights to offload")
        runtime = open_runtime(self.device)
        for group in groups:
            _check(group, selected=chosen is not None and not group.reason, device=runtime.device)
        # Everything is checked. From here on things change, and `_disable` can undo them at any point.
        self._runtime, self.device, self._starting = runtime, runtime.device, True
        self._store = PinnedStore(PinnedPool(runtime, budget=None))
        self._groups = groups
        self._stream = runtime.new_stream()
        for group in moving:
            self._attach(group)
        wait_until_idle(self._units[id(group.module)].gate for group in moving)
        for name, module in loose_modules(pipeline, components):
            self._groups.append(Group(name, module, None, "it belongs to no component"))
        for group in self._groups:
            self._place(group)
            if not group.reason and self.config.pin_cpu_memory and runtime.can_pin:
                self._store.settle(group.tensors())
        self._starting = False

    def _group(self, component: Component) -> Group:
        chosen, kind, reason = self.config.components, component.kind, ""
        if component.on_demand:
            reason = "the pipeline moves it itself"
        elif kind is ComponentKind.OTHER or (chosen is not None and kind.value not in chosen):
            reason = f"its kind ({kind.value}) does not move"
        elif not collect(component.module):
            reason = "it has no weights"
        return Group(component.name, component.module, component, reason)

    def _attach(self, group: Group) -> None:
        """Guard every module that can be called and has weights inside; forget those that are gone."""
        gone = {key for key, unit in self._units.items() if unit.group is group}
        for name, module, reader, callable_ in divide(group.module, group.name, self._options.whole):
            unit = self._units.get(id(module))
            if unit is None and callable_ and collect(module):
                unit = self._units[id(module)] = Unit(group, name, module)
                declared = group.component.entry_methods if group.component and module is group.module else ()
                unit.gate = Gate(
                    module,
                    name=name,
                    owner=self,
                    # Hooks run in `_call_impl`, and some of them read weights, as weight_norm's does.
                    methods=(*entry_methods(module), *declared, "_call_impl"),
                    opened=partial(self._opened, unit),
                    closed=partial(self._closed, unit),
                    lock=self._lock,
                )
                unit.gate.attach(watch=False)
            if unit is not None and unit.group is group:
                gone.discard(id(module))
                outer = group.module if reader is module else reader
                unit.members, unit.outer = [], None if module is group.module else self._units[id(outer)]
            if (home := self._units.get(id(reader))) is not None and home.group is group:
                home.members.append(module)
        for key in gone:
            self._let_go(self._units.pop(key))

    def _place(self, group: Group) -> None:
        """Put on the device what stays there. What is left moves, and is laid out when its turn comes."""
        runtime, limit = self._runtime, self._options.keep_below_mib * 2**20
        for resident in [one for one in group.residents if one.replaced or one.carried_off(runtime)]:
            (resident.forget if resident.replaced else resident.restore)(runtime)
            group.residents.remove(resident)
        if not group.reason and self._starting:
            self._to_host(group)
        units = [unit for unit in self._units.values() if unit.group is group]
        homes = {id(module): unit for unit in units for module in unit.members}
        sizes = {unit: sum(held.nbytes for held in unit.tensors()) for unit in units}
        first = next(group.module.parameters(), None)
        tensors = [] if group.component and group.component.on_demand else group.tensors()
        unfit = {id(held.master): reason for held, reason in split_packable(tensors)[1]}
        for held in tensors:
            own = {homes.get(id(place.module)) for place in held.places}
            reason = group.reason or unfit.get(id(held.master), "")
            if not reason and held.master is first and runtime.separate and held.nbytes <= ANCHOR_BYTES:
                reason = "it says which device computes"
            if not reason and len(own) > 1 and any(place.key in place.module._buffers for place in held.places):
                reason = "several modules hold this buffer, and each may write it"
            if not reason and all(unit is not None and sizes[unit] < limit for unit in own):
                reason = "its module is small"
            if reason:
                self._keep(group, held, reason)
        group.streamed = 0 if group.reason else sum(held.nbytes for held in group.tensors())
        for unit in units:
            unit.laid_out = False
            if runtime.separate:
                answer_device(unit.module, runtime.device)
        group.structure = Structure(group.module)

    def _keep(self, group: Group, held: Held, reason: str) -> None:
        if held.master.is_meta:
            raise UnsupportedModelError(f"{held.name} has no values (it is on meta): load it before the next call")
        group.residents.append(Resident(held, reason))
        group.residents[-1].place(self._runtime)

    def _opened(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module's weights are used. If this raises, the gate calls `_closed`."""
        group = unit.group
        trained = unit.outer is None and torch.is_grad_enabled() and any(p.requires_grad for p in group.module.parameters())
        if trained or execution_is_differentiable((*args, *kwargs.values())):
            raise UnsupportedModelError(f"{unit.name} is for inference only: call it under torch.no_grad()")
        if unit.outer is not None:
            unit.outer.gate.enter(args, kwargs)
            unit.inside = True
        elif not group.structure.same() or any(one.carried_off(self._runtime) for one in group.residents):
            self._attach(group)
            self._place(group)
        ahead, group.ahead = group.ahead, None
        if ahead is not None and not (ahead is unit and unit.image.fits() and unit.image.unchanged()):
            self._drop(ahead)  # another came, or it was edited since
        if unit.buffer is None and not self._fetch(unit):
            return
        self._runtime.wait(unit.copy, group.meter)
        unit.image.see_in(unit.buffer)
        unit.image.bind()
        ...
