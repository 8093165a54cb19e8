"""`model_level` passes the kit: by default, with everything selected, with a budget, and released after requests."""

from __future__ import annotations

from typing import Any

from torch import nn

from sidestream.testing.conformance import StrategyConformance
from sidestream.testing.conformance.base import all_bytes, distinct

ALL = {"dit", "text_encoder", "vae"}


class _ModelLevel(StrategyConformance):
    strategy = "model_level"

    def device_limit(self, pipe: nn.Module) -> int:
        """Return the bytes of the largest component that takes turns and of all that stays on the device."""
        return stays(self, pipe) + max(map(all_bytes, turns(self, pipe)))


def turns(suite: type[StrategyConformance] | StrategyConformance, pipe: nn.Module) -> list[nn.Module]:
    """Return the components that take turns."""
    selected = "vae" in suite.settings.get("components", ())
    return [child for name, child in pipe.named_children() if name != "vae" or selected]


def stays(suite: type[StrategyConformance] | StrategyConformance, pipe: nn.Module) -> int:
    """Return the bytes that stay: a VAE that is not selected, and the first parameter of each that takes turns."""
    moving = turns(suite, pipe)
    resident = [child for child in pipe.children() if not any(child is other for other in moving)]
    anchors = [next(child.parameters()) for child in moving]
    return sum(tensor.nbytes for tensor in (*distinct(*resident), *anchors))


class TestDefault(_ModelLevel):
    """Encoders and DiTs in strict turns; the VAE stays."""

    thorough = False


class TestAll(_ModelLevel):
    """The VAE takes turns, too."""

    settings = {"components": ALL}  # noqa: RUF012
    thorough = False


class TestBudget(_ModelLevel):
    """As many components as fit are on the device, the next one copied ahead: here order matters most."""

    settings = {"components": ALL}  # noqa: RUF012

    def options_for(self, pipe: nn.Module) -> dict[str, Any]:
        """Give room for some, and for the next one beside any; not for all of them together."""
        largest = max(map(all_bytes, turns(self, pipe)))
        return {"device_budget_gib": (stays(self, pipe) + 2.5 * largest) / 2**30}

    def device_limit(self, pipe: nn.Module) -> int:
        """Return the budget."""
        return int(self.options_for(pipe)["device_budget_gib"] * 2**30)


class TestReleased(_ModelLevel):
    """Between requests the device holds only what stays."""

    settings = {"components": ALL}  # noqa: RUF012
    options = {"release_after_request": True}  # noqa: RUF012
    thorough = False
