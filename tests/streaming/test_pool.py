"""Pinned memory in slabs: within a budget, nearly full, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sidestream import OffloadWarning, PinError
from sidestream.streaming.image import Held, collect
from sidestream.streaming.pool import PinnedPool, align, host_memory_limit, slab_size
from sidestream.streaming.store import PinnedStore
from sidestream.testing.runtimes import WatchfulRuntime


def make_pool(budget: int | None = 1 << 30, **limits: int) -> tuple[PinnedPool, WatchfulRuntime]:
    """Return a pool over simulated pinning."""
    runtime = WatchfulRuntime(torch.device("cpu"), **limits)
    return PinnedPool(runtime, budget=budget), runtime


def tensors_of(sizes: list[int]) -> list[Held]:
    """Return masters of the given sizes in bytes."""
    module = nn.ParameterList(nn.Parameter(torch.randn(size // 4), requires_grad=False) for size in sizes)
    return collect(module)


@pytest.mark.parametrize(
    "sizes",
    [
        [1 << 20] * 40,
        [1_300_000] * 30,
        [70 << 20, 1 << 20, 3 << 20],
        [(33 << 20) + 4, 5 << 20, 5 << 20, 300],
        [1000] * 2000,
        [(17 << 20)] * 9,
    ],
    ids=["equal", "odd", "one larger than a slab", "just over a power of two", "tiny", "three to a slab"],
)
def test_slabs_are_filled(sizes: list[int]) -> None:
    """pytorch/pytorch#150517: one request each would take up to twice the bytes; here at most a twentieth more."""
    pool, runtime = make_pool()
    store = PinnedStore(pool)
    tensors = tensors_of(sizes)
    values = [held.master.clone() for held in tensors]
    store.settle(tensors)
    needed = sum(align(size) for size in sizes)
    alone = sum(runtime.pinned_size(size) for size in sizes)
    assert needed <= pool.pinned_bytes <= max(1.05 * needed, needed + 64 * 1024) or pool.pinned_bytes < alone
    assert all(torch.equal(held.master, value) for held, value in zip(tensors, values, strict=True))
    assert all(held.master.untyped_storage().nbytes() == held.master.nbytes for held in tensors)
    store.release()
    assert pool.pinned_bytes == runtime.ledger.pinned_bytes == 0
    assert all(torch.equal(held.master, value) for held, value in zip(tensors, values, strict=True))


def test_the_budget_counts_the_allocators_rounding() -> None:
    """A budget that is kept only on paper is none."""
    pool, _ = make_pool(budget=5000)
    assert pool.take(3000) is not None  # 4096 with rounding
    with pytest.warns(OffloadWarning, match="budget of 5000 bytes is used up"):
        assert pool.take(600) is None
    assert pool.take(1) is None, "warned once, and then quiet"


def test_without_a_fallback_the_error_names_the_cure() -> None:
    """And the driver's own words."""
    runtime = WatchfulRuntime(torch.device("cpu"), pin_total=0)
    with pytest.raises(PinError, match=r"driver refused.*out of memory.*pin_cpu_memory"):
        PinnedPool(runtime, budget=None, required=True).take(100)


def test_what_was_dropped_meanwhile_is_not_brought_back() -> None:
    """A replaced weight is freed, not copied at the end."""
    pool, _ = make_pool()
    store = PinnedStore(pool)
    tensors = tensors_of([1 << 20, 1 << 20])
    store.settle(tensors)
    kept = tensors[0].master
    del tensors[1]
    store.release()
    assert pool.pinned_bytes == 0
    assert kept.untyped_storage().nbytes() == 1 << 20


@pytest.mark.parametrize(("wanted", "remaining"), [(256, 256), (1 << 20, 70 << 20), (100 << 20, 100 << 20)])
def test_a_slab_holds_what_is_wanted(wanted: int, remaining: int) -> None:
    """Whatever is left to place."""
    assert slab_size(wanted, remaining) >= wanted


def machine(root: Path, *, total_kib: int, v2: dict[str, str] | None = None, v1: str | None = None) -> Path:
    """Write what `/proc` and `/sys` would say."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n")
    lines = []
    if v2 is not None:
        lines.append("0::/box/inner")
        for group, limit in v2.items():
            folder = root / "sys/fs/cgroup" / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(limit + "\n")
    if v1 is not None:
        lines.append("5:cpu,memory:/box")
        folder = root / "sys/fs/cgroup/memory/box"
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(v1 + "\n")
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root


def test_a_slab_whose_return_failed_can_be_given_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cleans up calls again until it succeeds."""
    pool, runtime = make_pool()
    slab = pool.take(4096)
    assert slab is not None
    with monkeypatch.context() as planted:
        planted.setattr(runtime.ledger, "pinned", lambda change: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.give_back(slab)
    pool.give_back(slab)
    assert (pool.pinned_bytes, runtime.ledger.pinned_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("v2", "v1", "expected"),
    [
        (None, None, 8192 * 1024),
        ({"box/inner": "max", "box": "4000000"}, None, 4_000_000),
        ({"box/inner": "3000000", "box": "4000000"}, None, 3_000_000),
        ({"box/inner": "99999999999"}, None, 8192 * 1024),
        (None, "2000000", 2_000_000),
        (None, str((1 << 63) - 4096), 8192 * 1024),
    ],
)
def test_the_limit_is_the_containers_if_that_is_less(
    tmp_path: Path, v2: dict[str, str] | None, v1: str | None, expected: int
) -> None:
    """sgl-project/sglang#35641: a container was killed, for the budget came from the machine."""
    assert host_memory_limit(machine(tmp_path, total_kib=8192, v2=v2, v1=v1)) == expected


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path) -> None:
    """Not every system has /proc."""
    assert host_memory_limit(tmp_path) is None
