"""`python -m meshtune …`: the same as the console script `meshtune`."""

from meshtune.cli import main

main()
