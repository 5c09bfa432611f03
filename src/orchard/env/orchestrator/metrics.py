"""What the service counts and times, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from orchard.env.contract import SandboxStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
_START_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COMMAND_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
#: From an empty file to the largest that JSON may carry, in steps of eight.
_FILE_BUCKETS = (0, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20, 256 << 20)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_HTTP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)


@dataclass(frozen=True, slots=True)
class TunnelMeter:
    """The series of one target."""

    open: Gauge
    connections: Counter
    failures: Counter
    sent: Counter
    received: Counter


@dataclass(frozen=True, slots=True)
class Watched:
    """What an orchestrator has just now: sandboxes by status, and how many creations wait and start, and commands."""

    counts: Callable[[], dict[str, int]]
    queued: Callable[[], int]
    starting: Callable[[], int]
    jobs: Callable[[], int]


class Metrics:
    """One registry per service, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.created = Counter("orchard_sandboxes_created", "Sandboxes accepted", registry=registry)
        self.ended = Counter("orchard_sandboxes_ended", "Sandboxes that ended", ["reason"], registry=registry)
        self.start_seconds = Histogram(
            "orchard_sandbox_start_seconds",
            "From its turn in the queue to ready",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "orchard_create_queue_seconds",
            "Time in the create queue",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self.live = Gauge("orchard_sandboxes", "Live sandboxes", ["status"], registry=registry)
        self.queued = Gauge("orchard_create_queue_length", "Sandboxes waiting to start", registry=registry)
        self.starting = Gauge("orchard_sandboxes_starting", "Sandboxes starting now", registry=registry)
        self.jobs_live = Gauge("orchard_jobs", "Commands queued or running", registry=registry)
        jobs = Counter("orchard_jobs_finished", "Commands that finished", ["status"], registry=registry)
        self.job_finished = {
            status: jobs.labels(status) for status in ("succeeded", "failed", "timeout", "infra")
        }
        self.job_seconds = Histogram(
            "orchard_job_seconds", "Run time of commands", buckets=_COMMAND_BUCKETS, registry=registry
        )
        files = Histogram(
            "orchard_file_bytes", "Sizes of files written (in) and read (out)", ["direction"],
            buckets=_FILE_BUCKETS, registry=registry,
        )  # fmt: skip
        self.file_bytes = {direction: files.labels(direction) for direction in ("in", "out")}
        self.quota_refusals = Counter(
            "orchard_quota_refusals", "Creations refused by a quota", ["quota"], registry=registry
        )
        self.audit_lost = Counter(
            "orchard_audit_lines_lost", "Lines that the audit log could not take", registry=registry
        )
        self.event_streams = Gauge("orchard_event_streams", "Readers of GET /events", registry=registry)
        self.event_streams_dropped = Counter(
            "orchard_event_streams_dropped", "Readers of GET /events that were too slow", registry=registry
        )
        self._tunnels_open = Gauge(
            "orchard_tunnel_connections_open", "Connections through tunnels", ["target"], registry=registry
        )
        self._tunnel_connections = Counter(
            "orchard_tunnel_connections", "Connections made through tunnels", ["target"], registry=registry
        )
        self._tunnel_failures = Counter(
            "orchard_tunnel_failures", "Those of them that were refused or broken by the target's side", ["target"],
            registry=registry,
        )  # fmt: skip
        self._tunnel_bytes = Counter(
            "orchard_tunnel_bytes", "Bytes from sandboxes (out) and to them (in) through tunnels",
            ["target", "direction"], registry=registry,
        )  # fmt: skip
        self._requests = Counter(
            "orchard_http_requests", "Answers", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "orchard_http_request_seconds", "Time to the first byte of the answer", ["method", "route"],
            buckets=_HTTP_BUCKETS, registry=registry,
        )  # fmt: skip
        self._request_children: dict[tuple[str, str, int], Counter] = {}
        self._seconds_children: dict[tuple[str, str], Histogram] = {}
        self._watched: list[Watched] = []
        for status in (SandboxStatus.PENDING, SandboxStatus.READY, SandboxStatus.PAUSED):
            self.live.labels(status.value).set_function(partial(self._count, status.value))
        self.queued.set_function(lambda: sum(each.queued() for each in self._watched))
        self.starting.set_function(lambda: sum(each.starting() for each in self._watched))
        self.jobs_live.set_function(lambda: sum(each.jobs() for each in self._watched))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One HTTP answer; `route` is the template of the path, so that ids make no series, nor do odd methods."""
        if method not in _METHODS:
            method = "other"
        counter = self._request_children.get((method, route, status))
        if counter is None:
            counter = self._request_children[method, route, status] = self._requests.labels(
                method, route, status
            )
        counter.inc()
        histogram = self._seconds_children.get((method, route))
        if histogram is None:
            histogram = self._seconds_children[method, route] = self._seconds.labels(method, route)
        histogram.observe(seconds)

    def tunnel_meter(self, target: str) -> TunnelMeter:
        """What counts the tunnels to a target; its name is the operator's, so that there are few."""
        return TunnelMeter(
            self._tunnels_open.labels(target),
            self._tunnel_connections.labels(target),
            self._tunnel_failures.labels(target),
            self._tunnel_bytes.labels(target, "out"),
            self._tunnel_bytes.labels(target, "in"),
        )

    def watch(self, watched: Watched) -> None:
        """Gauges that are read when they are asked for, and summed up."""
        self._watched.append(watched)

    def forget(self, watched: Watched) -> None:
        """It is no more."""
        self._watched = [each for each in self._watched if each is not watched]

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge of its own that is read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def _count(self, status: str) -> float:
        return sum(each.counts().get(status, 0) for each in self._watched)

    def text(self) -> bytes:
        """The exposition format, see `CONTENT_TYPE`."""
        return generate_latest(self.registry)
