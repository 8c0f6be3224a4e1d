"""The attention examples in float32 and bfloat16 on one CUDA card, all at once, each in a process of its own.

python benchmarks/card/training.py [equinox] [flax] [quick]   (default: both)

What is looked at: that the loss falls, that it stays finite, and how it ends on unseen sequences, beside what the same run
gives in float32. JAX_PLATFORMS=cuda, so that nothing falls back to a CPU unseen. Pictures of bfloat16 go to $OUT.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import time

from facts import QUICK, WORDS, fact, say

STEPS, PATIENCE = (4 if QUICK else 400), 420
STEP = re.compile(r"step +(\d+) +loss +(\S+) +right +(\S+)")
UNSEEN = re.compile(r"unseen sequences: loss (\S+), right (\S+)")


def start(hosts):
    """Everything at once; then each in turn is waited for."""
    folders = tempfile.TemporaryDirectory()
    folder = os.environ.get("OUT") or folders.name
    environment = {**os.environ, "JAX_PLATFORMS": "cpu" if QUICK else "cuda", "MPLBACKEND": "Agg"}
    begun, running = time.time(), {}
    for host, precision in itertools.product(hosts, ("float32", "bfloat16")):
        command = [sys.executable, f"examples/attention/{host}_alignment.py", "--steps", str(STEPS)]
        command += (
            ["--out", f"{folder}/{host}.png", "--bfloat16"]
            if precision == "bfloat16"
            else ["--out", f"{folders.name}/{host}.png"]
        )
        running[host, precision] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for (host, precision), process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1, PATIENCE - (time.time() - begun)))
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\ntook too long"
        judge(host, precision, output, time.time() - begun)


def judge(host, precision, output, seconds):
    curve = [float(loss) for _, loss, _ in STEP.findall(output)]
    unseen = UNSEEN.search(output)
    if not curve or not unseen:
        fact(f"{host}, {precision}", failed=output[-1500:])
        return
    loss, right = map(float, unseen.groups())
    finite = all(map(math.isfinite, [*curve, loss]))
    falls = finite and curve[-1] < curve[0] * (2 if QUICK else 0.5)
    verdict = "good" if finite and falls else "BAD"
    fact(
        f"{host}, {precision}",
        verdict=verdict,
        steps=STEPS,
        seconds=seconds,
        curve=curve,
        unseen_loss=loss,
        unseen_right=right,
    )


if __name__ == "__main__":
    say("JAX_PLATFORMS=cpu" if QUICK else "JAX_PLATFORMS=cuda")
    start(WORDS or ("equinox", "flax"))
