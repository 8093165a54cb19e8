"""The strategy's own options."""

from __future__ import annotations

from enum import Enum

from sidestream import option, options_class


class PinFailure(str, Enum):
    """What to do when host memory cannot be page-locked."""

    FALLBACK = "fallback"
    FAIL = "fail"


@options_class
class ModelLevelOptions:
    """Options of `model_level`. Sizes in GiB (2**30 bytes)."""

    device_budget_gib: float | None = option(
        None,
        help="weights that may be on the device at once, those that stay there included; components leave only when "
        "the next one needs their room, and it is copied ahead where it fits. None: strict turns, nothing ahead",
        minimum=0.0,
        exclusive_minimum=True,
    )
    prefetch: bool = option(
        True,
        help="copy the next component while the present one computes, where the device budget leaves room",
    )
    release_after_request: bool = option(
        False, help="free the device of the last component as soon as the pipeline's call ends"
    )
    pin_budget_gib: float | None = option(
        None,
        help="host memory that may be page-locked. None: three quarters of what the machine or its cgroup allows",
        minimum=0.0,
    )
    pin_failure: PinFailure = option(
        PinFailure.FALLBACK,
        help="when page-locking fails: go on with pageable memory and one warning, or fail",
    )
