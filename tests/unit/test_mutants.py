"""The mutants that tests/mutate.py tries: of each kind one, named and applied where it stands."""

from __future__ import annotations

import ast

import pytest
from mutation.mutants import find_mutants, statements

SOURCE = '''"""Text: 1 < 2."""
LIMIT: int = 3


class Box:
    def put(self, a, b=4):
        """Also text."""
        if a <= b and a:
            self.a = a
            self.tell(a, b, loud=True)
        for one in a:
            break
        return

    def take(self):
        logger.debug("nothing", 5)
        raise ValueError(f"{1 + 1}", 6)
        return [x for x in self.a if x] or zip(a, strict=True)
'''


@pytest.mark.parametrize(
    ("operator", "scope", "before", "after"),
    [
        ("constant", "", "3", "(4)"),
        ("constant", "", "3", "(2)"),
        ("constant", "Box.put", "4", "(5)"),
        ("comparison", "Box.put", "a <= b", "(a < b)"),
        ("and/or", "Box.put", "a <= b and a", "(a <= b or a)"),
        ("negated condition", "Box.put", "a <= b and a", "(not (a <= b and a))"),
        ("removed assignment", "Box.put", "self.a = a", "pass"),
        ("removed call", "Box.put", "self.tell(a, b, loud=True)", "pass"),
        ("swapped arguments", "Box.put", "self.tell(a, b, loud=True)", "(self.tell(b, a, loud=True))"),
        ("dropped keyword", "Box.put", "self.tell(a, b, loud=True)", "(self.tell(a, b))"),
        ("constant", "Box.put", "True", "False"),
        ("loop", "Box.put", "break", "continue"),
        ("early return", "Box.put", "", "return"),
        ("returned nothing", "Box.take", "return [x for x in self.a if x] or zip(a, strict=True)", "return None"),
        ("negated condition", "Box.take", "x", "(not x)"),
        ("and/or", "Box.take", "[x for x in self.a if x] or zip(a, strict=True)",
         "([x for x in self.a if x] and zip(a, strict=True))"),
    ],
)  # fmt: skip
def test_one_of_each_kind(operator: str, scope: str, before: str, after: str) -> None:
    (found,) = [one for one in find_mutants("a.py", SOURCE) if (one.operator, one.scope, one.before, one.after)
                == (operator, scope, before, after)]  # fmt: skip
    changed = found.apply(SOURCE)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
    lines = [at for at, (old, new) in enumerate(zip(SOURCE.splitlines(), changed.splitlines()), 1) if old != new]
    assert lines[0] == found.line
    places = {(one.lineno, one.col_offset) for one in statements(SOURCE)}
    assert found.statement in places or found.statement == (0, 0)


def test_those_are_all() -> None:
    """Nothing in texts, messages and annotations."""
    assert len(find_mutants("a.py", SOURCE)) == 17
