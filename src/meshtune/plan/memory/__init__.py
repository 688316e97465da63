"""Bytes on a rank at each event of a step; timeline.py says how they add up."""

from meshtune.plan.memory.activations import compiled
from meshtune.plan.memory.stages import RANKS
from meshtune.plan.memory.states import gpt_parameters
from meshtune.plan.memory.timeline import CATEGORIES, EVENTS

__all__ = ["CATEGORIES", "EVENTS", "RANKS", "compiled", "gpt_parameters"]
