"""The kit itself: nobody takes a test out of it, and it says what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.testing.conformance import StrategyConformance, expected_to_fail, models, run_test, world_names
from sidestream.testing.conformance.base import assert_same, kit_tests, taken_out
from sidestream.testing.conformance.worlds import CPU_WORLDS, open_world, sim_worlds

TEST = "test_clause_05_one_component_is_called_inside_another"
GUARD = "test_no_test_of_the_kit_was_taken_out"


def suite(**members: Any) -> type[StrategyConformance]:
    """Return a suite with these members beside the strategy."""
    return type("Suite", (StrategyConformance,), {"strategy": "model_level", "__module__": __name__, **members})


def replacement(self: Any, one: Any) -> None:
    """Stand in for a test of the kit."""


def marked(mark: str, **how: Any) -> Any:
    """Return a stand-in with this mark."""

    def stand_in(self: Any, one: Any) -> None:
        return None

    return getattr(pytest.mark, mark)(**how)(stand_in)


def test_a_suite_that_adds_and_overrides_nothing_is_in_order() -> None:
    """Tests of its own are welcome."""
    mine = suite(test_of_my_own=replacement, options={"prefetch": False})
    assert taken_out(mine) == []
    mine().test_no_test_of_the_kit_was_taken_out()


@pytest.mark.parametrize(
    ("member", "text"),
    [
        (None, "sets it to None"),
        (replacement, "overrides it"),
        (marked("skip", reason="slow"), "overrides it"),
        (marked("xfail"), "marks it xfail without a reason"),
        (marked("xfail", reason="  "), "marks it xfail without a reason"),
        (marked("xfail", reason="#12", run=False), "does not even run it"),
    ],
    ids=["deleted", "overridden", "skipped", "no reason", "empty reason", "not run"],
)
def test_a_test_that_is_deleted_or_overridden_is_named(member: Any, text: str) -> None:
    """Also by a class between the kit and the suite."""
    for bad in (suite(**{TEST: member}), type("Deeper", (suite(**{TEST: member}),), {})):
        with pytest.raises(AssertionError, match=rf"{TEST}: Suite {text}"):
            bad().test_no_test_of_the_kit_was_taken_out()
        outcomes = list(run_test(bad, GUARD))
        assert [outcome.error is None for outcome in outcomes] == [False]


def test_an_override_that_is_marked_xfail_with_a_reason_is_allowed() -> None:
    """Written out, or in one line that keeps the test and its parameters."""
    written = marked("xfail", reason="one component at a time: #12")
    assert taken_out(suite(**{TEST: written})) == []
    edits = "test_clause_07_an_edit_between_calls_takes_effect_at_the_next_call_and_lasts"
    original = getattr(StrategyConformance, edits)
    copied = expected_to_fail(original, reason="no edits: #13")
    assert taken_out(suite(**{edits: copied})) == []
    assert [mark.name for mark in copied.pytestmark] == ["parametrize", "xfail"]
    assert [mark.name for mark in original.pytestmark] == ["parametrize"], "the kit's own test was marked"
    with pytest.raises(ValueError, match="say why"):
        expected_to_fail(original, reason=" ")


@pytest.mark.parametrize("name", [GUARD, "pytest_generate_tests", "worlds_of"])
def test_what_guards_the_kit_cannot_be_overridden(name: str) -> None:
    """It could not tell of itself."""
    with pytest.raises(TypeError, match=f"{name} belongs to the kit"):
        suite(**{name: replacement})


def test_every_test_is_named_for_a_clause_and_says_its_claim() -> None:
    """The kit's only other test is the one that guards it."""
    names = kit_tests(StrategyConformance)
    assert [name for name in names if not name.startswith("test_clause_")] == [GUARD]
    assert all(getattr(StrategyConformance, name).__doc__ for name in names)
    assert len(names) > 35


def test_the_worlds_are_the_cpus_and_all_orders_of_the_simulated_accelerator() -> None:
    """The latter as soon as it can be imported; a further configuration takes fewer of them."""
    simulated = pytest.importorskip("sidestream.testing.simulated")
    orders = {name.split("-")[1] for name in sim_worlds()}
    assert orders == set(simulated.ORDERS)
    assert world_names() == (*CPU_WORLDS, *sim_worlds()) == suite().worlds_of("place")
    assert suite(thorough=False).worlds_of("place") == (*CPU_WORLDS, sim_worlds()[0])
    assert suite(thorough=False).worlds_of("one") == ("cpu-eager", "cpu-separate")


def test_where_the_simulated_accelerator_is_missing_its_worlds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it is broken, that is not hidden."""
    monkeypatch.setitem(sys.modules, "sidestream.testing.simulated", None)
    assert world_names() == CPU_WORLDS


def test_a_difference_says_how_much_and_whether_poison_was_read() -> None:
    """The first thing to know: wrong weights, or memory at the wrong time."""
    expected = torch.arange(6.0).reshape(2, 3)
    assert_same(expected, expected.clone(), "request 0")
    wrong = expected.clone()
    wrong[0] += 1
    with pytest.raises(pytest.fail.Exception, match=r"request 0: 3 of 6 elements differ from the resident model's$"):
        assert_same(expected, wrong, "request 0")
    wrong[1, 2] = float("nan")
    with pytest.raises(pytest.fail.Exception, match=r"4 of 6 elements.*1 are NaN: memory was read before its copy"):
        assert_same(expected, wrong, "request 0")
    with pytest.raises(AssertionError, match="other dtype or shape"):
        assert_same(expected, expected.double(), "request 0")
    assert_same(torch.tensor([float("nan")]), torch.tensor([float("nan")]), "the same NaN")


@pytest.mark.parametrize("name", CPU_WORLDS)
def test_a_world_leaves_nothing_behind(name: str) -> None:
    """Neither the number of threads, nor gradients, nor its runtime, nor a backend that a test left at work."""
    from sidestream.streaming.runtime import open_runtime

    before = torch.get_num_threads(), torch.is_grad_enabled(), type(open_runtime(torch.device("cpu")))
    state = torch.get_rng_state()
    started: list[Any] = []

    def fail(place: Any) -> None:
        assert not torch.is_grad_enabled()
        torch.rand(3)
        started.append(suite()().start(place, models.small()))
        raise KeyError

    with pytest.raises(KeyError), open_world(name) as place:
        fail(place)
    assert not started[0].enabled
    assert before == (torch.get_num_threads(), torch.is_grad_enabled(), type(open_runtime(torch.device("cpu"))))
    assert torch.equal(state, torch.get_rng_state())


SUITE = """
import pytest
from sidestream.testing.conformance import StrategyConformance, expected_to_fail

MOVED = "test_clause_01_same_bits_as_the_resident_model_for_several_requests"


class TestWhole(StrategyConformance):
    strategy = "model_level"


class TestExcused(StrategyConformance):
    strategy = "none"


setattr(TestExcused, MOVED, expected_to_fail(getattr(StrategyConformance, MOVED), reason="it moves nothing"))


class TestCheat(StrategyConformance):
    strategy = "none"

    def test_clause_01_same_bits_as_the_resident_model_for_several_requests(self):
        pass
"""


def test_a_suite_runs_under_pytest_with_its_worlds_and_its_excuses(tmp_path: Path) -> None:
    """As an author runs it: passed, expected to fail, and caught."""
    (tmp_path / "test_strategies.py").write_text(SUITE)
    chosen = "taken_out or cpu-eager and same_bits_as_the_resident"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", chosen, "--tb=line"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    assert sum(line.startswith("PASSED") and "TestWhole" in line for line in lines) == 2, done.stdout
    assert sum(line.startswith("XFAIL") and "TestExcused" in line for line in lines) == 1, done.stdout
    failed = [line for line in lines if line.startswith("FAILED")]
    assert [("TestCheat" in line, GUARD in line) for line in failed] == [(True, True)], done.stdout
    assert "TestCheat overrides it; mark it xfail with a reason instead" in done.stdout
