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

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sidestream
from sidestream.api import resolve_config
from sidestream.cli import main
from sidestream.testing import toys
from sidestream.testing.portrait import portrait
from sidestream.testing.runtimes import WatchfulRuntime

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


@pytest.mark.parametrize("separate", [False, True], ids=["shared memory", "memory of its own"])
def test_the_strangers_strategy_is_found_by_its_string_and_keeps_every_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    """The page's strategy on two DiTs, a poisoned device and late copies; with a failure and an edit."""
    write_files(ROOT / "docs" / "writing-a-strategy.md", folder)
    assert "one_by_one" in [info.name for info in sidestream.strategies() if info.problem is None]
    stranger = importlib.import_module("acme_offload.backend")
    make = partial(WatchfulRuntime, lazy=True, separate=separate)
    monkeypatch.setattr(stranger, "open_runtime", make)
    pipe, reference = toys.pipeline(second=True), toys.pipeline(second=True)
    x = torch.ones(2, 16)
    before, mine = portrait(pipe), pipe.transformer.turned.weight
    settings = {"strategy": "one_by_one", "components": ["dit", "text_encoder", "vae"]}
    inside: list[int] = []
    with torch.no_grad(), sidestream.offload(pipe, settings, device="cpu") as backend:
        for seed in range(2):
            assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))

        def interrupt(*args: Any) -> None:
            assert pipe.transformer.turned.weight is not mine
            inside.append(backend.report().device_bytes)
            with pytest.raises(sidestream.BackendStateError, match="inside a forward of transformer"):
                backend.disable()
            raise KeyboardInterrupt

        hook = pipe.transformer.blocks[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.transformer(x, x)
        with pytest.raises(KeyboardInterrupt):
            pipe.transformer.blocks[1](x)
        hook.remove()
        pipe.load_state_dict(reference.state_dict())
        for model in (pipe, reference):
            model.transformer.turned.weight.data.mul_(2)
        for seed in range(2):
            assert torch.equal(reference(toys.prompt(), seed=seed), pipe(toys.prompt(), seed=seed))
        assert torch.equal(reference.vae.decode(x), pipe.vae.decode(x))
        assert pipe.transformer.turned.weight is mine
        report = backend.report()
    stays = sum(tensor.bytes for tensor in report.resident)
    assert separate == bool(stays)
    assert report.device_bytes == stays < min(inside)
    sizes = [_size(pipe.transformer), _size(pipe.transformer_2)]
    assert max(sizes) <= report.peak_device_bytes < sum(sizes)
    assert report.moved_bytes > 0
    assert backend.report().device_bytes == 0
    assert before == portrait(pipe)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, pipe.state_dict()[name]), name


def test_the_strangers_strategy_refuses_what_it_cannot_do(folder: Path) -> None:
    """A kind that is not there, gradients, a second owner, an odd tensor; small components stay."""
    write_files(ROOT / "docs" / "writing-a-strategy.md", folder)
    pipe = toys.pipeline()
    before, x = portrait(pipe), torch.ones(2, 16)
    missing = {"strategy": "one_by_one", "components": ["image_encoder"]}
    with pytest.raises(sidestream.UnsupportedModelError, match="no image_encoder"):
        sidestream.enable_offload(pipe, missing, device="cpu")
    wrong = {"strategy": "one_by_one", "options": {"keep_below_mib": -1}}
    with pytest.raises(sidestream.ConfigError, match=r"options\.keep_below_mib: -1 is out of bounds"):
        sidestream.enable_offload(pipe, wrong, device="cpu")
    with sidestream.offload(pipe, "one_by_one", device="cpu"):
        with pytest.raises(sidestream.UnsupportedModelError, match="inference only"):
            pipe.transformer(x.requires_grad_(), x)
        with pytest.raises(sidestream.BackendStateError, match="offloaded already"):
            sidestream.enable_offload(pipe, "model_level", device="cpu")
    pipe.transformer.register_buffer("table", torch.ones(1, 16).expand(4, 16), persistent=False)
    hook = pipe.transformer.blocks[1].register_forward_hook(_interrupt)
    with torch.no_grad(), sidestream.offload(pipe, "one_by_one", device="cpu") as backend:
        assert [tensor.name for tensor in backend.report().resident] == ["transformer.table"]
        with pytest.raises(KeyboardInterrupt):
            pipe.transformer.blocks[1](torch.ones(2, 16))
        assert backend.report().device_bytes > 0
    assert backend.report().device_bytes == 0
    hook.remove()
    del pipe.transformer.table
    assert before == portrait(pipe)
    keep = {"strategy": "one_by_one", "options": {"keep_below_mib": 1}}
    with sidestream.offload(pipe, keep, device="cpu") as backend:
        pipe(toys.prompt())
        assert backend.report().moved_bytes == 0
        assert {tensor.name for tensor in backend.report().resident} == {"text_encoder", "transformer", "vae"}
    assert before == portrait(pipe)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _size(module: torch.nn.Module | None) -> int:
    assert module is not None
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
