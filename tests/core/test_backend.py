"""The life of a backend: which calls do what in which state, and what a failure leaves behind."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest

from sidestream.backend import BackendState, OffloadBackend, run_cleanup_steps
from sidestream.config import OffloadConfig
from sidestream.errors import BackendStateError, OffloadWarning
from sidestream.report import OffloadReport


class Pipeline:
    """Weights by name; `where` says where each is."""

    def __init__(self) -> None:
        self.where = {"dit": "device", "text_encoder": "device", "vae": "device"}


class MovingBackend(OffloadBackend):
    """Moves the weights of a `Pipeline` to the host one by one, and back; fails where it is told to."""

    def __init__(self, *, fail_enable_at: str | None = None, error: BaseException | None = None) -> None:
        super().__init__(config=OffloadConfig(strategy="moving"), device=object())  # type: ignore[arg-type]
        self.fail_enable_at = fail_enable_at
        self.error = error or RuntimeError("the copy failed")
        self.disable_failures = 0
        self.shutdown_failures = 0
        self.moved: list[str] = []
        self.target: Pipeline | None = None
        self.refreshed = 0
        self.running = False

    def _enable(self, pipeline: Pipeline) -> None:
        self.target = pipeline
        for name in pipeline.where:
            if name == self.fail_enable_at:
                raise self.error
            pipeline.where[name] = "host"
            self.moved.append(name)

    def _disable(self) -> None:
        while self.moved:
            if self.disable_failures and len(self.moved) == 1:
                self.disable_failures -= 1
                raise RuntimeError("no memory for the last weight")
            assert self.target is not None
            self.target.where[self.moved.pop()] = "device"
        self.target = None

    def _shutdown(self) -> None:
        if self.shutdown_failures:
            self.shutdown_failures -= 1
            raise RuntimeError("the pool is still in use")
        self.moved.clear()
        self.target = None

    def _refresh(self) -> None:
        self.refreshed += 1

    def _check_not_running(self, verb: str) -> None:
        if self.running:
            raise BackendStateError(f"cannot {verb} inside a forward")

    def _report(self) -> OffloadReport:
        return OffloadReport(strategy="moving", device="fake", host_bytes=len(self.moved))


def state(backend: OffloadBackend) -> BackendState:
    """Keep the type checker from concluding that a state lasts."""
    return backend.state


def whole(pipeline: Pipeline) -> bool:
    return set(pipeline.where.values()) == {"device"}


def test_a_backend_can_be_enabled_and_disabled_again_and_again() -> None:
    """Each round offloads everything, gives everything back, and the state tells which of the two it is."""
    backend, pipeline = MovingBackend(), Pipeline()
    for _ in range(3):
        assert (backend.state, backend.enabled, backend.is_enabled()) == (BackendState.IDLE, False, False)
        assert whole(pipeline)
        backend.enable(pipeline)
        assert (backend.state, backend.enabled, backend.is_enabled()) == (BackendState.ENABLED, True, True)
        assert set(pipeline.where.values()) == {"host"}
        assert backend.report().host_bytes == 3
        backend.disable()


def test_enabling_the_same_pipeline_twice_warns_and_does_nothing() -> None:
    """The second call must not offload what is offloaded already, and one `disable` ends it."""
    backend, pipeline = MovingBackend(), Pipeline()
    backend.enable(pipeline)
    with pytest.warns(OffloadWarning, match="already") as caught:
        backend.enable(pipeline)
    assert caught[0].filename == __file__
    assert backend.moved == list(pipeline.where)
    backend.disable()
    assert whole(pipeline)


def test_enabling_a_second_pipeline_is_refused() -> None:
    """A backend owns one pipeline; the refusal touches neither."""
    backend, first, second = MovingBackend(), Pipeline(), Pipeline()
    backend.enable(first)
    with pytest.raises(BackendStateError, match="disable"):
        backend.enable(second)
    assert whole(second)
    backend.disable()
    backend.enable(second)
    assert whole(first)
    assert not whole(second)
    backend.disable()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("at", ["dit", "text_encoder", "vae"])
def test_a_failing_enable_leaves_the_pipeline_as_it_was(at: str, error: BaseException) -> None:
    """Wherever and however it fails: the error comes out, what was moved is back, and the backend is free."""
    backend, pipeline = MovingBackend(fail_enable_at=at, error=error), Pipeline()
    with pytest.raises(type(error)) as raised:
        backend.enable(pipeline)
    assert raised.value is error
    assert whole(pipeline)
    assert state(backend) is BackendState.IDLE
    backend.fail_enable_at = None
    backend.enable(pipeline)
    assert backend.enabled
    backend.disable()


def test_a_failing_enable_whose_undoing_fails_too_can_be_undone_later() -> None:
    """The first error comes out, the second is logged, and `disable` finishes the job."""
    backend, pipeline = MovingBackend(fail_enable_at="vae"), Pipeline()
    backend.disable_failures = 1
    seen: list[Any] = []
    backend.observe(enabled=lambda *args: seen.append(args), disabled=lambda *args: seen.append(args))
    with pytest.raises(RuntimeError, match="the copy failed") as raised:
        backend.enable(pipeline)
    if sys.version_info >= (3, 11):
        assert "disable()" in str(raised.value.__notes__)
    assert state(backend) is BackendState.UNDOING
    assert not backend.enabled
    with pytest.raises(BackendStateError, match="disable"):
        backend.enable(pipeline)
    backend.disable()
    assert whole(pipeline)
    assert state(backend) is BackendState.IDLE
    assert seen == [], "a pipeline that was never offloaded is no news"


def test_a_failing_disable_can_be_called_again_until_it_succeeds() -> None:
    """Until then the backend is neither enabled nor free; the observers hear of the end once."""
    backend, pipeline = MovingBackend(), Pipeline()
    ended: list[Any] = []
    backend.observe(disabled=lambda *args: ended.append(args))
    backend.enable(pipeline)
    backend.disable_failures = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="last weight"):
            backend.disable()
        assert state(backend) is BackendState.UNDOING
        assert not backend.enabled
        assert ended == []
    backend.disable()
    assert whole(pipeline)
    assert ended == [(backend, pipeline)]
    backend.disable()
    assert ended == [(backend, pipeline)]


def test_disabling_what_is_not_enabled_does_nothing() -> None:
    """A `disable` in a `finally` must not need to know how far things came."""
    backend = MovingBackend()
    backend.disable()
    backend.shutdown()
    backend.disable()
    assert state(backend) is BackendState.SHUT_DOWN


def test_shutdown_is_final_and_can_be_called_again() -> None:
    """It frees what was taken, tells the observers once, and nothing can be enabled afterwards."""
    backend, pipeline = MovingBackend(), Pipeline()
    ended: list[Any] = []
    backend.observe(disabled=lambda *args: ended.append(args))
    backend.enable(pipeline)
    for _ in range(3):
        backend.shutdown()
        assert state(backend) is BackendState.SHUT_DOWN
        assert backend.report().host_bytes == 0
    assert ended == [(backend, pipeline)]
    with pytest.raises(BackendStateError, match="make another"):
        backend.enable(pipeline)


def test_a_failing_shutdown_can_be_called_again() -> None:
    """It is not taken for done before it is."""
    backend = MovingBackend()
    backend.enable(Pipeline())
    backend.shutdown_failures = 1
    with pytest.raises(RuntimeError, match="pool"):
        backend.shutdown()
    assert state(backend) is not BackendState.SHUT_DOWN
    backend.shutdown()
    assert state(backend) is BackendState.SHUT_DOWN


def test_shutdown_after_an_unfinished_undoing_tells_only_of_a_beginning_that_there_was() -> None:
    """A failed `enable` is no news when it is over; after a failed `disable` the end is news once."""
    failed = MovingBackend(fail_enable_at="vae")
    failed.disable_failures = 1
    ended: list[OffloadBackend] = []
    failed.observe(disabled=lambda backend, _: ended.append(backend))
    with pytest.raises(RuntimeError):
        failed.enable(Pipeline())
    failed.shutdown()
    assert ended == []

    stuck = MovingBackend()
    stuck.observe(disabled=lambda backend, _: ended.append(backend))
    stuck.enable(Pipeline())
    stuck.disable_failures = 1
    with pytest.raises(RuntimeError):
        stuck.disable()
    stuck.shutdown()
    assert ended == [stuck]


def test_nothing_is_ended_inside_a_forward() -> None:
    """`disable` and `shutdown` are refused there, and the backend goes on as before."""
    backend, pipeline = MovingBackend(), Pipeline()
    backend.enable(pipeline)
    backend.running = True
    with pytest.raises(BackendStateError, match="cannot disable"):
        backend.disable()
    with pytest.raises(BackendStateError, match="cannot shutdown"):
        backend.shutdown()
    assert backend.enabled
    backend.running = False
    backend.disable()
    assert whole(pipeline)


def test_refresh_needs_an_offloaded_pipeline() -> None:
    """Elsewhere it says which call is missing."""
    backend, pipeline = MovingBackend(), Pipeline()
    with pytest.raises(BackendStateError, match="enable"):
        backend.refresh()
    backend.enable(pipeline)
    backend.refresh()
    backend.disable()
    backend.shutdown()
    with pytest.raises(BackendStateError, match="shut down"):
        backend.refresh()
    assert backend.refreshed == 1


def test_a_failing_observer_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Enabling and disabling succeed, and the observers after it are called all the same."""
    backend, pipeline = MovingBackend(), Pipeline()
    seen: list[str] = []

    def fail(_backend: OffloadBackend, _pipeline: object) -> None:
        raise ValueError("a broken dashboard")

    backend.observe(enabled=fail, disabled=fail)
    backend.observe(enabled=lambda *_: seen.append("enabled"), disabled=lambda *_: seen.append("disabled"))
    with caplog.at_level(logging.ERROR, logger="sidestream"):
        backend.enable(pipeline)
        assert backend.enabled
        backend.disable()
    assert whole(pipeline)
    assert seen == ["enabled", "disabled"]
    assert [record.getMessage().count("a broken dashboard") for record in caplog.records] == [1, 1]


def test_observers_hear_of_things_after_they_happened() -> None:
    """The state that an observer sees is the one that it is told of, and it may end the offloading itself."""
    backend, pipeline = MovingBackend(), Pipeline()
    states: list[BackendState] = []
    backend.observe(
        enabled=lambda backend, _: states.append(backend.state),
        disabled=lambda backend, _: states.append(backend.state),
    )
    backend.observe(enabled=lambda backend, _: backend.disable())
    backend.enable(pipeline)
    assert states == [BackendState.ENABLED, BackendState.IDLE]
    assert whole(pipeline)


def test_two_threads_that_enable_at_once_wait_for_each_other() -> None:
    """One of them wins, the other is told so; the pipelines are offloaded once and not at all."""
    backend, pipelines = MovingBackend(), [Pipeline(), Pipeline()]
    start = threading.Barrier(2)
    refused: list[BackendStateError] = []

    def enable(pipeline: Pipeline) -> None:
        start.wait()
        try:
            backend.enable(pipeline)
        except BackendStateError as error:
            refused.append(error)

    threads = [threading.Thread(target=enable, args=(pipeline,)) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert sorted(whole(pipeline) for pipeline in pipelines) == [False, True]
    backend.disable()


def test_cleanup_runs_every_step_and_returns_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a step raises, KeyboardInterrupt included, the rest runs, and each failure is logged."""
    done: list[int] = []
    interrupt, failure = KeyboardInterrupt(), OSError("gone")

    def step(number: int, error: BaseException | None = None) -> tuple[str, Any]:
        def call() -> None:
            done.append(number)
            if error is not None:
                raise error

        return f"run step {number}", call

    with caplog.at_level(logging.ERROR, logger="sidestream"):
        first = run_cleanup_steps([step(0), step(1, interrupt), step(2), step(3, failure), step(4)])
    assert first is interrupt
    assert done == [0, 1, 2, 3, 4]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "failed to run step 1",
        "failed to run step 3",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_cleanup_without_a_failure_returns_none() -> None:
    """Also without a step."""
    assert run_cleanup_steps([]) is None
    assert run_cleanup_steps([("succeed", lambda: 1)]) is None
