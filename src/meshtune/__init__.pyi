from types import ModuleType

from meshtune.api.dryrun import dryrun as dryrun
from meshtune.api.generate import generate as generate
from meshtune.api.plan import plan as plan
from meshtune.api.sweep import sweep as sweep
from meshtune.api.train import Result as Result
from meshtune.api.train import train as train
from meshtune.config import Config as Config
from meshtune.layout import Layout as Layout
from meshtune.train.callbacks import Callback as Callback
from meshtune.train.callbacks import Training as Training

__version__: str

class CallablePackage(ModuleType): ...
