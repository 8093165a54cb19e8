"""Everything that sidestream raises or warns with, in one tree.

Each error is near a builtin, names the culprit, and says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class OffloadWarning(UserWarning):
    """Something was done otherwise than asked, and the model is right all the same."""


class OffloadError(Exception):
    """Root of all errors of sidestream; its text is meant for the user."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a configuration.

    `path` is where (`options.slots`; the empty string is the whole), `message` what is wrong and what is allowed,
    `value` what stood there.
    """

    path: str
    message: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(OffloadError, ValueError):
    """A configuration is wrong; `problems` holds every single fault, each with its path."""

    def __init__(self, problems: Iterable[Problem] | str, *, source: str | None = None) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        self.source = source
        where = f"{source}: " if source else ""
        if len(self.problems) == 1:
            text = f"{where}{self.problems[0]}"
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            text = f"{where}{len(self.problems)} problems in the configuration:{lines}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_config_error, (self.problems, self.source)


def _rebuild_config_error(problems: tuple[Problem, ...], source: str | None) -> ConfigError:
    return ConfigError(problems, source=source)


class ConfigFileError(ConfigError):
    """A configuration file cannot be read: missing, a directory, empty, not UTF-8 or malformed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_config_file_error, (self.problems, self.source)


def _rebuild_config_file_error(problems: tuple[Problem, ...], source: str | None) -> ConfigFileError:
    return ConfigFileError(problems, source=source)


class UnknownStrategyError(OffloadError, LookupError):
    """No installed distribution offers the strategy; the text lists what is installed and what to install."""


class PluginError(OffloadError):
    """A plugin cannot be used: it fails at import, or two distributions claim its name.

    `distribution`, `version` and `entry_point` say whose fault it is; `cause` is the original exception, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        distribution: str | None = None,
        version: str | None = None,
        entry_point: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.distribution = distribution
        self.version = version
        self.entry_point = entry_point
        self.cause = cause


class IncompatiblePluginError(PluginError):
    """A plugin was written for another version of the contract, or its hooks do not fit this one."""


class UnsupportedModelError(OffloadError):
    """A model, module or tensor cannot be offloaded as asked; the text names it and the way out."""


class BackendStateError(OffloadError):
    """A backend was asked for something that its present state does not allow."""


class TransferError(OffloadError):
    """A copy between host and device failed or did not end within its time limit."""


class PinError(OffloadError):
    """Host memory could not be page-locked and the configuration forbids to go on without."""
