"""What the package promises by its names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import sidestream
from sidestream import hookspecs

HOOKS = ("sidestream_strategies", "sidestream_enabled", "sidestream_disabled")


def test_the_public_names_are_sorted_and_there_are_no_others() -> None:
    """Constants, then classes, then functions; `dir` shows these and no helpers."""
    names = sidestream.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(names) == len(set(names))
    assert dir(sidestream) == sorted(names)


def test_every_public_name_can_be_had_and_lives_in_the_package() -> None:
    """By attribute, by `from` and by `*`."""
    starred: dict[str, object] = {}
    exec("from sidestream import *", starred)
    for name in sidestream.__all__:
        value = getattr(sidestream, name)
        assert starred[name] is value
        module = getattr(value, "__module__", "sidestream")
        assert module.partition(".")[0] in ("sidestream", "pluggy")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'enable_ofload'"):
        _ = sidestream.enable_ofload  # type: ignore[attr-defined]


def test_the_type_checker_sees_the_same_names() -> None:
    """Those imported under TYPE_CHECKING are those that load on first use, each from the same module."""
    tree = ast.parse(Path(str(sidestream.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == {name: f"sidestream.{module}" for name, module in sidestream._HOMES.items()}
    assert sorted(declared) == dir(sidestream)


def test_everything_public_has_a_docstring() -> None:
    """Of its own: an inherited one describes something else."""
    missing = []
    for name in sidestream.__all__:
        value = getattr(sidestream, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            missing += [name] if not value.__doc__ else []
        if inspect.isclass(value):
            missing += [
                f"{name}.{attribute}"
                for attribute, member in vars(value).items()
                if not attribute.startswith("_") and inspect.isfunction(member) and not member.__doc__
            ]
    assert missing == []


def test_the_errors_form_one_tree_near_the_builtins() -> None:
    """`except OffloadError` catches them all, `except ValueError` and `LookupError` what they should."""
    errors = [getattr(sidestream, name) for name in sidestream.__all__ if name.endswith("Error")]
    assert all(issubclass(error, sidestream.OffloadError) for error in errors)
    assert issubclass(sidestream.ConfigError, ValueError)
    assert issubclass(sidestream.UnknownStrategyError, LookupError)
    assert issubclass(sidestream.IncompatiblePluginError, sidestream.PluginError)
    assert issubclass(sidestream.OffloadWarning, UserWarning)


def test_every_hook_is_specified_and_says_when_it_is_called() -> None:
    """A plugin's author has nothing else to go by."""
    specified = [name for name, value in vars(hookspecs).items() if hasattr(value, "sidestream_spec")]
    assert tuple(specified) == HOOKS
    for name in specified:
        doc = inspect.getdoc(getattr(hookspecs, name))
        assert doc
        assert "called" in doc.lower()
    assert f"sidestream.backends.v{hookspecs.HOOKSPEC_VERSION}" == hookspecs.ENTRY_POINT_GROUP
    assert hookspecs.ENTRY_POINT_GROUP in str(hookspecs.__doc__)
