import sys

from meshtune import CallablePackage

sys.modules[__name__].__class__ = CallablePackage  # meshtune.plan(…), docs/python.md
