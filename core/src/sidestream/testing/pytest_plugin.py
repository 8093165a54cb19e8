"""A pytest plugin: a test that leaves a backend enabled, page-locked memory behind or a gate on a module fails.

It comes with sidestream and is at work in every session; `-p no:sidestream` turns it off. What a test left is told as
an error of its teardown, with the backend, the pipeline and what is left, and then ended, so that the next test is
clean. A test that means to leave something says why::

    @pytest.mark.sidestream_leaks_allowed("the process ends next")

A backend that a fixture of a wider scope enabled may stay until that fixture ends. The plugin loads nothing: neither
torch nor a part of sidestream that no test has loaded.

Note: knowing without a register
--------------------------------
The library keeps no list of backends, and should not. For the session this plugin stands behind the two methods of
`OffloadBackend` that every backend goes through when it was enabled and when it has given everything back, and
remembers them weakly. One that a test enabled before `sidestream.backend` was seen to be loaded is searched for, once.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sidestream.backend import OffloadBackend

MARKER = "sidestream_leaks_allowed"
#: Seconds to wait for a backend that another thread computes with, before it is left as it is.
PATIENCE = 10.0

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def pytest_configure(config: pytest.Config) -> None:
    """Explain the marker and begin to watch."""
    config.addinivalue_line(
        "markers", f"{MARKER}(reason): the test may leave a sidestream backend enabled; it is ended all the same"
    )
    config.pluginmanager.register(Watch(), "sidestream-watch")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the library as it was."""
    watch = config.pluginmanager.unregister(name="sidestream-watch")
    if isinstance(watch, Watch):
        watch.patch.undo()


class Life:
    """One backend's time with one pipeline, remembered weakly. `fixture` is the one of a wider scope that began it."""

    def __init__(self, backend: OffloadBackend, pipeline: Any, fixture: object | None) -> None:
        self.backend = weakref.ref(backend)
        self.text = f"{type(backend).__name__} (strategy {backend.config.strategy!r} on {backend.device})"
        self.pipeline = type(pipeline).__name__
        self.package = type(backend).__module__.partition(".")[0]
        self.modules = [(name, weakref.ref(module)) for name, module in _roots(pipeline)]
        self.fixture = fixture
        self.ended = False

    def problem(self, test_package: str) -> str | None:
        """Return what is left of it, or None."""
        backend = self.backend()
        if backend is None:
            if self.ended:
                return None
            return f"{self.text} was dropped while it offloaded a {self.pipeline}: nobody can disable it any more"
        if self.ended and backend.enabled:
            return None  # again, which is another life
        left = _bytes_of(backend) + self._left_on_modules(backend, {"sidestream", self.package} - {test_package})
        told = f": left are {', '.join(left)}" if left else ""
        if not self.ended:
            state = "is still enabled for" if backend.enabled else "did not finish giving back"
            return f"{self.text} {state} a {self.pipeline}{told}"
        return f"{self.text} was disabled, but something of it is left on a {self.pipeline}{told}" if left else None

    def _left_on_modules(self, backend: OffloadBackend, packages: set[str]) -> list[str]:
        found = []
        for root_name, root in self.modules:
            for name, module in _named_modules(root(), root_name):
                marks = [what for what, owner in _marks(module, packages) if owner is None or owner is backend]
                if marks:
                    found.append(f"{' and '.join(dict.fromkeys(marks))} on {name or type(module).__name__}")
        more = [f"the like on {len(found) - 3} more modules"] if len(found) > 3 else []
        return found[:3] + more

    def end(self) -> str | None:
        """Give the pipeline back, or at least free what was taken; return why that was impossible, if it was."""
        backend = self.backend()
        if backend is None or self.ended:
            return None
        if not backend._lock.acquire(timeout=PATIENCE):
            return f"{self.text} could not be ended: another thread computes with it"
        failure: BaseException | None = None
        try:
            for way in (backend.disable, backend.disable, backend.shutdown):  # a second try may succeed
                try:
                    way()
                except Exception as error:
                    failure = error
                else:
                    return None
        finally:
            backend._lock.release()
        return f"{self.text} could not be ended: {failure!r}"


class Watch:
    """Sees backends come and go, and looks after each test for those that stayed."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self._seen = False
        self._lives: list[Life] = []
        self._wide_fixtures: list[object] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to watch if there is something to watch by now; tell at once that a marker lacks its reason."""
        self._look(search=False)
        _allowed(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Note which fixture of a wider scope is at work: what it enables lives as long as it."""
        if fixturedef.scope == "function":
            return (yield)
        self._wide_fixtures.append(fixturedef)
        try:
            return (yield)
        finally:
            self._wide_fixtures.pop()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """What a fixture enabled has to be gone after the test with which it ends."""
        for life in self._lives:
            if life.fixture is fixturedef:
                life.fixture = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Remember whether a test failed: that it left things behind is then no news."""
        report = yield
        if report.failed:
            item.stash[_failed] = True
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """After the fixtures were torn down: tell what is left, and end it."""
        try:
            result = yield
        except BaseException:
            self._end_of_test(_package_of(item))
            raise
        problems = self._end_of_test(_package_of(item))
        if problems and not item.stash.get(_failed, False) and not _allowed(item):
            pytest.fail(_explain(problems), pytrace=False)
        return result

    def _end_of_test(self, test_package: str) -> list[str]:
        self._look(search=True)
        due = [life for life in self._lives if life.fixture is None]
        if not due:
            return []
        self._lives = [life for life in self._lives if life.fixture is not None]
        problems = [problem for life in due if (problem := life.problem(test_package)) is not None]
        return problems + [problem for life in due if (problem := life.end()) is not None]

    def _look(self, *, search: bool) -> None:
        """Stand behind the backends' methods once they are loaded; search for those that were quicker."""
        module = sys.modules.get("sidestream.backend")
        if self._seen or module is None or not hasattr(module, "OffloadBackend"):
            return
        self._seen = True
        base = module.OffloadBackend
        for backend in [one for one in (gc.get_objects() if search else ()) if issubclass(type(one), base)]:
            if getattr(backend, "_pipeline", None) is not None:
                self._began(backend, backend._pipeline)
        tell, forget = base._tell, base._forget

        @functools.wraps(tell)
        def telling(backend: OffloadBackend, observers: list[Any], pipeline: Any) -> None:
            if backend.enabled:
                self._began(backend, pipeline)
            tell(backend, observers, pipeline)

        @functools.wraps(forget)
        def forgetting(backend: OffloadBackend) -> None:
            forget(backend)
            for life in self._lives:
                life.ended = life.ended or life.backend() is backend

        self.patch.setattr(base, "_tell", telling)
        self.patch.setattr(base, "_forget", forgetting)

    def _began(self, backend: OffloadBackend, pipeline: Any) -> None:
        self._lives.append(Life(backend, pipeline, self._wide_fixtures[-1] if self._wide_fixtures else None))


_failed = pytest.StashKey[bool]()


def _allowed(item: pytest.Item) -> bool:
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return False
    reason = marker.kwargs.get("reason", marker.args[0] if marker.args else None)
    if not isinstance(reason, str) or not reason.strip():
        pytest.fail(f"@pytest.mark.{MARKER} needs a reason, for instance ('the process ends next')", pytrace=False)
    return True


def _explain(problems: Iterable[str]) -> str:
    lines = "\n".join(f"- {problem}" for problem in problems)
    return (
        f"the test left offloading behind:\n{lines}\n"
        "Write `with sidestream.offload(...)`, or call disable() whatever happens, best in a fixture. "
        f"If it is meant: @pytest.mark.{MARKER}(reason)"
    )


def _bytes_of(backend: OffloadBackend) -> list[str]:
    try:
        report = backend.report()
    except Exception as error:
        return [f"a report that fails ({error!r})"]
    sizes = {"device": report.device_bytes, "pinned": report.pinned_bytes}
    return [f"{size} {what} bytes" for what, size in sizes.items() if size]


def _package_of(item: pytest.Item) -> str:
    module = getattr(item, "module", None)
    return str(getattr(module, "__name__", "")).partition(".")[0]


def _roots(pipeline: Any) -> list[tuple[str, Any]]:
    """Return the modules of a pipeline that its components and itself are, with their names; loads nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    try:
        values = pipeline if isinstance(pipeline, dict) else getattr(pipeline, "components", None)
    except Exception:  # a property of somebody's pipeline
        values = None
    if not isinstance(values, dict):
        values = {} if isinstance(pipeline, torch.nn.Module) else dict(getattr(pipeline, "__dict__", {}))
    named = [(str(name), value) for name, value in [("", pipeline), *values.items()]]
    return [(name, value) for name, value in named if isinstance(value, torch.nn.Module)]


def _named_modules(root: Any, name: str) -> Iterable[tuple[str, Any]]:
    return () if root is None else root.named_modules(prefix=name)


def _marks(module: Any, packages: set[str]) -> Iterator[tuple[str, object | None]]:
    """Yield what a strategy left on a module, and whose it is if that is known."""
    for name, value in vars(module).items():
        gate = getattr(value, "gate", None)
        if callable(value) and type(value).__module__.partition(".")[0] == "sidestream" and gate is not None:
            yield f"an entrance of {name}", gate.owner
    for registry in _HOOKS:
        for hook in getattr(module, registry, {}).values():
            call: Callable[..., Any] = hook
            while isinstance(call, functools.partial):
                call = call.func
            origin = getattr(call, "__module__", None) or type(call).__module__
            # A copy of a module has hooks that do nothing in the place of a gate's.
            # The kit's models hook themselves, as users do.
            ours = str(origin).partition(".")[0] in packages and not str(origin).startswith("sidestream.testing.")
            if ours and type(call).__name__ != "_Inert":
                yield f"a hook in {registry}", getattr(getattr(call, "gate", None), "owner", None)
