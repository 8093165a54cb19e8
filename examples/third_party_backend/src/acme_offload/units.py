"""What moves: a component is divided into units, each a module that computes with the tensors its forward reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from sidestream.streaming.entry import Gate
from sidestream.streaming.image import Held, Image, Structure, collect
from sidestream.streaming.runtime import Copy

#: Modules that read the weights of modules inside them without calling those: torch's, and diffusers' by name.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
WHOLE_NAMES = frozenset({"AttentionPooling", "FirDownsample2D", "FirUpsample2D", "VectorQuantizer"})


@dataclass(eq=False)
class Unit:
    """A module that computes. `outer` is entered before it: who reads its tensors, too, or the component's root.

    `members` are the modules whose own tensors its forward reads; a root's `structure` is what the component held when
    it was last looked at.
    """

    name: str
    module: nn.Module
    outer: Unit | None = None
    gate: Gate = field(init=False)
    structure: Structure = field(init=False)
    members: list[nn.Module] = field(default_factory=list)
    image: Image | None = None
    buffer: torch.Tensor | None = None
    copy: Copy | None = None
    inside: bool = False

    def tensors(self, there: Collection[int]) -> list[Held]:
        """Return what moves with this unit: not those in `there` (by `id`); of a tied tensor the places here alone."""
        own = {id(module) for module in self.members}
        found = [held for held in collect(self.module, self.name) if id(held.master) not in there]
        found = [
            Held(one.name, one.master, [place for place in one.places if id(place.module) in own]) for one in found
        ]
        return [held for held in found if held.places]


def divide(root: nn.Module, name: str, whole: Collection[str]) -> Iterator[tuple[str, nn.Module, nn.Module, bool]]:
    """Yield each module's name, itself, the module whose forward reads its tensors, and whether it can be called.

    Most modules read their own. A `ParameterList` has no forward, a parametrization computes a weight of the module
    that it belongs to, and some modules read what lies inside them; `whole` names more classes of those.
    """
    names = WHOLE_NAMES.union(whole)
    readers: dict[str, nn.Module] = {}
    serving: set[str] = set()
    for path, module in root.named_modules(prefix=name):
        parent = path.rpartition(".")[0]
        above = module if module is root else readers[parent]
        if parent in serving or isinstance(module, ParametrizationList):
            serving.add(path)
        passive = path in serving or type(module).forward is nn.Module.forward
        is_read = isinstance(above, WHOLE) or any(base.__name__ in names for base in type(above).__mro__)
        readers[path] = above if passive or is_read else module
        yield path, module, readers[path], module is root or not passive
