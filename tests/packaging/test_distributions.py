"""What is installed is what is meant: distributions, entry points, typing, licence, and a checkout's two commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import importlib_metadata
import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"sidestream": ROOT / "core", "sidestream-model-cpu": ROOT / "plugins/model_cpu"}


def test_each_distribution_offers_its_strategy_and_only_that() -> None:
    """A strategy that is not there is not registered."""
    found = {
        entry.name: (entry.dist.name, entry.value)
        for entry in importlib_metadata.entry_points(group="sidestream.backends.v1")
    }
    assert found == {
        "none": ("sidestream", "sidestream.no_offload"),
        "model_level": ("sidestream-model-cpu", "sidestream_model_cpu.plugin"),
    }


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_each_distribution_is_typed_licensed_and_described(name: str) -> None:
    """All of one shape."""
    folder = DISTRIBUTIONS[name]
    package = next((folder / "src").iterdir())
    assert (package / "py.typed").exists()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    metadata = importlib_metadata.metadata(name)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description"].startswith(f"# {name}")


def test_the_core_requires_no_torch() -> None:
    """Listing and checking strategies needs none."""
    plain = [line for line in importlib_metadata.requires("sidestream") or [] if "extra" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in plain) == [
        "attrs",
        "cattrs",
        "importlib-metadata",
        "pluggy",
        "tomli",
    ]


def test_the_readmes_first_screen_shows_the_two_commands_and_the_makefile_has_them() -> None:
    """What a newcomer types."""
    screen = (ROOT / "README.md").read_text().splitlines()[:12]
    commands = [line.split("#")[0].strip() for line in screen if line.startswith("make ")]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{command.removeprefix('make ')}:" in makefile for command in commands)


def test_no_file_names_a_machine_or_an_index() -> None:
    """A checkout works anywhere."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    words = [re.compile(word) for word in ("pypi" + r"\.org", "files.python" + "hosted", "/" + "work/", "/" + "root/")]
    for name in files:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ""} and path.is_file():
            text = path.read_text()
            assert not [word.pattern for word in words if word.search(text)], name


@pytest.mark.slow
def test_pip_install_of_the_root_installs_core_and_plugins() -> None:
    """Needs the package index, for the build backend."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    report = subprocess.run([*command, "--report", "-", "."], cwd=ROOT, capture_output=True, text=True, check=True)
    root = json.loads(report.stdout)["install"][0]["metadata"]
    assert root["name"] == "sidestream-workspace"
    required = {line.split(" @ ")[0].strip(): line.split(" @ ")[1] for line in root["requires_dist"]}
    assert set(required) == set(DISTRIBUTIONS)
    for name, url in required.items():
        assert url.removeprefix("file://") == str(DISTRIBUTIONS[name])
