"""One valid instance of a JSON Schema, for an upstream that has no model to write one.

The schema is the caller's: anybody's JSON. So everything here is bounded: its size, the nodes
visited, the depth, the characters made and the work in all. Patterns are read by a small engine of
our own, which cannot be made to backtrack for ever. Every instance is checked before it is handed
out.
"""

from __future__ import annotations

import math
import re
import string
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

import msgspec

NODES_MAX = 2_000
DEPTH_MAX = 32
CHARS_MAX = 20_000
SCHEMA_BYTES_MAX = 200_000
# A unit of work is a small loop's turn, a few microseconds at most.
WORK_MAX = 200_000
CHECK_DEPTH_MAX = 64
HINT_CHARS_MAX = 2_000
PATTERN_CHARS_MAX = 1_000
PATTERN_DEPTH_MAX = 20
# Below this depth optional properties and items are left out, so that answers stay readable.
RICH_DEPTH_MAX = 8
UNIQUE_TRIES_PER_ITEM = 8
WORD = "demonstration"

PLACE_WORDS = frozenset(
    {"city", "location", "place", "town", "address", "destination", "country", "region"}
)
TEXT_WORDS = frozenset(
    {"query", "question", "q", "text", "input", "prompt", "message", "search", "topic", "content", "body"}
)
SUM_WORDS = frozenset({"expression", "formula", "calculation", "equation"})
NOT_PLACES = frozenset(
    {"a", "an", "the", "my", "your", "this", "that", "it", "english", "celsius", "fahrenheit"}
)

OBJECT_KEYS = frozenset(
    {
        "properties", "required", "additionalProperties", "patternProperties", "minProperties",
        "propertyNames",
    }
)
ARRAY_KEYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"})
STRING_KEYS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER_KEYS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def instance_of(schema: dict[str, Any] | bool, hint: str = "") -> Any:
    """Build a value that `schema` accepts, the same one every time.

    `hint` is text whose words, numbers and places fill properties of a fitting name. Local `$ref`s
    only. Raises ValueError for a schema that is malformed, contradictory, beyond what is known
    here, larger than 200 kB, or that needs more than 2,000 nodes, 32 levels or 20,000 characters.
    """
    hints = _Hints(hint[:HINT_CHARS_MAX])
    budget = _Budget()
    for lean, nodes in ((False, NODES_MAX // 2), (True, NODES_MAX)):
        budget.nodes_max = nodes
        try:
            return _checked_instance(schema, hints, budget, _Place(lean=lean))
        # A keyword of the wrong type, such as a `minimum` that is a list, surfaces as one of these.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            continue
    raise ValueError("no valid instance of this schema was found within the limits")


def _checked_instance(schema: Any, hints: _Hints, budget: _Budget, place: _Place) -> Any:
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES_MAX:
        raise _Spent("a schema too large")
    value = _Maker(schema, hints, budget).build(schema, place)
    if not _Check(schema, budget).accepts(schema, value):
        raise _DeadEnd("what was built is no instance")
    return value


class _DeadEnd(ValueError):
    """Report that this branch of the schema has no instance we can build; another one may."""


class _Spent(ValueError):
    """Report that a limit is used up: no use in trying another branch."""


class _Budget:
    """Count what building and checking may cost in all: schema nodes, characters and work."""

    def __init__(self) -> None:
        self.nodes_max = NODES_MAX
        self.nodes = 0
        self.chars = 0
        self.units = 0

    def node(self) -> None:
        self.nodes += 1
        if self.nodes > self.nodes_max:
            raise _Spent("too many schema nodes")

    def text(self, chars: int) -> None:
        self.chars += chars
        if self.chars > CHARS_MAX:
            raise _Spent("too many characters")

    def work(self, units: int) -> None:
        self.units += units
        if self.units > WORK_MAX:
            raise _Spent("too much work")


@dataclass(frozen=True, slots=True)
class _Place:
    """Say where in the instance a value is being built.

    `variant` asks for another value than 0 would give (for unique items), `active` are the
    references being followed, `lean` wants the smallest value.
    """

    name: str = ""
    depth: int = 0
    variant: int = 0
    active: frozenset[str] = frozenset()
    lean: bool = False

    def below(self, name: str, variant: int | None = None) -> _Place:
        depth = self.depth + 1
        lean = self.lean or depth > RICH_DEPTH_MAX
        chosen = self.variant if variant is None else variant
        return _Place(name, depth, chosen, self.active, lean)


class _Maker:
    """Build instances of the parts of one schema document."""

    def __init__(self, root: Any, hints: _Hints, budget: _Budget) -> None:
        self.root = root
        self.hints = hints
        self.budget = budget
        self.check = _Check(root, budget)

    def build(self, schema: Any, place: _Place) -> Any:
        if place.depth > DEPTH_MAX:
            raise _DeadEnd("too deep")
        flat, forks, refs = self._flatten(schema)
        again = not refs.isdisjoint(place.active)
        place = replace(place, active=place.active | refs, lean=place.lean or again)
        if forks:
            return self._take_branch(flat, forks, place)
        return self._value(flat, place)

    def _flatten(self, schema: Any) -> tuple[dict[str, Any], list[_Fork], frozenset[str]]:
        """Return the schema with `$ref` and `allOf` merged in, its forks, and the references met."""
        flat: dict[str, Any] = {}
        forks: list[_Fork] = []
        refs: set[str] = set()
        pending = deque([schema])
        while pending:
            self.budget.node()
            part = pending.popleft()
            if part is True:
                continue
            if not isinstance(part, dict):
                raise _DeadEnd("a schema that accepts nothing")
            part = dict(part)
            ref = part.pop("$ref", None)
            if ref is not None and ref not in refs:
                refs.add(ref)
                pending.append(_resolve(self.root, ref))
            pending.extend(part.pop("allOf", ()))
            forks.extend(_pop_forks(part))
            self._merge_into(flat, part)
        return flat, forks, frozenset(refs)

    def _merge_into(self, flat: dict[str, Any], part: dict[str, Any]) -> None:
        """Narrow `flat` by the keywords of `part`, as far as that is simple; the check does the rest."""
        for key, value in part.items():
            self.budget.work(1 + (len(value) if isinstance(value, list | dict) else 0))
            if key not in flat:
                flat[key] = value
            elif key == "enum":
                known = {_identity(item, self.budget) for item in value}
                flat[key] = [item for item in flat[key] if _identity(item, self.budget) in known]
            elif (merge := _MERGES.get(key)) is not None:
                flat[key] = merge(flat[key], value)

    def _take_branch(self, flat: dict[str, Any], forks: list[_Fork], place: _Place) -> Any:
        first, rest = forks[0], forks[1:]
        self.budget.work(len(first.branches))
        ranked = sorted(first.branches, key=lambda branch: self._rank(branch, place))
        turn, variant = place.variant % max(1, len(ranked)), place.variant // max(1, len(ranked))
        deeper = replace(place, depth=place.depth + 1, variant=variant)
        for branch in ranked[turn:] + ranked[:turn]:
            try:
                value = self.build({"allOf": [flat, branch, *(fork.schema() for fork in rest)]}, deeper)
            except _DeadEnd:
                continue
            # oneOf: a value that two branches accept is no instance.
            if self.check.accepts(first.schema(), value):
                return value
        raise _DeadEnd("no branch can be built")

    def _rank(self, branch: Any, place: _Place) -> int:
        """Return how late to try a branch: those that lead back into themselves come last."""
        if not isinstance(branch, dict):
            return 0
        if place.active and not _refs_within(branch, self.budget).isdisjoint(place.active):
            return 3
        empty = branch.get("type") == "null" or ("const" in branch and branch["const"] is None)
        if empty:
            return 0 if place.lean else 2
        return 1

    def _value(self, flat: dict[str, Any], place: _Place) -> Any:
        if "const" in flat or "enum" in flat:
            return self._listed(flat, place)
        if not place.variant and not place.lean:
            for value in self._suggested(flat, place):
                if self.check.accepts(flat, value):
                    self.budget.text(_weight(value))
                    return value
        return self._of_some_type(flat, place)

    def _listed(self, flat: dict[str, Any], place: _Place) -> Any:
        values = list(flat["enum"]) if "enum" in flat else [flat["const"]]
        self.budget.work(len(values))
        turn = place.variant % max(1, len(values))
        values = values[turn:] + values[:turn]
        if not place.variant:
            # A stable sort: the values that the hint mentions come first.
            values.sort(key=lambda value: not self.hints.mentions(value))
        for value in values:
            self.budget.node()
            if self.check.accepts(flat, value):
                self.budget.text(_weight(value))
                return value
        raise _DeadEnd("no listed value fits")

    def _suggested(self, flat: dict[str, Any], place: _Place) -> Iterator[Any]:
        types = _types_of(flat)
        if "string" in types:
            yield from self.hints.texts(place.name, flat.get("format"))
        for key in ("default", "example"):
            if key in flat:
                yield flat[key]
        if isinstance(flat.get("examples"), list):
            yield from flat["examples"]

    def _of_some_type(self, flat: dict[str, Any], place: _Place) -> Any:
        types = _types_of(flat)
        # Null first where the smallest is wanted: it ends a recursion. Last where it tells nothing.
        types.sort(key=lambda name: (name == "null") != place.lean)
        makers: dict[str, Callable[[dict[str, Any], _Place], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
            "boolean": lambda _, where: where.variant % 2 == 0,
            "null": lambda *_: None,
        }
        for name in types:
            try:
                return makers[name](dict(flat, type=[name]), place)
            except _DeadEnd:
                continue
        if flat.get("nullable") is True:
            return None
        raise _DeadEnd("no type fits")

    def _object(self, flat: dict[str, Any], place: _Place) -> dict[str, Any]:
        properties = flat.get("properties", {})
        required = set(flat.get("required", ()))
        self.budget.work(len(properties) + len(required))
        names = [name for name in properties if name in required or not place.lean]
        names += [name for name in flat.get("required", ()) if name not in properties]
        made: dict[str, Any] = {}
        for name in names:
            self._add_property(made, flat, name, place, needed=name in required)
        self._add_dependents(made, flat, place)
        self._add_until_enough(made, flat, place)
        for name in [name for name in reversed(made) if name not in required]:
            if len(made) > flat.get("maxProperties", math.inf):
                del made[name]
        if not self.check.accepts(flat, made):
            raise _DeadEnd("the properties contradict each other")
        return made

    def _add_property(
        self, made: dict[str, Any], flat: dict[str, Any], name: str, place: _Place, *, needed: bool
    ) -> None:
        if name in made:
            return
        self.budget.text(len(name))
        try:
            made[name] = self.build(_property_schema(flat, name, self.budget), place.below(name))
        except _DeadEnd:
            if needed:
                raise

    def _add_dependents(self, made: dict[str, Any], flat: dict[str, Any], place: _Place) -> None:
        waiting = list(made)
        while waiting:
            for name in flat.get("dependentRequired", {}).get(waiting.pop(), ()):
                if name not in made:
                    self._add_property(made, flat, name, place, needed=True)
                    waiting.append(name)

    def _add_until_enough(self, made: dict[str, Any], flat: dict[str, Any], place: _Place) -> None:
        low = flat.get("minProperties", 0)
        for name in flat.get("properties", {}):
            if len(made) < low:
                self._add_property(made, flat, name, place, needed=False)
        number = 0
        while len(made) < low:
            name = self.build(
                {"allOf": [flat.get("propertyNames", True), {"type": "string"}]},
                place.below("name", variant=number),
            )
            number += 1
            self._add_property(made, flat, name, place, needed=True)

    def _array(self, flat: dict[str, Any], place: _Place) -> list[Any]:
        low, high = flat.get("minItems", 0), flat.get("maxItems", math.inf)
        prefix, rest = _item_schemas(flat)
        contained = flat.get("minContains", 1) if "contains" in flat else 0
        wished = low if place.lean else max(low, len(prefix), 1)
        count = min(max(wished, contained), high)
        items: list[Any] = []
        while len(items) < count:
            schema = prefix[len(items)] if len(items) < len(prefix) else rest
            if len(items) < contained:
                schema = {"allOf": [schema, flat["contains"]]}
            try:
                items.append(self._item(schema, flat, items, place))
            except _DeadEnd:
                if len(items) < max(low, contained):
                    raise
                break
        if not self.check.accepts(flat, items):
            raise _DeadEnd("the items contradict each other")
        return items

    def _item(self, schema: Any, flat: dict[str, Any], items: list[Any], place: _Place) -> Any:
        if flat.get("uniqueItems") is not True:
            return self.build(schema, place.below(place.name))
        seen = {_identity(item, self.budget) for item in items}
        for variant in range(len(items), len(items) + UNIQUE_TRIES_PER_ITEM):
            item = self.build(schema, place.below(place.name, variant=variant))
            if _identity(item, self.budget) not in seen:
                return item
        raise _DeadEnd("not enough different items")

    def _number(self, flat: dict[str, Any], place: _Place) -> int | float:
        hinted = [] if place.variant or place.lean else self.hints.unused_numbers()
        for value in [*hinted, *_number_candidates(flat, place.variant)]:
            if flat["type"] == ["integer"] and value == int(value):
                value = int(value)
            if self.check.accepts(flat, value):
                self.hints.use_number(value)
                return value
        raise _DeadEnd("no number fits")

    def _string(self, flat: dict[str, Any], place: _Place) -> str:
        low, high = flat.get("minLength", 0), flat.get("maxLength", math.inf)
        if low > CHARS_MAX:
            raise _Spent("a string too long")
        for value in _string_candidates(flat, low, high, place.variant, self.budget):
            self.budget.node()
            if self.check.accepts(flat, value):
                self.budget.text(len(value))
                return value
        raise _DeadEnd("no string fits")


# Reading schemas.


@dataclass(frozen=True, slots=True)
class _Fork:
    """Hold alternatives, of which one (or exactly one) must be taken."""

    kind: str
    branches: list[Any]

    def schema(self) -> dict[str, Any]:
        return {self.kind: self.branches}


def _pop_forks(part: dict[str, Any]) -> Iterator[_Fork]:
    for kind in ("oneOf", "anyOf"):
        if kind in part:
            yield _Fork(kind, list(part.pop(kind)))
    if "if" in part:
        condition = part.pop("if")
        met = {"allOf": [condition, part.pop("then", True)]}
        unmet = {"allOf": [{"not": condition}, part.pop("else", True)]}
        yield _Fork("anyOf", [met, unmet])


def _both_types(a: Any, b: Any) -> list[str]:
    first, second = _as_list(a), _as_list(b)
    kept = [name for name in first if name in second or (name == "integer" and "number" in second)]
    kept += [name for name in second if name == "integer" and "number" in first and name not in kept]
    if not kept:
        raise _DeadEnd("types contradict each other")
    return kept


def _both_schemas(a: Any, b: Any) -> Any:
    return a if a is b else {"allOf": [a, b]}


def _both_properties(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {**a, **{name: _both_schemas(a[name], sub) if name in a else sub for name, sub in b.items()}}


def _both_steps(a: int | float, b: int | float) -> int | float:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    return max(a, b)


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _both_types,
    "properties": _both_properties,
    "patternProperties": _both_properties,
    "additionalProperties": _both_schemas,
    "propertyNames": _both_schemas,
    "items": _both_schemas,
    "not": lambda a, b: {"anyOf": [a, b]},
    "required": lambda a, b: [*a, *(name for name in b if name not in a)],
    "multipleOf": _both_steps,
    "uniqueItems": lambda a, b: a or b,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


def _resolve(root: Any, ref: Any) -> Any:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise _DeadEnd("only references into the schema itself are followed")
    found = root
    for step in ref[2:].split("/") if ref != "#" else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


def _refs_within(schema: Any, budget: _Budget, parts_max: int = 100) -> frozenset[str]:
    """Return the references that stand in a schema, looking at no more than `parts_max` parts."""
    refs: set[str] = set()
    pending = [schema]
    for _ in range(parts_max):
        if not pending:
            break
        part = pending.pop()
        budget.work(1 + (len(part) if isinstance(part, list | dict) else 0))
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                refs.add(part["$ref"])
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    return frozenset(refs)


def _types_of(flat: dict[str, Any]) -> list[str]:
    if "type" in flat:
        return list(_as_list(flat["type"]))
    for keys, name in ((OBJECT_KEYS, "object"), (ARRAY_KEYS, "array"), (STRING_KEYS, "string")):
        if not keys.isdisjoint(flat):
            return [name]
    if not NUMBER_KEYS.isdisjoint(flat):
        return ["number"]
    return ["string", "object", "array", "number", "boolean", "null"]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _property_schema(flat: dict[str, Any], name: str, budget: _Budget) -> Any:
    parts = [flat["properties"][name]] if name in flat.get("properties", {}) else []
    patterns = flat.get("patternProperties", {}).items()
    parts += [sub for pattern, sub in patterns if _found(pattern, name, budget)]
    if not parts:
        return flat.get("additionalProperties", True)
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def _item_schemas(flat: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first items and that of the rest, in the new spelling or the old."""
    items = flat.get("items", True)
    if isinstance(items, list):
        return items, flat.get("additionalItems", True)
    return flat.get("prefixItems", []), items


def _identity(value: Any, budget: _Budget) -> bytes:
    """Return bytes that are equal for values that JSON Schema calls equal: 1 is 1.0, but not true."""
    return msgspec.json.encode(_plain(value, budget), order="deterministic")


def _plain(value: Any, budget: _Budget) -> Any:
    budget.work(1 + (len(value) // 100 if isinstance(value, str) else 0))
    if isinstance(value, dict):
        return {str(key): _plain(item, budget) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, budget) for item in value]
    if isinstance(value, float) and value.is_integer():
        return str(int(value)) + "#"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) + "#"
    return value


def _weight(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))


# Candidates for numbers and strings. Whether one fits is for the check to say.


def _number_candidates(flat: dict[str, Any], variant: int) -> Iterator[int | float]:
    lows = [Fraction(flat[key]) for key in ("minimum", "exclusiveMinimum") if _is_number(flat.get(key))]
    highs = [Fraction(flat[key]) for key in ("maximum", "exclusiveMaximum") if _is_number(flat.get(key))]
    step = Fraction(flat.get("multipleOf", 1))
    if step <= 0:
        raise _DeadEnd("multipleOf must be above 0")
    anchors = [Fraction(1), step, Fraction(0)]
    anchors += [math.ceil(low / step) * step for low in lows]
    anchors += [math.floor(high / step) * step for high in highs]
    for anchor in anchors:
        for steps in range(variant, variant + 3):
            yield _number_from(anchor + steps * step)
            yield _number_from(anchor - steps * step)
    yield from _numbers_between(lows, highs, variant)


def _numbers_between(lows: list[Fraction], highs: list[Fraction], variant: int) -> Iterator[float]:
    if lows and highs:
        yield float(max(lows) + (min(highs) - max(lows)) / (variant + 2))
    for low in lows:
        yield math.nextafter(float(low), math.inf)
    for high in highs:
        yield math.nextafter(float(high), -math.inf)


def _number_from(exact: Fraction) -> int | float:
    return exact.numerator if exact.denominator == 1 else float(exact)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _string_candidates(
    flat: dict[str, Any], low: int, high: float, variant: int, budget: _Budget
) -> Iterator[str]:
    if "pattern" in flat:
        yield from _spellings(flat["pattern"], low, variant, budget)
    if (formatted := _FORMATS.get(flat.get("format"))) is not None:
        yield formatted(variant)
    word = WORD if not variant else f"{WORD} {variant + 1}"
    yield word
    letters = _letters(variant)
    yield word + " " * (len(word) < low) + "x" * (low - len(word) - 1)
    yield letters.rjust(min(low, CHARS_MAX), "a")
    if not variant and high >= 1:
        yield word[: int(min(high, len(word)))].rstrip() or letters
    yield ""


def _letters(number: int) -> str:
    letters = ""
    while True:
        number, digit = divmod(number, len(string.ascii_lowercase))
        letters = string.ascii_lowercase[digit] + letters
        if not number:
            return letters


def _nth_day(variant: int) -> str:
    return (date(2026, 1, 1) + timedelta(days=variant)).isoformat()


_FORMATS: dict[Any, Callable[[int], str]] = {
    "date": _nth_day,
    "date-time": lambda n: f"{_nth_day(n)}T12:00:00Z",
    "time": lambda n: f"12:{n // 60 % 60:02}:{n % 60:02}Z",
    "duration": lambda n: f"P{n + 1}D",
    "email": lambda n: f"demo{n or ''}@example.com",
    "idn-email": lambda n: f"demo{n or ''}@example.com",
    "hostname": lambda n: f"demo{n or ''}.example.com",
    "idn-hostname": lambda n: f"demo{n or ''}.example.com",
    "ipv4": lambda n: f"192.0.2.{n % 254 + 1}",
    "ipv6": lambda n: f"2001:db8::{n + 1:x}" if n < 0xFFFF else "2001:db8::",
    "uri": lambda n: f"https://example.com/{n or ''}",
    "uri-reference": lambda n: f"/{n or ''}",
    "iri": lambda n: f"https://example.com/{n or ''}",
    "iri-reference": lambda n: f"/{n or ''}",
    "uri-template": lambda n: f"/{n or ''}",
    "url": lambda n: f"https://example.com/{n or ''}",
    "uuid": lambda n: f"00000000-0000-4000-8000-{n + 1:012x}",
    "json-pointer": lambda n: f"/{n or ''}",
    "relative-json-pointer": lambda n: str(n),
    "regex": lambda n: f"^.{{0,{n + 1}}}$",
    "byte": lambda n: "ZGVtbw==" if not n else f"ZGVt{n:04}",
}


class _Hints:
    """Offer words, places and numbers of one short text for properties of a fitting name."""

    def __init__(self, text: str) -> None:
        self._text = text.strip()
        self._words = _words(text)
        numbers = re.findall(r"-?\b\d{1,12}(?:\.\d{1,6})?\b", text)
        self._numbers = [_number_from(Fraction(number)) for number in numbers]

    def mentions(self, value: Any) -> bool:
        """Return whether the text contains a value of an enum, as whole words."""
        words = _words(value) if isinstance(value, str) else ""
        return bool(words) and f" {words} " in f" {self._words} "

    def texts(self, name: str, format_name: Any) -> Iterator[str]:
        """Yield what the text offers for a string property of this name and format."""
        if not self._text:
            return
        if (pattern := _HINT_FORMATS.get(format_name)) is not None:
            yield from re.findall(pattern, self._text)
        words = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
        if words & PLACE_WORDS:
            yield from self._places()
        if words & SUM_WORDS:
            yield from re.findall(r"[\d(][\d .+*/()^%-]{0,200}[\d)]", self._text)
        if words & TEXT_WORDS:
            yield self._text

    def unused_numbers(self) -> list[int | float]:
        return list(self._numbers)

    def use_number(self, value: int | float) -> None:
        """Take a number out, so that two properties get the first and the second one."""
        if value in self._numbers:
            self._numbers.remove(value)

    def _places(self) -> Iterator[str]:
        """Yield what follows "in" or the like: "in New York?" gives "New York"."""
        leads = r"\b(?:[Ii]n|[Ff]or|[Aa]t|[Nn]ear|[Tt]o|[Ff]rom)\s+"
        yield from re.findall(leads + r"([A-Z][\w'’-]{0,40}(?:\s[A-Z][\w'’-]{0,40}){0,3})", self._text)
        for word in re.findall(r"\b[Ii]n\s+([^\W\d_][\w'’-]{0,40})", self._text):
            if word.casefold() not in NOT_PLACES:
                yield word


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


_HINT_FORMATS = {
    "date": r"\b\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])\b",
    "email": r"\b[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}\b",
    "uri": r"https?://[\w./?=&%~:#-]{1,500}",
    "url": r"https?://[\w./?=&%~:#-]{1,500}",
}


class _Check:
    """Say whether a value is an instance, as far as the keywords known here go.

    Formats are not judged. Raises _Spent when it takes too much work.
    """

    def __init__(self, root: Any, budget: _Budget) -> None:
        self.root = root
        self.budget = budget

    def accepts(self, schema: Any, value: Any, depth: int = 0) -> bool:
        self.budget.work(2)
        if depth > CHECK_DEPTH_MAX:
            raise _Spent("too deep to check")
        if isinstance(schema, bool):
            return schema
        if value is None and schema.get("nullable") is True:
            return True
        return (
            _type_fits(schema, value)
            and self._listed_fits(schema, value)
            and self._combined_fits(schema, value, depth + 1)
            and self._content_fits(schema, value, depth + 1)
        )

    def _listed_fits(self, schema: dict[str, Any], value: Any) -> bool:
        if "const" not in schema and "enum" not in schema:
            return True
        identity = _identity(value, self.budget)
        if "const" in schema and _identity(schema["const"], self.budget) != identity:
            return False
        return "enum" not in schema or any(
            _identity(listed, self.budget) == identity for listed in schema["enum"]
        )

    def _combined_fits(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        def fits(part: Any) -> bool:
            return self.accepts(part, value, depth)

        if "$ref" in schema and not fits(_resolve(self.root, schema["$ref"])):
            return False
        if not all(map(fits, schema.get("allOf", ()))):
            return False
        if "anyOf" in schema and not any(map(fits, schema["anyOf"])):
            return False
        if "oneOf" in schema and sum(map(fits, schema["oneOf"])) != 1:
            return False
        if "not" in schema and fits(schema["not"]):
            return False
        if "if" in schema:
            return fits(schema.get("then" if fits(schema["if"]) else "else", True))
        return True

    def _content_fits(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        if isinstance(value, dict):
            return self._object_fits(schema, value, depth)
        if isinstance(value, list):
            return self._array_fits(schema, value, depth)
        if isinstance(value, str):
            return self._string_fits(schema, value)
        return _number_fits(schema, value) if _is_number(value) else True

    def _string_fits(self, schema: dict[str, Any], value: str) -> bool:
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
            return False
        return "pattern" not in schema or _found(schema["pattern"], value, self.budget)

    def _object_fits(self, schema: dict[str, Any], value: dict[str, Any], depth: int) -> bool:
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf):
            return False
        self.budget.work(len(schema.get("required", ())) + len(schema.get("dependentRequired", ())))
        if not all(name in value for name in schema.get("required", ())):
            return False
        if not all(self.accepts(schema.get("propertyNames", True), name, depth) for name in value):
            return False
        for name, needed in schema.get("dependentRequired", {}).items():
            if name in value and not all(other in value for other in needed):
                return False
        for name, dependent in schema.get("dependentSchemas", {}).items():
            if name in value and not self.accepts(dependent, value, depth):
                return False
        return all(
            self.accepts(_property_schema(schema, name, self.budget), item, depth)
            for name, item in value.items()
        )

    def _array_fits(self, schema: dict[str, Any], value: list[Any], depth: int) -> bool:
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            return False
        prefix, rest = _item_schemas(schema)
        for number, item in enumerate(value):
            if not self.accepts(prefix[number] if number < len(prefix) else rest, item, depth):
                return False
        if schema.get("uniqueItems") is True:
            different = {_identity(item, self.budget) for item in value}
            if len(different) < len(value):
                return False
        if "contains" in schema:
            found = sum(self.accepts(schema["contains"], item, depth) for item in value)
            return schema.get("minContains", 1) <= found <= schema.get("maxContains", math.inf)
        return True


def _type_fits(schema: dict[str, Any], value: Any) -> bool:
    if "type" not in schema:
        return True
    return any(_is_of_type(name, value) for name in _as_list(schema["type"]))


def _is_of_type(name: str, value: Any) -> bool:
    if name == "integer":
        return _is_number(value) and value == int(value)
    if name == "number":
        return _is_number(value)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def _number_fits(schema: dict[str, Any], value: int | float) -> bool:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and (value < low or (above is True and value == low)):
        return False
    if high is not None and (value > high or (below is True and value == high)):
        return False
    if _is_number(above) and value <= above or _is_number(below) and value >= below:
        return False
    step = schema.get("multipleOf")
    if step is None:
        return True
    # With fractions, validators divide as floats; whoever accepts that also accepts 0 and whole steps.
    quotient = value / step if isinstance(step, float) else Fraction(value) / step
    return quotient == int(quotient)


# Patterns: a small engine for the common part of regular expressions. A match is a set of positions
# moved forward, so that no pattern makes it run for long.


class _Chars:
    """Match one character: of these ranges, or of none of them."""

    def __init__(self, ranges: Iterable[tuple[str, str]], negated: bool = False) -> None:
        self.ranges = tuple(ranges)
        self.negated = negated
        self.choices: list[str] = []

    def has(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self.ranges) != self.negated

    def spelling(self, run: _Spelling) -> str:
        if not self.choices:
            run.budget.work(len(self.ranges))
            self.choices = [char for char in _LIKED if self.has(char)] or self._unusual()
        return run.pick(self.choices)

    def ends(self, search: _Search, starts: set[int]) -> set[int]:
        text = search.text
        return {at + 1 for at in starts if at < len(text) and self.has(text[at])}

    def _unusual(self) -> list[str]:
        if self.negated or not self.ranges:
            raise _DeadEnd("no character fits")
        return [self.ranges[0][0]]


class _At:
    """Match a place between characters: the beginning, the end, a word's edge or none."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def spelling(self, run: _Spelling) -> str:
        return ""

    def ends(self, search: _Search, starts: set[int]) -> set[int]:
        return {at for at in starts if self._holds(search.text, at)}

    def _holds(self, text: str, at: int) -> bool:
        if self.kind in "^$":
            return at == (0 if self.kind == "^" else len(text))
        before = at > 0 and _WORD.has(text[at - 1])
        after = at < len(text) and _WORD.has(text[at])
        return (before != after) == (self.kind == "b")


class _Sequence:
    """Match parts one after the other."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts

    def spelling(self, run: _Spelling) -> str:
        return "".join(part.spelling(run) for part in self.parts)

    def ends(self, search: _Search, starts: set[int]) -> set[int]:
        for part in self.parts:
            search.spend(len(starts))
            starts = part.ends(search, starts)
        return starts


class _Either:
    """Match one of several parts."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts

    def spelling(self, run: _Spelling) -> str:
        return run.pick(self.parts, first=run.alternative).spelling(run)

    def ends(self, search: _Search, starts: set[int]) -> set[int]:
        search.spend(len(starts))
        return set().union(*(part.ends(search, starts) for part in self.parts))


class _Repeat:
    """Match a part so many times."""

    def __init__(self, part: _Part, low: int, high: float) -> None:
        self.part, self.low, self.high = part, low, high

    def spelling(self, run: _Spelling) -> str:
        made = ""
        count = 0
        while count < self.low or (run.wanted > 0 and count < self.high):
            run.budget.work(1)
            unit = self.part.spelling(run)
            if count >= self.low:
                if not unit:
                    break
                run.wanted -= len(unit)
            made += unit
            count += 1
        return made

    def ends(self, search: _Search, starts: set[int]) -> set[int]:
        reached = set(starts) if not self.low else set()
        count = 0
        while starts and count < self.high:
            search.spend(len(starts))
            starts = self.part.ends(search, starts)
            count += 1
            if count >= self.low:
                starts = starts - reached
                reached |= starts
        return reached


_Part = _Chars | _At | _Sequence | _Either | _Repeat
_DIGIT_RANGES = (("0", "9"),)
_WORD_RANGES = (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))
_SPACE_RANGES = (("\t", "\r"), (" ", " "), ("\u00a0", "\u00a0"), ("\u2028", "\u2029"))
_WORD = _Chars(_WORD_RANGES)
_LIKED = string.ascii_lowercase + string.digits + string.ascii_uppercase + " _-" + string.punctuation


def _complement(ranges: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the ranges between these, which are in order and apart."""
    edges = [-1, *(ord(edge) for pair in ranges for edge in pair), 0x110000]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((chr(low + 1), chr(high - 1)) for low, high in gaps if low + 1 < high)


_CLASSES = {"d": _DIGIT_RANGES, "w": _WORD_RANGES, "s": _SPACE_RANGES}
_CLASSES |= {name.upper(): _complement(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class _Spelling:
    """Spell one text that a pattern matches.

    `wanted` is how many characters more than the fewest are needed. `variant` is used up like the
    digits of a number, a digit for each choice, so that variants differ.
    """

    def __init__(self, variant: int, wanted: int, alternative: int, budget: _Budget) -> None:
        self.variant, self.wanted, self.alternative = variant, wanted, alternative
        self.picks = 0
        self.budget = budget

    def pick(self, choices: Any, first: int | None = None) -> Any:
        self.budget.work(1)
        self.variant, digit = divmod(self.variant, len(choices))
        if first is None:
            first = self.picks
            self.picks += 1
        return choices[(first + digit) % len(choices)]


class _Search:
    """Hold the text that a pattern is looked for in, and count the positions tried."""

    def __init__(self, text: str, budget: _Budget) -> None:
        self.text = text
        self.budget = budget

    def spend(self, positions: int) -> None:
        self.budget.work(1 + positions // 8)


def _found(pattern: str, text: str, budget: _Budget) -> bool:
    """Return whether a pattern matches somewhere in the text."""
    part = _PatternReader(pattern, budget).read()
    return bool(part.ends(_Search(text, budget), set(range(len(text) + 1))))


def _spellings(pattern: str, low: int, variant: int, budget: _Budget) -> Iterator[str]:
    """Yield texts that probably match a pattern, of `low` characters at least where it can be."""
    part = _PatternReader(pattern, budget).read()
    for alternative in range(4):
        shortest = part.spelling(_Spelling(variant, 0, alternative, budget))
        yield shortest
        if len(shortest) < low:
            longer = part.spelling(_Spelling(variant, low - len(shortest), alternative, budget))
            yield longer
            # A pattern without an anchor may stand anywhere in the text.
            yield longer.ljust(low, "x")
            yield longer.rjust(low, "x")


class _PatternReader:
    """Read the common part of regular expressions. Raises _DeadEnd for anything else."""

    def __init__(self, pattern: str, budget: _Budget) -> None:
        if len(pattern) > PATTERN_CHARS_MAX:
            raise _DeadEnd("a pattern too long to read")
        budget.work(len(pattern))
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def read(self) -> _Part:
        part = self._either()
        if self.at < len(self.pattern):
            raise _DeadEnd("an unbalanced pattern")
        return part

    def _either(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Either(parts)

    def _sequence(self) -> _Sequence:
        parts: list[_Part] = []
        while self.at < len(self.pattern) and self._peek() not in "|)":
            parts.append(self._repeated(self._one()))
        return _Sequence(parts)

    def _one(self) -> _Part:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char in "^$":
            return _At(char)
        if char == ".":
            return _Chars([("\n", "\n"), ("\r", "\r"), ("\u2028", "\u2029")], negated=True)
        if char in "*+?":
            raise _DeadEnd("nothing to repeat")
        return _Chars([(char, char)])

    def _group(self) -> _Part:
        self.depth += 1
        if self.depth > PATTERN_DEPTH_MAX:
            raise _DeadEnd("a pattern too deep")
        if self._take("?") and not self._take(":"):
            named = re.compile(r"P?<[A-Za-z_]\w{0,50}>").match(self.pattern, self.at)
            if named is None:
                raise _DeadEnd("a group of a kind not known here")
            self.at = named.end()
        part = self._either()
        if not self._take(")"):
            raise _DeadEnd("a group without an end")
        self.depth -= 1
        return part

    def _class(self) -> _Chars:
        negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        while not self._take("]"):
            ranges += self._class_range()
        return _Chars(ranges, negated)

    def _class_range(self) -> Iterable[tuple[str, str]]:
        low = self._class_char()
        if not isinstance(low, str):
            return low
        if not self.pattern.startswith("-", self.at) or self.pattern.startswith("-]", self.at):
            return [(low, low)]
        self._next()
        high = self._class_char()
        if not isinstance(high, str) or high < low:
            raise _DeadEnd("a range that is none")
        return [(low, high)]

    def _class_char(self) -> str | tuple[tuple[str, str], ...]:
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        return "\b" if char == "b" else self._literal(char)

    def _escape(self) -> _Part:
        char = self._next()
        if char in _CLASSES:
            return _Chars(_CLASSES[char])
        if char in "bB":
            return _At(char)
        if char in "AZz":
            return _At("^" if char == "A" else "$")
        literal = self._literal(char)
        return _Chars([(literal, literal)])

    def _literal(self, char: str) -> str:
        """Return the character that an escape stands for."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "xu":
            digits = 2 if char == "x" else 4
            code = "".join(self._next() for _ in range(digits))
            return chr(int(code, 16))
        if char.isalnum():
            raise _DeadEnd("an escape not known here")
        return char

    def _repeated(self, part: _Part) -> _Part:
        counts = re.compile(r"[*+?]|\{(\d{1,6})(,?)(\d{0,6})\}").match(self.pattern, self.at)
        if counts is None:
            return part
        self.at = counts.end()
        # A lazy quantifier matches the same texts; a possessive or doubled one is not known here.
        if not self._take("?") and self.at < len(self.pattern) and self._peek() in "*+":
            raise _DeadEnd("a quantifier of a quantifier")
        if counts[0] in "*+?":
            return _Repeat(part, int(counts[0] == "+"), 1 if counts[0] == "?" else math.inf)
        low = int(counts[1])
        high = int(counts[3]) if counts[3] else math.inf
        return _Repeat(part, low, high if counts[2] else low)

    def _peek(self) -> str:
        return self.pattern[self.at]

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            raise _DeadEnd("a pattern cut short")
        self.at += 1
        return self.pattern[self.at - 1]

    def _take(self, char: str) -> bool:
        taken = self.pattern.startswith(char, self.at)
        self.at += taken
        return taken
