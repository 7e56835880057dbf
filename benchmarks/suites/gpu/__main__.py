# SPDX-License-Identifier: Apache-2.0
"""Run the parts that need a GPU, one after the other.

`python -m benchmarks.suites.gpu [PART ...] --out DIR`

Each part is a benchmark (`python -m benchmarks run gpu_PART`) in its own process. It leaves
`gpu_PART.json`, and its output in `gpu_PART.log`. If a part fails or takes too long, the others
still run; the exit status reports the failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.gpu.device import require_gpu
from benchmarks.suites.gpu.parts import PARTS


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        print(f"error: no part {unknown[0]!r}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 1
    if not arguments.without_gpu:
        try:
            require_gpu("python -m benchmarks.suites.gpu")
        except MeasurementError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.parts or PARTS:
        start = time.perf_counter()
        problem = _run(name, arguments)
        seconds = time.perf_counter() - start
        print(f"gpu_{name}: {problem or 'done'} ({seconds:.0f} s)", flush=True)
        if problem:
            failed.append(name)
    tuned(arguments.out)
    return 1 if failed else 0


def _run(name: str, arguments: argparse.Namespace) -> str | None:
    """Run one part; return what went wrong, or None."""
    out, log = (arguments.out / f"gpu_{name}.{ending}" for ending in ("json", "log"))
    out.unlink(missing_ok=True)  # an earlier run's figures must not be taken for this one's
    command = [
        *(sys.executable, "-m", "benchmarks", "run", f"gpu_{name}"),
        *("--profile", arguments.profile, "--out", str(out.absolute())),
    ]
    for override in arguments.set:
        part, _, rest = override.partition(".")
        if part == name:
            command += ["--set", rest]
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=REPO_ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=arguments.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {arguments.limit_s} s, see {log}"
    return None if done.returncode == 0 else f"failed, see {log}:\n{_tail(log)}"


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-num_lines:])


def tuned(out: Path) -> Path | None:
    """Write the launch parameters that `link` found as a file for `kv_pages/tuned/`."""
    source = out / "gpu_link.json"
    if not source.is_file():
        return None
    from vllm_tiered.kernels import tuned as known

    result: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    target = out / f"{result['device']['name'].replace(' ', '_')}.json"
    # What is not measured here keeps its value.
    parameters = {**known.parameters("kv_pages"), **result["tuned"]}
    target.write_text(json.dumps(parameters) + "\n", encoding="utf-8")
    print(f"candidate for triton_kernels/kv_pages/tuned/: {target}", flush=True)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--profile", choices=("quick", "full"), default="quick")
    parser.add_argument("--limit-s", type=float, default=540, help="for a part, at most")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PART.KEY=VALUE", help="may be repeated"
    )
    parser.add_argument(
        "--without-gpu",
        action="store_true",
        help="do not ask for one: parts with device=cpu run on vLLM's CPU backend",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
