"""Configuration files: right ones are read, and every wrong one gets one line that says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sidestream.config import DLOTransfer, OffloadConfig
from sidestream.errors import ConfigError, ConfigFileError

TOML = """\
# every field of it
strategy = "distributed_layer_wise"
components = ["dit", "text_encoder"]
dlo_host_registration_limit_gib = 2
[dlo_transfers]
text_encoder = "allgather"
[options]
slots = 3
"""


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_toml_and_json_give_the_same_configuration(tmp_path: Path) -> None:
    toml = OffloadConfig.from_file(write(tmp_path, "a.toml", TOML))
    assert toml.transfer_for("text_encoder") is DLOTransfer.ALLGATHER
    assert toml.options == {"slots": 3}
    assert toml.dlo_host_registration_limit_gib == 2.0
    path = write(tmp_path, "a.json", json.dumps(toml.to_mapping()))
    for source in (path, str(path), os.fspath(path)):
        assert OffloadConfig.from_source(source) == toml


@pytest.mark.parametrize("name", ["A.TOML", "ends.in.toml"])
def test_the_suffix_says_how_to_read_it(tmp_path: Path, name: str) -> None:
    config = OffloadConfig.from_source(str(write(tmp_path, name, TOML)))
    assert config.components == frozenset({"dit", "text_encoder"})


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode())
    assert OffloadConfig.from_file(path).options == {"slots": 3}


def test_a_string_is_a_file_only_by_its_suffix_or_a_separator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "layer_wise", "not read")
    assert OffloadConfig.from_source("layer_wise") == OffloadConfig("layer_wise")
    write(tmp_path, "a.toml", TOML)
    assert OffloadConfig.from_source("a.toml") == OffloadConfig.from_source("./a.toml")
    with pytest.raises(ConfigFileError, match="no such file"):
        OffloadConfig.from_source("b.toml")
    with pytest.raises(ConfigFileError, match="no such file"):
        OffloadConfig.from_source("folder/layer_wise")


BAD_FILES: list[tuple[str, bytes, str]] = [
    ("empty.toml", b"", "this file is empty"),
    ("blank.json", b" \n\t\n", "this file is empty"),
    ("bom.json", b"\xef\xbb\xbf", "this file is empty"),
    ("latin.toml", 'strategy = "caf\xe9"'.encode("latin-1"), "this file is not UTF-8: byte 0xe9 at 15"),
    ("utf16.json", '{"strategy": "none"}'.encode("utf-16"), "this file is not UTF-8"),
    ("binary.toml", bytes(range(256)), "this file is not UTF-8"),
    ("nul.toml", b"strategy = \x00", "malformed TOML at line 1, column 12"),
    ("a.toml", b'strategy = "none"\ndp_size = = 2\n', "malformed TOML at line 2, column 11: "),
    ("cut.toml", b'strategy = "none"\noptions = {', "malformed TOML at line 2, column 12: "),
    ("twice.toml", b'strategy = "a"\nstrategy = "b"\n', "malformed TOML at line 2, column "),
    ("date.toml", b'strategy = "a"\nx = 2024-02-31\n', "malformed TOML"),
    ("long.toml", b"x = " + b"9" * 5000, "malformed TOML"),
    ("deep.toml", b"x = " + b"[" * 5000, "malformed TOML"),
    ("a.json", b'{"strategy": "none",\n "dp_size": }', "malformed JSON at line 2, column 13: "),
    ("comma.json", b'{"strategy": "none",}', "malformed JSON at line 1, column "),
    ("two.json", b"{}\n{}", "malformed JSON at line 2, column 1: Extra data"),
    ("twice.json", b'{"strategy": "a", "strategy": "b"}', "the key 'strategy' stands more than once"),
    ("deeper.json", b'{"options": {"a": 1, "a": 2}}', "the key 'a' stands more than once"),
    ("nan.json", b'{"dlo_host_registration_limit_gib": NaN}', "malformed JSON: NaN is not a value of JSON"),
    ("inf.json", b'{"x": -Infinity}', "-Infinity is not a value of JSON"),
    ("long.json", b'{"x": ' + b"9" * 5000 + b"}", "malformed JSON"),
    ("deep.json", b"[" * 100_000, "malformed JSON: nested too deeply"),
    ("list.json", b'["layer_wise"]', "the whole is not a table of settings but ['layer_wise']"),
    ("text.json", b'"layer_wise"', "the whole is not a table of settings but 'layer_wise'"),
    ("null.json", b"null", "the whole is not a table of settings but None"),
    ("a.yaml", b"strategy: none", "a configuration file ends in .toml or .json"),
    ("nosuffix", b"{}", "a configuration file ends in .toml or .json"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_file_that_cannot_be_read_gets_one_line_with_its_name_and_stays_as_it_is(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigFileError) as caught:
        OffloadConfig.from_source(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert words in text
    assert "\n" not in text
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.toml", "there is no such file"),
        ("folder", "this is a directory, not a file"),
        ("folder/", "this is a directory, not a file"),
        ("file.json/inner.json", "this file cannot be read: Not a directory"),
        ("x" * 300 + ".toml", "this file cannot be read: File name too long"),
        ("nul\0.toml", "this file cannot be read"),
        ("line\nbreak.toml", "there is no such file"),
        ("pipe.toml", "this is not a regular file"),
    ],
    ids=lambda item: repr(item[:20]),
)
def test_what_is_no_readable_file_gets_one_line(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path, "file.json", "{}")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigFileError) as caught:
        OffloadConfig.from_source(f"{tmp_path}/{name}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_permission_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.toml", TOML)

    def refuse(_self: Path) -> bytes:  # the tests may run as root, who may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigFileError, match=r"a\.toml: there is no permission to read this file$"):
        OffloadConfig.from_file(path)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.toml", 'strategy = "x"\ndp_size = nan', ["dp_size: nan is not an integer"]),
        (
            "a.toml",
            'strategy = "x"\ncomponents = "dit"',
            ["components: 'dit' is not a list of strings or none"],
        ),
        ("a.toml", "# nothing but a comment", ["strategy: missing; a string is required"]),
        ("a.json", "{}", ["strategy: missing; a string is required"]),
        ("a.json", '{"strategy": null}', ["strategy: None is not a string"]),
        (
            "a.json",
            '{"strategy": "x", "dlo_host_registration_limit_gib": 1e999, "dlo_use_algather": true}',
            [
                "dlo_use_algather: unknown key; did you mean 'dlo_use_allgather'?",
                "dlo_host_registration_limit_gib: inf is not a finite number",
            ],
        ),
    ],
)
def test_wrong_values_in_a_readable_file_are_named_with_the_file(
    tmp_path: Path, name: str, content: str, lines: list[str]
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_source(path)
    assert not isinstance(caught.value, ConfigFileError)
    assert caught.value.source == str(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(caught.value.problems) == len(lines)
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert str(problem).startswith(line)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "inline JSON: malformed JSON at line 1, column 2"),
        ('  {"strategy": }', "inline JSON: malformed JSON at line 1, column 16"),
        ('{"strategy": "a", "strategy": "b"}', "stands more than once"),
        ('{"strategy": "a", "dp_size": 0}', "inline JSON: dp_size: 0 is out of bounds"),
    ],
)
def test_inline_json_is_as_strict_and_no_file(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_source(text)
    assert words in str(caught.value)
    assert not isinstance(caught.value, ConfigFileError)


@pytest.mark.parametrize("source", ["", " ", "\n"])
def test_an_empty_string_is_no_strategy(source: Any) -> None:
    if source:
        assert OffloadConfig.from_source(source).strategy == source  # its absence is the registry's to report
    else:
        with pytest.raises(ConfigError, match="strategy: '' is out of bounds"):
            OffloadConfig.from_source(source)
