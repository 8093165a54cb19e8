"""Who is on the device when: the order of components, learned, and who has to leave for whom. Pure data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sidestream import ComponentKind, UnsupportedModelError

_ENCODERS = (ComponentKind.TEXT_ENCODER, ComponentKind.IMAGE_ENCODER)


def enough_gib(nbytes: int) -> str:
    """Return a figure in GiB that surely holds `nbytes`: rounded up, so that who follows the advice succeeds."""
    return f"{math.ceil(nbytes / 2**30 * 1e6) / 1e6:.6f}"


class Order:
    """The order in which components are entered, learned from the last request and from who followed whom."""

    def __init__(self) -> None:
        self._last: list[str] = []
        self._now: list[str] = []
        self._after: dict[str, str] = {}

    def entered(self, name: str) -> None:
        """Note that a component is entered; again and again in a row counts once."""
        previous = self._now[-1] if self._now else None
        if previous == name:
            return
        if previous is not None:
            self._after[previous] = name
        self._now.append(name)
        # Without an end of the request in sight only the latest transitions matter.
        del self._now[:-256]

    def ended(self) -> None:
        """Note that the request is over: what it entered is what the next one is expected to enter."""
        if self._now:
            self._after.setdefault(self._now[-1], self._now[0])
            self._last, self._now = self._now, []

    def upcoming(self) -> list[str]:
        """Return the components expected next, nearest first, each once; the present one comes last, if at all."""
        done = len(self._now)
        if self._last and self._last[:done] == self._now:
            future = self._last[done:] + self._last
        else:
            future = []
            name = self._now[-1] if self._now else None
            while name in self._after and self._after[name] not in future:
                name = self._after[name]
                future.append(name)
        return list(dict.fromkeys(future))


class Schedule:
    """Decides who leaves and who comes early.

    Without a budget components take strict turns: a DiT or VAE with everybody, an encoder with everybody but other
    encoders. With a budget (bytes, `resident_bytes` of it taken for good) they leave only when there is no room, the
    one needed farthest in the future first.
    """

    def __init__(
        self, kinds: Mapping[str, ComponentKind], *, budget: int | None = None, resident_bytes: int = 0
    ) -> None:
        self.kinds = dict(kinds)
        self.sizes: dict[str, int] = {}
        self.budget = budget
        self.resident_bytes = resident_bytes
        self.order = Order()

    def leaving(self, name: str, present: Sequence[str], busy: Collection[str] = ()) -> list[str]:
        """Return who of `present` has to leave before `name` is copied in; never one of `busy`.

        Raises `UnsupportedModelError` if `name` does not fit the budget alone.
        """
        others = [other for other in present if other != name and other not in busy]
        if self.budget is None:
            return [other for other in others if not self._together(name, other)]
        if self.resident_bytes + self.sizes[name] > self.budget:
            raise UnsupportedModelError(
                f"component {name!r} needs {self.sizes[name]} bytes and {self.resident_bytes} bytes stay on the "
                f"device, but the device budget is {self.budget} bytes: raise device_budget_gib to at least "
                f"{enough_gib(self.resident_bytes + self.sizes[name])}"
            )
        return self._make_room({name}, present, others)

    def ahead(self, name: str, present: Sequence[str], busy: Collection[str] = ()) -> tuple[str, list[str]] | None:
        """Return who should be copied in while `name` computes, and who has to leave for that; None for nobody."""
        if self.budget is None:
            return None
        following = next(iter(self.order.upcoming()), None)
        if following is None or following == name or following in present or following not in self.sizes:
            return None
        stay = {name, following, *(other for other in present if other in busy)}
        if self.resident_bytes + sum(self.sizes[other] for other in stay) > self.budget:
            return None
        others = [other for other in present if other not in stay]
        return following, self._make_room({name, following}, present, others)

    def _together(self, name: str, other: str) -> bool:
        return self.kinds[name] in _ENCODERS and self.kinds[other] in _ENCODERS

    def _make_room(self, wanted: set[str], present: Sequence[str], others: Sequence[str]) -> list[str]:
        upcoming = self.order.upcoming()
        distance = {other: upcoming.index(other) if other in upcoming else len(upcoming) for other in others}
        leaving: list[str] = []
        staying = wanted | set(present)
        for other in sorted(others, key=lambda candidate: -distance[candidate]):
            if self.resident_bytes + sum(self.sizes[name] for name in staying) <= (self.budget or 0):
                break
            staying.discard(other)
            leaving.append(other)
        return leaving
