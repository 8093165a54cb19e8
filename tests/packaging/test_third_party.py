"""A stranger's strategy: installed by pip, selected by its string, passing the kit, with nothing changed here."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import importlib_metadata
import pytest

ROOT = Path(__file__).parents[2]
STRANGER = ROOT / "examples" / "third_party_backend"
#: The build backend is installed with what the tests need, so nothing is fetched.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")

SELECT = """
import torch
import sidestream
from sidestream.testing import toys

pipe, prompt = toys.pipeline(), toys.prompt()
with torch.no_grad(), sidestream.offload(pipe, "leaf_wise", device="cpu") as backend:
    assert torch.equal(toys.pipeline()(prompt), pipe(prompt))
    report = backend.report()
assert type(backend).__module__ == "acme_offload.backend"
print(report.fetches, report.peak_device_bytes, report.host_bytes)
"""


def run(
    *command: str | Path, python: str | Path = sys.executable, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> str:
    """Run Python with these arguments and return what it prints; if it fails, so does the test, with all of it."""
    done = subprocess.run(
        [python, *command], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def copied(folder: Path) -> Path:
    """Return a copy of the package, so that building it leaves no trace in the checkout."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "dist", "build")
    return shutil.copytree(STRANGER, folder / "acme-offload", ignore=ignore)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip installed the package."""
    folder = tmp_path_factory.mktemp("stranger")
    run(*PIP, "--no-build-isolation", "--target", folder / "site", copied(folder))
    return folder / "site"


@pytest.fixture
def env(target: Path) -> dict[str, str]:
    """Return an environment in which the package is found."""
    return {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}


def test_it_is_a_whole_distribution(target: Path) -> None:
    """Typed, with its metadata and the one entry point."""
    assert (target / "acme_offload" / "py.typed").exists()
    [found] = importlib_metadata.distributions(name="acme-offload", path=[str(target)])
    assert [(entry.group, entry.name, entry.value) for entry in found.entry_points] == [
        ("sidestream.backends.v1", "leaf_wise", "acme_offload.plugin")
    ]
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert not list(importlib_metadata.entry_points(name="leaf_wise")), "it is not part of the checkout"


def test_the_command_lists_shows_and_checks_it(env: dict[str, str]) -> None:
    """As if it had always been there."""
    [listed] = [
        info
        for info in json.loads(run("-m", "sidestream", "strategies", "--json", env=env))
        if info["name"] == "leaf_wise"
    ]
    assert (listed["distribution"], listed["version"], listed["problem"]) == ("acme-offload", "0.1.0", None)
    shown = run("-m", "sidestream", "show", "leaf_wise", env=env)
    assert "acme-offload" in shown
    assert "whole" in shown
    run("-m", "sidestream", "check", '{"strategy": "leaf_wise", "options": {"whole": ["Block"]}}', env=env)


def test_it_is_selected_by_its_string(env: dict[str, str]) -> None:
    """And streams: far less than the model is on the device at once."""
    fetches, peak, whole = map(int, run("-c", SELECT, env=env).split())
    assert fetches > 50
    assert peak < whole / 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "selection",
    [("test_leaf_wise.py",), ("test_conformance.py", "-k", "cpu-separate or sim-copy_first")],
    ids=["its own", "the kit"],
)
def test_its_own_tests_pass(env: dict[str, str], selection: tuple[str, ...]) -> None:
    """Of the kit the worlds that show most; all of it below."""
    file, *options = selection
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"tests/{file}", env=env, cwd=STRANGER)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pytest_on_it_alone_passes_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """With the core and itself installed there; torch and pytest are lent, since they take minutes to install."""
    venv.create(tmp_path / "env", with_pip=False)
    python = next(path for path in tmp_path.glob("env/*/python*") if path.stem == "python")
    own = Path(run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python).strip())
    (own / "lent.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    for source in (ROOT / "core", copied(tmp_path)):
        run(*PIP, "--no-build-isolation", "--ignore-installed", source, python=python)
    where = run(
        "-c", "import sidestream, acme_offload; print(sidestream.__file__, acme_offload.__file__)", python=python
    )
    assert where.count(str(own)) == 2, "the checkout was used in the place of what was installed"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", python=python, cwd=tmp_path / "acme-offload")
