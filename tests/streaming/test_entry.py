"""Gates: opened before, closed after, whatever happens, and gone without a trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.streaming.entry import Gate, execution_is_differentiable, gate_of, gates_within
from sidestream.testing.portrait import portrait


class Logged:
    """A gate over a small model, with a log of what happens."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        self.log: list[str] = []
        self.gate = Gate(
            self.model,
            name="net",
            owner=self,
            methods=(),
            opened=lambda args, kwargs: self.log.append("open"),
            closed=lambda: self.log.append("closed"),
            lock=threading.RLock(),
        )
        self.gate.attach()


@pytest.fixture
def logged() -> Logged:
    return Logged()


X = torch.ones(1, 2)


def test_a_gate_opens_once_for_the_outermost_entry(logged: Logged) -> None:
    """By the root, by a child, and nested."""
    logged.model(X)
    logged.model[1](X)
    logged.model[0](X)
    logged.model[1][0].register_forward_hook(lambda *args: logged.log.append("inside") and None)
    logged.model(X)
    assert logged.log == ["open", "closed"] * 3 + ["open", "inside", "closed"]


def test_while_open_no_module_inside_has_a_hook_of_ours(logged: Logged) -> None:
    """Hooks would cost time, and have some modules choose another kernel."""
    counts: list[int] = []
    logged.model[1][1].register_forward_hook(
        lambda *args: counts.append(sum(len(m._forward_pre_hooks) for m in logged.model.modules())) and None
    )
    logged.model(X)
    assert counts == [0]
    assert sum(len(m._forward_pre_hooks) for m in logged.model.modules()) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_closes_after_an_error(logged: Logged, error: type[BaseException]) -> None:
    """By the root at once; by a child, for what no hook is told of, when the next one looks."""

    def fail(*args: Any) -> None:
        raise error

    handle = logged.model[1][0].register_forward_hook(fail)
    with pytest.raises(error):
        logged.model(X)
    assert logged.log == ["open", "closed"]
    with pytest.raises(error):
        logged.model[1](X)
    handle.remove()
    assert not logged.gate.running
    logged.gate.close_left_open()
    assert logged.log == ["open", "closed"] * 2
    logged.model(X)
    assert logged.log == ["open", "closed"] * 3
    assert not logged.model[1]._forward_hooks


def test_an_error_while_opening_closes_again_and_comes_out(logged: Logged) -> None:
    """The next call tries again."""

    def fail(args: Any, kwargs: Any) -> None:
        raise OSError("no room")

    opened, logged.gate._opened = logged.gate._opened, fail
    for call in (logged.model, logged.model[0]):
        with pytest.raises(OSError, match="no room"):
            call(X)
    logged.gate._opened = opened
    logged.model(X)
    assert logged.log == ["closed", "closed", "open", "closed"]
    assert not logged.gate.running


def test_detaching_leaves_no_trace() -> None:
    """Not on the root, nor inside."""
    before = None
    logged = Logged()
    logged.gate.detach()
    before = portrait(logged.model)
    logged.gate.attach()
    logged.model(X)
    assert before != portrait(logged.model)
    logged.gate.detach()
    logged.gate.detach()
    assert before == portrait(logged.model)


def test_a_call_that_waited_while_the_gate_was_taken_away_goes_on_without(logged: Logged) -> None:
    """Another thread ended the offload first."""
    results: list[torch.Tensor] = []
    with logged.gate.lock:
        threads = [threading.Thread(target=lambda m=m: results.append(m(X))) for m in (logged.model, logged.model[0])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=0.05)
        logged.gate.detach()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert len(results) == 2
    assert logged.log == []


def test_a_wrapper_that_a_user_put_around_an_entrance_outlives_the_gate(logged: Logged) -> None:
    """It calls the entrance, which must not ask the module what to call: that is the wrapper again."""
    entrance: Any = logged.model.forward
    logged.model.forward = lambda x: entrance(x) + 1
    with_gate = logged.model(X)
    logged.gate.detach()
    assert torch.equal(with_gate, logged.model(X))
    assert logged.log == ["open", "closed"]


def test_owners_are_found_from_the_root_and_from_inside(logged: Logged) -> None:
    """Two strategies must see each other, whichever took the larger part."""
    assert gate_of(logged.model) is logged.gate
    assert gate_of(logged.model[1]) is None
    assert gates_within(logged.model) == [logged.gate]
    assert gates_within(logged.model[1]) == [logged.gate]
    assert gates_within(nn.Sequential(logged.model)) == [logged.gate]
    assert gates_within(nn.Linear(1, 1)) == []


def test_gradients_are_seen_in_arguments_one_level_deep() -> None:
    """A tuple or a dict of tensors is how models take their states."""
    wants = torch.ones(1, requires_grad=True)
    for values in ([wants], [(X, wants)], [{"a": wants}]):
        assert execution_is_differentiable(values)
        with torch.no_grad():
            assert not execution_is_differentiable(values)
    assert not execution_is_differentiable([X, (X,), {"a": X}, 3])
