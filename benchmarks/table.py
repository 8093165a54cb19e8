"""Measuring by turns, and writing a table into docs/benchmarks.md."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def by_turns(cases: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Run every case once in each round, A B C A B C, and return the seconds of each run by case."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()  # warm up
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def setting(*packages: str) -> str:
    """Return a line that says what was measured on what."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    processor = platform.processor() or platform.machine()
    return f"{processor}, {torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}."


def write(section: str, text: str) -> None:
    """Put `text` between the markers of `section` in docs/benchmarks.md, and print it."""
    start, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    page = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n\nEach table is written by the script that it names.\n"
    block = f"{start}\n{text.rstrip()}\n{end}"
    if start in page:
        before, _, rest = page.partition(start)
        page = before + block + rest.partition(end)[2]
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    PAGE.write_text(page)
    print(text)


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)
