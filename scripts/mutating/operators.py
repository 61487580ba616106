"""Mutation operators: small faults that a programmer could make, as rewrites of a syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Site:
    """A place in a module where one fault can be planted.

    Attributes:
        scope: qualified name of the function.
        operator: name of the mutation operator.
        text: source of what is changed.
        occurrence: how many equal ones stand before it in the same scope.
        line: for people; not part of the site's identity, so edits elsewhere move no fault.
    """

    scope: str
    operator: str
    text: str
    occurrence: int
    line: int

    @property
    def identity(self) -> str:
        return f"{self.scope}|{self.operator}|{self.text}|{self.occurrence}"


def _compare(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = copy.deepcopy(node)
        changed.ops = [_COMPARISONS[type(node.ops[0])]()]
        return changed
    return None


def _arithmetic(node: ast.AST) -> ast.expr | None:
    if not isinstance(node, ast.BinOp) or type(node.op) not in _ARITHMETIC:
        return None
    if any(_is_text(side) for side in (node.left, node.right)):
        return None
    changed = copy.deepcopy(node)
    changed.op = _ARITHMETIC[type(node.op)]()
    return changed


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _boolean(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return changed
    return None


def _negation(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.Call(ast.Name("bool", ast.Load()), [copy.deepcopy(node.operand)], [])
    return None


def _function(node: ast.AST) -> ast.expr | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ):
        changed = copy.deepcopy(node)
        changed.func = ast.Name(_FUNCTIONS[node.func.id], ast.Load())
        return changed
    return None


def _constant(node: ast.AST) -> ast.expr | None:
    if not isinstance(node, ast.Constant):
        return None
    if isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node.value, int):
        return ast.Constant(1 if node.value == 0 else node.value - 1)
    return None


EXPRESSIONS: dict[str, Callable[[ast.AST], ast.expr | None]] = {
    "compare": _compare,
    "arithmetic": _arithmetic,
    "boolean": _boolean,
    "negation": _negation,
    "function": _function,
    "constant": _constant,
}

Select = Callable[[Site], int | None]
"""The number under which a site is planted, or None where it is left as it is."""


class Planter(ast.NodeTransformer):
    """Give each selected site both forms, and a switch: `fault if __fault__(number) else original`.

    Only bodies of functions are changed. Messages of errors, f-strings, annotations, default
    values and docstrings are left alone: what a fault there does is for people to read.
    """

    def __init__(self, select: Select) -> None:
        self.sites: list[Site] = []
        self._select = select
        self._scope: list[str] = []
        self._seen: dict[str, int] = {}
        self._functions = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._scope.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in ("__repr__", "__str__"):
            return node
        self._scope.append(node.name)
        self._functions += 1
        node.body = [self.visit(statement) for statement in node.body]
        self._functions -= 1
        self._scope.pop()
        return node

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Global = visit_Nonlocal = _leave
    visit_Import = visit_ImportFrom = visit_AsyncFunctionDef = visit_arguments = _leave

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        if not isinstance(node.value, ast.Call) or not self._functions:
            return self.generic_visit(node)
        number = self._number("call dropped", node)
        node = self.generic_visit(node)
        if number is None:
            return node
        off = ast.UnaryOp(ast.Not(), _switch(number))
        return ast.copy_location(ast.If(off, [node], []), node)

    def visit(self, node: ast.AST) -> ast.AST:
        if not self._functions or not isinstance(node, ast.expr):
            return super().visit(node)
        planted = None
        for operator, change in EXPRESSIONS.items():
            changed = change(node)
            if changed is not None:
                number = self._number(operator, node)
                if number is not None:
                    planted = number, changed
                break
        kept = super().visit(node)
        if planted is None:
            return kept
        return ast.copy_location(ast.IfExp(_switch(planted[0]), planted[1], kept), node)

    def _number(self, operator: str, node: ast.AST) -> int | None:
        scope, text = ".".join(self._scope), ast.unparse(node)
        key = f"{scope}|{operator}|{text}"
        occurrence = self._seen.get(key, 0)
        self._seen[key] = occurrence + 1
        site = Site(scope, operator, text, occurrence, getattr(node, "lineno", 0))
        self.sites.append(site)
        return self._select(site)


def _switch(number: int) -> ast.expr:
    return ast.Call(ast.Name("__fault__", ast.Load()), [ast.Constant(number)], [])


def sites_of(source: str) -> Iterator[Site]:
    """Every place in a module where a fault can be planted."""
    planter = Planter(lambda site: None)
    planter.visit(ast.parse(source))
    yield from planter.sites


def plant(source: str, select: Select) -> ast.Module:
    """The module with the switches of the selected sites; `__fault__` must be in its builtins."""
    tree = Planter(select).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)
