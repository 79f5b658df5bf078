"""Finds possible mutations of a Python module, from which `benchmarks.mutants` draws.

A mutation replaces one range of the source text, so that line numbers stay the same and a diff shows one line. Texts
for people (docstrings, logs, error messages), annotations, assertions, imports, decorators and `__main__` are not
mutated; neither are named constants of a module (`PATIENCE_S = 120.0`), which are settings rather than logic.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "&",
}
COMPARISON_TOKEN = re.compile(rb"not\s+in\b|is\s+not\b|in\b|is\b|[<>=!]=|[<>]")
ARITHMETIC_TOKEN = re.compile(rb"\*\*|//|<<|>>|[-+*/%&|^]")
LOGS = ("log", "logger", "logging", "warnings")
SWAP_CHANGES_NOTHING = ("isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "max", "min")
STRINGS = (ast.JoinedStr, ast.Dict, ast.List)


@dataclass(frozen=True)
class Mutation:
    """One mutation.

    Attributes:
        path: The file, relative to the checkout.
        line: Its first line, counted from 1.
        kind: Kind of mutation.
        start: Offset of the first replaced byte.
        end: Offset after the last replaced byte.
        text: The replacement.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.start] + self.text + source[self.end :]

    def is_valid(self, source: bytes) -> bool:
        """Whether the mutated source is valid Python."""
        try:
            ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return True


def mutations(path: str, source: bytes) -> list[Mutation]:
    """All mutations of a module, in the order of its lines."""
    return sorted(
        _Finder(path, source).mutations, key=lambda change: (change.start, change.end, change.kind, change.text)
    )


class _Finder(ast.NodeVisitor):
    """Collects the mutations of a module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.mutations: set[Mutation] = set()
        self.function = ""
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Start and end (exclusive) of a node in bytes."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        """A node's source."""
        start, end = self.span(node)
        return self.source[start:end]

    def add(self, node: ast.AST, kind: str, text: bytes) -> None:
        """Add a mutation that replaces a node."""
        self.add_at(*self.span(node), kind, text)

    def add_at(self, start: int, end: int, kind: str, text: bytes) -> None:
        """Add a mutation that replaces a range."""
        line = self.source.count(b"\n", 0, start) + 1
        self.mutations.add(Mutation(self.path, line, kind, start, end, text))

    def add_between(self, left: ast.AST, right: ast.AST, token: re.Pattern[bytes], kind: str, text: str) -> None:
        """Add a mutation that replaces the operator between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        if match := token.search(self.source, start, end):
            self.add_at(match.start(), match.end(), kind, text.encode())

    # --- not mutated

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.function = self.function, node.name
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)
        self.function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not self.is_setting([node.target]):
            self.visit(node.value)

    def is_setting(self, targets: list[ast.expr]) -> bool:
        """Whether an assignment sets a constant of the module."""
        return not self.function and any(isinstance(target, ast.Name) and target.id.isupper() for target in targets)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    visit_Import = visit_ImportFrom = visit_Assert  # type: ignore[assignment]  # noqa: N815

    # --- conditions

    def visit_If(self, node: ast.If) -> None:
        if any(isinstance(part, ast.Name) and part.id in ("__name__", "TYPE_CHECKING") for part in ast.walk(node.test)):
            return
        self.condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if isinstance(node.test, ast.Constant):  # the body ends a `while True`
            for part in node.body:
                self.visit(part)
            return
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
            self.add(test, "condition dropped", b"True")
        self.generic_visit(node)

    def condition(self, test: ast.expr) -> None:
        """Add a mutation that negates a condition."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.add(test, "condition negated", b"(" + self.text(test.operand) + b")")
        elif not isinstance(test, ast.Compare) or len(test.ops) > 1:
            self.add(test, "condition negated", b"(not (" + self.text(test) + b"))")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = b" and " if isinstance(node.op, ast.And) else b" or "
        for dropped in node.values:
            rest = [b"(" + self.text(value) + b")" for value in node.values if value is not dropped]
            self.add(node, "condition dropped", b"(" + word.join(rest) + b")")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            for text in COMPARISONS[type(op)]:
                self.add_between(left, right, COMPARISON_TOKEN, "comparison", text)
        self.generic_visit(node)

    # --- values

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = [isinstance(side, STRINGS) or _is_text(side) for side in (node.left, node.right)]
        if type(node.op) in ARITHMETIC and not any(texts):
            self.add_between(node.left, node.right, ARITHMETIC_TOKEN, "arithmetic", ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, "constant", str(not value).encode())
        elif isinstance(value, int):
            self.add(node, "constant", str(value + 1).encode())
            if value == 1:
                self.add(node, "constant", b"0")
        elif isinstance(value, float):
            self.add(node, "constant", repr(value * 2 if value else 1.0).encode())

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        if name not in SWAP_CHANGES_NOTHING:
            for left, right in zip(node.args, node.args[1:], strict=False):
                first, second = self.text(left), self.text(right)
                if first != second and not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                    start, end = self.span(left)[0], self.span(right)[1]
                    between = self.source[self.span(left)[1] : self.span(right)[0]]
                    self.add_at(start, end, "arguments swapped", second + between + first)
        self.generic_visit(node)

    # --- statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[0] in LOGS:
            return
        self.add(node, "statement dropped", b"pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.is_setting(node.targets):
            return
        # dropping a first assignment leaves a name undefined, which any test detects
        if self.function != "__init__" and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self.add(node, "statement dropped", b"pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "statement dropped", b"pass")
        if type(node.op) in ARITHMETIC and not isinstance(node.value, STRINGS) and not _is_text(node.value):
            operator = ARITHMETIC[type(node.op)]
            self.add_between(node.target, node.value, ARITHMETIC_TOKEN, "arithmetic", operator)
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "statement dropped", b"pass")

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(node, "statement dropped", b"pass")

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self.add(node, "statement dropped", b"pass")

    visit_Break = visit_Continue  # type: ignore[assignment]  # noqa: N815

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            self.add(node, "statement dropped", b"pass")
            return
        if isinstance(value, ast.Compare | ast.BoolOp) and not (isinstance(value, ast.Compare) and len(value.ops) == 1):
            self.add(value, "return value", b"not (" + self.text(value) + b")")
        elif not isinstance(value, ast.Constant | ast.Compare):
            self.add(value, "return value", b"None")
        self.visit(value)


def _is_text(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str | bytes) for part in _shallow(node))


def _shallow(node: ast.expr) -> Iterator[ast.expr]:
    """Yield a node and the operands of its binary operators."""
    yield node
    if isinstance(node, ast.BinOp):
        yield from _shallow(node.left)
        yield from _shallow(node.right)
