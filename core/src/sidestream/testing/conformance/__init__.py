"""The conformance kit: what every strategy promises, as tests that its author inherits.

    from sidestream.testing.conformance import StrategyConformance

    class TestMine(StrategyConformance):
        strategy = "mine"
        options = {"slots": 2}

Each test is named for the clause that it proves. Those that compare outputs also prove that something was moved, since
a strategy that does nothing is right, too. docs/testing-a-strategy.md shows what each failure looks like.
"""

from __future__ import annotations

import pytest

# The asserts of an imported suite would say nothing but "AssertionError" otherwise.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("base", "computing", "holding", "resources", "worlds"))
)

from sidestream.testing.conformance.base import expected_to_fail  # noqa: E402
from sidestream.testing.conformance.computing import ComputingClauses  # noqa: E402
from sidestream.testing.conformance.holding import HoldingClauses  # noqa: E402
from sidestream.testing.conformance.resources import ResourceClauses  # noqa: E402
from sidestream.testing.conformance.running import Outcome, run_test  # noqa: E402
from sidestream.testing.conformance.worlds import Place, world_names  # noqa: E402


class StrategyConformance(ComputingClauses, HoldingClauses, ResourceClauses):
    """All clauses. Inherit it, give `strategy` and perhaps `options`; see :class:`~.base.Conformance` for the rest."""


__all__ = ["Outcome", "Place", "StrategyConformance", "expected_to_fail", "run_test", "world_names"]
