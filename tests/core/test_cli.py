"""The command `sidestream`: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidestream.cli import main

if TYPE_CHECKING:
    from tests.core.conftest import FakeSite

TRAY_PLUGIN = """
    import sidestream

    @sidestream.options_class
    class Options:
        slots: int = sidestream.option(2, minimum=1, maximum=8, help="buffers that blocks share")
        folder: str = sidestream.option(help="where to spill to")
        limit: float | None = sidestream.option(None, help="GiB; none: all")

    @sidestream.hookimpl
    def sidestream_strategies():
        return [sidestream.Strategy(name="tray", summary="serves trays", options=Options, create=print)]
"""


@pytest.fixture
def tray(site: FakeSite) -> FakeSite:
    """A site with the strategy `tray`, and one with a plugin that fails at import."""
    source = TRAY_PLUGIN.replace("import sidestream", "from __future__ import annotations\n    import sidestream", 1)
    site.add("tray-dist", {"tray": "tray_plugin"}, {"tray_plugin": source}, version="0.3")
    site.add("ill-dist", {"ill": "ill_plugin"}, {"ill_plugin": "import a_module_that_nobody_has"})
    return site


class Shell:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        """Return the exit status and what was printed."""
        try:
            status = main(argv)
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 0
        printed = self.capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return status, printed.out, printed.err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command."""
    return Shell(capsys)


# --- strategies ---------------------------------------------------------------------------------------------


def test_strategies_lists_them_and_the_broken_ones_with_their_reason(tray: FakeSite, shell: Shell) -> None:
    """One line each; a broken neighbour is no failure of the listing."""
    status, out, err = shell("strategies")
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line.split(maxsplit=4)[1:] for line in out.splitlines()}
    assert lines["tray"] == ["tray-dist", "0.3", "v1", "serves trays"]
    assert lines["none"][0] == "sidestream"
    assert lines["ill"][:3] == ["ill-dist", "1.0", "v1"]
    assert lines["ill"][3].startswith("broken: ")
    assert "a_module_that_nobody_has" in lines["ill"][3]


def test_strategies_as_json(tray: FakeSite, shell: Shell) -> None:
    """The same, for programs."""
    status, out, _ = shell("strategies", "--json")
    assert status == 0
    by_name = {info["name"]: info for info in json.loads(out)}
    assert by_name["tray"] == {
        "name": "tray",
        "summary": "serves trays",
        "distribution": "tray-dist",
        "version": "0.3",
        "contract_version": 1,
        "problem": None,
    }
    assert "a_module_that_nobody_has" in by_name["ill"]["problem"]


# --- show ---------------------------------------------------------------------------------------------------


def test_show_says_what_a_strategy_can_be_told(tray: FakeSite, shell: Shell) -> None:
    """Each option with its type, bounds, default and meaning, and the fields that all strategies share."""
    status, out, err = shell("show", "Tray")
    assert (status, err) == (0, "")
    for words in (
        "tray: serves trays",
        "tray-dist 0.3",
        "slots: integer, at least 1, at most 8; default 2",
        "buffers that blocks share",
        "folder: string; required",
        "limit: number or none; default none",
        "pin_cpu_memory: boolean; default true",
    ):
        assert words in out


def test_show_as_json(tray: FakeSite, shell: Shell) -> None:
    """The same, for programs."""
    status, out, _ = shell("show", "tray", "--json")
    shown = json.loads(out)
    assert status == 0
    assert (shown["name"], shown["version"]) == ("tray", "0.3")
    assert shown["options"][0] == {
        "name": "slots",
        "type": "integer",
        "required": False,
        "default": 2,
        "bounds": "at least 1, at most 8",
        "help": "buffers that blocks share",
    }
    assert [option["required"] for option in shown["options"]] == [False, True, False]
    assert "pin_cpu_memory" in [field["name"] for field in shown["fields"]]


def test_show_of_a_strategy_without_options_says_so(shell: Shell) -> None:
    """As `none`."""
    status, out, _ = shell("show", "none")
    assert status == 0
    assert "no options of its own" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [("tary", ["'tary'", "did you mean 'tray'?"]), ("ill", ["ill-dist 1.0", "a_module_that_nobody_has"])],
)
def test_show_of_what_cannot_be_had_is_one_line(name: str, words: list[str], tray: FakeSite, shell: Shell) -> None:
    """On stderr, with exit status 1."""
    status, out, err = shell("show", name)
    assert (status, out, err.count("\n")) == (1, "", 1)
    for word in words:
        assert word in err


# --- check --------------------------------------------------------------------------------------------------


def test_check_prints_the_configuration_in_full(tray: FakeSite, shell: Shell, tmp_path: Path) -> None:
    """The strategy, where it comes from, and every field and option with its value, given or default."""
    file = tmp_path / "config.toml"
    file.write_text('strategy = "tray"\ncomponents = ["vae", "dit"]\n[options]\nfolder = "/tmp/tray"\n')
    inline = '{"strategy": "Tray", "components": ["dit", "vae"], "options": {"folder": "/tmp/tray"}}'
    outputs = []
    for source in (str(file), inline):
        status, out, err = shell("check", source)
        assert (status, err) == (0, "")
        outputs.append(out)
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert lines[0] == "strategy: tray (tray-dist 0.3)"
    for line in (
        'components: ["dit", "vae"]',
        "pin_cpu_memory: true",
        "options.slots: 2",
        'options.folder: "/tmp/tray"',
        "options.limit: none",
    ):
        assert line in lines


def test_check_as_json_prints_what_can_be_checked_again(tray: FakeSite, shell: Shell, tmp_path: Path) -> None:
    """Its `config` is a configuration file that says the same."""
    status, out, _ = shell("check", '{"strategy": "tray", "options": {"folder": "x"}}', "--json")
    checked = json.loads(out)
    assert status == 0
    assert (checked["distribution"], checked["version"]) == ("tray-dist", "0.3")
    assert checked["config"]["options"] == {"slots": 2, "folder": "x", "limit": None}
    file = tmp_path / "again.json"
    file.write_text(json.dumps(checked["config"]))
    assert shell("check", str(file), "--json")[:2] == (0, out)


def test_check_of_a_name_alone(shell: Shell) -> None:
    """A string is a configuration too."""
    status, out, _ = shell("check", "none")
    assert status == 0
    assert out.startswith("strategy: none (sidestream ")


def test_check_prints_every_problem_on_a_line_of_its_own(tray: FakeSite, shell: Shell, tmp_path: Path) -> None:
    """On stderr, each with the file and the path inside, and exit status 1."""
    file = tmp_path / "wrong.json"
    file.write_text('{"strategy": "tray", "dp_size": 1.5, "options": {"slots": 0, "fodler": "x"}}')
    status, out, err = shell("check", str(file))
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"sidestream: {file}: ") for line in lines)
    for path in ("dp_size", "options.slots", "options.fodler", "options.folder"):
        assert sum(f"{file}: {path}: " in line for line in lines) == 1

    status, out, again = shell("check", str(file), "--json")
    assert (status, again) == (1, err)
    problems = json.loads(out)
    assert problems["error"] == "ConfigError"
    assert sorted(problem["path"] for problem in problems["problems"]) == [
        "dp_size",
        "options.fodler",
        "options.folder",
        "options.slots",
    ]


def missing(_file: Path) -> None:
    pass


def folder(file: Path) -> None:
    file.mkdir()


def empty(file: Path) -> None:
    file.write_text("")


def not_utf8(file: Path) -> None:
    file.write_bytes(b"strategy = '\xff\xfe'")


def malformed(file: Path) -> None:
    file.write_text("strategy = \n")


@pytest.mark.parametrize("make", [missing, folder, empty, not_utf8, malformed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_that_cannot_be_read_is_one_line_and_status_2(
    make: Any, suffix: str, shell: Shell, tmp_path: Path
) -> None:
    """Missing, a directory, empty, not UTF-8 or malformed: the line starts with the file's name."""
    file = tmp_path / f"config{suffix}"
    make(file)
    status, out, err = shell("check", str(file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"sidestream: {file}: ")
    if make is malformed:
        assert "line 1, column" in err


# --- The whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["shwo"], ["show"], ["check"], ["strategies", "--yaml"], ["--jsno"]], ids=repr)
def test_bad_usage_is_status_2_and_prints_the_usage(argv: list[str], shell: Shell) -> None:
    """On stderr."""
    status, out, err = shell(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("usage: sidestream")


def test_version_and_help(shell: Shell) -> None:
    """Both exit with status 0."""
    status, out, _ = shell("--version")
    assert status == 0
    assert out.startswith("sidestream 0.")
    status, out, _ = shell("--help")
    assert status == 0
    for command in ("strategies", "show", "check"):
        assert command in out


def test_the_module_is_the_command() -> None:
    """`python -m sidestream` passes arguments, output and exit status on."""
    right = run("check", "none")
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.startswith("strategy: none")
    wrong = run("check", "nowhere.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "sidestream: nowhere.toml: there is no such file\n"


def test_a_letter_that_the_terminal_lacks_does_not_end_the_listing(site: FakeSite) -> None:
    """It is escaped."""
    source = TRAY_PLUGIN.replace("serves trays", "serviert Küchlein").replace("| None", "")
    site.add("tray-dist", {"tray": "tray_plugin"}, {"tray_plugin": source})
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH")]))
    listing = run("strategies", PYTHONPATH=path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (listing.returncode, listing.stderr) == (0, "")
    assert r"serviert K\xfcchlein" in listing.stdout
    assert "none " in listing.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `sidestream show NAME | head -1`."""
    command = [sys.executable, "-m", "sidestream", "show", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidestream", *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
