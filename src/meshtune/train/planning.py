"""Where a run meets the planner: a config's workload, and the layout that it leaves open.

Imports no torch by itself: `meshtune plan` asks here too, and has the model's numbers from the disk.
"""

from dataclasses import replace
from pathlib import Path

from meshtune.config import Config
from meshtune.errors import NothingFits, UserError
from meshtune.layout import Layout
from meshtune.model.known import LoraShape, known
from meshtune.plan import advice
from meshtune.plan.answer import plan_yaml
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory import compiled
from meshtune.plan.search import search
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload


def workload_of(config: Config) -> Workload:
    """The workload of a config; its data need not exist. Raises UserError for a model that can't be
    planned.
    """
    model, lora = config.model, None
    if config.method == "lora":
        lora = LoraShape(config.lora.r, config.lora.target_modules)
    found = known(
        model.name,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        freeze=model.freeze,
        lora=lora,
        cache_dir=Path(config.data.cache).expanduser(),
    )
    if found.census.unsupported:
        raise UserError(
            f"{model.name} can't be planned: {found.census.unsupported}. Name a layout to train it "
            "(layout=zero3x8-mb1)."
        )
    work = Work.of(found.census)
    if config.train.compile:
        work = replace(work, kept={element: compiled(kept) for element, kept in work.kept.items()})
    return Workload(
        model=model.name,
        work=work,
        traits=found.traits,
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        document_tokens=config.data.mean_document_tokens,
        precision=config.train.precision,
        reduce_dtype=config.train.reduce_dtype,
        compile=config.train.compile,
        packing=config.data.packing,
        attention=found.attention if model.attention == "auto" else model.attention,
    )


def chosen(config: Config, ranks: int) -> tuple[Layout, str]:
    """The layout that the planner chooses for `ranks` ranks of the devices here, and its plan.yaml; what the
    config fixes of it is kept.

    Raises NothingFits, with the nearest that does, where no layout fits.
    """
    workload = workload_of(config)
    cluster = cluster_of(config.cluster_config, gpus=ranks)
    if cluster.gpus != ranks:
        raise UserError(
            f"cluster.gpus = {cluster.gpus}, but {ranks} ranks were started; leave cluster.gpus out, or "
            "start as many."
        )
    plan = search(workload, cluster, fixed=config.partial_layout.given)
    if not len(plan):
        raise NothingFits(advice.nothing_fits(plan))
    choice = plan.choice(0)
    return choice.layout, plan_yaml(choice, plan)
