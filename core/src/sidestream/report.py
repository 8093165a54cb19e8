"""What an offloaded pipeline costs and what was done: plain figures, no torch."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class ComponentReport:
    """One component. All sizes in bytes, times in seconds.

    `bytes` counts each weight and buffer once, `streamed_bytes` what moves, `resident_bytes` what stays on the
    device; `fetches` counts the times it was copied in, `moved_bytes` the bytes of those copies, and `wait_seconds`
    is how long its forwards waited for them.
    """

    name: str
    kind: str
    bytes: int
    streamed_bytes: int
    resident_bytes: int
    fetches: int = 0
    moved_bytes: int = 0
    wait_seconds: float = 0.0


@attrs.frozen(kw_only=True)
class ResidentTensor:
    """Something that could have moved and did not: its qualified name, the reason, its size in bytes."""

    name: str
    reason: str
    bytes: int = 0


@attrs.frozen(kw_only=True)
class OffloadReport:
    """A backend's figures at one moment; `str()` gives a table, `as_dict()` plain JSON types.

    `device_bytes` and `peak_device_bytes` count the weights on the device now and at worst, `host_bytes` the weights
    in host memory, `pinned_bytes` page-locked memory with the allocator's rounding, `moved_bytes` all bytes copied to
    the device. `late_fetches` are the fetches that a forward had to start itself and wait for; `wait_seconds` is
    the time for which forwards waited for copies.
    """

    strategy: str
    device: str
    device_bytes: int = 0
    peak_device_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    moved_bytes: int = 0
    fetches: int = 0
    late_fetches: int = 0
    wait_seconds: float = 0.0
    components: tuple[ComponentReport, ...] = ()
    resident: tuple[ResidentTensor, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report in types that `json.dumps` takes."""
        data: dict[str, Any] = attrs.asdict(self)
        data["components"] = [attrs.asdict(component) for component in self.components]
        data["resident"] = [attrs.asdict(tensor) for tensor in self.resident]
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.strategy} on {self.device}: {format_bytes(self.device_bytes)} on the device now, "
            f"{format_bytes(self.peak_device_bytes)} at worst; {format_bytes(self.host_bytes)} of weights in host "
            f"memory, {format_bytes(self.pinned_bytes)} pinned",
            f"moved {format_bytes(self.moved_bytes)} in {self.fetches} fetches, {self.late_fetches} of them late; "
            f"waited {self.wait_seconds:.3f} s",
        ]
        if self.components:
            header = ("component", "kind", "bytes", "streamed", "resident", "fetches", "moved", "waited s")
            rows = [
                (
                    component.name,
                    component.kind,
                    format_bytes(component.bytes),
                    format_bytes(component.streamed_bytes),
                    format_bytes(component.resident_bytes),
                    str(component.fetches),
                    format_bytes(component.moved_bytes),
                    f"{component.wait_seconds:.3f}",
                )
                for component in self.components
            ]
            widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
            for row in [header, *rows]:
                cells = [
                    cell.ljust(width) if column < 2 else cell.rjust(width)
                    for column, (cell, width) in enumerate(zip(row, widths, strict=True))
                ]
                lines.append("  ".join(cells).rstrip())
        lines += [
            f"resident: {tensor.name} ({format_bytes(tensor.bytes)}): {tensor.reason}" for tensor in self.resident
        ]
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Return a size for people: binary units, three figures (`1.25 MiB`)."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
