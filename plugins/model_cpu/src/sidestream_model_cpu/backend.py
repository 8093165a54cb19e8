"""`model_level` at work on one pipeline: check, take over, take turns, give back."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from sidestream import (
    BackendStateError,
    ComponentKind,
    ComponentReport,
    OffloadBackend,
    OffloadConfig,
    OffloadReport,
    OffloadWarning,
    ResidentTensor,
    SupportsModelCpuOffload,
    UnsupportedModelError,
    run_cleanup_steps,
)
from sidestream.discovery import Component, discover, loose_modules
from sidestream.streaming.entry import Entrance, Gate, execution_is_differentiable, gates_within, wait_until_idle
from sidestream.streaming.image import (
    Held,
    Image,
    Structure,
    collect,
    is_sharded,
    plain_attributes,
    split_packable,
)
from sidestream.streaming.placement import Resident, answer_device, answer_no_more
from sidestream.streaming.runtime import DeviceRuntime, open_runtime, resolve_device
from sidestream_model_cpu.options import ModelLevelOptions, PinFailure
from sidestream_model_cpu.prefetch import Prefetcher, Unit
from sidestream_model_cpu.schedule import Schedule, enough_gib

logger = logging.getLogger("sidestream")

#: Kinds that take turns when none are selected; a VAE is small and stays, unless it is selected.
DEFAULT_KINDS = frozenset({ComponentKind.DIT, ComponentKind.TEXT_ENCODER, ComponentKind.IMAGE_ENCODER})
#: A component's first parameter stays on the device if it is no larger than this (bytes): libraries and users ask it
#: where to put their tensors. Embeddings of a gigabyte do not stay for that.
ANCHOR_BYTES = 64 << 20


class ModelLevelBackend(OffloadBackend):
    """Whole components take turns on the device.

    `runtime` makes the runtime for a device when offloading starts; the default takes what torch drives.
    """

    def __init__(
        self,
        *,
        config: OffloadConfig,
        device: torch.device | str | None = None,
        runtime: Callable[[torch.device], DeviceRuntime] = open_runtime,
    ) -> None:
        super().__init__(config=config, device=resolve_device(device))
        options = config.options
        self.options = options if isinstance(options, ModelLevelOptions) else ModelLevelOptions(**options)
        self._open_runtime = runtime
        self._last = OffloadReport(strategy="model_level", device=str(self.device))
        self._clear()

    def _clear(self) -> None:
        self._runtime: DeviceRuntime | None = None
        self._prefetcher: Prefetcher | None = None
        self._units: dict[str, Unit] = {}
        self._guests: list[tuple[Component, ModelLevelBackend]] = []
        self._heirs: list[tuple[Component, ModelLevelBackend]] = []
        self._residents: list[Resident] = []
        self._resident_components: list[tuple[Component, int]] = []
        self._notes: list[ResidentTensor] = []
        self._delegate: SupportsModelCpuOffload | None = None
        self._request_gate: Gate | None = None
        self._request_hook: Any = None
        self._ending: OffloadReport | None = None
        self._starting = False
        self._late_fetches = 0
        self._schedule = Schedule({})

    # --- Enabling -------------------------------------------------------------------------------------------------

    def _enable(self, pipeline: Any) -> None:
        self._clear()
        self._starting = True
        if isinstance(pipeline, SupportsModelCpuOffload):
            self._hand_over(pipeline)
            return
        components = discover(pipeline)
        moving, staying = self._select(components)
        for component in components:
            _check_usable(component)
        self._check_owners(moving, staying)
        guests = [(component, gate) for component in moving if (gate := _root_gate(component)) is not None]
        own = [component for component in moving if not any(component is guest for guest, _ in guests)]
        runtime = self._open_runtime(self.device)
        self.device = runtime.device
        packed = {component.name: self._check_tensors(component) for component in own}
        budget = self.options.device_budget_gib
        self._check_budget(own, packed, staying)

        # Everything is checked; from here on things change, and `_disable` knows how to undo each of them.
        self._runtime = runtime
        self._schedule = Schedule(
            {component.name: component.kind for component in own},
            budget=None if budget is None else _gib(budget),
        )
        pin_budget = self.options.pin_budget_gib
        self._prefetcher = Prefetcher(
            runtime,
            pin=self.config.pin_cpu_memory,
            pin_budget=None if pin_budget is None else _gib(pin_budget),
            pin_required=self.options.pin_failure is PinFailure.FAIL,
        )
        for name, module in loose_modules(pipeline, components):
            self._keep(name, module, "it belongs to no component", recurse=False)
        for component in staying:
            before = sum(resident.nbytes for resident in self._residents)
            self._keep(component.name, component.module, "")
            size = sum(resident.nbytes for resident in self._residents) - before
            self._resident_components.append((component, size))
        self._adopt(own)
        for component, gate in guests:
            owner = gate.owner
            if isinstance(owner, ModelLevelBackend):
                owner._heirs.append((component, self))
                self._guests.append((component, owner))
        self._watch_requests(pipeline, components)
        self._starting = False
        if not self._units and not self._guests:
            warnings.warn(
                f"nothing takes turns: no {_kinds(DEFAULT_KINDS)} with weights among "
                + (", ".join(f"{component.name} ({component.kind.value})" for component in components)),
                OffloadWarning,
                stacklevel=4,
            )

    def _hand_over(self, pipeline: SupportsModelCpuOffload) -> None:
        """Let a pipeline that owns its life cycle do it; undo what it did if it fails."""
        selection: dict[str, Any] = {}
        if self.config.components is not None:
            selection["offload_components"] = set(self.config.components)
        self._delegate = pipeline
        pipeline.enable_omni_model_cpu_offload(
            device=self.device,
            pin_memory=self.config.pin_cpu_memory,
            use_hsdp=self.config.use_hsdp,
            **selection,
        )
        self._notes.append(ResidentTensor(name=type(pipeline).__name__, reason="it owns its own model-level offload"))

    def _select(self, components: tuple[Component, ...]) -> tuple[list[Component], list[Component]]:
        chosen = self.config.components
        kinds = DEFAULT_KINDS if chosen is None else frozenset(ComponentKind(kind) for kind in chosen)
        found = {component.kind for component in components}
        if chosen is not None and not kinds <= found:
            listed = ", ".join(f"{component.name} ({component.kind.value})" for component in components)
            raise UnsupportedModelError(
                f"components asks for {_kinds(kinds - found)}, but the pipeline has none: found {listed}. "
                "Correct components, or declare the component's kind in the pipeline's _offload_plan"
            )
        moving, staying = [], []
        for component in components:
            if component.on_demand:
                if chosen is not None and component.kind in kinds:
                    raise UnsupportedModelError(
                        f"component {component.name!r} is selected, but the pipeline declares that it moves it itself"
                    )
                self._notes.append(ResidentTensor(name=component.name, reason="the pipeline moves it itself", bytes=0))
            elif component.kind in kinds and (chosen is not None or collect(component.module)):
                moving.append(component)
            else:
                staying.append(component)
        return moving, staying

    def _check_owners(self, moving: list[Component], staying: list[Component]) -> None:
        guests = 0
        for component in (*moving, *staying):
            for gate in gates_within(component.module):
                shareable = (
                    component in moving
                    and gate.module is component.module
                    and isinstance(gate.owner, ModelLevelBackend)
                    and gate.owner.device == self.device
                )
                if not shareable:
                    raise BackendStateError(
                        f"component {component.name!r} is offloaded already, as {gate.name!r} of another backend "
                        f"({type(gate.owner).__name__}): disable() that one first"
                    )
                guests += 1
        if moving and guests == len(moving):
            raise BackendStateError(
                "every selected component is offloaded by another backend already: disable() that one first"
            )

    def _check_tensors(self, component: Component) -> tuple[list[Held], list[tuple[Held, str]]]:
        packable, rest = split_packable(collect(component.module, component.name), from_device=self.device)
        for held, reason in rest:
            if is_sharded(held.master):
                raise UnsupportedModelError(
                    f"{held.name} is a DTensor: model_level moves whole weights and cannot move one rank's share. "
                    "Leave the component out, or offload before sharding"
                )
            if self.config.components is not None:
                raise UnsupportedModelError(
                    f"component {component.name!r} is selected, but {held.name} cannot be offloaded: {reason}. "
                    "Leave the component out of components, or replace the tensor"
                )
        if self.config.components is not None and not packable:
            raise UnsupportedModelError(
                f"component {component.name!r} is selected, but has no weights that could be offloaded"
            )
        return packable, rest

    def _check_budget(
        self,
        own: list[Component],
        packed: dict[str, tuple[list[Held], list[tuple[Held, str]]]],
        staying: list[Component],
    ) -> None:
        if self.options.device_budget_gib is None:
            return
        budget = _gib(self.options.device_budget_gib)
        resident = sum(held.nbytes for component in staying for held in collect(component.module))
        resident += sum(held.nbytes for _, rest in packed.values() for held, _ in rest)
        sizes = {component.name: Image(packed[component.name][0]).nbytes for component in own}
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if largest is not None and resident + sizes[largest] > budget:
            raise UnsupportedModelError(
                f"device_budget_gib is {self.options.device_budget_gib}, but component {largest!r} needs "
                f"{sizes[largest]} bytes beside {resident} bytes that stay on the device: "
                f"set it to at least {enough_gib(resident + sizes[largest])}, or offload more components"
            )

    def _adopt(self, components: list[Component]) -> None:
        """Take components over: close their doors, wait for who is inside, move the masters to pinned memory."""
        runtime, _ = self._parts()
        units = [Unit(component.name, component.kind, component.module) for component in components]
        for component, unit in zip(components, units, strict=True):
            unit.gate = Gate(
                component.module,
                name=component.name,
                owner=self,
                methods=component.entry_methods,
                opened=functools.partial(self._opened, unit),
                closed=functools.partial(self._closed, unit),
                lock=self._lock,
            )
            unit.image = Image([])
            self._units[unit.name] = unit
            self._schedule.kinds[unit.name] = unit.kind
            unit.gate.attach(watch=False)
        wait_until_idle(unit.gate for unit in units)
        for unit in units:
            if runtime.separate and any(held.master.device == runtime.device for held in collect(unit.module)):
                unit.came_from = runtime.device
                unit.module.to("cpu")
            self._notes += [
                ResidentTensor(
                    name=name,
                    reason="a plain attribute, neither parameter nor buffer: the model moves it, or nobody",
                    bytes=tensor.nbytes,
                )
                for name, tensor in plain_attributes(unit.module, unit.name)
            ]
            self._lay_out(unit, settle=True)
            if runtime.separate:
                answer_device(unit.module, runtime.device)
            unit.gate.watch()
            unit.structure = Structure(unit.module)

    def _lay_out(self, unit: Unit, *, settle: bool = False) -> None:
        """Find the unit's tensors, as they are now, and lay out its image; what cannot travel is placed."""
        runtime, prefetcher = self._parts()
        for resident in [resident for resident in unit.residents if resident.replaced]:
            resident.forget(runtime)
            unit.residents.remove(resident)
        placed = {id(resident.current) for resident in unit.residents}
        tensors = [held for held in collect(unit.module, unit.name) if id(held.master) not in placed]
        meta = next((held for held in tensors if held.master.is_meta), None)
        if meta is not None:
            raise UnsupportedModelError(f"{meta.name} has no values (it is on meta): load it before the next call")
        packable, rest = split_packable(tensors)
        if not unit.residents and runtime.separate:
            packable, anchor = _take_anchor(packable)
            rest += anchor
        for held, reason in rest:
            resident = Resident(held, reason)
            unit.residents.append(resident)
            resident.place(runtime)
        if settle:
            prefetcher.settle(packable)
        unit.image = Image(packable, prefetcher.store.located())
        self._schedule.sizes[unit.name] = unit.image.nbytes
        self._count_residents()

    def _keep(self, name: str, module: nn.Module, reason: str, *, recurse: bool = True) -> None:
        """Put a module's tensors on the device for the whole time."""
        runtime, _ = self._parts()
        tensors = collect(module, name)
        if not recurse:
            tensors = [held for held in tensors if any(place.module is module for place in held.places)]
        placed = {id(resident.current) for resident in self._residents}
        for held in tensors:
            if id(held.master) in placed:
                continue
            resident = Resident(held, reason)
            self._residents.append(resident)
            resident.place(runtime)
        self._count_residents()

    def _count_residents(self) -> None:
        own = sum(resident.nbytes for unit in self._units.values() for resident in unit.residents)
        self._schedule.resident_bytes = own + sum(resident.nbytes for resident in self._residents)

    def _watch_requests(self, pipeline: Any, components: tuple[Component, ...]) -> None:
        """Notice the end of a request: of a module pipeline's forward, or of a diffusers pipeline's call."""
        if isinstance(pipeline, nn.Module) and not any(component.module is pipeline for component in components):
            self._request_gate = Gate(
                pipeline,
                name=type(pipeline).__name__,
                owner=self,
                methods=(),
                opened=lambda args, kwargs: None,
                closed=self._request_ended,
                lock=self._lock,
            )
            self._request_gate.attach(watch=False)
        elif callable(getattr(pipeline, "maybe_free_model_hooks", None)):
            # diffusers calls this at the end of every pipeline's __call__.
            free = pipeline.maybe_free_model_hooks

            @functools.wraps(free)
            def ended(*args: Any, **kwargs: Any) -> Any:
                result = free(*args, **kwargs)
                with self._lock:
                    self._request_ended()
                return result

            pipeline.__dict__["maybe_free_model_hooks"] = ended
            self._request_hook = ended
        elif self.options.release_after_request:
            raise UnsupportedModelError(
                f"release_after_request: the end of a request cannot be seen for a {type(pipeline).__name__}; "
                "leave the option out and call backend.release() at the end of each request"
            )

    # --- Computing ------------------------------------------------------------------------------------------------

    def _opened(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a component's weights are used: make room, have its bytes, bind them, and start on the next."""
        _, prefetcher = self._parts()
        self._refuse_gradients(unit, args, kwargs)
        moved = [resident for resident in unit.residents if resident.carried_off(self._parts()[0])]
        for resident in moved:
            resident.restore(self._parts()[0])
            unit.residents.remove(resident)
        if moved or not (unit.structure.same() and unit.image.fits()):
            prefetcher.evict(unit)
            self._lay_out(unit)
            unit.gate.watch()
            unit.structure = Structure(unit.module)
        elif unit.buffer is not None and not unit.image.unchanged():
            prefetcher.evict(unit)
        present, busy = self._present()
        for name in self._schedule.leaving(unit.name, present, busy):
            prefetcher.evict(self._units[name])
        if prefetcher.fetch(unit):
            self._late_fetches += 1
        prefetcher.wait(unit)
        self._schedule.order.entered(unit.name)
        if self.options.prefetch:
            self._fetch_ahead(unit)

    def _fetch_ahead(self, unit: Unit) -> None:
        _, prefetcher = self._parts()
        present, busy = self._present()
        plan = self._schedule.ahead(unit.name, present, busy)
        if plan is None:
            return
        following, leaving = plan
        for name in leaving:
            prefetcher.evict(self._units[name])
        try:
            prefetcher.fetch(self._units[following])
        except torch.OutOfMemoryError as error:
            # The budget did not know of the activations; the component is fetched when its turn comes.
            logger.warning("no room to copy %s ahead: %s", following, error)

    def _closed(self, unit: Unit) -> None:
        """After a component's weights were used: its modules hold their masters again."""
        self._parts()[1].unbind(unit)

    def _present(self) -> tuple[list[str], list[str]]:
        present = [unit.name for unit in self._units.values() if unit.buffer is not None]
        return present, [name for name in present if self._units[name].gate.running]

    def _refuse_gradients(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        masters = [held.master for held in unit.image.tensors]
        masters += [resident.held.master for resident in unit.residents]
        if execution_is_differentiable((*args, *kwargs.values())) or any(master.requires_grad for master in masters):
            raise UnsupportedModelError(
                f"component {unit.name!r} is called with gradients enabled; offloading is for inference only: call it "
                "under torch.no_grad() or torch.inference_mode()"
            )

    def _request_ended(self) -> None:
        self._schedule.order.ended()
        if self.options.release_after_request:
            self.release()

    def release(self) -> None:
        """Free the device of every component that is not computing now; the next call fetches it again."""
        with self._lock:
            for unit in self._units.values():
                if not unit.gate.running and self._prefetcher is not None:
                    unit.gate.close_left_open()
                    self._prefetcher.evict(unit)

    def _refresh(self) -> None:
        self.release()

    # --- Ending ---------------------------------------------------------------------------------------------------

    def _disable(self) -> None:
        self._end(keep_memory=False)

    def _shutdown(self) -> None:
        self._end(keep_memory=True)

    def _end(self, *, keep_memory: bool) -> None:
        """Undo `_enable`, in reverse. What is undone is forgotten, so that a second call does what is left.

        The doors open last: a forward that began while weights still move would compute with freed memory.
        """
        self._ending = self._ending or self._report()
        steps: list[tuple[str, Callable[[], object]]] = []
        if self._delegate is not None:
            steps.append(("end the pipeline's own offload", self._end_delegate))
        steps += [
            ("take the request's end away", self._unwatch_requests),
            ("withdraw from shared components", self._withdraw),
        ]
        units = list(reversed(self._units.values()))
        steps += [(f"bring component {unit.name} home", functools.partial(self._bring_home, unit)) for unit in units]
        steps += [
            ("take resident weights off the device", self._take_off),
            ("give pinned memory back", functools.partial(self._free_host, keep_memory)),
        ]
        steps += [(f"open component {unit.name} to everybody", unit.gate.detach) for unit in units]
        failure = run_cleanup_steps(steps)
        if failure is not None:
            raise failure
        heirs = self._heirs
        self._last = attrs.evolve(self._ending, device_bytes=0, host_bytes=0, pinned_bytes=0)
        self._clear()
        for component, heir in heirs:
            heir._inherit(component)

    def _end_delegate(self) -> None:
        if self._delegate is not None:
            self._delegate.disable_omni_model_cpu_offload()
            self._delegate = None

    def _unwatch_requests(self) -> None:
        if self._request_gate is not None:
            self._request_gate.detach()
            self._request_gate = None
        if self._request_hook is not None:
            if vars(self._pipeline).get("maybe_free_model_hooks") is self._request_hook:
                del self._pipeline.maybe_free_model_hooks
            self._request_hook = None

    def _withdraw(self) -> None:
        for component, owner in self._guests:
            owner._heirs = [heir for heir in owner._heirs if heir != (component, self)]
        self._guests = []

    def _bring_home(self, unit: Unit) -> None:
        runtime, prefetcher = self._parts()
        unit.gate.close_left_open()
        prefetcher.evict(unit)
        answer_no_more(unit.module)
        for resident in reversed(list(unit.residents)):
            resident.restore(runtime)
            unit.residents.remove(resident)
        _move_to_host(unit.module, runtime.device)
        if unit.came_from is not None and self._starting:
            unit.module.to(unit.came_from)  # enabling failed: as it was
        unit.image = Image([])  # the old one holds on to slabs

    def _take_off(self) -> None:
        for resident in reversed(list(self._residents)):
            resident.restore(self._parts()[0])
            self._residents.remove(resident)

    def _free_host(self, keep_memory: bool) -> None:
        if self._prefetcher is not None:
            self._prefetcher.drain()
            self._prefetcher.store.release(keep_memory=keep_memory)
            self._prefetcher.close()

    def _inherit(self, component: Component) -> None:
        """Take over a shared component that its owner gave back, while this backend is still enabled."""
        with self._lock:
            self._guests = [guest for guest in self._guests if guest[0] is not component]
            self._adopt([component])

    def _check_not_running(self, verb: str) -> None:
        for unit in list(self._units.values()):
            unit.gate.wait_for_others()
            if unit.gate.running:
                raise BackendStateError(
                    f"{verb}() inside a forward of component {unit.name!r}: call it after the forward has returned"
                )

    # --- Telling --------------------------------------------------------------------------------------------------

    def _report(self) -> OffloadReport:
        if self._prefetcher is None and self._delegate is None:
            return self._last
        prefetcher, units = self._prefetcher, list(self._units.values())
        ledger = self._runtime.ledger if self._runtime is not None else None
        components = [_report_unit(unit) for unit in units]
        components += [
            ComponentReport(
                name=component.name,
                kind=component.kind.value,
                bytes=size,
                streamed_bytes=0,
                resident_bytes=size,
            )
            for component, size in self._resident_components
        ]
        notes = list(self._notes)
        notes += [
            ResidentTensor(
                name=component.name,
                reason=f"its kind ({component.kind.value}) does not take turns here",
                bytes=size,
            )
            for component, size in self._resident_components
        ]
        notes += [
            ResidentTensor(name=resident.held.name, reason=resident.reason, bytes=resident.nbytes)
            for resident in [*self._residents, *(resident for unit in units for resident in unit.residents)]
            if resident.reason
        ]
        notes += [
            ResidentTensor(name=component.name, reason="another pipeline's backend offloads this shared component")
            for component, _ in self._guests
        ]
        return OffloadReport(
            strategy="model_level",
            device=str(self.device),
            device_bytes=ledger.device_bytes if ledger else 0,
            peak_device_bytes=ledger.peak_device_bytes if ledger else 0,
            host_bytes=sum(component.streamed_bytes for component in components),
            pinned_bytes=prefetcher.pool.pinned_bytes if prefetcher else 0,
            moved_bytes=sum(unit.moved_bytes for unit in units),
            fetches=sum(unit.fetches for unit in units),
            late_fetches=self._late_fetches,
            wait_seconds=sum(unit.meter.seconds() for unit in units),
            components=tuple(components),
            resident=tuple(notes),
        )

    def _parts(self) -> tuple[DeviceRuntime, Prefetcher]:
        if self._runtime is None or self._prefetcher is None:
            raise BackendStateError(self._explain_state())
        return self._runtime, self._prefetcher


def _report_unit(unit: Unit) -> ComponentReport:
    streamed = sum(held.nbytes for held in unit.image.tensors)
    resident = sum(resident.nbytes for resident in unit.residents)
    return ComponentReport(
        name=unit.name,
        kind=unit.kind.value,
        bytes=streamed + resident,
        streamed_bytes=streamed,
        resident_bytes=resident,
        fetches=unit.fetches,
        moved_bytes=unit.moved_bytes,
        wait_seconds=unit.meter.seconds(),
    )


def _check_usable(component: Component) -> None:
    """Refuse what nobody could offload: weights without values, another offloader's hooks."""
    for name, module in component.module.named_modules(prefix=component.name):
        library = None
        if "_hf_hook" in module.__dict__:
            library = "accelerate"
        # diffusers keeps a registry on many modules; only its offloading hook moves weights.
        elif "group_offloading" in getattr(module.__dict__.get("_diffusers_hook"), "hooks", ()):
            library = "diffusers"
        if library is not None:
            raise UnsupportedModelError(
                f"{name} carries an offloading hook of {library}, which would move its weights too: remove that first "
                "(pipe.remove_all_hooks(), or build the pipeline without offloading)"
            )
    forward = component.module.__dict__.get("forward")
    if forward is not None and not isinstance(forward, Entrance):
        raise UnsupportedModelError(
            f"the forward of component {component.name!r} was replaced on the instance by {forward!r}: undo "
            "that first, and put it in place again after enabling"
        )
    for held in collect(component.module, component.name):
        if held.master.is_meta:
            raise UnsupportedModelError(f"{held.name} has no values (it is on meta): load the weights first")


def _root_gate(component: Component) -> Gate | None:
    return next((gate for gate in gates_within(component.module) if gate.module is component.module), None)


def _take_anchor(packable: list[Held]) -> tuple[list[Held], list[tuple[Held, str]]]:
    parameters = [held for held in packable if isinstance(held.master, nn.Parameter)]
    if not parameters or parameters[0].nbytes > ANCHOR_BYTES:
        return packable, []
    anchor = parameters[0]
    return [held for held in packable if held is not anchor], [
        (anchor, "the component's first parameter: it says which device computes")
    ]


def _move_to_host(module: nn.Module, device: torch.device) -> None:
    """Move to the host what a forward or the user made on the device meanwhile."""
    if device.type == "cpu":
        return
    for held in collect(module):
        if held.master.device.type == device.type:
            moved = held.master.detach().to("cpu")
            if isinstance(held.master, nn.Parameter):
                moved = nn.Parameter(moved, held.master.requires_grad)
            for place in held.places:
                place.put(moved)


def _kinds(kinds: frozenset[ComponentKind]) -> str:
    return " or ".join(sorted(kind.value for kind in kinds))


def _gib(size: float) -> int:
    return int(size * 2**30)
