"""The strategy `none`: leaves the pipeline where it is. The smallest plugin there is; one to copy from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from sidestream.backend import OffloadBackend
from sidestream.config import OffloadConfig
from sidestream.hookspecs import Strategy, hookimpl
from sidestream.report import OffloadReport

if TYPE_CHECKING:
    import torch

NAME = "none"


class NoOffloadBackend(OffloadBackend):
    """Has the whole life cycle and moves nothing; all figures of its report are zero.

    As nothing moves, `device` is where the pipeline is once it is enabled; until then, what was asked for.
    """

    def _enable(self, pipeline: Any) -> None:
        self.device = _device_of(pipeline) or self.device

    def _disable(self) -> None:
        """Nothing was done, so nothing is undone."""

    def _report(self) -> OffloadReport:
        return OffloadReport(strategy=NAME, device=str(self.device or "unknown"))


def _device_of(pipeline: Any) -> torch.device | None:
    """Return where the first weight is, of a module, of a pipeline with `components`, or of a mapping."""
    if callable(getattr(pipeline, "parameters", None)):
        return next((weight.device for weight in pipeline.parameters()), None)
    parts = pipeline if isinstance(pipeline, Mapping) else getattr(pipeline, "components", None)
    if not isinstance(parts, Mapping):
        return None
    return next((device for part in parts.values() if (device := _device_of(part)) is not None), None)


def _create(config: OffloadConfig, device: torch.device | str | None) -> NoOffloadBackend:
    # Only torch could turn the user's word into a torch.device, and nothing else here needs torch.
    return NoOffloadBackend(config=config, device=cast("torch.device", device))


@hookimpl
def sidestream_strategies() -> Iterable[Strategy]:
    """Offer the one strategy; it takes no options."""
    return [Strategy(name=NAME, summary="leave the pipeline where it is: no offload", create=_create)]
