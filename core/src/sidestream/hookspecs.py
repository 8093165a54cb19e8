"""The contract between the core and a strategy's distribution, in the order in which it is used.

A distribution names its plugin module in the entry-point group :data:`ENTRY_POINT_GROUP`. The *name* of the entry
point is the string by which users select the strategy:

.. code-block:: toml

    [project.entry-points."sidestream.backends.v1"]
    my_strategy = "my_package.plugin"

Only the module of the strategy that is asked for is ever imported. It implements the hooks below with
:data:`hookimpl`; an implementation may take any subset of a hook's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from sidestream.backend import OffloadBackend
from sidestream.config import OffloadConfig

if TYPE_CHECKING:
    import torch

#: Version of this contract. It is part of the group's name, so a mismatch shows before anything is imported.
HOOKSPEC_VERSION = 1
#: The entry-point group that this version of the core reads.
ENTRY_POINT_GROUP = f"sidestream.backends.v{HOOKSPEC_VERSION}"
#: pluggy's project name: what ties the two markers to the core's managers.
PROJECT_NAME = "sidestream"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
#: Marks a function of a plugin or observer as the implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@attrs.frozen(kw_only=True)
class Strategy:
    """One strategy: what the core has to know to list it, check its options and make its backend.

    `name` equals the entry point's name. `summary` is one line for listings. `options` is the frozen attrs class of
    the strategy's own options (see :func:`sidestream.option`); None: it takes none. `create(config, device)` makes a
    backend and touches neither model nor accelerator; `config.options` is then an instance of `options`, and
    `device` is as the user gave it: a `torch.device`, a string, or None for the current accelerator.
    """

    name: str
    summary: str
    create: Callable[[OffloadConfig, torch.device | str | None], OffloadBackend]
    options: type[Any] | None = None


# --- Loading: once, when the strategy is first asked for ---------------------------------------------------------


@hookspec
def sidestream_strategies() -> Iterable[Strategy]:  # type: ignore[empty-body]
    """Return the strategies that this plugin offers.

    Called after the plugin's module was imported. Must not import torch or anything heavy: import it inside
    `Strategy.create`. Exactly one of the returned strategies must bear the entry point's name.
    """


# --- Life: once for each pipeline ---------------------------------------------------------------------------------


@hookspec
def sidestream_enabled(backend: OffloadBackend, pipeline: Any) -> None:
    """Observe that `backend` now offloads `pipeline`. Called after `enable` succeeded, never inside a forward."""


@hookspec
def sidestream_disabled(backend: OffloadBackend, pipeline: Any) -> None:
    """Observe that `backend` gave `pipeline` back whole, or was shut down. Never called inside a forward."""
