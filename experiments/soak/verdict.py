"""What the clients were told against what the service still says, after the soak."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.samples import percentile
from experiments.soak.ledger import notes
from tests.support.rest import Rest


@dataclass
class Owed:
    """What all ledgers say. acked: job id → its note; seen: job id → the result that a client has seen."""

    acked: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    ready: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    unready: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def read(folder: Path) -> Owed:
    owed = Owed()
    for note in notes(folder):
        match note["kind"]:
            case "ack":
                owed.acked[note["job"]] = note
            case "result":
                owed.seen[note["job"]] = note
            case "file":
                owed.files[note["sandbox"]].append(note)
            case "asked":
                owed.asked.add(note["sandbox"])
            case "ready":
                owed.ready[note["sandbox"]] = note["client"]
            case "deleted":
                owed.deleted.add(note["sandbox"])
            case "gone":
                owed.gone[note["sandbox"]] = note["reason"]
            case "unready":
                owed.unready[str(note["reason"])] += 1
            case "wrong":
                owed.wrong.append(f"{note['client']}: {note['what']}")
            case "did":
                owed.seconds[note["what"].strip("_")].append(note["seconds"])
    return owed


class Verdict:
    """Faults found, as text; empty lists are what is wanted."""

    def __init__(self, owed: Owed, rest: Rest, killed_agents: set[str], killed_clients: set[str]) -> None:
        self._owed = owed
        self._rest = rest
        self._killed_agents = killed_agents
        self._killed_clients = killed_clients
        self.lost_results: list[str] = []
        self.changed_results: list[str] = []
        self.double_executions: list[str] = []
        self.never_ran: list[str] = []
        self.lost_files: list[str] = []
        self.lost_sandboxes: list[str] = []
        self.checked: Counter[str] = Counter()

    def find(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._check_job, self._owed.acked.values()))
            list(pool.map(self._check_sandbox, [*self._owed.ready]))

    def _check_job(self, ack: dict[str, Any]) -> None:
        job_id = ack["job"]
        self.checked["results"] += 1
        answer = self._rest.get(f"/jobs/{job_id}/wait", timeout=60)
        if answer.status != 200:
            self.lost_results.append(f"{job_id} in {ack['sandbox']}: {answer.status} {answer.body[:200]!r}")
            return
        job = answer.json
        if job["status"] == "succeeded":
            full = f"full-{job_id}\n"
            if job["stdout"][:100] not in (ack["expected"], full):
                self.changed_results.append(f"{job_id}: {job['stdout'][:100]!r}")
        elif not job["error"] or not (job["infra"] or ack["sandbox"] in self._ended()):
            self.lost_results.append(f"{job_id}: failed without a reason: {str(job)[:300]}")
        if (seen := self._owed.seen.get(job_id)) is not None:
            digest = hashlib.sha256(job["stdout"].encode()).hexdigest()
            now = (job["status"], job["exit_code"], digest)
            if now != (seen["status"], seen["exit_code"], seen["stdout"]):
                self.changed_results.append(f"{job_id}: was seen as {seen}, is {str(job)[:300]}")

    def _ended(self) -> set[str]:
        owned = {box for box, client in self._owed.ready.items() if client in self._killed_clients}
        return self._killed_agents | self._owed.deleted | owned | set(self._owed.gone)

    def _check_sandbox(self, sandbox_id: str) -> None:
        self.checked["sandboxes"] += 1
        path = f"/sandboxes/{sandbox_id}"
        answer = self._rest.get(path)
        status = answer.json.get("status") if answer.status == 200 else None
        if status != "ready":
            mine = self._owed.ready[sandbox_id] in self._killed_clients
            if sandbox_id not in self._killed_agents | self._owed.deleted and not mine:
                self.lost_sandboxes.append(f"{sandbox_id}: {answer.status} {answer.body[:300]!r}")
            return
        if sandbox_id in self._owed.deleted:
            self.lost_sandboxes.append(f"{sandbox_id} was deleted and is there")
        self._check_ran(sandbox_id)
        for file in self._owed.files[sandbox_id]:
            self.checked["files"] += 1
            found = self._rest.get(f"{path}/files/content", path=file["path"])
            if found.status != 200 or hashlib.sha256(found.body).hexdigest() != file["sha"]:
                self.lost_files.append(f"{sandbox_id}:{file['path']}: {found.status}")

    def _check_ran(self, sandbox_id: str) -> None:
        body = {"command": ["/bin/sh", "-c", "cat /tmp/ran 2>/dev/null; true"], "wait": True}
        answer = self._rest.post(f"/sandboxes/{sandbox_id}/exec", {**body, "max_output_bytes": 8 << 20})
        if answer.status != 200:
            self.lost_sandboxes.append(f"{sandbox_id} answers no command: {answer.body[:200]!r}")
            return
        counts = Counter(line for line in answer.json["stdout"].split() if line.startswith("job-"))
        self.double_executions += [f"{job} in {sandbox_id}" for job, count in counts.items() if count > 1]
        for job_id, ack in self._owed.acked.items():
            if ack["sandbox"] != sandbox_id or not ack["expected"].startswith("out-"):
                continue
            job = self._rest.get(f"/jobs/{job_id}").json
            if job.get("stdout") == ack["expected"] and job_id not in counts:
                self.never_ran.append(f"{job_id} in {sandbox_id}")

    def faults(self) -> dict[str, list[str]]:
        return {
            "lost results": self.lost_results, "changed results": self.changed_results,
            "double executions": self.double_executions, "told but not run": self.never_ran,
            "lost files": self.lost_files, "lost sandboxes": self.lost_sandboxes, "wrong answers": self._owed.wrong,
        }  # fmt: skip


def latencies(owed: Owed) -> dict[str, dict[str, float]]:
    """Seconds of each kind of action, waiting for what was broken included."""
    return {
        name: {"n": len(values), "p50_s": percentile(values, 0.5), "p99_s": percentile(values, 0.99), "max_s": max(values)}
        for name, values in sorted(owed.seconds.items())
    }  # fmt: skip


def until_gone(rest: Rest, sandboxes: set[str], within_s: float) -> list[str]:
    """Those of the sandboxes that have not ended after the time."""
    deadline = time.monotonic() + within_s
    while sandboxes and time.monotonic() < deadline:
        for sandbox_id in [*sandboxes]:
            answer = rest.get(f"/sandboxes/{sandbox_id}")
            if answer.status != 200 or answer.json["status"] not in ("ready", "pending"):
                sandboxes.discard(sandbox_id)
        time.sleep(0.5)
    return sorted(sandboxes)
