"""Mutants: small wrong changes to a source file, one at a time.

In: the text of a Python file. Out: `Mutant`s, each with the changed text, and the statement that must run for the
change to be seen. Pure: the same text gives the same mutants in the same order.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change to one file."""

    path: str
    """From the root of the checkout."""
    line: int
    scope: str
    """Names of the classes and functions around it, joined by dots; "" at the top of the file."""
    operator: str
    before: str
    after: str
    """The changed piece of source, blanks and line ends made one blank."""
    occurrence: int
    """How many equal changes come before it in the same scope."""
    statement: tuple[int, int]
    """Line and column of the statement that contains it; (0, 0) for what runs when the file is imported."""
    edit: tuple[int, int, str]
    """First byte, one past the last byte, and what stands there instead."""

    @property
    def name(self) -> str:
        """What the report and the list of equivalent mutants call it; other lines of the file may change."""
        again = f" (#{self.occurrence + 1})" if self.occurrence else ""
        return f"{self.path} {self.scope or 'import'}: `{self.before}` → `{self.after}`{again}"

    def rank(self, seed: int) -> str:
        """A mutant's place in the random order of a seed: it does not depend on other mutants."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()

    def apply(self, source: str) -> str:
        """The file with this change."""
        begin, end, text = self.edit
        data = source.encode()
        return (data[:begin] + text.encode() + data[end:]).decode()


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file."""
    finder = _Finder(path, source)
    finder.visit_body(ast.parse(source).body, "", (0, 0))
    return finder.found


def statements(source: str) -> Iterator[ast.stmt]:
    """The statements of all functions of a file: what `Mutant.statement` names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _inside(node.body)


def _inside(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            continue
        if not is_text(node):
            yield node
        for inner in _blocks(node):
            yield from _inside(inner)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if getattr(node, field, None):
            yield getattr(node, field)
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.seen: dict[tuple[str, str, str], int] = {}

    # Statements

    def visit_body(self, body: list[ast.stmt], scope: str, place: tuple[int, int]) -> None:
        for node in body:
            own = (0, 0) if place == (0, 0) else (node.lineno, node.col_offset)
            if isinstance(node, ast.ClassDef):
                self.visit_body(node.body, f"{scope}.{node.name}".strip("."), (0, 0))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit_function(node, f"{scope}.{node.name}".strip("."))
            elif not (is_text(node) or _is_for_types(node)):
                self.visit_statement(node, scope, own)
                for inner in _blocks(node):
                    self.visit_body(inner, scope, own)

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: str) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit_expression(default, scope, (0, 0))
        first = next((one for one in node.body if not is_text(one)), None)
        if first is None:
            return
        returns = [one for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
        if not any(getattr(one, "value", None) for one in returns) and not isinstance(first, ast.Return | ast.Pass):
            head = ast.get_source_segment(self.source.decode(), first) or ""
            place = (first.lineno, first.col_offset)
            self.add("early return", first, f"return; {head}" if _is_simple(first) else None, scope, place)
        self.visit_body(node.body, scope, (node.lineno, node.col_offset))

    def visit_statement(self, node: ast.stmt, scope: str, place: tuple[int, int]) -> None:
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_debug(node.value):
            self.add("removed call", node, "pass", scope, place)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign) and any(isinstance(one, ast.Attribute) for one in targets):
            self.add("removed assignment", node, "pass", scope, place)
        if isinstance(node, ast.AugAssign):
            other = ARITHMETIC.get(type(node.op))
            if other:
                self.add_node("arithmetic", node, _with(node, op=other()), scope, place, brackets=False)
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            self.add("returned nothing", node, "return None", scope, place)
        if isinstance(node, ast.Break | ast.Continue):
            self.add("loop", node, "continue" if isinstance(node, ast.Break) else "break", scope, place)
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody", "handlers", "cases", "annotation", "decorator_list"):
                continue
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    self.visit_expression(one, scope, place)
        if isinstance(node, ast.If | ast.While):
            self.negate(node.test, scope, place)

    # Expressions

    def visit_expression(self, node: ast.AST, scope: str, place: tuple[int, int]) -> None:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _is_debug(node)):
            return
        if isinstance(node, ast.Compare):
            for at, op in enumerate(node.ops):
                ops = [*node.ops[:at], COMPARISONS[type(op)](), *node.ops[at + 1 :]]
                self.add_node("comparison", node, _with(node, ops=ops), scope, place)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_string(node):
            self.add_node("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()), scope, place)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self.add_node("and/or", node, _with(node, op=other), scope, place)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            self.add_node("sign", node, node.operand, scope, place)
        elif isinstance(node, ast.Constant):
            self.visit_constant(node, scope, place)
        elif isinstance(node, ast.Call):
            self.visit_call(node, scope, place)
            if _is_guard(node):
                return self.visit_all(node.args, scope, place)
        elif isinstance(node, ast.IfExp):
            self.negate(node.test, scope, place)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                self.negate(test, scope, place)
        self.visit_all(ast.iter_child_nodes(node), scope, place)

    def visit_all(self, nodes: Iterable[ast.AST], scope: str, place: tuple[int, int]) -> None:
        for node in nodes:
            self.visit_expression(node, scope, place)

    def visit_constant(self, node: ast.Constant, scope: str, place: tuple[int, int]) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value), scope, place)
        elif isinstance(value, int | float):
            self.add("constant", node, f"({value + 1})", scope, place)
            self.add("constant", node, f"({value - 1})", scope, place)

    def visit_call(self, node: ast.Call, scope: str, place: tuple[int, int]) -> None:
        for at in range(0 if _is_symmetric(node) else len(node.args) - 1):
            left, right = node.args[at : at + 2]
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                swapped = [*node.args[:at], right, left, *node.args[at + 2 :]]
                self.add_node("swapped arguments", node, _with(node, args=swapped), scope, place)
        for at, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "help") and not _is_guard(node):
                rest = node.keywords[:at] + node.keywords[at + 1 :]
                self.add_node("dropped keyword", node, _with(node, keywords=rest), scope, place)

    def negate(self, test: ast.expr, scope: str, place: tuple[int, int]) -> None:
        self.add_node("negated condition", test, ast.UnaryOp(ast.Not(), test), scope, place)

    # Results

    def add_node(
        self, operator: str, old: ast.AST, new: ast.AST, scope: str, place: tuple[int, int], brackets: bool = True
    ) -> None:
        text = ast.unparse(ast.fix_missing_locations(new))  # type: ignore[type-var]
        if text != ast.unparse(old):
            self.add(operator, old, f"({text})" if brackets else text, scope, place)

    def add(self, operator: str, old: ast.AST, text: str | None, scope: str, place: tuple[int, int]) -> None:
        begin, end = self.offset(old.lineno, old.col_offset), self.offset(old.end_lineno, old.end_col_offset)  # type: ignore[attr-defined]
        if text is None:  # a compound statement: what is wanted comes before it
            indent = " " * old.col_offset  # type: ignore[attr-defined]
            text, end = f"return\n{indent}", begin
        before, after = " ".join(self.source[begin:end].decode().split()), " ".join(text.split())
        key = (scope, before, after)
        self.seen[key] = self.seen.get(key, -1) + 1
        self.found.append(
            Mutant(self.path, old.lineno, scope, operator, before, after, self.seen[key], place, (begin, end, text))  # type: ignore[attr-defined]
        )

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column


def _with(node: ast.AST, **fields: object) -> ast.AST:
    copied = type(node)(**{name: getattr(node, name, None) for name in node._fields})
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def _is_simple(node: ast.stmt) -> bool:
    return not any(_blocks(node)) and not isinstance(node, ast.FunctionDef | ast.ClassDef)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_string(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
        for one in sides
    )


def _is_debug(node: ast.Call) -> bool:
    """A message that only developers turn on."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "debug"


def _is_guard(node: ast.Call) -> bool:
    """`zip`, whose one keyword only says that the lengths are equal."""
    return isinstance(node.func, ast.Name) and node.func.id == "zip"


def _is_symmetric(node: ast.Call) -> bool:
    """Whether the order of its arguments cannot matter."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("max", "min", "maximum", "minimum", "array_equal", "isclose", "gcd")


def _is_for_types(node: ast.stmt) -> bool:
    """What only type checkers read: `if TYPE_CHECKING`, aliases of types, `__all__`."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        alias = isinstance(node.value, ast.Subscript | ast.BinOp) and node.targets[0].id[:1].isupper()
        return node.targets[0].id == "__all__" or (alias and not node.targets[0].id.isupper())
    return False
