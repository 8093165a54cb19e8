"""Installed distributions, faked: real `*.dist-info` folders and real modules in a folder on `sys.path`."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

#: A plugin with which nothing is wrong. `{name}` is to be filled in.
HEALTHY_PLUGIN = """
    import sidestream

    class Backend(sidestream.OffloadBackend):
        def _enable(self, pipeline): pass
        def _disable(self): pass
        def _report(self): return sidestream.OffloadReport(strategy="{name}", device=str(self.device))

    @sidestream.hookimpl
    def sidestream_strategies():
        create = lambda config, device: Backend(config=config, device=device)
        return [sidestream.Strategy(name="{name}", summary="does what {name} does", create=create)]
"""


class FakeSite:
    """A folder on `sys.path` into which distributions can be put, one `add` for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def add(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        contract: int = 1,
    ) -> Path:
        """Install a distribution anew and return its dist-info; its modules, if imported, are forgotten."""
        for name, source in (modules or {}).items():
            sys.modules.pop(name, None)
            self.modules.add(name)
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        text = f"[console_scripts]\nunrelated = os:getcwd\n\n[sidestream.backends.v{contract}]\n{lines}"
        (info / "entry_points.txt").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return info

    def add_healthy(self, distribution: str, strategy: str, module: str, version: str = "1.0") -> Path:
        """Install a distribution whose one strategy works."""
        source = HEALTHY_PLUGIN.format(name=strategy)
        return self.add(distribution, {strategy: module}, {module: source}, version=version)


class MakeSite(Protocol):
    """Make the folder `name` and put it in front of `sys.path`."""

    def __call__(self, name: str = ...) -> FakeSite: ...


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    """Make any number of folders on `sys.path`; the last one made is searched first."""
    sites = []
    # A module rewritten within one tick of the clock must not be taken from a stale .pyc.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(name: str = "site") -> FakeSite:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        sites.append(FakeSite(folder))
        return sites[-1]

    yield make
    for module in [module for site in sites for module in site.modules]:
        sys.modules.pop(module, None)


@pytest.fixture
def site(make_site: MakeSite) -> FakeSite:
    """One folder in front of `sys.path`."""
    return make_site()
