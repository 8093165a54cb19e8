"""From plain mappings to frozen attrs classes and back: strictly, and with every problem at once.

Nothing is coerced that a person could have meant otherwise: `"false"` is no boolean, `1.9` and `True` are no
integers, a string is no list. Each fault is a :class:`Problem` with the path of the value, and all faults of
one input come in one :class:`ConfigError`. Constructing a class directly checks the same, by :func:`check`.

A plugin declares its options with :func:`options_class` and :func:`option`:

.. code-block:: python

    @sidestream.options_class
    class Options:
        slots: int = sidestream.option(default=2, minimum=2, help="device buffers that the blocks share")
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs
import cattrs

from sidestream.errors import ConfigError, PluginError, Problem

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """Stand in for the type checker's marker, which Python 3.10 does not have."""
        return lambda function: function


T = TypeVar("T")
V = TypeVar("V")

NoneType = type(None)

_CONSTRAINTS = "sidestream.constraints"
_VALIDATOR = "sidestream.validator"

_SCALARS = types.MappingProxyType(
    {bool: "boolean", int: "integer", float: "number", str: "string", Path: "path", NoneType: "none"}
)
_COLLECTIONS: Mapping[Any, Callable[[Iterable[Any]], Any]] = types.MappingProxyType(
    {tuple: tuple, Sequence: tuple, list: list, frozenset: frozenset, AbstractSet: frozenset, set: set}
)
_MAPPINGS = (Mapping, MutableMapping, dict)


class FrozenMapping(Mapping[str, V]):
    """A mapping that cannot be changed and, unlike the standard library's read-only view, pickles."""

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, V]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> V:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return repr(self._data)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (self._data,)


# --- Declaring options --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Constraints:
    """What an option means, and which values of its type are allowed.

    The bounds hold for a number itself, and for the length of a string, list or table. `choices` holds for a
    scalar itself, for each item of a list and each key of a table. None is never held against them.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    choices: tuple[Any, ...] | None = None

    def bounds(self) -> str:
        """Return the bounds in words (`at least 1, at most 8`); empty if there are none."""
        words = []
        if self.minimum is not None:
            words.append(f"{'above' if self.exclusive_minimum else 'at least'} {self.minimum}")
        if self.maximum is not None:
            words.append(f"{'below' if self.exclusive_maximum else 'at most'} {self.maximum}")
        return ", ".join(words)

    def admits(self, size: float) -> bool:
        """Return whether `size` is within the bounds."""
        low, high = self.minimum, self.maximum
        return (low is None or size > low or (size == low and not self.exclusive_minimum)) and (
            high is None or size < high or (size == high and not self.exclusive_maximum)
        )


def constraints(
    *,
    help: str,  # noqa: A002 - the word that declarations of options use everywhere
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive_minimum: bool = False,
    exclusive_maximum: bool = False,
    choices: Iterable[Any] | None = None,
) -> dict[str, Any]:
    """Return the metadata by which a field made with `attrs.field` carries its :class:`Constraints`."""
    return {
        _CONSTRAINTS: Constraints(
            help=help,
            minimum=minimum,
            maximum=maximum,
            exclusive_minimum=exclusive_minimum,
            exclusive_maximum=exclusive_maximum,
            choices=None if choices is None else tuple(choices),
        )
    }


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive_minimum: bool = False,
    exclusive_maximum: bool = False,
    choices: Iterable[Any] | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare one option of an :func:`options_class`; without `default` and `factory` it is required.

    `help` is one line for `sidestream show`, with the unit if there is one. `minimum` and `maximum` bound a
    number, or the length of a string, list or table. `choices` are the allowed values of a scalar, of each
    item of a list, or of each key of a table.
    """
    metadata = constraints(
        help=help,
        minimum=minimum,
        maximum=maximum,
        exclusive_minimum=exclusive_minimum,
        exclusive_maximum=exclusive_maximum,
        choices=choices,
    )
    return attrs.field(default=default, factory=factory, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, attrs.field))
def options_class(cls: type[T]) -> type[T]:
    """Make `cls` a frozen attrs class, keyword-only, whose construction checks types, bounds and choices.

    A method `validate(self) -> Iterable[Problem]` is called afterwards, if there is one, for what concerns
    several options at once. All problems come in one :class:`ConfigError`. A value is kept in the form that
    its type names: a list given for a `frozenset` becomes one, a string for an enumeration its member.
    """
    if "__attrs_post_init__" in cls.__dict__:
        raise TypeError(f"{cls.__qualname__}: define validate() and not __attrs_post_init__()")
    cls.__attrs_post_init__ = check  # type: ignore[attr-defined]
    return attrs.frozen(cls, kw_only=True, field_transformer=_adopt)


def _adopt(_cls: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    # attrs would stop at the first validator that raises; from the metadata, `check` can run them all.
    return [
        field.evolve(kw_only=True, validator=None, metadata={**field.metadata, _VALIDATOR: field.validator})
        if field.validator is not None
        else field.evolve(kw_only=True)
        for field in fields
    ]


# --- Words --------------------------------------------------------------------------------------------------


def show(value: Any) -> str:
    """Return `value` for a message: on one line, and short."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 60
    return " ".join(shortener.repr(value).split())


def suggest(word: object, allowed: Iterable[object]) -> str:
    """Return `; did you mean 'x'?` for the allowed word nearest to `word`, or an empty string."""
    matches = difflib.get_close_matches(str(word), [str(candidate) for candidate in allowed], n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def join(path: str, *more: str) -> str:
    """Return the path of what is at `more` under `path`; an item is spelt `[0]`; any part may be empty."""
    for part in more:
        path += f".{part}" if path and part and not part.startswith("[") else part
    return path


def type_text(kind: Any) -> str:
    """Return a type in words: `integer`, `number or none`, `list of strings`, `one of fallback, fail`."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return "anything"
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind is attrs.AttrsInstance:
        return "options object"
    if origin is Literal:
        return _one_of(args)
    if _is_union(kind):
        none_last = sorted(args, key=lambda member: member is NoneType)
        return " or ".join(type_text(member) for member in none_last)
    if origin in _COLLECTIONS:
        return "list" + _each(args[0] if args else Any)
    if origin in _MAPPINGS:
        return "table" + _each(args[1] if args else Any)
    if _is_enum(kind):
        return _one_of(member.value for member in kind)
    return "table" if _is_model(kind) else getattr(kind, "__qualname__", str(kind))


def _one_of(values: Iterable[Any]) -> str:
    return f"one of {', '.join(str(value) for value in values)}"


def _each(kind: Any) -> str:
    text = type_text(kind)
    if kind is Any:
        return ""
    return f" (each {text})" if " " in text else f" of {text}s"


def _phrase(text: str) -> str:
    """Put the article before the name of a type."""
    if text.split()[0] in ("one", "anything", "none"):
        return text
    if text.startswith("number"):
        return f"a finite {text}"
    article = "an" if text[0] in "aeiou" else "a"
    return f"{article} {text}" + (" (true or false)" if text.startswith("boolean") else "")


def _wrong(value: Any, kind: Any) -> ConfigError:
    allowed: tuple[Any, ...] = ()
    if _is_enum(kind):
        allowed = tuple(member.value for member in kind)
    elif get_origin(kind) is Literal:
        allowed = get_args(kind)
    message = f"{show(value)} is not {_phrase(type_text(kind))}{suggest(value, allowed)}"
    return ConfigError([Problem("", message, value)])


def _under(path: str, problems: Iterable[Problem]) -> list[Problem]:
    return [Problem(join(path, problem.path), problem.message, problem.value) for problem in problems]


def _key_path(key: Any) -> str:
    """Spell a key as a part of a path, so that an odd one cannot be read as several."""
    return key if isinstance(key, str) and re.fullmatch(r"[\w-]+", key) else show(key)


def _words(error: Exception) -> str:
    """Return what an exception says, on one line; some of attrs' carry more arguments than their text."""
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(text.split()) or type(error).__name__


# --- One hook for each kind of type -------------------------------------------------------------------------

Hook = Callable[[Any, Any], Any]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and attrs.has(kind)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _refuse(kind: Any) -> Hook:
    raise PluginError(
        f"values of type {getattr(kind, '__qualname__', kind)} cannot be checked; use bool, int, float, str, "
        "Path, an Enum, a Literal, an attrs class, Any, or tuples, frozensets, mappings and unions of these"
    )


def _class(value: Any, kind: Any) -> Any:
    """Take a value of a builtin class, or of an enumeration: in `class E(str, Enum)` cattrs sees `str`."""
    if _is_enum(kind):
        return _member(value, kind)
    if kind not in _SCALARS:
        return _refuse(kind)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    if kind is str and isinstance(value, str):
        # The text itself: a member of a string enumeration would be printed by its member's name later.
        return str.__str__(value)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise _wrong(value, kind)


def _none(value: Any, kind: Any) -> None:
    if value is not None:
        raise _wrong(value, kind)


def _member(value: Any, kind: Any) -> Any:
    for member in kind:
        if value is member or (type(value) is type(member.value) and value == member.value):
            return member
    raise _wrong(value, kind)


def _literal(value: Any, kind: Any) -> Any:
    for candidate in get_args(kind):
        # 1 == True, hence the look at the types; a member of a string enumeration is as good as its text.
        same_type = type(value) is type(candidate) or (isinstance(value, str) and isinstance(candidate, str))
        if same_type and value == candidate:
            return candidate
    raise _wrong(value, kind)


def _anything(value: Any, _kind: Any) -> Any:
    try:
        return _plain(value, lambda other: other)
    except RecursionError:
        raise ConfigError([Problem("", f"{show(value)} is nested too deeply, or in itself", value)]) from None


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, type) and attrs.has(type(value)):
        return value
    raise _wrong(value, kind)


def _union(kind: Any, converter: cattrs.BaseConverter) -> Hook:
    hooks = {member: converter.get_structure_hook(member) for member in get_args(kind)}

    def hook(value: Any, _kind: Any) -> Any:
        errors = []
        for member, take in hooks.items():
            try:
                return take(value, member)
            except ConfigError as error:
                errors.append(error)
        # A member that got as far as looking inside the value knows more than "is not a table or none".
        deep = [error for error in errors if any(problem.path for problem in error.problems)]
        raise (deep or [_wrong(value, kind)])[0]

    return hook


def _collection(kind: Any, converter: cattrs.BaseConverter) -> Hook:
    args = get_args(kind)
    origin = get_origin(kind) or kind
    if origin is tuple and args and args[1:] != (...,):
        return _refuse(kind)
    make, item_kind = _COLLECTIONS[origin], args[0] if args else Any
    take = converter.get_structure_hook(item_kind)

    def hook(value: Any, _kind: Any) -> Any:
        if not _is_listlike(value):
            raise _wrong(value, kind)
        items, problems = [], []
        for index, item in enumerate(_ordered(value)):
            try:
                items.append(take(item, item_kind))
            except ConfigError as error:
                problems += _under(f"[{index}]", error.problems)
        if problems:
            raise ConfigError(problems)
        try:
            return make(items)
        except TypeError as error:  # an unhashable item of a set of anything
            raise ConfigError([Problem("", f"{show(value)}: {_words(error)}", value)]) from None

    return hook


def _mapping(kind: Any, converter: cattrs.BaseConverter) -> Hook:
    key_kind, item_kind = get_args(kind) or (str, Any)
    take_key, take = converter.get_structure_hook(key_kind), converter.get_structure_hook(item_kind)
    make = FrozenMapping if (get_origin(kind) or kind) is Mapping else dict

    def hook(value: Any, _kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, kind)
        items, problems = {}, []
        for key, item in value.items():
            try:
                name = take_key(key, key_kind)
            except ConfigError as error:
                problems += [Problem(_key_path(key), f"key {found.message}", key) for found in error.problems]
                continue
            try:
                items[name] = take(item, item_kind)
            except ConfigError as error:
                problems += _under(_key_path(key), error.problems)
        if problems:
            raise ConfigError(problems)
        return make(items)

    return hook


def _is_listlike(value: Any) -> bool:
    return isinstance(value, (list, tuple, AbstractSet))


def _ordered(value: Iterable[Any]) -> list[Any]:
    """Return the items in an order that does not change from run to run."""
    return sorted(value, key=repr) if isinstance(value, AbstractSet) else list(value)


@attrs.frozen(kw_only=True)
class _Field:
    """One field of a model, with what is needed to take a value for it. `key` is its name in a mapping."""

    attribute: attrs.Attribute[Any]
    key: str
    kind: Any
    hook: Hook
    constraints: Constraints

    def take(self, value: Any) -> Any:
        """Return `value` in the form that the field's type names; :class:`ConfigError` has all problems."""
        problems = self._choice_problems(value)
        seen = {problem.path for problem in problems}
        try:
            taken = self.hook(value, self.kind)
        except ConfigError as error:
            raise ConfigError([*problems, *(p for p in error.problems if p.path not in seen)]) from None
        if taken is not None and self.constraints.bounds():
            size = len(taken) if hasattr(taken, "__len__") else taken
            if not self.constraints.admits(size):
                problems.append(Problem("", f"{show(value)} is out of bounds: {self.bounds()}", value))
        if problems:
            raise ConfigError(problems)
        return taken

    def _choice_problems(self, value: Any) -> list[Problem]:
        """Hold what was given against the choices. What is of another kind altogether is left to the hook."""
        if self.constraints.choices is None or (value is None and NoneType in get_args(self.kind)):
            return []
        if self._is_made_of(_MAPPINGS):
            entries = [(_key_path(key), key) for key in value] if isinstance(value, Mapping) else []
        elif self._is_made_of(_COLLECTIONS):
            items = _ordered(value) if _is_listlike(value) else []
            entries = [(f"[{index}]", item) for index, item in enumerate(items)]
        else:
            entries = [("", value)]
        choices = self.constraints.choices
        return [
            Problem(path, f"{show(entry)} is not {self._choices_text(path)}{suggest(entry, choices)}", entry)
            for path, entry in entries
            # Only what can equal a choice is compared: an array, say, would answer for each of its numbers.
            if not isinstance(entry, (str, int, float, Enum)) or entry not in choices
        ]

    def _choices_text(self, path: str = "") -> str:
        none = " or none" if not path and NoneType in get_args(self.kind) else ""
        return _one_of(self.constraints.choices or ()) + none

    def _is_made_of(self, origins: Iterable[Any]) -> bool:
        members = get_args(self.kind) if _is_union(self.kind) else (self.kind,)
        return any((get_origin(kind) or kind) in origins for kind in members)

    def default(self) -> Any:
        """Return a fresh default, or `attrs.NOTHING`."""
        default = self.attribute.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            factory = cast(Any, default)
            return attrs.NOTHING if factory.takes_self else factory.factory()
        return default

    def text(self) -> str:
        """Return what the field takes, in words."""
        many = self._is_made_of(_COLLECTIONS) or self._is_made_of(_MAPPINGS)
        return type_text(self.kind) if self.constraints.choices is None or many else self._choices_text()

    def bounds(self) -> str:
        """Return which values of its type it takes, in words."""
        words = [self.constraints.bounds()] if self.constraints.bounds() else []
        if words and not self._is_made_of((int, float)):
            words[0] = f"length {words[0]}"
        if self.constraints.choices is not None and self._is_made_of(_COLLECTIONS):
            words.append(f"each {_one_of(self.constraints.choices)}")
        if self.constraints.choices is not None and self._is_made_of(_MAPPINGS):
            words.append(f"each key {_one_of(self.constraints.choices)}")
        return "; ".join(words)


class _Model:
    """The hook of one attrs class. Types are resolved at first use, so that classes may name each other."""

    def __init__(self, cls: type[Any], converter: cattrs.BaseConverter) -> None:
        self._cls = cls
        self._converter = converter

    @cached_property
    def fields(self) -> tuple[_Field, ...]:
        name = self._cls.__qualname__
        try:
            kinds = get_type_hints(self._cls)
        except Exception as error:
            raise PluginError(
                f"{name}: the type of a field cannot be resolved ({_words(error)}); import what the "
                "annotations name at run time, outside `if TYPE_CHECKING:`, and at the top of the module",
                cause=error,
            ) from error
        fields = []
        for attribute in attrs.fields(self._cls):
            if not attribute.init:
                continue
            kind: Any = kinds.get(attribute.name, attribute.type)
            if kind is None:
                raise PluginError(f"{name}.{attribute.name}: the field has no type")
            try:
                hook = self._converter.get_structure_hook(kind)
            except PluginError as error:
                raise PluginError(f"{name}.{attribute.name}: {error}") from None
            fields.append(
                _Field(
                    attribute=attribute,
                    key=attribute.alias or attribute.name,
                    kind=kind,
                    hook=hook,
                    constraints=attribute.metadata.get(_CONSTRAINTS) or Constraints(help=""),
                )
            )
        return tuple(fields)

    def __call__(self, value: Any, _kind: Any) -> Any:
        if isinstance(value, self._cls):
            return value
        by_key = {field.key: field for field in self.fields}
        if not isinstance(value, Mapping):
            keys = ", ".join(by_key) or "none"
            raise ConfigError([Problem("", f"{show(value)} is not a table (valid keys: {keys})", value)])
        problems = [
            Problem(
                _key_path(key),
                f"unknown key{suggest(key, by_key)} (valid keys: {', '.join(by_key) or 'none'})",
                value[key],
            )
            for key in value
            if key not in by_key
        ]
        problems += [
            Problem(key, f"missing; {_phrase(field.text())} is required")
            for key, field in by_key.items()
            if key not in value and field.attribute.default is attrs.NOTHING
        ]
        given = {field.attribute.name: value[key] for key, field in by_key.items() if key in value}
        # Validators want an object to look at. This one is thrown away; the real one is constructed below.
        taken, wrong = self.examine(object.__new__(self._cls), given)
        problems += wrong
        if problems:
            raise ConfigError(problems)
        try:
            return self._cls(**{key: taken[field.attribute.name] for key, field in by_key.items() if key in value})
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError([Problem("", _words(error), value)]) from error

    def examine(self, candidate: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Take the given values into `candidate`; return those that are right by name, and all problems."""
        taken: dict[str, Any] = {}
        problems: list[Problem] = []
        for field in self.fields:
            name = field.attribute.name
            if name not in given:
                default = field.default()
                if default is not attrs.NOTHING:
                    object.__setattr__(candidate, name, default)
                continue
            try:
                taken[name] = field.take(given[name])
            except ConfigError as error:
                problems += _under(field.key, error.problems)
            else:
                object.__setattr__(candidate, name, taken[name])
        for field in self.fields:
            name = field.attribute.name
            validator = field.attribute.metadata.get(_VALIDATOR)
            if validator is None or name not in taken:
                continue
            try:
                validator(candidate, field.attribute, taken[name])
            except ConfigError as error:
                problems += _under(field.key, error.problems)
            except (TypeError, ValueError) as error:
                problems.append(Problem(field.key, _words(error), taken[name]))
            except AttributeError:
                # It looked at another field, and that one is wrong and reported already.
                if not problems:
                    raise
        return taken, problems


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    # cattrs asks the class hooks first, then the predicates, the last registered one first. Its own
    # lenient hooks are all behind the first predicate here, which refuses.
    for kind in (bytes, float, int, str, Enum, Path):
        converter.register_structure_hook(kind, _class)
    factories: tuple[tuple[Callable[[Any], bool], Any], ...] = (
        (lambda kind: True, _refuse),
        (lambda kind: (get_origin(kind) or kind) in _MAPPINGS, _mapping),
        (lambda kind: (get_origin(kind) or kind) in _COLLECTIONS, _collection),
        (_is_union, _union),
        (_is_model, _Model),
        (lambda kind: kind is attrs.AttrsInstance, lambda kind: _instance),
        (lambda kind: get_origin(kind) is Literal, lambda kind: _literal),
        (lambda kind: kind is NoneType, lambda kind: _none),
        (lambda kind: kind is Any, lambda kind: _anything),
    )
    for predicate, factory in factories:
        converter.register_structure_hook_factory(predicate, factory)
    return converter


#: Private: cattrs' global converter is every other library's too.
_CONVERTER = _make_converter()


# --- The public verbs ---------------------------------------------------------------------------------------


def structure(cls: type[T], mapping: Any, *, path: str = "") -> T:
    """Make an instance of the attrs class `cls` from a mapping; an instance of it is returned as it is.

    Raises :class:`ConfigError` with every problem, each at its place under `path`, and :class:`PluginError`
    if a field of `cls` has a type that cannot be checked.
    """
    try:
        return _CONVERTER.structure(mapping, cls)
    except ConfigError as error:
        raise ConfigError(_under(path, error.problems)) from error.__cause__


def check(instance: Any) -> None:
    """Check an attrs instance as :func:`structure` checks a mapping: the whole of an `__attrs_post_init__`.

    Each value is put into the form that its type names. Then `instance.validate()` is asked for what concerns
    several fields, if there is such a method. Raises as :func:`structure` does.
    """
    model: _Model = cast(Any, _CONVERTER.get_structure_hook(type(instance)))
    given = {field.attribute.name: getattr(instance, field.attribute.name) for field in model.fields}
    _, problems = model.examine(instance, given)
    if not problems and callable(getattr(type(instance), "validate", None)):
        try:
            problems = list(instance.validate() or ())
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError([Problem("", _words(error))]) from error
    if problems:
        raise ConfigError(problems)


def unstructure(instance: Any) -> dict[str, Any]:
    """Return an attrs instance in the types of JSON; `structure(type(x), unstructure(x)) == x`.

    Sets become sorted lists, members of enumerations their values. Raises :class:`ConfigError` for a value
    that has no such form.
    """

    def refuse(value: Any) -> Any:
        if attrs.has(type(value)):
            return unstructure(value)
        raise ConfigError([Problem("", f"{show(value)} has no plain form", value)])

    plain: dict[str, Any] = {}
    problems: list[Problem] = []
    for attribute in attrs.fields(type(instance)):
        if not attribute.init:
            continue
        key = attribute.alias or attribute.name
        try:
            plain[key] = _plain(getattr(instance, attribute.name), refuse)
        except ConfigError as error:
            problems += _under(key, error.problems)
    if problems:
        raise ConfigError(problems)
    return plain


def _plain(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` in plain types; what is of no known kind goes through `other`."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {
            _plain(key, other) if isinstance(key, str) else other(key): _plain(item, other)
            for key, item in value.items()
        }
    if isinstance(value, AbstractSet):
        return sorted((_plain(item, other) for item in value), key=lambda item: (str(type(item)), item))
    if isinstance(value, (list, tuple)):
        return [_plain(item, other) for item in value]
    return other(value)


def _plain_or_words(value: Any) -> Any:
    return unstructure(value) if attrs.has(type(value)) else show(value)


@attrs.frozen(kw_only=True)
class OptionInfo:
    """One option in words, for listings. `default` is in plain types; None where the option is required."""

    name: str
    type: str
    required: bool
    default: Any
    bounds: str
    help: str


def describe(cls: type[Any]) -> tuple[OptionInfo, ...]:
    """Return the options of the attrs class `cls` in the order of their declaration."""
    model: _Model = cast(Any, _CONVERTER.get_structure_hook(cls))
    infos = []
    for field in model.fields:
        default = field.default()
        infos.append(
            OptionInfo(
                name=field.key,
                type=field.text(),
                required=field.attribute.default is attrs.NOTHING,
                default=None if default is attrs.NOTHING else _plain(default, _plain_or_words),
                bounds=field.bounds(),
                help=field.constraints.help,
            )
        )
    return tuple(infos)
