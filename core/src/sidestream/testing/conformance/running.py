"""Run tests of a suite without a test runner: how the kit proves that each of its tests can fail."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from sidestream.testing.conformance.base import Conformance
from sidestream.testing.conformance.worlds import FIXTURES, open_world


@attrs.frozen
class Outcome:
    """One case of one test: `case` names its world and parameters, `error` is what it raised or None."""

    case: str
    error: BaseException | None


def run_test(suite: type[Conformance], name: str) -> Iterator[Outcome]:
    """Run the test `name` of a suite in each of its worlds with each of its parameters, lazily, one by one.

    What the test skips is left out. Its xfail marks are not looked at.
    """
    test = getattr(suite, name)
    names = list(inspect.signature(test).parameters)[1:]
    axes: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            axes.append([_bound(mark.args[0], values) for values in mark.args[1]])
    fixture = next((fixture for fixture in FIXTURES if fixture in names), None)
    for world in suite.worlds_of(fixture) if fixture else (None,):
        for choice in itertools.product(*axes):
            arguments = {key: value for part in choice for key, value in part.items()}
            case = ", ".join(
                [*([world] if world else []), *(getattr(value, "__name__", str(value)) for value in arguments.values())]
            )
            try:
                if fixture is None or world is None:
                    getattr(suite(), name)(**arguments)
                else:
                    with open_world(world) as place:
                        getattr(suite(), name)(**{fixture: place}, **arguments)
            except pytest.skip.Exception:
                continue
            # Whatever a bad strategy raises is its failure, pytest's own outcomes and an interrupt included.
            except BaseException as error:
                yield Outcome(case, error)
            else:
                yield Outcome(case, None)


def _bound(names: Any, values: Any) -> dict[str, Any]:
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = getattr(values, "values", values)  # a pytest.param
    return dict(zip(listed, values if len(listed) > 1 else [values], strict=True))
