"""Where masters live: in pinned slabs as far as the pool allows, else where they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sidestream.streaming.image import Held, parts
from sidestream.streaming.pool import PinnedPool, Slab, align, slab_size


@dataclass
class _Tenant:
    """A part that was moved into a slab, and the address it has there."""

    part: weakref.ref[torch.Tensor]
    address: int


class PinnedStore:
    """Moves masters into a pool's slabs, and back into ordinary memory of their own.

    The user's tensor objects stay; only the memory they point at changes. Masters are moved one slab at a time, so
    the extra host memory is one slab while moving in and one while moving out. What the pool refuses stays where it
    is, uncopied.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._tenants: dict[int, tuple[Slab, list[_Tenant]]] = {}

    def settle(self, tensors: Iterable[Held]) -> None:
        """Move the masters in, in order. If it raises, what was moved is still whole, and `release` undoes it."""
        waiting = [part for held in tensors for part in parts(held.master) if part.nbytes]
        remaining = sum(align(part.nbytes) for part in waiting)
        while waiting:
            slab = self._pool.take(slab_size(align(waiting[0].nbytes), remaining))
            if slab is None:
                return
            tenants: list[_Tenant] = []
            self._tenants[id(slab)] = (slab, tenants)
            left = []
            for part in waiting:
                if not slab.fits(part.nbytes):
                    left.append(part)
                    continue
                remaining -= align(part.nbytes)
                target = slab.carve(part)
                with torch.inference_mode(part.is_inference()), torch.no_grad():
                    target.copy_(part)
                tenants.append(_Tenant(weakref.ref(part), target.data_ptr()))
                part.data = target
            waiting = left

    def located(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return, by address, the slab memory that each settled part lies in and its offset there, in bytes."""
        return {
            tenant.address: (slab.memory, tenant.address - slab.memory.data_ptr())
            for slab, tenants in self._tenants.values()
            for tenant in tenants
        }

    def release(self, *, keep_memory: bool = False) -> None:
        """Give each part that still lies in a slab memory of its own, slab by slab, and the slabs back.

        With `keep_memory` the parts keep pointing at the slabs' memory, which then lives as long as they do: nothing
        is allocated. Repeatable: a slab that failed is still there.
        """
        for key in list(self._tenants):
            slab, tenants = self._tenants[key]
            if not keep_memory:
                for tenant in tenants:
                    part = tenant.part()
                    if part is None or part.data_ptr() != tenant.address:
                        continue
                    with torch.inference_mode(part.is_inference()), torch.no_grad():
                        part.data = part.detach().clone()
            self._pool.give_back(slab)
            # Its memory goes now, not when the next slab's tensors have been allocated.
            del self._tenants[key], slab
