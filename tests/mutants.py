"""Mutants: small wrong changes to a source file, one at a time.

In: the text of a Python file. Out: `Mutant`s. Pure: the same text gives the same mutants in the same order.
"""

import ast
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
UNSEEN = (ast.Raise, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.JoinedStr)
"""What is left as it is: texts, and what decides only about them."""
SYMMETRIC = "max min maximum minimum array_equal isclose gcd suppress transpose promote_types".split()
"""Functions for which the order of arguments cannot matter."""


@dataclass(frozen=True)
class Mutant:
    """One change to one file."""

    path: str
    """From the root of the checkout."""
    line: int
    scope: str
    """Names of the classes and functions around it, joined by dots; "import" at the top of the file."""
    operator: str
    change: str
    """What becomes what, and which of equal ones in this scope it is: the name, whatever other lines become."""
    number: int
    """Among all changes of the file."""

    @property
    def name(self) -> str:
        """What the report and the list of equivalent mutants call it."""
        return f"{self.path} {self.scope}: {self.change}"

    def rank(self, seed: int) -> str:
        """A mutant's place in the random order of a seed: it does not depend on other mutants."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()

    def apply(self, source: str) -> str:
        """The file with this change."""
        tree = ast.parse(source)
        change = next(itertools.islice(_changes(tree), self.number, None))
        change.put(change.new)
        return ast.unparse(ast.fix_missing_locations(tree))


class _Change(NamedTuple):
    scope: str
    operator: str
    old: ast.AST
    new: ast.AST
    put: Callable[[ast.AST], None]


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file."""
    found, seen = [], Counter[tuple[str, str]]()
    for number, one in enumerate(_changes(ast.parse(source))):
        before, after = (" ".join(ast.unparse(ast.fix_missing_locations(x)).split()) for x in (one.old, one.new))
        scope, change = one.scope or "import", f"`{before}` → `{after}`"
        seen[scope, change] += 1
        again = f" (#{seen[scope, change]})" if seen[scope, change] > 1 else ""
        if before != after:
            found.append(Mutant(path, getattr(one.old, "lineno", 0), scope, one.operator, change + again, number))
    return found


def _changes(owner: ast.AST, scope: str = "") -> Iterator[_Change]:
    for field, value in ast.iter_fields(owner):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for at, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or isinstance(node, UNSEEN) or _is_for_types(node):
                continue
            if _is_call(node, "debug") or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            put = partial(_put, owner, field, at)
            for operator, new in _instead(node, condition=field in ("test", "ifs")):
                yield _Change(scope, operator, node, new, put)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _changes(node, f"{scope}.{node.name}".strip("."))
            elif not (isinstance(node, ast.keyword) and _is_call(owner, "zip")):
                yield from _changes(node, scope)


def _put(owner: ast.AST, field: str, at: int, new: ast.AST) -> None:
    value = getattr(owner, field)
    if isinstance(value, list):
        value[at] = new
    else:
        setattr(owner, field, new)


def _instead(node: Any, condition: bool) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in place of a node: the kind of change, and the node."""
    if condition:
        yield "negated condition", ast.UnaryOp(ast.Not(), node)
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                yield "comparison", _with(node, ops=[*node.ops[:at], OPERATORS[type(op)](), *node.ops[at + 1 :]])
        case ast.BoolOp():
            yield "and/or", _with(node, op=OPERATORS[type(node.op)]())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS and not _is_string(node):
            yield "arithmetic", _with(node, op=OPERATORS[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
            yield "constant", ast.Constant(node.value - 1)
        case ast.Call():
            for at in range(0 if _is_call(node, *SYMMETRIC) else len(node.args) - 1):
                left, right = node.args[at : at + 2]
                if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                    yield "swapped arguments", _with(node, args=[*node.args[:at], right, left, *node.args[at + 2 :]])
            for at, keyword in enumerate(node.keywords):
                if keyword.arg not in (None, "help") and not _is_call(node, "zip"):
                    yield "dropped keyword", _with(node, keywords=node.keywords[:at] + node.keywords[at + 1 :])
        case ast.Expr(value=ast.Call()) if not _is_call(node.value, "debug"):
            yield "removed call", ast.Pass()
        case ast.Return() if node.value is not None and ast.unparse(node.value) != "None":
            yield "returned nothing", ast.Return(None)
        case ast.Break():
            yield "loop", ast.Continue()
        case ast.Continue():
            yield "loop", ast.Break()
        case ast.FunctionDef() | ast.AsyncFunctionDef() if len(node.body) > 1 or not isinstance(node.body[0], ast.Expr):
            returns = [one for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
            if not any(getattr(one, "value", None) for one in returns):
                yield "early return", _with(node, body=[ast.Return(None), *node.body])
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Assign | ast.AugAssign) and any(isinstance(one, ast.Attribute) for one in targets):
        yield "removed assignment", ast.Pass()


def _with(node: Any, **fields: Any) -> ast.AST:
    return type(node)(**{name: fields.get(name, getattr(node, name, None)) for name in node._fields})


def _is_string(node: ast.BinOp | ast.AugAssign) -> bool:
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", None), str | bytes) for one in sides)


def _is_call(node: Any, *names: str) -> bool:
    """Whether it is a call of one of these functions or methods."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) in names


def _is_for_types(node: Any) -> bool:
    """What only type checkers read: `if TYPE_CHECKING`, aliases of types, `__all__`."""
    if isinstance(node, ast.If):
        return getattr(node.test, "id", "") == "TYPE_CHECKING"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        alias = isinstance(node.value, ast.Subscript | ast.BinOp) and name[:1].isupper() and not name.isupper()
        return name == "__all__" or alias
    return False
