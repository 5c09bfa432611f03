"""`python -m benchmarks`: measures the service and other tools in one run; JSON and a table.

A missed target does not fail the run: measurements depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import agent, machine, tunnels
from benchmarks.peers import bubblewrap, crun, swerex
from benchmarks.report import print_table
from benchmarks.samples import Metrics
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.targets import TARGETS, TOOL
from examples.demo.service import running_service

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = {peer.NAME: peer for peer in (bubblewrap, crun, swerex)}
OURS = "orchard"


def measure_service(scale: Scale, say: Any) -> dict[str, Metrics]:
    """REST and SDK figures of one `orchard serve`, from generators in processes of their own."""
    plan = (
        ("load", "create_first_exec", scale.sequential, 1),
        ("load", "creates", scale.creates, 8),
        ("load", "exec_true", scale.execs, 1),
        ("load", "exec_true", scale.execs, 8),
        ("load", "exec_true", 2 * scale.execs, 64),
        ("load", "idle_memory", scale.idle, 8),
        ("load", "lifecycle", scale.lifecycles, scale.lifecycles),
        ("flows", "raw_stream", scale.mib // 2, 1),
        ("flows", "file_up", scale.mib, 1),
        ("flows", "file_down", scale.mib, 1),
        ("flows", "ptys", 0, scale.ptys),
        ("flows", "sdk_stream", scale.mib // 2, 1),
        ("sdk", "create_first_exec", scale.sequential, 1),
        ("sdk", "exec_true", scale.execs, 1),
        ("sdk", "exec_true", scale.execs, 8),
        ("sdk", "exec_true", scale.execs, 64),
    )
    results: dict[str, Metrics] = {TOOL: {}, "orchard (SDK)": {}}
    with (
        tempfile.TemporaryDirectory(prefix="bench-orchard-") as folder,
        running_service(Path(folder) / "state") as (base_url, key),
    ):
        for module, scenario, count, concurrency in plan:
            what = f"{count} MiB, {concurrency}" if module == "flows" else f"{count} times, {concurrency}"
            say(f"{module}: {scenario}, {what} at a time")
            by_sdk = module == "sdk" or scenario.startswith("sdk_")
            results["orchard (SDK)" if by_sdk else TOOL] |= generate(
                base_url, key, module, scenario, count, concurrency
            )
    return results


def generate(base_url: str, key: str, module: str, scenario: str, count: int, concurrency: int) -> Metrics:
    """Runs one generator to its end; RuntimeError with what it said if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", scenario, str(count), str(concurrency)],
        cwd=machine.ROOT,
        env={**os.environ, "ORCHARD_BASE_URL": base_url, "ORCHARD_API_KEY": key},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{module} {scenario} failed:\n{result.stderr.strip()[-3000:]}")
    metrics: Metrics = json.loads(result.stdout)
    return metrics


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it works; not kept")
    parser.add_argument(
        "--only", nargs="+", choices=[OURS, "agent", "tunnels", *PEERS], help="measure only these"
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results/)")
    return parser.parse_args()


def measure_all(chosen: list[str], scale: Scale, say: Any) -> tuple[dict[str, Metrics], dict[str, str]]:
    """The figures of each tool, and for each that cannot be measured the reason."""
    results: dict[str, Metrics] = {}
    missing: dict[str, str] = {}
    if OURS in chosen:
        results |= measure_service(scale, say)
    for name, tool in {"agent": agent, "tunnels": tunnels, **PEERS}.items():
        if name not in chosen:
            continue
        say(f"{name}: …")
        if reason := tool.missing():
            missing[name] = reason
        else:
            results[tool.NAME] = tool.measure(scale)
    return results, missing


def main() -> None:
    options = arguments()
    # Into a file or a pipe, the table is as wide as it needs to be.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    document = machine.describe()
    chosen = options.only or [OURS, "agent", "tunnels", *PEERS]
    document["scale"] = "quick" if options.quick else "full"
    results, missing = measure_all(
        chosen, QUICK if options.quick else FULL, lambda text: console.print(text, style="dim", markup=False)
    )
    document |= {
        "results": results,
        "missing": missing,
        "peers": {name: peer.describe() for name, peer in PEERS.items() if name in results},
        "targets": [
            {"metric": t.metric, "field": t.field, "target": str(t), "met": t.met(results)} for t in TARGETS
        ],
    }
    output = options.output
    if output is None and not options.quick:
        output = RESULTS / f"{document['date'][:10]}-{document['commit'][:8]}.json"
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print_table(console, document)
    if output:
        console.print(f"results: {output}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
