"""Conditions of a sweep on an experiment's settings: `layout.tp <= 2 or data.seq_len >= 512`.

A condition is a Python expression of names with dots, numbers, texts, lists, and/or/not, comparisons, in,
+ - * / // %. Nothing else passes `Checked`, so that it can be evaluated. true, false and null are YAML's.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from meshtune.errors import UserError, written

ValueOf = Callable[[str], Any]  # returns the value of a dotted setting
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
LONGEST = 1000  # characters of a condition
PARTS = (ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.List, ast.Tuple)
OPERATORS = (
    ast.And, ast.Or, ast.Not, ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn,
)  # fmt: skip
WRITTEN_LIKE = "write a condition such as layout.tp <= 2 or data.seq_len >= 512"


@dataclass(frozen=True)
class Condition:
    """One condition: its text, and the names of the settings in it."""

    text: str
    code: CodeType
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: Any) -> "Condition":
        """Read a condition. Raises UserError for other text, and for a part that conditions do not have."""
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"where: {written(text)} is not a condition; {WRITTEN_LIKE}.")
        if len(text) > LONGEST:
            raise UserError(f"where: a condition has {len(text):,} characters; at most {LONGEST:,} are read.")
        try:
            checked = Checked()
            tree = ast.fix_missing_locations(checked.visit(ast.parse(text.strip(), mode="eval")))
            code = None if checked.unknown else compile(tree, "<where>", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise UserError(f"where: '{text}' can't be read ({reason}); {WRITTEN_LIKE}.") from None
        if code is None:
            raise UserError(
                f"where: '{ast.get_source_segment(text.strip(), part) or text}' of '{text}' is not "
                "understood; conditions have names of settings, numbers, texts, lists, and, or, not, "
                "comparisons, in, + - * / // %."
                for part in checked.unknown
            )
        return cls(text, code, tuple(checked.names))

    def holds(self, value_of: ValueOf) -> bool:
        """Evaluate the condition. Raises UserError for values that it can't compare or calculate with."""
        try:
            return bool(eval(self.code, {"__builtins__": {}}, Settings(value_of)))
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            values = ", ".join(f"{name} = {written(value_of(name))}" for name in self.names)
            reason = "only numbers are calculated with" if "unary +" in str(error) else error
            raise UserError(f"where: '{self.text}' has no answer with {values}: {reason}.") from None


class Settings(dict[str, Any]):
    """The values of settings by dotted name, each read when a condition needs it."""

    def __init__(self, value_of: ValueOf) -> None:
        self.value_of = value_of

    def __missing__(self, name: str) -> Any:
        return self.value_of(name)


class Checked(ast.NodeTransformer):
    """Rewrites an expression: a setting is one name with its dots, arithmetic refuses texts and lists."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # of settings, in their order
        self.unknown: list[ast.expr] = []  # parts that conditions do not have

    def visit(self, node: ast.AST) -> Any:
        if name := _dotted(node):
            if name.lower() in CONSTANTS:
                return ast.Constant(CONSTANTS[name.lower()])
            self.names[name] = None
            return ast.Name(name, ast.Load())
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
            return node
        known = (ast.expr, ast.Load, *OPERATORS)
        if isinstance(node, ast.expr) and not (
            isinstance(node, PARTS) and all(isinstance(part, known) for part in ast.iter_child_nodes(node))
        ):
            self.unknown.append(node)
            return node
        self.generic_visit(node)
        if isinstance(node, ast.BinOp):  # +x is an error for all but numbers: no text times 10⁹
            node.left, node.right = (ast.UnaryOp(ast.UAdd(), part) for part in (node.left, node.right))
        return ast.List(node.elts, ast.Load()) if isinstance(node, ast.Tuple) else node  # as YAML's are


def _dotted(tree: ast.AST) -> str:
    """The name that a Name or a chain of attributes spells; "" for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute) and (before := _dotted(tree.value)):
        return f"{before}.{tree.attr}"
    return ""
