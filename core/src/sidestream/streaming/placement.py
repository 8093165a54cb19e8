"""What stays on the device for the whole time, and how a module says which device that is."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from sidestream.streaming.image import Held, is_opaque, parts, rebuild
from sidestream.streaming.runtime import DeviceRuntime


class Resident:
    """A tensor that lives on the device while offloading is on: for each place the module holds a device copy.

    Where the device's memory is the host's, or if it is there already, it is left alone and only counted.
    """

    def __init__(self, held: Held, reason: str) -> None:
        self.held = held
        self.reason = reason
        self.nbytes = held.nbytes
        self._counted = False
        self._copy: torch.Tensor | None = None
        self._version: int | None = None

    @property
    def current(self) -> torch.Tensor:
        """The object that the module holds while this is placed."""
        return self._copy if self._copy is not None else self.held.master

    @property
    def replaced(self) -> bool:
        """Whether somebody put other tensors in all its places."""
        return not any(place.holds(self.current) for place in self.held.places)

    def carried_off(self, runtime: DeviceRuntime) -> bool:
        """Return whether its device copy was moved away from the device, as `module.cpu()` does."""
        return self._copy is not None and self._copy.device != runtime.device

    def forget(self, runtime: DeviceRuntime) -> None:
        """Count it no more, without putting anything back."""
        self._copy = None
        if self._counted:
            runtime.ledger.device(-self.nbytes)
            self._counted = False

    def place(self, runtime: DeviceRuntime) -> None:
        """Put it on the device."""
        master = self.held.master
        runtime.ledger.device(self.nbytes)
        self._counted = True
        if not runtime.separate or (master.device == runtime.device and master.device.type != "cpu"):
            return
        self._version = _version_of(master)
        with torch.inference_mode(False), torch.no_grad():
            if is_opaque(master):
                moved = master.detach().to(runtime.device, copy=True)
                self._copy = nn.Parameter(moved, False) if isinstance(master, nn.Parameter) else moved
            else:
                self._copy = rebuild(master, iter([_copied(part, runtime.device) for part in parts(master)]))
        for place in self.held.places:
            if place.holds(master):
                place.put(self._copy)

    def restore(self, runtime: DeviceRuntime) -> None:
        """Have the module hold the host object again, with the device's values unless its own are newer."""
        if self._copy is not None:
            # What a class of its own holds cannot be written part by part; such a weight is only read here.
            if _version_of(self.held.master) == self._version and not is_opaque(self.held.master):
                for part, copy in zip(parts(self.held.master), parts(self._copy), strict=True):
                    if (copy.dtype, copy.shape) == (part.dtype, part.shape):
                        runtime.read_back(_once(part.data), _once(copy.detach(), like=part))
                    else:  # cast, or given other data meanwhile
                        part.data = _copied(copy, part.device)
            for place in self.held.places:
                if place.holds(self._copy):
                    place.put(self.held.master)
        self.forget(runtime)


def _copied(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    return part.detach().to(device, copy=True)


def _once(tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return each element of an expanded tensor once, for torch refuses to write one place twice."""
    for dimension, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def answer_device(module: nn.Module, device: torch.device) -> bool:
    """Have `module.device` answer `device`, if its class has such a property and it says otherwise now.

    Libraries answer with the first parameter's device, which is the host's while a component waits for its turn.
    The instance gets a subclass that differs in nothing else and pickles as the original. Returns whether it did.
    """
    cls = type(module)
    if not isinstance(getattr(cls, "device", None), property) or getattr(module, "device", None) == device:
        return False

    def reduce(self: nn.Module, protocol: Any) -> Any:
        state = getattr(self, "__getstate__", lambda: self.__dict__)()
        return _new, (cls,), state

    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
        "device": property(lambda self: device),
        "_sidestream_answers_for": cls,
    }
    module.__class__ = types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(names))
    return True


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def answer_no_more(module: nn.Module) -> None:
    """Undo :func:`answer_device`. Idempotent."""
    original = vars(type(module)).get("_sidestream_answers_for")
    if original is not None:
        module.__class__ = original
