"""What is loaded when: importing, listing, showing and checking need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import sidestream


def loaded_after(code: str) -> set[str]:
    """Run `code` in a fresh interpreter and return the top-level modules that it has then."""
    program = textwrap.dedent(code) + "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in json.loads(result.stderr.splitlines()[-1])}


def test_importing_the_package_loads_next_to_nothing() -> None:
    """No torch, and no dependency either before a name is used; so it is fast."""
    loaded = loaded_after("import sidestream")
    assert "sidestream" in loaded
    assert not loaded & {"torch", "attr", "attrs", "cattrs", "pluggy", "importlib_metadata"}


def test_no_public_name_loads_torch() -> None:
    """Nor does any room of the contract."""
    loaded = loaded_after("""
        import sidestream, sidestream.cli, sidestream.no_offload, sidestream.omni
        for name in sidestream.__all__:
            getattr(sidestream, name)
    """)
    assert "pluggy" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("strategy", ["none", "model_level"])
def test_listing_showing_and_checking_load_no_torch(strategy: str) -> None:
    """With every plugin of the project that is installed."""
    if strategy not in {info.name for info in sidestream.strategies()}:
        pytest.skip(f"{strategy} is not installed")
    loaded = loaded_after(f"""
        from sidestream.cli import main
        for arguments in (["strategies"], ["show", "{strategy}"], ["check", "{strategy}"]):
            assert main(arguments) == 0
            assert main([*arguments, "--json"]) == 0
    """)
    assert "torch" not in loaded


def test_none_works_where_torch_is_not_installed() -> None:
    """The whole way through the core needs none of it."""
    loaded_after("""
        import sys
        sys.modules["torch"] = None  # importing it fails from here on
        import sidestream
        with sidestream.offload({}, "none") as backend:
            assert backend.report().moved_bytes == 0
    """)
