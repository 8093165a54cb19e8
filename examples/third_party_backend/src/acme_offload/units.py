"""What moves: a component is divided into units, each a module that computes with the tensors that its forward reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from sidestream.discovery import Component
from sidestream.streaming.entry import Gate
from sidestream.streaming.image import Held, Image, Structure, collect
from sidestream.streaming.placement import Resident
from sidestream.streaming.runtime import Copy, WaitMeter

#: Modules that read the weights of modules inside them without calling those: torch's, and diffusers' by name.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
WHOLE_NAMES = frozenset({"AttentionPooling", "FirDownsample2D", "FirUpsample2D", "VectorQuantizer"})


class Group:
    """One component: what of it stays on the device, its figures, the order of its units. `reason`: why it all stays."""

    def __init__(self, name: str, module: nn.Module, component: Component | None, reason: str) -> None:
        self.name, self.module, self.component, self.reason = name, module, component, reason
        self.residents: list[Resident] = []
        self.structure: Structure | None = None
        self.came_from: torch.device | None = None
        self.last: Unit | None = None
        self.ahead: Unit | None = None
        self.following: dict[Unit, Unit] = {}
        self.streamed = self.fetches = self.late_fetches = self.moved_bytes = 0
        self.meter = WaitMeter()

    def tensors(self) -> list[Held]:
        """Return its tensors but for the residents; of a module that is no component, only the module's own."""
        found = _without(self.residents, collect(self.module, self.name))
        return [held for held in found if self.component or held.places[0].module is self.module]


class Unit:
    """One module that computes. `outer` is entered before it: who reads its tensors, too, or else the root."""

    gate: Gate

    def __init__(self, group: Group, name: str, module: nn.Module) -> None:
        self.group, self.name, self.module = group, name, module
        self.outer: Unit | None = None
        self.members: list[nn.Module] = []  # whose tensors its forward reads
        self.image = Image([])
        self.laid_out = self.inside = False
        self.buffer: torch.Tensor | None = None
        self.copy: Copy | None = None

    def tensors(self) -> list[Held]:
        """Return what its forward reads but for the residents; a tied tensor with the places in this unit alone."""
        mine = {id(module) for module in self.members}
        found = _without(self.group.residents, collect(self.module, self.name))
        own = [Held(one.name, one.master, [place for place in one.places if id(place.module) in mine]) for one in found]
        return [held for held in own if held.places]


def _without(residents: list[Resident], tensors: list[Held]) -> list[Held]:
    there = {id(resident.current) for resident in residents}
    return [held for held in tensors if id(held.master) not in there]


def divide(root: nn.Module, name: str, whole: Collection[str]) -> Iterator[tuple[str, nn.Module, nn.Module, bool]]:
    """Yield each module's name, itself, the module whose forward reads its tensors, and whether it can be called.

    Most modules read their own. A `ParameterList` has no forward, a parametrization computes a weight of the module
    that it belongs to, and some modules read what lies inside them; `whole` names more classes of those.
    """
    readers: dict[str, nn.Module] = {}
    serving: set[str] = set()
    for path, module in root.named_modules(prefix=name):
        parent = path.rpartition(".")[0]
        above = None if module is root else readers[parent]
        if parent in serving or isinstance(module, ParametrizationList):
            serving.add(path)
        passive = path in serving or type(module).forward is nn.Module.forward
        readers[path] = module if above is None or not (passive or _is_whole(above, whole)) else above
        yield path, module, readers[path], above is None or not passive


def _is_whole(module: nn.Module, names: Collection[str]) -> bool:
    classes = {base.__name__ for base in type(module).__mro__}
    return isinstance(module, WHOLE) or not classes.isdisjoint(WHOLE_NAMES) or not classes.isdisjoint(names)
