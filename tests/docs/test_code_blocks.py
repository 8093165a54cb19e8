"""Every code block of the README and of the pages in docs runs, parses or compiles.

- A `python` or `toml` block whose first line is `# some/path.ext` is a file, written before anything runs.
- The other `python` blocks of a page run in one namespace, in order, in an empty folder. `python no-run` is
  compiled only.
- A `toml` or `json` block with a `strategy` is a configuration and has to be right.
- In a `shell` block each line that starts with `sidestream` runs and has exit status 0, or the one that a
  comment behind it states (`# exit status 1`).
- In a `console` block each `$ sidestream` line prints what stands below it, `...` being anything; `$ echo $?`
  tells its exit status, 0 if it is not asked.
- Files with a `pyproject.toml` among them are a distribution, and installed.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sidestream.api import resolve_config
from sidestream.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]

_FENCE = re.compile(r"^```([\w-]*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")
_STATUS = re.compile(r"# exit status (\d+)")


class Block(NamedTuple):
    """One fenced block: `line` is that of its fence, `flags` what stands behind the language."""

    page: Path
    line: int
    language: str
    flags: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The path that the block's first line gives it, if it is a file."""
        named = _FILE_NAME.match(self.text) if self.language in ("python", "toml") else None
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty current folder; what is imported from its `src` is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks that are files, and install them if they are a distribution."""
    for block in blocks(page):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    if not (folder / "pyproject.toml").exists():
        return
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entry_points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    importlib.invalidate_caches()


def compiled(block: Block) -> Any:
    return compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)


def run_command(line: str) -> int:
    try:
        return main(shlex.split(line, comments=True)[1:])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def run_shell(block: Block) -> None:
    for line in block.text.splitlines():
        if line.startswith("sidestream "):
            stated = _STATUS.search(line)
            assert run_command(line) == (int(stated[1]) if stated else 0), f"{block.where}: {line}"


def run_console(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    steps = [step.partition("\n") for step in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
    status = 0
    for index, (line, _, expected) in enumerate(steps):
        if line == "echo $?":
            assert int(expected) == status, f"{block.where}: {steps[index - 1][0]}"
            continue
        assert line.startswith("sidestream "), f"{block.where}: only sidestream can be run here, not {line}"
        status = run_command(line)
        asked = index + 1 < len(steps) and steps[index + 1][0] == "echo $?"
        assert asked or status == 0, f"{block.where}: {line}"
        printed = "".join(capsys.readouterr())
        pattern = ".*".join(re.escape(part) for part in expected.rstrip().split("..."))
        assert re.fullmatch(pattern, printed.rstrip(), re.DOTALL), f"{block.where}: {line}\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a reader copies works, in the order in which it is read."""
    write_files(page, folder)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.enable_grad():  # a page may turn gradients off, for itself
        for block in blocks(page):
            if block.language == "shell":
                run_shell(block)
            elif block.language == "console":
                run_console(block, capsys)
            elif block.language == "python":
                code = compiled(block)
                if block.file is None and "no-run" not in block.flags:
                    exec(code, namespace)


DATA = [block for block in ALL if block.language in ("toml", "json")]


@pytest.mark.parametrize("block", DATA, ids=lambda block: block.where)
def test_data_parses_and_configurations_are_right(block: Block) -> None:
    """A configuration that is printed is one that can be used."""
    data = tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)
    if "strategy" in data:
        resolve_config(data)


def test_there_is_something_to_run() -> None:
    """The pattern that finds the blocks finds them; no page writes a language that nothing here looks at."""
    names = {page.name for page in PAGES}
    assert {"architecture.md", "configuration.md", "model-level.md", "writing-a-strategy.md"} <= names
    assert {block.language for block in ALL} <= {"", "console", "json", "python", "shell", "text", "toml"}
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in PAGES)
    assert fences == 2 * len(ALL)
    for language, least in (("python", 9), ("shell", 1), ("console", 1), ("toml", 2), ("json", 1)):
        assert sum(block.language == language for block in ALL) >= least, language


STRANGER = ROOT / "examples" / "third_party_backend"
SOURCES = sorted(path for path in (STRANGER / "src").rglob("*.py") if path.name != "__init__.py")


def test_the_page_about_strategies_is_the_strangers_package() -> None:
    """Its files, word for word and all of them but its own tests and its README."""
    shown = {block.file: block.text for block in blocks(ROOT / "docs" / "writing-a-strategy.md") if block.file}
    files = [STRANGER / "pyproject.toml", *SOURCES, STRANGER / "tests" / "test_conformance.py"]
    assert set(shown) == {str(path.relative_to(STRANGER)) for path in files}
    for name, text in shown.items():
        assert text == f"# {name}\n{(STRANGER / name).read_text(encoding='utf-8')}", f"{name} on the page is another"


def test_the_strangers_package_is_small() -> None:
    """Under 200 lines of code, without imports, comments and docstrings: what an author has to write and understand."""
    assert 100 < sum(map(_lines_of_code, SOURCES)) < 200


def _lines_of_code(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)
