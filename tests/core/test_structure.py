"""The strict converter: nothing coerced or ignored, every problem with its path, construction checked too."""

from __future__ import annotations

import enum
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import ConfigError, PluginError, Problem
from sidestream.structure import FrozenMapping, check, describe, option, options_class, structure, unstructure

if TYPE_CHECKING:
    from decimal import Decimal


class Mode(str, enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@options_class
class Pool:
    slots: int = option(default=2, minimum=2, maximum=8, help="device buffers")
    budget_gib: float | None = option(default=None, minimum=0, exclusive_minimum=True, help="GiB to pin")


@options_class
class Options:
    name: str = option(help="required")
    pin: bool = option(default=True, help="page-lock")
    depth: int = option(default=1, minimum=0, help="blocks fetched early")
    ratio: float = option(default=0.5, minimum=0, maximum=1, exclusive_maximum=True, help="share")
    limit: int | None = option(default=None, help="none: no limit")
    policy: str = option(default="fallback", choices=("fallback", "fail"), help="when a pin fails")
    mode: Mode = option(default=Mode.FAST, help="")
    level: Level = option(default=Level.LOW, help="")
    copy: Literal["async", "sync"] = option(default="async", help="")
    kinds: frozenset[str] = option(default=frozenset({"dit"}), choices=("dit", "vae"), minimum=1, help="")
    sizes: tuple[int, ...] = option(default=(), help="")
    pool: Pool = option(factory=Pool, help="")
    pools: Mapping[str, Pool] = option(factory=dict, help="")
    spill: Path | None = option(default=None, help="")
    extra: Any = option(default=None, help="")


@options_class
class Ranks:
    group_in: int = option(default=1, minimum=1, help="")
    group_size: int = option(default=1, minimum=1, help="")

    def validate(self) -> Iterator[Problem]:
        if self.group_in > self.group_size:
            yield Problem("group_in", f"{self.group_in} is more than group_size, {self.group_size}", self.group_in)


@options_class
class Node:
    children: tuple[Node, ...] = option(default=(), help="")


def error_of(call: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


def problems_of(call: Callable[[], object]) -> tuple[Problem, ...]:
    return error_of(call).problems


WRONG = [
    # key, value, path of the problem, words of its message
    ("pin", "false", "pin", "'false' is not a boolean (true or false)"),
    ("pin", "0", "pin", "'0' is not a boolean"),
    ("pin", "no", "pin", "'no' is not a boolean"),
    ("pin", 0, "pin", "0 is not a boolean"),
    ("pin", 1, "pin", "1 is not a boolean"),
    ("pin", None, "pin", "None is not a boolean"),
    ("name", None, "name", "None is not a string"),
    ("name", 3, "name", "3 is not a string"),
    ("name", b"x", "name", "b'x' is not a string"),
    ("name", ["x"], "name", "['x'] is not a string"),
    ("depth", 2.9, "depth", "2.9 is not an integer"),
    ("depth", 2.0, "depth", "2.0 is not an integer"),
    ("depth", True, "depth", "True is not an integer"),
    ("depth", "2", "depth", "'2' is not an integer"),
    ("depth", None, "depth", "None is not an integer"),
    ("depth", -1, "depth", "-1 is out of bounds: at least 0"),
    ("limit", "none", "limit", "'none' is not an integer or none"),
    ("limit", False, "limit", "False is not an integer or none"),
    ("ratio", float("nan"), "ratio", "nan is not a finite number"),
    ("ratio", float("inf"), "ratio", "inf is not a finite number"),
    ("ratio", 10**400, "ratio", "is not a finite number"),
    ("ratio", True, "ratio", "True is not a finite number"),
    ("ratio", "0.5", "ratio", "'0.5' is not a finite number"),
    ("ratio", 1, "ratio", "1 is out of bounds: at least 0, below 1"),
    ("policy", "fial", "policy", "'fial' is not one of fallback, fail; did you mean 'fail'?"),
    ("policy", 3, "policy", "3 is not one of fallback, fail"),
    ("policy", None, "policy", "None is not one of fallback, fail"),
    ("mode", "fats", "mode", "'fats' is not one of fast, slow; did you mean 'fast'?"),
    ("mode", 0, "mode", "0 is not one of fast, slow"),
    ("level", "1", "level", "'1' is not one of 1, 2"),
    ("level", True, "level", "True is not one of 1, 2"),
    ("copy", "asink", "copy", "'asink' is not one of async, sync"),
    ("copy", None, "copy", "None is not one of async, sync"),
    ("kinds", "dit", "kinds", "'dit' is not a list of strings"),
    ("kinds", {"dit": 1}, "kinds", "{'dit': 1} is not a list of strings"),
    ("kinds", None, "kinds", "None is not a list of strings"),
    ("kinds", [], "kinds", "[] is out of bounds: length at least 1"),
    ("kinds", ["dit", "vea"], "kinds[1]", "'vea' is not one of dit, vae; did you mean 'vae'?"),
    ("kinds", ["dit", 4], "kinds[1]", "4 is not one of dit, vae"),
    ("kinds", [["dit"]], "kinds[0]", "['dit'] is not one of dit, vae"),
    ("sizes", "123", "sizes", "'123' is not a list of integers"),
    ("sizes", 5, "sizes", "5 is not a list of integers"),
    ("sizes", [1, 2.5], "sizes[1]", "2.5 is not an integer"),
    ("sizes", [1, None], "sizes[1]", "None is not an integer"),
    ("pool", "big", "pool", "'big' is not a table (valid keys: slots, budget_gib)"),
    ("pool", [], "pool", "[] is not a table"),
    ("pool", 42, "pool", "42 is not a table"),
    ("pool", None, "pool", "None is not a table"),
    ("pool", {"slots": 1}, "pool.slots", "1 is out of bounds: at least 2, at most 8"),
    ("pool", {"slots": 9}, "pool.slots", "9 is out of bounds"),
    ("pool", {"slot": 3}, "pool.slot", "unknown key; did you mean 'slots'? (valid keys: slots, budget_gib)"),
    ("pool", {3: 3}, "pool.3", "unknown key"),
    ("pool", {"budget_gib": 0}, "pool.budget_gib", "0 is out of bounds: above 0"),
    ("pools", [("a", {})], "pools", "is not a table"),
    ("pools", {"a": {"slots": "two"}}, "pools.a.slots", "'two' is not an integer"),
    ("pools", {"a.b": {"slots": "two"}}, "pools.'a.b'.slots", "'two' is not an integer"),
    ("pools", {1: {}}, "pools.1", "1 is not a string"),
    ("spill", 7, "spill", "7 is not a path or none"),
]


@pytest.mark.parametrize(("key", "value", "path", "words"), WRONG, ids=lambda item: str(item)[:30])
def test_a_wrong_value_is_refused_the_same_way_whether_structured_or_constructed(
    key: str, value: object, path: str, words: str
) -> None:
    """Coerced values, and checks that construction skips.

    python-attrs/cattrs#294, python-attrs/cattrs#316, python-attrs/cattrs#601.
    """
    mapping: Any = {"name": "n", key: value}
    structured = problems_of(lambda: structure(Options, mapping))
    constructed = problems_of(lambda: Options(**mapping))
    assert [(p.path, p.message) for p in structured] == [(p.path, p.message) for p in constructed]
    (problem,) = structured
    assert problem.path == path
    assert words in problem.message
    assert "\n" not in str(problem)


@pytest.mark.parametrize("value", ["layerwise", [], 42, None, 1.5, {"name"}, b"", object(), Options])
def test_what_is_no_mapping_never_becomes_an_all_default_configuration(value: object) -> None:
    """python-attrs/cattrs#101: a bare string where a mapping is expected gave a configuration of defaults."""
    (problem,) = problems_of(lambda: structure(Pool, value, path="options"))
    assert problem.path == "options"
    assert "is not a table (valid keys: slots, budget_gib)" in problem.message


def test_an_instance_of_the_class_is_returned_as_it_is() -> None:
    pool = Pool(slots=3)
    assert structure(Pool, pool) is pool
    assert Options(name="n", pool=pool).pool is pool


def test_a_misspelt_key_is_reported_with_the_near_miss_and_the_valid_keys() -> None:
    """python-attrs/cattrs#101: a misspelt option was ignored."""
    (problem,) = problems_of(lambda: structure(Options, {"name": "n", "deptth": 2}))
    assert problem.path == "deptth"
    assert problem.value == 2
    assert "did you mean 'depth'?" in problem.message
    assert "valid keys: name, pin, depth" in problem.message


def test_all_problems_come_at_once_with_their_paths() -> None:
    wrong = {
        "pinn": True,
        "depth": "x",
        "pool": {"slots": 1, "bugdet_gib": 2},
        "kinds": ["dit", "vea", 3],
        "pools": {"a": {"slots": 0}, "b": 5},
        "policy": "x",
    }
    error = error_of(lambda: structure(Options, wrong, path="options"))
    assert [problem.path for problem in error.problems] == [
        "options.pinn",
        "options.name",
        "options.depth",
        "options.policy",
        "options.kinds[1]",
        "options.kinds[2]",
        "options.pool.bugdet_gib",
        "options.pool.slots",
        "options.pools.a.slots",
        "options.pools.b",
    ]
    assert error.problems[1].message == "missing; a string is required"
    assert len(str(error).splitlines()) == 11


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("ratio", 0, 0.0),
        ("limit", None, None),
        ("mode", "slow", Mode.SLOW),
        ("mode", Mode.SLOW, Mode.SLOW),
        ("level", 2, Level.HIGH),
        ("copy", "sync", "sync"),
        ("kinds", ["vae", "dit"], frozenset({"dit", "vae"})),
        ("kinds", ("vae",), frozenset({"vae"})),
        ("kinds", {"vae"}, frozenset({"vae"})),
        ("sizes", [1, 2], (1, 2)),
        ("pool", {"slots": 4}, Pool(slots=4)),
        ("pools", {"a": {}}, {"a": Pool()}),
        ("spill", "/tmp/x", Path("/tmp/x")),
        ("name", Mode.FAST, "fast"),
        ("extra", {"a": (1, {"b": Mode.FAST})}, {"a": [1, {"b": "fast"}]}),
    ],
)
def test_a_right_value_is_kept_in_the_form_of_its_type(key: str, given: object, kept: object) -> None:
    mapping: Any = {"name": "n", key: given}
    structured, constructed = structure(Options, mapping), Options(**mapping)
    assert structured == constructed
    assert getattr(structured, key) == kept
    assert type(getattr(constructed, key)) is type(getattr(structured, key))
    if isinstance(kept, (int, float, str, frozenset, tuple)):
        assert type(getattr(structured, key)) is type(kept)


def test_a_check_of_several_fields_is_made_both_ways_and_keeps_its_path() -> None:
    """vllm-project/vllm#29941, sgl-project/sglang#34736: contradictory options were accepted."""
    constructed = problems_of(lambda: Ranks(group_in=4, group_size=2))
    assert constructed == problems_of(lambda: structure(Ranks, {"group_in": 4, "group_size": 2}))
    assert str(constructed[0]) == "group_in: 4 is more than group_size, 2"


def test_the_words_of_a_validator_are_kept_and_all_validators_are_heard() -> None:
    def even(_instance: object, _field: object, value: int) -> None:
        if value % 2:
            raise ValueError("slots come in pairs")

    @options_class
    class Paired:
        slots: int = attrs.field(default=2, validator=even)
        depth: int = attrs.field(default=1, validator=attrs.validators.ge(1))
        name: str = option(default="", help="")

    mapping: Any = {"slots": 3, "depth": 0, "name": 1}
    for call in (lambda: structure(Paired, mapping), lambda: Paired(**mapping)):
        problems = problems_of(call)
        assert [problem.path for problem in problems] == ["name", "slots", "depth"]
        assert problems[1].message == "slots come in pairs"
        assert "must be >= 1" in problems[2].message


def test_a_plain_attrs_class_can_be_structured_and_its_own_refusal_is_kept() -> None:
    @attrs.frozen
    class Plain:
        size: int = attrs.field(validator=attrs.validators.instance_of(int))

        def __attrs_post_init__(self) -> None:
            if self.size == 13:
                raise ValueError("13 is unlucky")

    assert structure(Plain, {"size": 3}) == Plain(3)
    (problem,) = problems_of(lambda: structure(Plain, {"size": 13}, path="options"))
    assert str(problem) == "options: 13 is unlucky"


def test_check_serves_any_attrs_class() -> None:
    @attrs.frozen
    class Own:
        slots: int

        def __attrs_post_init__(self) -> None:
            check(self)

    assert problems_of(lambda: Own("two")) == problems_of(lambda: structure(Own, {"slots": "two"}))  # type: ignore[arg-type]


def test_an_annotation_that_is_imported_for_checking_only_is_explained() -> None:
    @options_class
    class Unresolved:
        size: Decimal = option(default=1, help="")

    with pytest.raises(PluginError, match=r"Unresolved: .*'Decimal' is not defined.*TYPE_CHECKING"):
        Unresolved()


def test_a_type_that_cannot_be_checked_is_named() -> None:
    unresolved = attrs.make_class("Odd", {"size": attrs.field(type=complex, default=1j)}, frozen=True)
    with pytest.raises(PluginError, match=r"Odd\.size: values of type complex cannot be checked"):
        structure(unresolved, {})
    inside = attrs.make_class("Inside", {"sizes": attrs.field(type=tuple[complex, ...], default=())})
    with pytest.raises(PluginError, match=r"Inside\.sizes: values of type complex cannot be checked"):
        describe(inside)
    untyped = attrs.make_class("Untyped", {"size": attrs.field(default=1)}, frozen=True)
    with pytest.raises(PluginError, match=r"Untyped\.size: the field has no type"):
        structure(untyped, {})


def test_an_options_class_is_frozen_keyword_only_and_without_a_post_init_of_its_own() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Pool().slots = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Pool(3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="validate"):

        @options_class
        class _Wrong:
            def __attrs_post_init__(self) -> None: ...


def test_options_of_a_base_class_are_inherited_with_their_checks() -> None:
    @options_class
    class Wider(Pool):
        extra: int = option(default=0, minimum=0, help="")

    problems = problems_of(lambda: Wider(slots=1, extra=-1))
    assert [problem.path for problem in problems] == ["slots", "extra"]


def test_a_mapping_given_is_copied_and_what_is_kept_cannot_be_changed() -> None:
    pools: Any = {"a": {"slots": 3}}
    options = Options(name="n", pools=pools, extra=pools)
    pools["a"]["slots"] = 7
    assert options.pools["a"].slots == 3
    assert options.extra == {"a": {"slots": 3}}
    with pytest.raises(TypeError):
        options.pools["b"] = Pool()  # type: ignore[index]


def test_a_frozen_mapping_pickles_and_equals_a_dict() -> None:
    mapping = FrozenMapping({"a": 1})
    assert pickle.loads(pickle.dumps(mapping)) == mapping == {"a": 1}
    assert repr(mapping) == "{'a': 1}"


def test_the_items_of_a_set_are_reported_in_one_order() -> None:
    problems = problems_of(lambda: Options(name="n", kinds=frozenset({"c", "a", "b"})))
    assert [(problem.path, problem.value) for problem in problems] == [
        ("kinds[0]", "a"),
        ("kinds[1]", "b"),
        ("kinds[2]", "c"),
    ]


def test_a_huge_or_many_lined_value_gives_one_short_line() -> None:
    class Loud:
        def __repr__(self) -> str:
            return "a\nb" * 1000

    for value in ("x" * 10_000, list(range(10_000)), Loud()):
        (problem,) = problems_of(lambda value=value: Options(name="n", depth=value))  # type: ignore[misc]
        assert len(str(problem)) < 200
        assert "\n" not in str(problem)


ANY_OPTIONS = st.builds(
    Options,
    name=st.text(max_size=5),
    pin=st.booleans(),
    depth=st.integers(min_value=0),
    ratio=st.floats(min_value=0, max_value=0.9),
    limit=st.none() | st.integers(),
    policy=st.sampled_from(["fallback", "fail"]),
    mode=st.sampled_from(Mode),
    level=st.sampled_from(Level),
    copy=st.sampled_from(["async", "sync"]),
    kinds=st.sets(st.sampled_from(["dit", "vae"]), min_size=1),
    sizes=st.lists(st.integers(), max_size=3),
    pool=st.builds(Pool, slots=st.integers(2, 8)),
    pools=st.dictionaries(st.text(max_size=3), st.builds(Pool), max_size=2),
    spill=st.none() | st.just(Path("/spill")),
    extra=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=5,
    ),
)


@settings(max_examples=60, deadline=None)
@given(ANY_OPTIONS)
def test_unstructure_then_structure_is_the_identity_through_json_and_pickle(options: Options) -> None:
    plain = json.loads(json.dumps(unstructure(options)))
    assert structure(Options, plain) == options
    assert pickle.loads(pickle.dumps(options)) == options


def test_what_has_no_plain_form_is_refused_with_its_path() -> None:
    for extra in (object(), {"a": [object()]}, {1: "a key that JSON would turn into text"}):
        options = Options(name="n", extra=extra)
        (problem,) = problems_of(lambda options=options: unstructure(options))  # type: ignore[misc]
        assert problem.path == "extra"
        assert "has no plain form" in problem.message


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    (problem,) = problems_of(lambda: Options(name="n", extra=endless))
    assert str(problem).startswith("extra: ")
    assert "nested too deeply" in problem.message


def test_an_option_may_be_called_like_the_check_of_several() -> None:
    @options_class
    class Named:
        validate: bool = option(default=True, help="")

    assert Named(validate=False) == structure(Named, {"validate": False})


def test_classes_may_hold_each_other() -> None:
    assert structure(Node, {"children": [{"children": []}]}) == Node(children=(Node(),))
    (problem,) = problems_of(lambda: structure(Node, {"children": [{"children": [3]}]}))
    assert problem.path == "children[0].children[0]"


def test_describe_says_type_default_bounds_and_meaning() -> None:
    infos = {info.name: info for info in describe(Options)}
    assert [info.name for info in describe(Pool)] == ["slots", "budget_gib"]
    assert infos["name"].required
    assert not infos["pin"].required
    rows = {name: (info.type, info.default, info.bounds) for name, info in infos.items()}
    assert rows == {
        "name": ("string", None, ""),
        "pin": ("boolean", True, ""),
        "depth": ("integer", 1, "at least 0"),
        "ratio": ("number", 0.5, "at least 0, below 1"),
        "limit": ("integer or none", None, ""),
        "policy": ("one of fallback, fail", "fallback", ""),
        "mode": ("one of fast, slow", "fast", ""),
        "level": ("one of 1, 2", 1, ""),
        "copy": ("one of async, sync", "async", ""),
        "kinds": ("list of strings", ["dit"], "length at least 1; each one of dit, vae"),
        "sizes": ("list of integers", [], ""),
        "pool": ("table", {"slots": 2, "budget_gib": None}, ""),
        "pools": ("table of tables", {}, ""),
        "spill": ("path or none", None, ""),
        "extra": ("anything", None, ""),
    }
    assert infos["depth"].help == "blocks fetched early"
    for info in infos.values():
        json.dumps(attrs.asdict(info))
        assert re.fullmatch(r"[^\n]*", info.type)
