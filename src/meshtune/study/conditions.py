"""Conditions of a sweep on an experiment's settings: `layout.tp <= 2 or data.seq_len >= 512`.

A condition is parsed as a Python expression and evaluated by its syntax tree, never by eval(): names with
dots, numbers, texts, lists, and/or/not, comparisons, in, + - * / // %. true, false and null are YAML's.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshtune.errors import UserError, written

ValueOf = Callable[[str], Any]  # returns the value of a dotted setting
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
LONGEST = 1000  # characters of a condition

ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, several: value in several,
    ast.NotIn: lambda value, several: value not in several,
}
SIGNS: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
WRITTEN_LIKE = "write a condition such as layout.tp <= 2 or data.seq_len >= 512"


@dataclass(frozen=True)
class Condition:
    """One condition: its text, and the names of the settings in it."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: Any) -> "Condition":
        """Read a condition. Raises UserError for what is none, and for a part that conditions do not have."""
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"where: {written(text)} is no condition; {WRITTEN_LIKE}.")
        if len(text) > LONGEST:
            raise UserError(f"where: a condition has {len(text):,} characters; at most {LONGEST:,} are read.")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise UserError(f"where: '{text}' can't be read ({reason}); {WRITTEN_LIKE}.") from None
        if problems := [*_unknown_parts(tree, text)]:
            raise UserError(problems)
        return cls(text, tree, tuple(dict.fromkeys(_names(tree))))

    def holds(self, value_of: ValueOf) -> bool:
        """Evaluate the condition. Raises UserError for values that it can't compare or calculate with."""
        try:
            return bool(_value(self.tree, value_of))
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            values = ", ".join(f"{name} = {written(value_of(name))}" for name in self.names)
            raise UserError(f"where: '{self.text}' has no answer with {values}: {error}.") from None


def _unknown_parts(tree: ast.expr, text: str) -> Iterator[str]:
    """Sentences on parts of an expression that conditions do not have."""
    match tree:
        case ast.BoolOp():
            parts: list[ast.expr] = tree.values
        case ast.UnaryOp(op=op) if type(op) in SIGNS:
            parts = [tree.operand]
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            parts = [tree.left, tree.right]
        case ast.Compare() if all(type(op) in COMPARISONS for op in tree.ops):
            parts = [tree.left, *tree.comparators]
        case ast.List() | ast.Tuple():
            parts = tree.elts
        case ast.Constant(value=value) if isinstance(value, bool | int | float | str):
            parts = []
        case ast.Name() | ast.Attribute() if _dotted(tree):
            parts = []
        case _:
            part = ast.get_source_segment(text.strip(), tree) or text
            yield (
                f"where: '{part}' of '{text}' is not understood; conditions have names of settings, numbers, "
                "texts, lists, and, or, not, comparisons, in, + - * / // %."
            )
            return
    for part in parts:
        yield from _unknown_parts(part, text)


def _dotted(tree: ast.expr) -> str:
    """The name that a Name or a chain of attributes spells; "" for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute) and (before := _dotted(tree.value)):
        return f"{before}.{tree.attr}"
    return ""


def _names(tree: ast.expr) -> Iterator[str]:
    """Yield the names of settings in an expression."""
    if name := _dotted(tree):
        if name.lower() not in CONSTANTS:
            yield name
        return
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.expr):
            yield from _names(part)


def _value(tree: ast.expr, value_of: ValueOf) -> Any:
    match tree:
        case ast.Constant():
            return tree.value
        case ast.BoolOp():
            wanted = isinstance(tree.op, ast.Or)  # the first part that is so ends it
            value: Any = None
            for part in tree.values:
                value = _value(part, value_of)
                if bool(value) is wanted:
                    break
            return value
        case ast.UnaryOp():
            return SIGNS[type(tree.op)](_value(tree.operand, value_of))
        case ast.BinOp():
            left, right = _value(tree.left, value_of), _value(tree.right, value_of)
            if isinstance(left, str | list) or isinstance(right, str | list):
                raise TypeError("only numbers are calculated with")
            return ARITHMETIC[type(tree.op)](left, right)
        case ast.Compare():
            return _compared(tree, value_of)
        case ast.List() | ast.Tuple():
            return [_value(part, value_of) for part in tree.elts]
        case _:
            name = _dotted(tree)
            return CONSTANTS[name.lower()] if name.lower() in CONSTANTS else value_of(name)


def _compared(tree: ast.Compare, value_of: ValueOf) -> bool:
    """Evaluate a chain of comparisons, 1 < a <= 4."""
    left = _value(tree.left, value_of)
    for op, part in zip(tree.ops, tree.comparators, strict=True):
        right = _value(part, value_of)
        if not COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True
