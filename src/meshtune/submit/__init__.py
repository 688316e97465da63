"""Submit a run to a cluster: the numbers of its job from the plan, and the files of an engine.

config ──> plan ──> Job (job.py) ──> an engine's files, and its commands (slurm.py …; engines.py has them)
"""
