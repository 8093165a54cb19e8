"""The device's tensors: real CPU bytes behind a device of its own, every operation queued on a simulated stream.

Note: how an operation runs
---------------------------
Its outputs' shapes and strides come from running it once on CPU tensors full of ones, and are remembered. (Meta tensors
do not always agree with the CPU about strides, and strides choose kernels.) Their memory comes from the device's
allocator. Then a closure that computes with the CPU's own kernel is queued on the current stream, so that the bits are
the CPU's, and the host goes on. Views are made at once: they touch no bytes. An operation whose result the host needs
(a number, a shape that depends on data) waits for the stream first, as on a real device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from sidestream.testing.simulated.machine import Memory
from sidestream.testing.simulated.memory import Block

if TYPE_CHECKING:
    from sidestream.testing.simulated.accelerator import SimulatedAccelerator

DEVICE_TYPE = "simdev"

_aten = torch.ops.aten
#: What `tensor.data = other` arrives as.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

#: Composite operations that are kept whole, for the CPU has a kernel of its own for them.
_WHOLE = {"aten::scaled_dot_product_attention", "aten::group_norm", "aten::lstm", "aten::gru"}
#: The functions that would take them apart by device before they get here.
_WHOLE_FUNCTIONS = {
    torch.nn.functional.scaled_dot_product_attention: _aten.scaled_dot_product_attention.default,
    torch.nn.functional.group_norm: _aten.group_norm.default,
    torch._VF.lstm: _aten.lstm.input,
    torch._VF.gru: _aten.gru.input,
}
#: Operations whose result the host needs at once.
_SYNCHRONOUS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}


class SimTensor(torch.Tensor):
    """A tensor on the simulated device: `elem` is its CPU bytes, `block` the memory they lie in."""

    elem: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, elem: torch.Tensor, block: Block) -> SimTensor:
        made: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device(DEVICE_TYPE, 0),
            requires_grad=False,
        )
        made.elem, made.block = elem, block
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # With gradients off nothing is lost by keeping them whole.
        if func in _WHOLE_FUNCTIONS and not torch.is_grad_enabled():
            return dispatch(_WHOLE_FUNCTIONS[func], args, kwargs or {})
        if func == _SET_DATA and all(isinstance(arg, SimTensor) for arg in args[:2]):
            args[0].elem, args[0].block = args[1].elem, args[1].block
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        # Without this, what comes back from the device would be called a tensor of the device.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until what is queued on `stream` at the time of freeing has run."""
        self.block.used_on.add(stream)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the device that is there."""
    from sidestream.testing.simulated.accelerator import current

    return _Dispatcher(current()).run(func, args, kwargs)


class _Dispatcher:
    def __init__(self, device: SimulatedAccelerator) -> None:
        self.device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy", "aten::_pin_memory", "aten::is_pinned"):
            return getattr(self, name.removeprefix("aten::").strip("_"))(func, args, kwargs)
        if name not in _WHOLE and func._can_decompose():
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_view(func):
            return self.view(func, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.check(name, tensors)
        if not any(isinstance(tensor, SimTensor) for tensor in tensors):
            return self.factory(func, args, kwargs)
        if name in _SYNCHRONOUS or (name == "aten::index" and _by_mask(args)):
            return self.synchronous(func, args, kwargs)
        written = _written(func, args, kwargs)
        if written and all(result.alias_info is not None for result in func._schema.returns):
            return self.in_place(func, args, kwargs, written)
        try:
            shapes = _shapes(func, args, kwargs)
        except (NotImplementedError, RuntimeError):
            # No rule for the shapes: compute now, which is one of the orders that are allowed.
            return self.synchronous(func, args, kwargs)
        outputs = pytree.tree_map_only(torch.Tensor, self.like, shapes)
        self.kernel(func, args, kwargs, outputs, shapes, written)
        return outputs

    # --- kinds of operation ----------------------------------------------------------------------------------------

    def view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SimTensor))
        with torch.inference_mode(False), torch.no_grad():
            made = func(*_elems(args), **_elems(kwargs))
        # A view is an inference tensor if what it views is one, whatever the mode is now.
        with torch.inference_mode(source.is_inference()):
            return pytree.tree_map_only(torch.Tensor, lambda elem: SimTensor(elem, source.block), made)

    def factory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from nothing: `empty`, `zeros`, `arange`."""
        plain = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        plain.pop("pin_memory", None)
        with torch.inference_mode(False), torch.no_grad():
            value = func(*args, **plain)
        made = self.like(value)
        if "empty" not in func._schema.name:
            self.device.launch(func._schema.name, lambda: _fill(made.elem, value), [(made, True)], 0.0)
        return made

    def synchronous(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SimTensor)]
        self.device.launch(func._schema.name, _nothing, [(tensor, False) for tensor in inputs], 0.0)
        self.device.machine.synchronize(self.device.machine.current)
        with torch.inference_mode(False), torch.no_grad():
            result = func(*_elems(args), **_elems(_without_device(kwargs)))

        def wrap(value: torch.Tensor) -> SimTensor:
            made = self.like(value)
            self.device.launch(func._schema.name, lambda: _fill(made.elem, value), [(made, True)], 0.0)
            return made

        return pytree.tree_map_only(torch.Tensor, wrap, result)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SimTensor)]
        accesses = [(tensor, any(tensor is other for other in written)) for tensor in inputs]
        plain_args, plain_kwargs = _elems(args), _elems(kwargs)
        self.device.launch(
            func._schema.name,
            lambda: _call(func, plain_args, plain_kwargs),
            accesses,
            self.seconds(func, args, kwargs, None),
        )
        out = [tensor for tensor in written if isinstance(tensor, SimTensor)]
        returns = len(func._schema.returns)
        return None if returns == 0 else out[0] if returns == 1 else tuple(out)

    def kernel(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        shapes: Any,
        written: list[torch.Tensor],
    ) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SimTensor)]
        made = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, SimTensor)]
        targets = [tensor.elem for tensor in made]
        plain_args, plain_kwargs = _elems(args), _elems(_without_device(kwargs))

        def compute() -> None:
            result = _call(func, plain_args, plain_kwargs)
            values = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for target, value in zip(targets, values, strict=True):
                _fill(target, value)

        accesses = [(tensor, any(tensor is other for other in written)) for tensor in inputs]
        accesses += [(tensor, True) for tensor in made]
        self.device.launch(func._schema.name, compute, accesses, self.seconds(func, args, kwargs, shapes))

    # --- copies ----------------------------------------------------------------------------------------------------

    def copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`target.copy_(source, non_blocking)` in all directions."""
        target, source = args[0], args[1]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(target, SimTensor) and isinstance(source, SimTensor):
            to, value = target.elem, source.elem
            self.device.launch(
                "aten::copy_", lambda: _fill(to, value), [(source, False), (target, True)], self.elementwise(to.numel())
            )
        elif isinstance(target, SimTensor):
            self.device.copy_in(target, source, non_blocking=non_blocking)
        else:
            self.device.copy_out(target, source, non_blocking=non_blocking)
        return target  # type: ignore[no-any-return]

    def to_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`tensor.to(device or dtype)`."""
        source = args[0]
        device = kwargs.get("device")
        dtype = kwargs.get("dtype") or source.dtype
        there = isinstance(source, SimTensor) if device is None else torch.device(device).type == DEVICE_TYPE
        template = source.elem if isinstance(source, SimTensor) else source
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        with torch.inference_mode(False):
            like = torch.empty_like(template, dtype=dtype, device="meta", memory_format=memory_format)
        if not there and torch.device(device or "cpu").type not in ("cpu", DEVICE_TYPE):
            return torch.empty_like(like, device=device)
        # The link moves bytes; what changes them is a kernel on the device.
        if there and not isinstance(source, SimTensor) and dtype != source.dtype:
            source, template = source.to(dtype), source
        if not there and dtype != source.dtype:
            source = source.to(dtype)
        target = self.like(like) if there else torch.empty_like(like, device="cpu")
        target.copy_(source, non_blocking=kwargs.get("non_blocking", False))
        return target

    def pin_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("cannot pin a tensor of the simulated device; only host memory can be pinned")

    def is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return False

    # --- helpers ---------------------------------------------------------------------------------------------------

    def like(self, value: torch.Tensor) -> SimTensor:
        """Return uninitialised memory of the device with a tensor's dtype, shape and strides."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        nbytes = span * value.element_size() if value.numel() else 0
        block = self.device.allocator.allocate(nbytes)
        with torch.inference_mode(False), torch.no_grad():
            flat = block.chunk.bytes[: nbytes or value.element_size()].view(value.dtype)
            elem = torch.as_strided(flat, value.shape, value.stride())
        return SimTensor(elem, block)

    def check(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raise what a real device raises when a CPU tensor is among its own; numbers as tensors are allowed."""
        strangers = [tensor for tensor in tensors if not isinstance(tensor, SimTensor) and tensor.dim() > 0]
        if strangers and any(isinstance(tensor, SimTensor) for tensor in tensors) and name != "aten::index":
            shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in strangers)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE_TYPE}:0 and "
                f"{strangers[0].device}! ({name} with {shapes})"
            )

    def seconds(self, func: Any, args: Any, kwargs: Any, shapes: Any) -> float:
        """Return how long the kernel takes by the time model."""
        counter = flop_registry.get(func.overloadpacket)
        if counter is not None and shapes is not None:
            try:
                return float(counter(*args, **kwargs, out_val=shapes)) / self.device.machine.model.rate
            except (TypeError, ValueError, AttributeError, IndexError):
                return self.elementwise(_elements(shapes))
        return self.elementwise(_elements(shapes if shapes is not None else args))

    def elementwise(self, count: int) -> float:
        """Return the seconds for going through `count` elements."""
        return count / self.device.machine.model.elements


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the schema says are written."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _by_mask(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in pytree.tree_leaves(args[1:])
    )


def _elems(tree: Any) -> Any:
    return pytree.tree_map_only(SimTensor, lambda tensor: tensor.elem, tree)


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.device("cpu") if key == "device" and value else value for key, value in kwargs.items()}


#: Shapes of results by operation and arguments: meta tensors, which hold no memory.
_known_shapes: dict[Any, Any] = {}


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's results as meta tensors with the shapes, strides and dtypes that the CPU gives."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, spec, tuple(map(_described, leaves)))
    try:
        known = _known_shapes.get(key)
    except TypeError:
        return _on_stand_ins(func, args, kwargs)
    if known is None:
        known = _known_shapes[key] = _on_stand_ins(func, args, kwargs)
    return known


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _on_stand_ins(func: Any, args: Any, kwargs: Any) -> Any:
    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(1)

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            result = func(
                *pytree.tree_map_only(torch.Tensor, stand_in, args),
                **pytree.tree_map_only(torch.Tensor, stand_in, _without_device(kwargs)),
            )
        except (RuntimeError, IndexError):  # ones are not valid everywhere, as an index for instance
            shifted = {key: torch.device("meta") if key == "device" else value for key, value in kwargs.items()}
            result = func(
                *pytree.tree_map_only(torch.Tensor, meta, args), **pytree.tree_map_only(torch.Tensor, meta, shifted)
            )
        return pytree.tree_map_only(torch.Tensor, meta, result)


def _elements(tree: Any) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return func(*args, **kwargs)


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        target.copy_(value)


def _nothing() -> None:
    return None


class HostWatch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what the host's own operations do to memory that the device may be copying from or to."""

    def __init__(self, device: SimulatedAccelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, SimTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return result  # the device noted its own accesses
        written = _written(func, args, kwargs)
        if not _is_view(func):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, SimTensor) and leaf.device.type == "cpu":
                    writes = any(leaf is tensor for tensor in written)
                    self.device.host_touches(leaf, writes=writes, operation=func._schema.name)
        return result


def host_watch(device: SimulatedAccelerator) -> AbstractContextManager[Any]:
    """Return the mode that sees the host's accesses on this thread."""
    return HostWatch(device)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a CPU tensor covers, as addresses."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


__all__ = ["DEVICE_TYPE", "HostWatch", "Memory", "SimTensor", "dispatch", "host_watch", "span"]
