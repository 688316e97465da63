"""Seconds of an optimizer step; step.py says how they add up."""

from meshtune.plan.seconds.step import PARTS

__all__ = ["PARTS"]
