"""What an author says about a strategy, how the kit starts and judges it, and that no test may be taken out."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs
import pytest
import torch
from torch import nn

from sidestream.api import resolve_config
from sidestream.backend import OffloadBackend
from sidestream.config import OffloadConfig
from sidestream.discovery import discover
from sidestream.streaming.pool import align
from sidestream.testing.conformance import models
from sidestream.testing.conformance.worlds import FIXTURES, Place, open_world, sim_worlds

_KIT = __name__.rpartition(".")[0]

F = TypeVar("F", bound=Callable[..., Any])


class Conformance:
    """What the author of a strategy gives, and the helpers of the tests.

    Only `strategy` has to be given. `options` and `settings` are the strategy's own options and other fields of
    `OffloadConfig` (`components`, `pin_cpu_memory`); the methods may be overridden where their docstrings do not fit.
    """

    #: The string that selects the strategy.
    strategy: ClassVar[str]
    #: Its own options, the same for every model; see also :meth:`options_for`.
    options: ClassVar[Mapping[str, Any]] = {}
    #: Other fields of `OffloadConfig`, for instance `{"components": {"dit", "text_encoder"}}`.
    settings: ClassVar[Mapping[str, Any]] = {}

    #: False takes one order of the simulated accelerator, and only where it matters most: for a further configuration
    #: of a strategy that another suite tries under all of them.
    thorough: ClassVar[bool] = True

    def options_for(self, pipe: nn.Module) -> Mapping[str, Any]:
        """Return the options for this model: for those that depend on its size, such as a budget."""
        return self.options

    def device_limit(self, pipe: nn.Module) -> int:
        """Return how many bytes of weights may be on the device at once.

        By default all of them, each tensor once and at a multiple of 256 bytes. A strategy that promises less
        computes that here: it is what the clause on memory is about.
        """
        return all_bytes(pipe)

    def host_limit(self, pipe: nn.Module) -> int:
        """Return by how many bytes host memory may grow while enabling and disabling.

        By default the largest tensor, rounded up to a power of two as page-locked memory is, and 24 MiB for Python.
        """
        largest = max((tensor.nbytes for tensor in (*pipe.parameters(), *pipe.buffers())), default=1)
        return (1 << (largest - 1).bit_length()) + (24 << 20)

    def make_backend(self, config: OffloadConfig, device: torch.device) -> OffloadBackend:
        """Return a backend that is not enabled: that of the installed strategy which `config` names.

        Override it for a strategy that is not installed, or to put a test device in by other means.
        """
        resolved, loaded = resolve_config(config)
        backend: OffloadBackend = loaded.strategy.create(resolved, device)
        return backend

    # --- For the tests ------------------------------------------------------------------------------------------------

    def config_for(self, pipe: nn.Module, **changes: Any) -> OffloadConfig:
        """Return the configuration for a model; `changes` go over `settings`.

        Of the component kinds in `settings` a small model has not all; those that it lacks are left out.
        """
        settings = {**self.settings, **changes}
        components = settings.get("components")
        if components is not None:
            found = {component.kind.value for component in discover(pipe)}
            selected = frozenset(components)
            settings["components"] = selected if "components" in changes else selected & found
        return OffloadConfig(self.strategy, options=dict(self.options_for(pipe)), **settings)

    def start(self, place: Place, pipe: nn.Module, **changes: Any) -> OffloadBackend:
        """Offload a model at this place."""
        backend = self.make_backend(self.config_for(pipe, **changes), place.device)
        place.backends.append(backend)
        backend.enable(pipe)
        return backend

    def assert_moved(self, place: Place, backend: OffloadBackend) -> None:
        """Prove that there was something to get wrong: by the report, and by what the device itself saw."""
        report = backend.report()
        assert report.moved_bytes > 0 and report.fetches > 0, (  # noqa: PT018
            f"nothing was moved, so equal outputs prove nothing: moved_bytes={report.moved_bytes}, "
            f"fetches={report.fetches}"
        )
        if place.watches:
            assert place.copied_bytes >= report.moved_bytes, (
                f"the report claims {report.moved_bytes} bytes moved, the device saw {place.copied_bytes}"
            )

    def end(self, place: Place, backend: OffloadBackend) -> None:
        """Disable, and prove that the device memory that was used was freed."""
        used = place.watches and place.copied_bytes > 0
        backend.disable()
        place.settle()
        if used:
            assert place.poisoned > 0, "no device buffer was ever freed, so none was poisoned"

    # --- Nobody takes a test out --------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_KIT):
            return
        for name in ("test_no_test_of_the_kit_was_taken_out", "pytest_generate_tests", "worlds_of"):
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} belongs to the kit and cannot be overridden")

    def test_no_test_of_the_kit_was_taken_out(self) -> None:
        """A test that does not hold is marked xfail, with the reason; it is neither deleted nor replaced."""
        taken = [f"{name}: {problem}" for name, problem in taken_out(type(self))]
        assert not taken, "tests of the kit were taken out:\n" + "\n".join(taken)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test in the worlds that its fixture stands for."""
        for fixture in FIXTURES.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(fixture, self.worlds_of(fixture), indirect=True)

    @classmethod
    def worlds_of(cls, fixture: str) -> tuple[str, ...]:
        """Return the names of the worlds that a fixture stands for."""
        names, orders = FIXTURES[fixture](), sim_worlds()
        if cls.thorough:
            return names
        left_out = orders[1:] if fixture in ("place", "sim") else orders
        return tuple(name for name in names if name not in left_out)

    @pytest.fixture
    def place(self, request: pytest.FixtureRequest) -> Any:
        """Each world in turn."""
        with open_world(request.param) as place:
            yield place

    @pytest.fixture
    def cpu(self, request: pytest.FixtureRequest) -> Any:
        """Each world of the CPU in turn."""
        with open_world(request.param) as place:
            yield place

    @pytest.fixture
    def one(self, request: pytest.FixtureRequest) -> Any:
        """One world of each kind of memory in turn."""
        with open_world(request.param) as place:
            yield place

    @pytest.fixture
    def host(self, request: pytest.FixtureRequest) -> Any:
        """One world of the CPU with memory that is the host's, and one with memory of its own."""
        with open_world(request.param) as place:
            yield place

    @pytest.fixture
    def sim(self, request: pytest.FixtureRequest) -> Any:
        """One world of the simulated accelerator, if it is there."""
        with open_world(request.param) as place:
            yield place

    @pytest.fixture
    def once(self, request: pytest.FixtureRequest) -> Any:
        """The simplest world."""
        with open_world(request.param) as place:
            yield place


def kit_tests(suite: type[Conformance]) -> list[str]:
    """Return the names of the kit's own tests in a suite, sorted."""
    return sorted(
        {name for cls in suite.__mro__ if _is_kit(cls) for name in vars(cls) if name.startswith("test_")},
    )


def taken_out(suite: type[Conformance]) -> list[tuple[str, str]]:
    """Return the kit's tests that a suite deletes, or overrides without an xfail that has a reason; and why."""
    found = []
    for name in kit_tests(suite):
        owner = next(cls for cls in suite.__mro__ if name in vars(cls))
        if _is_kit(owner):
            continue
        test = vars(owner)[name]
        if not callable(test):
            found.append((name, f"{owner.__name__} sets it to {test!r}; mark it xfail with a reason instead"))
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
        if not marks:
            found.append((name, f"{owner.__name__} overrides it; mark it xfail with a reason instead"))
        elif not any(str(mark.kwargs.get("reason") or "").strip() for mark in marks):
            found.append((name, f"{owner.__name__} marks it xfail without a reason"))
        elif any(mark.kwargs.get("run") is False for mark in marks):
            found.append((name, f"{owner.__name__} does not even run it"))
    return found


def _is_kit(cls: type) -> bool:
    return cls.__module__ == _KIT or cls.__module__.startswith(f"{_KIT}.")


def expected_to_fail(test: F, *, reason: str) -> F:
    """Return a test of the kit that is expected to fail, with its parameters; for the body of a suite.

    test_clause_11_... = expected_to_fail(StrategyConformance.test_clause_11_..., reason="one thread only: #12")
    """
    if not reason.strip():
        raise ValueError("say why the test is expected to fail")
    function: Any = test
    copy: Any = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    copy.pytestmark = [*getattr(function, "pytestmark", []), pytest.mark.xfail(reason=reason).mark]
    return copy  # type: ignore[no-any-return]


def distinct(*modules: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules, each object once."""
    return list({id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}.values())


def all_bytes(*modules: nn.Module) -> int:
    """Return what modules take on the device: each distinct tensor at a multiple of 256 bytes."""
    return sum(align(tensor.nbytes) for tensor in distinct(*modules))


def on_host(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in host memory, whatever order its device runs in."""
    return value.detach().cpu()


def assert_same(expected: torch.Tensor, actual: torch.Tensor, what: str) -> None:
    """Compare bit by bit; say how much differs and whether poison was read."""
    expected, actual = on_host(expected), on_host(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{what}: other dtype or shape"
    if torch.equal(_bits(expected), _bits(actual)):
        return
    wrong = int((expected != actual).sum())
    text = f"{what}: {wrong} of {expected.numel()} elements differ from the resident model's"
    if actual.is_floating_point() and not expected.isnan().any() and actual.isnan().any():
        text += f", {int(actual.isnan().sum())} are NaN: memory was read before its copy or after it was freed"
    pytest.fail(text)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Bit by bit: a NaN equals itself here.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_state(expected: nn.Module, actual: nn.Module, what: str) -> None:
    """Compare names, order and values of two state dicts."""
    wanted, found = expected.state_dict(), actual.state_dict()
    assert list(found) == list(wanted), f"{what}: other names in the state dict"
    for name, value in wanted.items():
        assert_same(value, found[name], f"{what}: {name}")


def request(place: Place, pipe: nn.Module, *, seed: int = 0) -> torch.Tensor:
    """Return what a pipeline makes of the same words on the place's device, read back to the host."""
    return on_host(pipe(place.to(models.words()), seed=seed))


def numbers(place: Place, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers on the place's device; equal seeds give equal ones."""
    return place.to(torch.randn(shape or (2, models.WIDTH), generator=torch.Generator().manual_seed(seed)))


@attrs.frozen
class Fault:
    """What a test plants: `error` is raised where `where` says."""

    where: str
    error: type[BaseException]

    def hook(self, *args: Any) -> None:
        """Raise, as a forward hook."""
        raise self.error("planted")

    def plant(self, pipe: nn.Module) -> Callable[[], None]:
        """Have the next call of the module raise; return what takes that away again."""
        return pipe.get_submodule(self.where).register_forward_hook(self.hook).remove


class Planted(Exception):
    """The failure that a test plants."""
