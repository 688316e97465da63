"""Cost of `meshtune dryrun` for large models: `python benchmarks/dryrun_cost.py [MODEL]`, six minutes.

Seconds and CPU seconds of the whole command with the ranks that it traces, and the memory of its largest
process. Sequences of 8,192 tokens; configurations are those of plan/models.toml: nothing is downloaded.
"""

import os
import subprocess
import sys
import tempfile
import time

GIB = 2**30
CASES = (  # model, global batch, layout
    ("meta-llama/Llama-3.1-8B", 512, "zero3x512-mb1"),
    ("meta-llama/Llama-3.1-70B", 512, "zero3x32-tp8-sp-mb16-full"),
    ("meta-llama/Llama-3.1-405B", 64, "zero3x8-tp8-sp-pp8-1f1b-mb1-ga8"),  # 126 blocks: 16 or 15 a rank
    ("deepseek-ai/DeepSeek-V3", 512, "zero3x64-ep64-pp8-1f1b-mb1-ga8-full"),  # 512 ranks
)


def main() -> None:
    for model, batch, layout in CASES:
        if not all(word in model for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as cache:
            words = [f"model.name={model}", "data.seq_len=8192", f"data.cache={cache}"]
            words += [f"train.global_batch_size={batch}", "--gpu", "h100-sxm", "--layout", layout, "--json"]
            began = time.monotonic()
            command = [sys.executable, "-m", "meshtune", "dryrun", *words]
            with tempfile.TemporaryFile() as out:
                process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
                _, status, used = os.wait4(process.pid, 0)  # with its ranks, which it has waited for
                wall = time.monotonic() - began
                process.returncode = os.waitstatus_to_exitcode(status)
                out.seek(0)
                ranks = out.read().count(b'"stands_for"')
        if process.returncode not in (0, 3):  # 3: it does not fit
            sys.exit(f"{' '.join(command)} ended with {process.returncode}.")
        seconds, memory = used.ru_utime + used.ru_stime, used.ru_maxrss * 2**10 / GIB
        print(f"{model} {layout}: {ranks} ranks traced, {wall:.0f} s, {seconds:.0f} CPU s, {memory:.2f} GiB")


if __name__ == "__main__":
    main()
