"""The attacks that are not just other numbers in a call, each in a process of its own, with one line for each.

    python -m tests.fuzz.attack --device cpu
    python -m tests.fuzz.attack --device cuda --only out_of_memory

"held" or "BROKE" with what happened; a process that dies or hangs broke. Exit code 1 if one did.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

from .attacks import ATTACKS, NotHere

MOST_SECONDS = 900.0
# These run once more without assertions: a check that a user can come to must not be one.
ALSO_OPTIMISED = ("default_dtype", "default_device", "strides", "nan_routing", "derivatives", "seeds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.attack", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=ATTACKS, help="one of them")
    parser.add_argument("--here", action="store_true", help="with --only: in this process")
    options = parser.parse_args()
    if options.here:
        return _here(options.only, options.device)
    broke = 0
    for name in [options.only] if options.only else ATTACKS:
        broke += not _apart(name, options.device, {})
    for name in ALSO_OPTIMISED:
        if options.only in (None, name):
            broke += not _apart(name, options.device, {"PYTHONOPTIMIZE": "1"})
    print("all held" if not broke else f"{broke} broke")
    return 1 if broke else 0


def _here(name: str, device: str) -> int:
    try:
        broken = ATTACKS[name](device)
    except NotHere as reason:
        print(f"left out: {reason}")
        return 0
    for line in broken:
        print(line)
    return 1 if broken else 0


def _apart(name: str, device: str, variables: dict[str, str]) -> bool:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {"OMP_WAIT_POLICY": "passive", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ | variables
    source = os.path.join(root, "src")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), source)))
    command = [sys.executable, "-m", "tests.fuzz.attack", "--device", device, "--only", name, "--here"]
    begun = time.monotonic()
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            output, _ = child.communicate(timeout=MOST_SECONDS)
            status = child.returncode
        except subprocess.TimeoutExpired:
            child.kill()
            output, status = f"no end after {MOST_SECONDS:.0f} seconds", 1
    said = output.strip().splitlines()
    if status < 0:
        said.append(f"the process died of {signal.Signals(-status).name}")
    word = f"{name}{''.join(f' {key}={value}' for key, value in variables.items())}"
    took = f"({time.monotonic() - begun:.0f} s)"
    if status == 0:
        left_out = [line for line in said if line.startswith("left out")]
        print(f"held   {word} {took}{' ' + left_out[0] if left_out else ''}", flush=True)
        return True
    shown = [line for line in said if line and not line.startswith("seed=")][-12:]
    print(f"BROKE  {word} {took}", *(f"         {line[:300]}" for line in shown), sep="\n", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
