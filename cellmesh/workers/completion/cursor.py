"""Parses unfinished code up to a cursor: the expression before it, the brackets around it.

Python's own tokenizer wants whole code. Here text is read from its begin to the cursor, piece by
piece; what it cannot be is passed over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..inspect.static_eval import Unknown
from .inference import (
    InferredValue,
    Known,
    Lookup,
    annotated,
    attribute,
    find_name,
    loaded,
    resolve,
)

# Lines of IPython's own, and what stands in for them.
_NO_PYTHON = re.compile(r"^([ \t]*)[%!?].*$|^([ \t]*).*\?$", re.MULTILINE)
_BINDS = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=[^=])",
    re.MULTILINE,
)


def names_in(code: str, cursor: int, namespace: Mapping[str, Any]) -> tuple[dict[str, str], Lookup]:
    """Return the names that a cell's own lines bind, with the kind of each, and their look-up.

    Args:
        code: the cell.
        cursor: where it is being written, in characters: that line is passed over.
        namespace: of the rank.

    Returns:
        Each name and what kind it is; and what names stand for in this cell, so far as can be told.
    """
    begin, end = code.rfind("\n", 0, cursor) + 1, code.find("\n", cursor)
    line = code[begin : end if end >= 0 else len(code)]
    indent = line[: len(line) - len(line.lstrip())]
    above = code[:begin]
    tree = None
    for rest in (code[begin + len(line) :], ""):  # all of it, or what is above
        text = _NO_PYTHON.sub(
            lambda match: f"{match[1] or match[2] or ''}pass", f"{above}{indent}pass{rest}"
        )
        try:
            tree = ast.parse(text)
            break
        except (SyntaxError, ValueError, RecursionError):
            continue
    if tree is None:
        found = {def_ or name: "instance" for def_, name in _BINDS.findall(above)}
        return found, lambda name: find_name(name, namespace)
    kinds, values = _bindings(tree, above.count("\n") + 1)
    return kinds, _Scope(values, namespace).look_up


def _bindings(tree: ast.AST, line: int) -> tuple[dict[str, str], dict[str, ast.AST]]:
    """Return the names that code binds, the kind of each, and the expression bound to it."""
    kinds: dict[str, str] = {}
    values: dict[str, ast.AST] = {}

    def keep(name: str, value: ast.stmt | ast.expr) -> None:
        if value.lineno < line:
            values[name] = value

    for node in sorted(ast.walk(tree), key=lambda each: getattr(each, "lineno", 0)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                kinds.setdefault(name, "instance")
            case ast.arg(arg=name):
                kinds.setdefault(name, "param")
                if node.annotation is not None and node.lineno <= line:
                    values[name] = node
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                kinds[name] = "function"
                keep(name, node)
            case ast.ClassDef(name=name):
                kinds[name] = "class"
                keep(name, node)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for name in {_bound_by(alias) for alias in aliases} - {"*"}:
                    kinds[name] = "module" if isinstance(node, ast.Import) else "instance"
                    keep(name, node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        keep(target.id, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                keep(name, value)
    return kinds, values


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


class _Scope:
    """Looks up names in a cell's own lines, else in the rank's namespace."""

    def __init__(self, values: Mapping[str, ast.AST], namespace: Mapping[str, Any]) -> None:
        self._values = values
        self._namespace = namespace
        self._visiting: set[str] = set()

    def look_up(self, name: str) -> Known:
        node = self._values.get(name)
        if node is None or name in self._visiting:
            return find_name(name, self._namespace)
        self._visiting.add(name)
        try:
            return self._read(name, node)
        except Unknown:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                raise  # it will not be what the rank has now
            return find_name(name, self._namespace)
        finally:
            self._visiting.discard(name)

    def _read(self, name: str, node: ast.AST) -> Known:
        match node:
            case ast.Import(names=aliases):
                full = next(a.name for a in aliases if name in (a.asname, a.name.partition(".")[0]))
                is_whole = any(name == a.asname for a in aliases)
                return loaded(full if is_whole else full.partition(".")[0])
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                return attribute(
                    loaded(module), next(a.name for a in aliases if name in (a.asname, a.name))
                )
            case ast.arg(annotation=ast.expr() as annotation):
                known = resolve(annotation, self.look_up)
                return annotated(
                    known.value if isinstance(known, InferredValue) else None, self._namespace
                )
            case ast.expr():
                return resolve(node, self.look_up)
        raise Unknown


Kind = Literal["name", "attribute", "key", "module", "member", "nothing"]

_PIECE = re.compile(
    r"""
    (?P<space>(?:[ \t\f\r]|\\\r?\n)+)
  | (?P<newline>\n)
  | (?P<comment>\#[^\n]*)
  | (?P<string>(?i:[rbuft]{0,2})(?:
        \"\"\"(?:\\.|[^\\])*?\"\"\" | '''(?:\\.|[^\\])*?'''
      | (?!\"\"\")"(?:\\.|[^"\\\n])*" | (?!''')'(?:\\.|[^'\\\n])*'))
  | (?P<torn>(?i:[rbuft]{0,2})(?: (?:\"\"\"|''').* | "[^\n]* | '[^\n]* ))
  | (?P<number>\d[\w.]*)
  | (?P<name>[^\W\d]\w*)
  | (?P<op>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTE = re.compile(r"(?i)([rbuft]*)(\"\"\"|'''|\"|')")
_OPENING = {")": "(", "]": "[", "}": "{"}


class Piece(NamedTuple):
    """A token of the code: a word, a string or an operator."""

    kind: str
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Spot:
    """What surrounds the cursor: the expression before it, the prefix typed so far, the call or
    index that it is in.

    Attributes:
        kind: what could stand there: a ``name``; an ``attribute`` or a ``key`` of `expression`; a
            ``module`` of the package `expression`; a ``member`` of the module `expression`;
            ``nothing`` that is known.
        begin: where that begins, in characters.
        typed: what of it is there.
        expression: whose.
        call: the expression whose brackets are open for another argument; "" if there is none.
        quote: of a key that is being typed; "" before its first quote.
    """

    kind: Kind
    begin: int
    typed: str = ""
    expression: str = ""
    call: str = ""
    quote: str = ""


def find_spot(text: str) -> Spot:
    """Return the `Spot` of a cursor at the end of a text."""
    pieces = _read(text)
    last = pieces[-1] if pieces else None
    if last is not None and last.kind in ("comment", "number") and last.end == len(text):
        return Spot("nothing", len(text))
    if last is not None and last.kind == "torn" and last.end == len(text):
        return _in_string(text, pieces)
    begin = len(text)
    if last is not None and last.kind == "name" and last.end == len(text):
        begin = last.begin
        pieces = pieces[:-1]
    typed = text[begin:]
    pieces = [piece for piece in pieces if piece.kind not in ("space", "comment")]
    imported = _in_import(pieces, begin, typed)
    if imported is not None:
        return imported
    if pieces and pieces[-1].text == ".":
        expression = _expression_before(text, pieces, len(pieces) - 1)
        return Spot("attribute" if expression else "nothing", begin, typed, expression)
    if pieces and pieces[-1].text == "[" and not typed:
        expression = _expression_before(text, pieces, len(pieces) - 1)
        if expression:
            return Spot("key", begin, typed, expression)
    return Spot("name", begin, typed, call=_open_call(text, pieces))


def _read(text: str) -> list[Piece]:
    pieces = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        assert match is not None  # the last alternative takes any character
        pieces.append(Piece(str(match.lastgroup), at, match.end(), match.group()))
        at = match.end()
    return pieces


def _in_string(text: str, pieces: Sequence[Piece]) -> Spot:
    """Return the `Spot` of a cursor in an unfinished string."""
    torn = pieces[-1]
    match = _QUOTE.match(torn.text)
    assert match is not None
    prefix, quote = match.groups()
    body = torn.begin + match.end()
    brace = text.rfind("{", body)
    if "f" in prefix.lower() and brace >= 0 and "}" not in text[brace:] and text[brace - 1] != "{":
        inner = find_spot(text[brace + 1 :])
        return replace(inner, begin=inner.begin + brace + 1)
    before = [piece for piece in pieces[:-1] if piece.kind not in ("space", "comment")]
    if before and before[-1].text == "[" and not prefix:
        expression = _expression_before(text, before, len(before) - 1)
        if expression:
            return Spot("key", body, text[body:], expression, quote=quote)
    return Spot("nothing", len(text))


def _in_import(pieces: Sequence[Piece], begin: int, typed: str) -> Spot | None:
    """Return the `Spot` of a cursor in an import statement."""
    start = depth = 0
    for at, piece in enumerate(pieces):
        depth = max(0, depth + (piece.text in _OPENING.values()) - (piece.text in _OPENING))
        if depth == 0 and piece.text in ("\n", ";", ":"):
            start = at + 1
    words = [piece.text for piece in pieces[start:] if piece.kind != "newline"]
    if not words or words[0] not in ("import", "from"):
        return None
    if words[0] == "from" and "import" in words:
        module = "".join(words[1 : words.index("import")])
        return Spot(
            "member" if words[-1] != "as" and not module.startswith(".") else "nothing",
            begin,
            typed,
            module,
        )
    if words[-1] == "as":
        return Spot("nothing", begin, typed)
    path = []
    for word in reversed(words):
        if not (word == "." or word.isidentifier()) or word in ("import", "from"):
            break
        path.append(word)
    package = "".join(reversed(path))
    if not package:
        return Spot("module", begin, typed)
    return Spot(
        "module" if package.endswith(".") else "nothing", begin, typed, package.removesuffix(".")
    )


def _expression_before(text: str, pieces: Sequence[Piece], index: int) -> str:
    """Return the longest expression before a token that may have attributes; "" if there is
    none.
    """
    found, depth = "", 0
    for piece in reversed(pieces[:index]):
        depth += (piece.text in _OPENING) - (piece.text in _OPENING.values())
        if depth < 0 or (depth == 0 and piece.kind == "newline"):
            break
        expression = text[piece.begin : pieces[index - 1].end]
        if depth == 0 and _may_have_attribute(expression):
            found = expression
    return found


def _may_have_attribute(expression: str) -> bool:
    try:
        tree = ast.parse(f"{expression}.attribute", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(tree.body, ast.Attribute)


def _open_call(text: str, pieces: Sequence[Piece]) -> str:
    """Return the function expression of the call in which the cursor may begin an argument."""
    pieces = [piece for piece in pieces if piece.kind != "newline"]
    if not pieces or pieces[-1].text not in ("(", ","):
        return ""
    depth = 0
    for at in range(len(pieces) - 1, -1, -1):
        if pieces[at].text in _OPENING:
            depth += 1
        elif pieces[at].text in _OPENING.values():
            depth -= 1
            if depth < 0:
                return _expression_before(text, pieces, at) if pieces[at].text == "(" else ""
    return ""
