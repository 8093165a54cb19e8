"""The shipped pytest plugin: tests that leave offloading behind fail, and the next one starts clean."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import TypeAlias

import pytest

import sidestream
from sidestream.testing import toys

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.sidestream_leaks_allowed("the sessions inside this one are told; it sees the same backends")

Run: TypeAlias = Callable[..., pytest.RunResult]

#: A strategy that takes what it is told to and forgets what it is told to.
FORGETFUL = """
    import pytest, torch
    import sidestream
    from sidestream import OffloadConfig, OffloadReport
    from sidestream.testing import toys
    from sidestream_model_cpu.backend import ModelLevelBackend

    class Forgetful(ModelLevelBackend):
        keeps_gates = keeps_bytes = fails = False

        def _shutdown(self):
            self._disable()

        def _disable(self):
            if self.fails:
                raise OSError("the cable is out")
            units = list(self._units.values())
            super()._disable()
            if self.keeps_gates:
                for unit in units:
                    unit.gate.attach()
            if self.keeps_bytes:
                import attrs
                self._last = attrs.evolve(self._last, pinned_bytes=4096)

    def enable(pipe):
        backend = Forgetful(config=OffloadConfig("model_level"), device="cpu")
        backend.enable(pipe)
        return backend

    PIPE = toys.pipeline()
"""


@pytest.fixture(scope="module", autouse=True)
def _all_is_loaded() -> None:
    """Load before the first session inside this one: it forgets what it imports, and torch cannot be imported twice."""
    sidestream.enable_offload(toys.pipeline(), "model_level", device="cpu").disable()


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Return `run(source)`: the result of a session over a test file that begins with `FORGETFUL`."""

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(textwrap.dedent(FORGETFUL) + textwrap.dedent(source))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)

    return run


def test_a_test_that_leaves_a_backend_enabled_fails_and_the_next_one_is_clean(run: Run) -> None:
    """The message names the backend, the pipeline and what is left; the backend is ended."""
    result = run("""
        KEPT = []

        def test_leaks():
            KEPT.append(enable(PIPE))

        def test_next():
            assert not KEPT[0].enabled
            assert "forward" not in vars(PIPE.transformer)
            with sidestream.offload(PIPE, "model_level", device="cpu"):
                PIPE(toys.prompt())
    """)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks*",
            "the test left offloading behind:",
            "- Forgetful (strategy 'model_level' on cpu) is still enabled for a Pipeline: left are *",
            "*@pytest.mark.sidestream_leaks_allowed(reason)*",
        ]
    )
    assert "an entrance of forward" in result.stdout.str()
    assert "more modules" in result.stdout.str()


def test_a_backend_that_nobody_holds_any_more_is_a_leak_whenever_the_collector_comes(run: Run) -> None:
    """A local variable is the usual way to leak."""
    result = run("""
        import gc

        def test_leaks():
            enable(toys.pipeline())

        def test_leaks_and_is_collected():
            enable(toys.pipeline())
            gc.collect()
    """)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*was dropped while it offloaded a Pipeline*"])


def test_clean_tests_pass(run: Run) -> None:
    """In a block, by hand, in a fixture, in one of a wider scope, twice, after a failure to enable."""
    result = run("""
        @pytest.fixture
        def offloaded():
            backend = enable(PIPE)
            yield PIPE
            backend.disable()

        @pytest.fixture(scope="module")
        def long():
            pipe = toys.pipeline()
            with sidestream.offload(pipe, "model_level", device="cpu") as backend:
                yield backend

        def test_block():
            with sidestream.offload(PIPE, "model_level", device="cpu"):
                PIPE(toys.prompt())

        def test_twice():
            backend = enable(PIPE)
            backend.disable()
            backend.enable(PIPE)
            backend.shutdown()

        def test_refused():
            settings = {"strategy": "model_level", "components": ["image_encoder"]}
            with pytest.raises(sidestream.OffloadError):
                sidestream.enable_offload(PIPE, settings, device="cpu")

        def test_fixture(offloaded):
            offloaded(toys.prompt())

        def test_long(long):
            assert long.enabled

        def test_long_again(long):
            assert long.enabled

        def test_none():
            pass
    """)
    result.assert_outcomes(passed=7)


def test_a_fixture_of_a_wider_scope_has_to_end_what_it_began(run: Run) -> None:
    """The last test that it serves is told."""
    result = run("""
        @pytest.fixture(scope="module")
        def long():
            return enable(PIPE)

        def test_one(long):
            assert long.enabled

        def test_two(long):
            assert long.enabled
    """)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_two*", "*is still enabled for a Pipeline*"])


def test_gates_and_bytes_that_a_disabled_backend_left_are_told(run: Run) -> None:
    """`disable` that forgets something is the strategy's bug, and its tests should show it."""
    result = run("""
        def test_gates():
            backend = enable(PIPE)
            backend.keeps_gates = True
            backend.disable()

        def test_bytes():
            backend = enable(toys.pipeline())
            backend.keeps_bytes = True
            backend.disable()
            test_bytes.kept = backend
    """)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*Forgetful*was disabled, but something of it is left on a Pipeline: left are an entrance of forward*",
            "*Forgetful*was disabled, but something of it is left on a Pipeline: left are 4096 pinned bytes",
        ]
    )


def test_a_backend_that_cannot_be_ended_is_told(run: Run) -> None:
    """And a disable that did not finish is a leak, too."""
    result = run("""
        def test_stuck():
            backend = enable(PIPE)
            backend.fails = True
            with pytest.raises(OSError):
                backend.disable()
            test_stuck.kept = backend
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*did not finish giving back a Pipeline*", "*could not be ended: OSError*"])


def test_a_failed_test_is_not_told_twice(run: Run) -> None:
    """It had no chance to end what it began; it is ended all the same."""
    result = run("""
        KEPT = []

        def test_fails():
            KEPT.append(enable(PIPE))
            assert False

        def test_next():
            assert not KEPT[0].enabled
    """)
    result.assert_outcomes(failed=1, passed=1)


def test_a_test_may_say_why_it_leaves_something(run: Run) -> None:
    """With a reason only."""
    result = run(
        """
        @pytest.mark.sidestream_leaks_allowed("the process ends next")
        def test_meant():
            test_meant.kept = enable(PIPE)

        @pytest.mark.sidestream_leaks_allowed()
        def test_silent():
            pass
    """,
        "--strict-markers",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*sidestream_leaks_allowed needs a reason*"])


def test_a_backend_made_before_anybody_watched_is_found(pytester: pytest.Pytester) -> None:
    """A test may be the first to import the library."""
    pytester.makepyfile("""
        def test_first():
            import sidestream
            from sidestream.testing import toys

            test_first.kept = sidestream.enable_offload(toys.pipeline(), "model_level", device="cpu")
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ModelLevelBackend*is still enabled for a Pipeline*"])


def test_a_session_without_sidestream_loads_neither_it_nor_torch(pytester: pytest.Pytester) -> None:
    """It is at work in every session of an environment, so it must cost nothing."""
    pytester.makepyfile("""
        import sys

        def test_light():
            heavy = ("torch", "attrs", "cattrs", "sidestream")
            loaded = [name for name in sys.modules if name.partition(".")[0] in heavy]
            assert sorted(loaded) == ["sidestream", "sidestream.testing", "sidestream.testing.pytest_plugin"]
    """)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    result = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_library_is_as_it_was_after_the_session(run: Run) -> None:
    """What the plugin put in its place is taken away again."""
    from sidestream import OffloadBackend

    before = (OffloadBackend._tell, OffloadBackend._forget)
    run("def test_uses_it():\n    enable(PIPE).disable()\n").assert_outcomes(passed=1)
    assert before == (OffloadBackend._tell, OffloadBackend._forget)
