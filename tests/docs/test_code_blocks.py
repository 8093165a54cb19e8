"""Every code block of the README and of the pages in docs runs, parses or compiles.

- A `python`, `toml` or `json` block whose first line is `# some/path.ext` is a file, written before anything runs.
- The other `python` blocks of a page run in one namespace, in order, in an empty folder; `python no-run` only compiles.
- A `toml` or `json` block with a `strategy` is a configuration and has to be right.
- In a `shell` block each line that starts with `sidestream` runs and has exit status 0, or the one that a comment
  behind it states (`# exit status 1`).
- In a `console` block each `$ sidestream` line prints what stands below it, `...` being anything; `$ echo $?` tells its
  exit status, 0 if it is not asked.
- Files with a `pyproject.toml` among them are a distribution, and installed.
"""

from __future__ import annotations

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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

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


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in ("toml", "json")], ids=lambda block: block.where
)
def test_data_parses_and_configurations_are_right(block: Block) -> None:
    """A configuration that is printed is one that can be used."""
    data = tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)
    if "strategy" in data:
        resolve_config(data)


def test_there_is_something_to_run() -> None:
    """The pattern that finds the blocks finds them; no page writes a language that nothing here looks at."""
    assert {"README.md", "architecture.md", "configuration.md", "model-level.md", "writing-a-strategy.md"} <= {
        page.name for page in PAGES
    }
    assert {block.language for block in ALL} <= {"", "console", "json", "python", "shell", "text", "toml"}
    assert sum(text.count("```") for text in (page.read_text(encoding="utf-8") for page in PAGES)) == 2 * len(ALL)
    for language, least in (("python", 10), ("shell", 2), ("console", 1), ("toml", 2), ("json", 1)):
        assert sum(block.language == language for block in ALL) >= least, language


def test_the_strangers_strategy_is_found_by_its_string_and_keeps_every_bit(folder: Path) -> None:
    """What the page says of its strategy, once more on two DiTs, with a failure, an edit and an odd selection."""
    import sidestream
    from sidestream.testing import toys
    from sidestream.testing.portrait import portrait

    write_files(ROOT / "docs" / "writing-a-strategy.md", folder)
    assert "one_by_one" in [info.name for info in sidestream.strategies() if info.problem is None]
    pipe, reference = toys.pipeline(second=True), toys.pipeline(second=True)
    before = portrait(pipe)
    settings = {"strategy": "one_by_one", "components": ["dit", "text_encoder", "vae"]}
    with torch.no_grad(), sidestream.offload(pipe, settings, device="cpu") as backend:
        for seed in range(2):
            assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))

        def interrupt(*args: Any) -> None:
            backend_was_inside.append(backend.report().device_bytes)
            with pytest.raises(sidestream.BackendStateError, match="inside a forward of transformer"):
                backend.disable()
            raise KeyboardInterrupt

        backend_was_inside: list[int] = []
        hook = pipe.transformer.blocks[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.transformer(torch.ones(2, 16), torch.ones(2, 16))
        hook.remove()
        assert backend_was_inside[0] > 0
        assert backend.report().device_bytes == 0
        pipe.load_state_dict(reference.state_dict())
        for model in (pipe, reference):
            model.transformer.turned.weight.data.mul_(2)
        assert torch.equal(reference(toys.prompt(), seed=5), pipe(toys.prompt(), seed=5))
        assert torch.equal(reference.vae.decode(torch.ones(2, 16)), pipe.vae.decode(torch.ones(2, 16)))
        report = backend.report()
    sizes = [sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (pipe.transformer, pipe.transformer_2)]
    assert max(sizes) <= report.peak_device_bytes < sum(sizes)
    assert report.moved_bytes > 0
    assert before == portrait(pipe)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, pipe.state_dict()[name]), name
    with pytest.raises(sidestream.UnsupportedModelError, match="image_encoder"):
        sidestream.enable_offload(pipe, {"strategy": "one_by_one", "components": ["image_encoder"]}, device="cpu")
    with sidestream.offload(pipe, "one_by_one", device="cpu"):
        with pytest.raises(sidestream.UnsupportedModelError, match="inference only"), torch.enable_grad():
            pipe.transformer(torch.ones(2, 16, requires_grad=True), torch.ones(2, 16))
        with pytest.raises(sidestream.BackendStateError, match="offloaded already"):
            sidestream.enable_offload(pipe, "model_level", device="cpu")
    assert before == portrait(pipe)
