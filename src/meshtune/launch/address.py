"""Find an address of the first machine, where the ranks meet, before they wait for each other there.

    gpu03, from the node list of Slurm or MASTER_ADDR
      resolves                             itself
      does not, in a Slurm job             NodeAddr or NodeHostName of `scontrol show node gpu03`
      neither                              UserError at once, instead of after the time-out of the rendezvous

On clouds a node's name in Slurm is often not the name of its machine.
"""

import os
import re
import socket
import subprocess
import time

from meshtune.errors import UserError

SCONTROL_TIMEOUT = 30.0  # s; slurmctld can be slow when many ranks ask at once
RESOLVER_ATTEMPTS = 3  # a second apart, while the resolver reports a temporary failure


def reachable_address(name: str) -> str:
    """Return `name` if it resolves on this machine, else the address that Slurm has for the node `name`.

    Raises UserError, with what to set, if neither gives one.
    """
    if resolves(name):
        return name
    addresses, reason = slurm_addresses(name) if "SLURM_JOB_ID" in os.environ else ([], "")
    for address in addresses:
        if resolves(address):
            return address
    source = "MASTER_ADDR" if os.environ.get("MASTER_ADDR") else "the first node of this Slurm job"
    raise UserError(
        f"The ranks are to meet at {name} ({source}), but this name does not resolve on "
        f"{socket.gethostname()}{reason}. Set MASTER_ADDR to an IP address of the machine of rank 0, or to a "
        "name that resolves on every machine (torchrun: start it there with --local-addr)."
    )


def resolves(name: str) -> bool:
    """True if this machine has an address for a host name; always for an IP address."""
    for attempt in range(1, RESOLVER_ATTEMPTS + 1):
        try:
            return bool(socket.getaddrinfo(name, None))
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or attempt == RESOLVER_ATTEMPTS:
                return False
            time.sleep(1)
        except UnicodeError:  # a name that can't be a host's, such as a..b
            return False
    return False


def slurm_addresses(node: str) -> tuple[list[str], str]:
    """Return the addresses that Slurm has for a node, and the end of the error if none of them resolves."""
    command = ["scontrol", "show", "node", node]
    asked = f"`{' '.join(command)}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT)
    except FileNotFoundError:
        return [], f", and {asked} can't be asked: scontrol is not on PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f", and {asked} failed: {error}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        return [], f", and {asked} failed: {lines[0] if lines else f'exit code {done.returncode}'}"
    addresses = re.findall(r"\b(?:NodeAddr|NodeHostName)=(\S+)", done.stdout)
    return addresses, f", nor does what {asked} gives: {' and '.join(addresses) or 'no address'}"
