"""The life of a backend: what every strategy inherits, and the order in which cleaning up is done.

A strategy fills in `_enable`, `_disable`, `_shutdown`, `_refresh` and `_report`; the public methods here keep the
state, serialise callers, undo a failed `enable` and tell the observers.
"""

from __future__ import annotations

import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from sidestream.config import OffloadConfig
from sidestream.errors import BackendStateError, OffloadWarning
from sidestream.report import OffloadReport

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("sidestream")

#: Called with the backend and the pipeline when offloading of the pipeline starts or ends.
Observer = Callable[["OffloadBackend", Any], None]


class BackendState(Enum):
    """Where a backend is in its life, and what that means for the model."""

    IDLE = "idle"
    """Owns nothing; the model is whole. Costs no memory."""
    ENABLED = "enabled"
    """Owns the components it offloads; their weights are in its host memory, some of them on the device too."""
    UNDOING = "undoing"
    """`disable`, or the undoing of a failed `enable`, did not finish: it can be called again until it does."""
    SHUT_DOWN = "shut down"
    """Ended without giving the weights back in memory of their own; cannot be used again."""


class OffloadBackend(ABC):
    """One strategy at work on one pipeline.

    Made by a strategy's `create`; `config` is its configuration and `device` the `torch.device` that computes.
    Making one touches no accelerator. All public methods may be called from any thread; they wait for each other.
    """

    def __init__(self, *, config: OffloadConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._state = BackendState.IDLE
        self._pipeline: Any = None
        self._was_enabled = False
        self._on_enabled: list[Observer] = []
        self._on_disabled: list[Observer] = []
        # One user at a time: strategies take the same lock around each outermost forward.
        self._lock = threading.RLock()

    @property
    def enabled(self) -> bool:
        """Whether a pipeline is offloaded now."""
        return self._state is BackendState.ENABLED

    def is_enabled(self) -> bool:
        """Return whether a pipeline is offloaded now."""
        return self.enabled

    @property
    def state(self) -> BackendState:
        """Where the backend is in its life."""
        return self._state

    def observe(self, *, enabled: Observer | None = None, disabled: Observer | None = None) -> None:
        """Have `enabled` and `disabled` called after the event, outside every forward. A failing observer is logged."""
        if enabled is not None:
            self._on_enabled.append(enabled)
        if disabled is not None:
            self._on_disabled.append(disabled)

    def enable(self, pipeline: Any) -> None:
        """Check everything, then offload `pipeline`; if anything fails the pipeline is as it was.

        Enabling the same pipeline again does nothing but warn. Raises `BackendStateError` if the backend has another
        pipeline, is shut down or has not finished undoing, and whatever the strategy finds wrong with the model.
        """
        with self._lock:
            if self._state is BackendState.ENABLED and pipeline is self._pipeline:
                warnings.warn("this pipeline is offloaded by this backend already", OffloadWarning, stacklevel=2)
                return
            if self._state is not BackendState.IDLE:
                raise BackendStateError(f"cannot enable: {self._explain_state()}")
            try:
                self._enable(pipeline)
                self._pipeline = pipeline
                self._state = BackendState.ENABLED
            except BaseException as error:
                self._state = BackendState.UNDOING
                self._pipeline = pipeline
                if run_cleanup_steps([("undo a failed enable", self._disable)]) is None:
                    self._forget()
                elif hasattr(error, "add_note"):
                    error.add_note("undoing failed too: call disable() until it succeeds")
                raise
            self._tell(self._on_enabled, pipeline)

    def disable(self) -> None:
        """Give the pipeline back whole, with every weight in ordinary host memory, and free all that was taken.

        Does nothing if nothing is offloaded. If it raises, nothing is lost: call it again.
        """
        with self._lock:
            self._check_not_running("disable")
            if self._state in (BackendState.IDLE, BackendState.SHUT_DOWN):
                return
            pipeline, was_enabled = self._pipeline, self._state is BackendState.ENABLED
            self._state = BackendState.UNDOING
            self._was_enabled = self._was_enabled or was_enabled
            self._disable()
            tell, self._was_enabled = self._was_enabled, False
            self._forget()
            if tell:
                self._tell(self._on_disabled, pipeline)

    def shutdown(self) -> None:
        """End for good, as at process exit: free what was taken without rebuilding weights in memory of their own.

        The weights stay readable on the host. Can be called again; the backend cannot be enabled afterwards.
        """
        with self._lock:
            self._check_not_running("shutdown")
            if self._state is BackendState.SHUT_DOWN:
                return
            pipeline, tell = self._pipeline, self._was_enabled or self._state is BackendState.ENABLED
            if self._state is not BackendState.IDLE:
                self._shutdown()
            self._was_enabled = False
            self._forget()
            self._state = BackendState.SHUT_DOWN
            if tell:
                self._tell(self._on_disabled, pipeline)

    def refresh(self) -> None:
        """Take every weight afresh at its next use, after an edit too small for the sampling check to see."""
        with self._lock:
            if self._state is not BackendState.ENABLED:
                raise BackendStateError(f"nothing to refresh: {self._explain_state()}")
            self._refresh()

    def report(self) -> OffloadReport:
        """Return the figures so far. Waits for no forward and no copy; any thread may ask at any time."""
        return self._report()

    @abstractmethod
    def _enable(self, pipeline: Any) -> None:
        """Check, then offload. If it raises, `_disable` is called next and must undo what was done so far."""

    @abstractmethod
    def _disable(self) -> None:
        """Undo `_enable`, however far it came. Must be repeatable: keep what is needed to finish until it is done."""

    def _shutdown(self) -> None:
        """Like `_disable`, but must not allocate anything the size of a model nor enter a collective."""
        self._disable()

    def _refresh(self) -> None:
        """Mistrust every copy on the device."""

    @abstractmethod
    def _report(self) -> OffloadReport:
        """Return the figures so far."""

    def _check_not_running(self, verb: str) -> None:
        """Wait for other threads' forwards; raise `BackendStateError` if called from inside one of this thread."""

    def _explain_state(self) -> str:
        return {
            BackendState.IDLE: "no pipeline is offloaded; call enable(pipeline) first",
            BackendState.ENABLED: "a pipeline is offloaded by this backend; disable() it first or make another backend",
            BackendState.UNDOING: "an earlier disable() did not finish; call disable() until it succeeds",
            BackendState.SHUT_DOWN: "this backend was shut down; make another",
        }[self._state]

    def _forget(self) -> None:
        self._pipeline = None
        self._state = BackendState.IDLE

    def _tell(self, observers: list[Observer], pipeline: Any) -> None:
        run_cleanup_steps([(f"tell {observer!r}", _bind(observer, self, pipeline)) for observer in observers])


def _bind(observer: Observer, backend: OffloadBackend, pipeline: Any) -> Callable[[], None]:
    return lambda: observer(backend, pipeline)


def run_cleanup_steps(steps: Iterable[tuple[str, Callable[[], object]]]) -> BaseException | None:
    """Run every `(what, call)` in order, whatever fails, and return the first failure or None.

    Each failure is logged with its `what`. Catches `BaseException`, KeyboardInterrupt included, and never raises:
    the caller decides what to do with the first failure.
    """
    first: BaseException | None = None
    for what, call in steps:
        try:
            call()
        except BaseException as error:
            logger.error("failed to %s: %r", what, error, exc_info=error)
            if first is None:
                first = error
    return first
