"""The command `sidestream`: what is installed, what it can be told, and whether a configuration is right.

Exit status: 0 right; 1 wrong (unknown or broken strategy, wrong values); 2 bad usage or an unreadable file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from sidestream.api import resolve_config, strategies
from sidestream.config import OffloadConfig
from sidestream.errors import ConfigError, ConfigFileError, OffloadError
from sidestream.registry import StrategyInfo, core_version, load_strategy
from sidestream.structure import OptionInfo, describe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (None: of the process) and return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter in one plugin's summary that the terminal lacks must not end the listing of all.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, `head` or a pager, has seen enough; at exit nothing may be flushed into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OffloadError as error:
        for line in _lines(error):
            print(f"sidestream: {line}", file=sys.stderr)
        if arguments.json:
            _print_json({"error": type(error).__name__, "problems": _problems(error)})
        return 2 if isinstance(error, ConfigFileError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidestream", description="CPU offload for PyTorch diffusion pipelines.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, argument, text in (
        ("strategies", _strategies, None, "list the strategies that are installed"),
        ("show", _show, ("name", "NAME", "name of a strategy"), "say what a strategy does and can be told"),
        (
            "check",
            _check,
            ("config", "CONFIG", "a .toml or .json file, a strategy's name, or inline JSON"),
            "check a configuration and print it in full",
        ),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if argument is not None:
            sub.add_argument(argument[0], metavar=argument[1], help=argument[2])
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command)
    return parser


class _Version(argparse.Action):
    """Look the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"sidestream {core_version()}")
        parser.exit()


# --- The commands -------------------------------------------------------------------------------------------


def _strategies(arguments: argparse.Namespace) -> int:
    found = strategies()
    if arguments.json:
        _print_json([attrs.asdict(info) for info in found])
        return 0
    header = ("strategy", "distribution", "version", "contract", "summary")
    _print_table([header, *(_row(info) for info in found)])
    return 0


def _row(info: StrategyInfo) -> tuple[str, ...]:
    told = info.summary if info.problem is None else f"broken: {info.problem}"
    return info.name, info.distribution, info.version, f"v{info.contract_version}", told


def _show(arguments: argparse.Namespace) -> int:
    loaded = load_strategy(arguments.name)
    own = () if loaded.strategy.options is None else describe(loaded.strategy.options)
    common = tuple(field for field in describe(OffloadConfig) if field.name not in ("strategy", "options"))
    if arguments.json:
        _print_json(
            {
                **attrs.asdict(loaded.info),
                "options": [attrs.asdict(option) for option in own],
                "fields": [attrs.asdict(field) for field in common],
            }
        )
        return 0
    info = loaded.info
    print(f"{info.name}: {info.summary}")
    print(f"from {info.distribution} {info.version}, contract v{info.contract_version}")
    print()
    if own:
        print("options of its own, under `options`:")
        _print_options(own)
    else:
        print("no options of its own")
    print()
    print("fields that every configuration has, beside `strategy` and `options`:")
    _print_options(common)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    config, loaded = resolve_config(arguments.config)
    plain = config.to_mapping()
    if arguments.json:
        _print_json({"distribution": loaded.info.distribution, "version": loaded.info.version, "config": plain})
        return 0
    options = plain.pop("options")
    print(f"strategy: {plain.pop('strategy')} ({loaded.info.distribution} {loaded.info.version})")
    for name, value in (*plain.items(), *((f"options.{name}", value) for name, value in options.items())):
        print(f"{name}: {_text(value)}")
    return 0


# --- Printing -----------------------------------------------------------------------------------------------


def _lines(error: OffloadError) -> list[str]:
    """Return one line for each problem, each with where the configuration came from."""
    if not isinstance(error, ConfigError):
        return [" ".join(str(error).split())]
    origin = f"{error.source}: " if error.source else ""
    return [origin + " ".join(str(problem).split()) for problem in error.problems]


def _problems(error: OffloadError) -> list[dict[str, str]]:
    if isinstance(error, ConfigError):
        return [{"path": problem.path, "message": problem.message} for problem in error.problems]
    return [{"path": "", "message": str(error)}]


def _print_options(options: Iterable[OptionInfo]) -> None:
    for option in options:
        bounds = f", {option.bounds}" if option.bounds else ""
        default = "required" if option.required else f"default {_text(option.default)}"
        print(f"  {option.name}: {option.type}{bounds}; {default}")
        print(f"      {option.help}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the last one ragged."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _text(value: Any) -> str:
    """Return a value as it would stand in a JSON configuration, with None spelt as in the listings."""
    return "none" if value is None else json.dumps(value)
