"""Models of plan/models.toml as the planner counts them, without their config.json."""

from functools import cache

from meshtune import config
from meshtune.api.plan import known_workload
from meshtune.plan.workload import Workload


@cache
def known(model: str, *words: str) -> Workload:
    """The workload of a model and of settings, section.key=value."""
    return known_workload(config.load(None, ["model.name=x", *words]), model)
