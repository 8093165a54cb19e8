"""All ways into a module: a gate that opens before its weights are used and closes afterwards, whatever happens.

Note: gates
-----------
`forward` alone is not enough: a VAE is entered by `decode`, which enters `decoder`; a language model by `generate`;
and anybody may call a child. So a gate has two parts. The *entry methods* of the root (its `forward` among them) are
replaced on the instance by an :class:`Entrance`, which has what a forward hook lacks: a `finally`. And while the gate
is closed every other module inside carries a *sentinel*, a forward pre-hook: whoever is called directly opens the
gate first. While the gate is open there is no sentinel, so that computing costs nothing and a module that would
choose another kernel because of a hook does not.

A forward hook is not told of a KeyboardInterrupt, so a gate that a sentinel opened may stay open by mistake. Whoever
comes next looks at the stacks of all threads and closes it if that module is not running any more.

Note: compilers
---------------
torch.compile traces through an entrance into the method, and must neither trace a gate's work nor make it part of a
graph's guards; so that work is wrapped in `torch.compiler.disable`, and breaks the graph before and after the method.
The method's own graph is the one it has without offloading.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from sidestream.errors import BackendStateError

#: Seconds for which enabling waits for another thread's forward to return.
IDLE_TIMEOUT = 60.0

P = ParamSpec("P")
T = TypeVar("T")


class Gate:
    """The ways into `module`.

    `opened` is called before its weights are used and `closed` afterwards, once for the outermost entry, under `lock`:
    a second thread waits. `owner` is whose gate this is, `name` the component's.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        owner: object,
        methods: Iterable[str],
        opened: Callable[[tuple[Any, ...], dict[str, Any]], None],
        closed: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        self.module = module
        self.name = name
        self.owner = owner
        self.methods = tuple(dict.fromkeys(("forward", *methods)))
        self._opened = opened
        self._closed = closed
        self.lock: Any = lock
        self._idle = threading.Condition(lock)
        self.attached = False
        self._depth = 0
        self._open = False
        self._direct: list[tuple[nn.Module, int]] = []
        self._sentinel = Sentinel(self)
        self._hooks: list[tuple[dict[int, Any], int]] = []

    @property
    def running(self) -> bool:
        """Whether somebody computes inside; forgets those that a KeyboardInterrupt threw out."""
        self._forget_thrown_out()
        return self._depth > 0

    def wait_for_others(self) -> None:
        """Wait until no other thread computes in a module that it called directly. The caller holds the lock."""
        while any(thread != threading.get_ident() for _, thread in self._direct) and self.running:
            self._idle.wait(timeout=0.05)

    def attach(self, *, watch: bool = True) -> None:
        """Put the entrances in place, and the sentinels unless `watch` is false."""
        for method in self.methods:
            self.module.__dict__[method] = Entrance(self, method)
        self.attached = True
        if watch:
            self.watch()

    def watch(self) -> None:
        """Have a sentinel for every module inside, those added since included."""
        self._unhook()
        for module in self.module.modules():
            if module is not self.module:
                handle = module.register_forward_pre_hook(self._sentinel, prepend=True)
                self._hooks.append((module._forward_pre_hooks, handle.id))
        if self._open:
            self._stand_down()

    def detach(self) -> None:
        """Take everything away again. Idempotent."""
        self.attached = False
        self._unhook()
        _sweep(self.module)
        for method in self.methods:
            entrance = self.module.__dict__.get(method)
            if isinstance(entrance, Entrance) and entrance.gate is self:
                del self.module.__dict__[method]

    def close_left_open(self) -> None:
        """Close if nobody computes inside, though the gate is open."""
        self._forget_thrown_out()
        if self._open and not self._depth:
            self._shut()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open unless open already. The caller holds the lock."""
        self._forget_thrown_out()
        if not self._depth:
            if self._open:  # an interrupt struck while closing
                self._shut()
            self._open = True
            try:
                self._stand_down()
                self._opened(args, kwargs)
            except BaseException:
                self._shut()
                raise
        self._depth += 1

    def leave(self) -> None:
        """Undo one `enter`; the last one closes. The caller holds the lock."""
        self._depth -= 1
        if not self._depth:
            self._shut()

    def enter_directly(self, module: nn.Module) -> bool:
        """Open for a module inside that was called from outside; False if the gate is not in place any more."""
        with self.lock:
            if not self.attached:
                return False
            self.enter((), {})
            self._direct.append((module, threading.get_ident()))
            module.register_forward_hook(Closer(self), always_call=True)
            return True

    def leave_directly(self, module: nn.Module) -> None:
        """Undo `enter_directly`."""
        with self.lock:
            entry = (module, threading.get_ident())
            if entry in self._direct:
                self._direct.remove(entry)
                self.leave()
                self._idle.notify_all()

    def _shut(self) -> None:
        self._closed()
        for hooks, key in self._hooks:
            if key not in hooks:
                hooks[key] = self._sentinel
                if len(hooks) > 1:
                    hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        self._open = False

    def _stand_down(self) -> None:
        for hooks, key in self._hooks:
            hooks.pop(key, None)

    def _unhook(self) -> None:
        self._stand_down()
        self._hooks = []

    def _forget_thrown_out(self) -> None:
        for module, thread in list(self._direct):
            if not _is_running(module, thread):
                self._direct.remove((module, thread))
                self._depth -= 1
                Closer.remove_from(module, self)


class Entrance:
    """Stands in for one method of a module's instance; looks like it to `inspect.signature`."""

    def __init__(self, gate: Gate, name: str) -> None:
        self.gate = gate
        self._name = name
        self._method: Callable[..., Any] = getattr(gate.module, name)
        functools.update_wrapper(self, self._method)
        # A compiler that traces through here must leave a gate's work alone: see "Note: compilers".
        self._before = _untraced(self._enter)
        self._after = _untraced(self._leave)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self.gate.lock.acquire()
        try:
            attached = self.gate.attached
            if attached:
                self.gate.enter(args, kwargs)
        except BaseException:
            self.gate.lock.release()
            raise
        if not attached:
            self.gate.lock.release()
        return attached

    def _leave(self) -> None:
        try:
            self.gate.leave()
        finally:
            self.gate.lock.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._before(args, kwargs):
            # The gate was taken away while this call waited for its turn, and another may have been put in its place.
            # What else stands there now may be somebody's wrapper around this very entrance.
            now = self.gate.module.__dict__.get(self._name)
            return (now if isinstance(now, Entrance) and now is not self else self._method)(*args, **kwargs)
        try:
            return self._method(*args, **kwargs)
        finally:
            self._after()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module is nobody's yet: its method is its own.
        copied = memo.get(id(self.gate.module))
        if copied is None:
            return _own_method(self.gate.module, self._name)
        return _own_method(copied, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self.gate.module, self._name)


class Sentinel:
    """The forward pre-hook of a closed gate's modules. Copied or pickled along with a module it does nothing."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._enter = _untraced(gate.enter_directly)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self._enter(module):
            # Taken away while this call waited; another gate may have been put in its place.
            for hook in list(module._forward_pre_hooks.values()):
                if isinstance(hook, Sentinel):
                    hook(module, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()


class Closer:
    """The forward hook of a module that was called directly: closes the gate, and is gone."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._leave = _untraced(self._leave_gate)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)

    def _leave_gate(self, module: nn.Module) -> None:
        self.remove_from(module, self.gate)
        self.gate.leave_directly(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()

    @staticmethod
    def remove_from(module: nn.Module, gate: Gate) -> None:
        """Take one closer of `gate` off `module`, the newest if there are several."""
        for key, hook in reversed(list(module._forward_hooks.items())):
            if isinstance(hook, Closer) and hook.gate is gate:
                del module._forward_hooks[key]
                module._forward_hooks_always_called.pop(key, None)
                return


class _Inert:
    """What a gate's hook becomes in a copy of the module."""

    def __call__(self, *args: Any) -> None:
        return None


def wait_until_idle(gates: Iterable[Gate], *, timeout: float = IDLE_TIMEOUT) -> None:
    """Wait until no other thread computes in the gates' modules; for at most `timeout` seconds.

    The caller holds the gates' lock and has attached their entrances, so that nobody new gets in: whoever is inside
    came before. Raises `BackendStateError` if somebody stays.
    """
    gates = list(gates)
    inside = {id(module): gate for gate in gates for module in gate.module.modules()}
    deadline = time.monotonic() + timeout
    while (gate := _busy(inside)) is not None:
        if time.monotonic() > deadline:
            raise BackendStateError(
                f"another thread has been inside component {gate.name!r} for {timeout:.0f} s: "
                "enable offloading when its forward has returned"
            )
        time.sleep(0.001)


def _busy(inside: dict[int, Gate]) -> Gate | None:
    own = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame: types.FrameType | None = top if thread != own else None
        while frame is not None:
            if frame.f_code is _WAITING:
                break  # at the door, not inside
            if frame.f_code.co_varnames[:1] == ("self",):
                gate = inside.get(id(frame.f_locals.get("self")))
                if gate is not None:
                    return gate
            frame = frame.f_back
    return None


_WAITING = Entrance._enter.__code__


def _sweep(module: nn.Module) -> None:
    """Take away what is left of a gate's hooks in a module that was copied, and put in, while a gate was there."""
    for child in module.modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Inert)]:
                del hooks[key]
                child._forward_hooks_always_called.pop(key, None)


def gate_of(module: nn.Module) -> Gate | None:
    """Return the gate that this very module is the root of, if any."""
    entrance = module.__dict__.get("forward")
    return entrance.gate if isinstance(entrance, Entrance) else None


def gates_within(module: nn.Module) -> list[Gate]:
    """Return every gate that `module` or a module inside it belongs to."""
    found: dict[int, Gate] = {}
    for child in module.modules():
        own = gate_of(child)
        hooks = [hook.gate for hook in child._forward_pre_hooks.values() if isinstance(hook, Sentinel)]
        for gate in ([own] if own is not None else []) + hooks:
            found[id(gate)] = gate
    return list(found.values())


def _untraced(call: Callable[P, T]) -> Callable[P, T]:
    untraced: Callable[P, T] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return untraced


def _own_method(module: nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)


def _is_running(module: nn.Module, thread: int) -> bool:
    """Return whether the thread is inside a call of `module` now. Slow: reads its stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def execution_is_differentiable(values: Iterable[Any]) -> bool:
    """Return whether gradients are on and one of the tensors among `values` (searched one level deep) wants one."""
    if not torch.is_grad_enabled():
        return False
    for value in values:
        items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
            return True
    return False
