"""What a soak does to the service, its helpers, its store, its disk and its clock; one at a random moment after another."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.machine import children, kill, pids, status_field
from tests.support.redis import RedisServer
from tests.support.service import Service

#: How long the disk stays full, and Redis frozen or away, at most.
_BROKEN_S = 3.0
_CLOCK_STEPS_S = (-7200, -60, 0, 60, 7200, 86400)


class ClientProcesses:
    """The processes of the clients; killed ones are replaced."""

    def __init__(
        self, folder: Path, services: list[Service], count: int, threads: int, rng: random.Random
    ) -> None:
        self._folder = folder
        self._services = services
        self._threads = threads
        self._random = rng
        self._number = 0
        self.killed: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(count):
            self.begin()

    def begin(self) -> None:
        self._number += 1
        name = f"client{self._number:03d}"
        command = [
            sys.executable, "-m", "experiments.soak.clients", str(self._folder / f"{name}.ledger"),
            str(self._random.randrange(1 << 30)), str(self._threads), self._services[0].api_key or "",
            *(service.base_url for service in self._services),
        ]  # fmt: skip
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_one(self) -> None:
        name = self._random.choice([*self.processes])
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        self.killed.add(name)
        self.begin()

    def stop(self) -> list[str]:
        """Asks all to end; the names of those that did not."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        stuck = []
        for name, process in self.processes.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                stuck.append(name)
        return stuck


class Strikes:
    """counts: of each kind. killed_agents: ids of the sandboxes whose agent was killed."""

    def __init__(
        self,
        services: list[Service],
        redis: RedisServer,
        clients: ClientProcesses,
        disk: Path,
        clock: Path | None,
        rng: random.Random,
    ) -> None:
        self._services = services
        self._redis = redis
        self._clients = clients
        self._disk = disk
        self._clock = clock
        self._random = rng
        self._coming_back: list[threading.Thread] = []
        self._away: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.killed_agents: set[str] = set()
        self.failures: list[str] = []

    def run(self, seconds: float) -> None:
        kinds: list[tuple[Callable[[], object], int]] = [
            (self.kill_service, 4), (self.kill_agent, 4), (self.kill_client, 3), (self.kill_helper, 1),
            (self.restart_redis, 2), (self.freeze_redis, 1), (self.wipe_redis, 2), (self.fill_disk, 2),
        ]  # fmt: skip
        if self._clock is not None:
            kinds.append((self.step_clock, 3))
        # Each kind at least once, then by chance.
        first = self._random.sample(kinds, len(kinds))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._random.uniform(0.5, 4.0))
            strike = first.pop()[0] if first else self._random.choices(*zip(*kinds, strict=True))[0]
            self.counts[strike.__name__] += 1
            try:
                strike()
            except Exception as error:
                self.failures.append(f"{strike.__name__}: {type(error).__name__}: {error}")
        for thread in self._coming_back:
            thread.join()

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        def wait_and_do() -> None:
            time.sleep(seconds)
            try:
                what()
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=wait_and_do)
        thread.start()
        self._coming_back.append(thread)

    # ------------------------------------------------------------------------------------------- kinds

    def kill_service(self) -> None:
        number = self._random.randrange(len(self._services))
        if number in self._away:
            return  # it is about to come back: two of it must not
        service = self._services[number]
        service.kill()
        self._away.add(number)

        def return_() -> None:
            come_back(service)
            self._away.discard(number)

        self._later(self._random.uniform(0, 2.5), return_)

    def kill_helper(self) -> None:
        """A process below a service: what makes sandboxes, mostly."""
        service = self._random.choice(self._services)
        if service.running and (below := children(service.pid)):
            kill(self._random.choice(below))

    def kill_agent(self) -> None:
        agents = [(pid, name) for pid in pids() if (name := _sandbox_of(pid))]
        if agents:
            pid, name = self._random.choice(agents)
            self.killed_agents.add(name)
            kill(pid)

    def kill_client(self) -> None:
        self._clients.kill_one()

    def restart_redis(self) -> None:
        if self._redis.running:
            self._redis.kill()
            self._later(self._random.uniform(0, _BROKEN_S), self._redis.start)

    def freeze_redis(self) -> None:
        if self._redis.running:
            self._redis.freeze()
            self._later(self._random.uniform(0.5, _BROKEN_S), self._redis.thaw)

    def wipe_redis(self) -> None:
        if self._redis.running:
            self._redis.wipe()

    def fill_disk(self) -> None:
        """Nothing fits on the services' disk any more, for a moment."""
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as file:
            piece = bytes(1 << 20)
            try:
                while True:
                    file.write(piece)
            except OSError:
                pass
        self._later(self._random.uniform(0.2, _BROKEN_S), lambda: filler.unlink(missing_ok=True))

    def step_clock(self) -> None:
        """The wall clock of one service jumps; the others' do not."""
        assert self._clock is not None
        self._clock.write_text(f"{self._random.choice(_CLOCK_STEPS_S):+d}\n")


def come_back(service: Service, within_s: float = 30.0) -> None:
    """Start it as a supervisor does: again and again where a full disk, say, does not let it."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            service.start()
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def _sandbox_of(pid: int) -> str | None:
    """The id of the sandbox whose agent this is."""
    inner = (status_field(pid, "NSpid") or "").split()
    if len(inner) != 2 or inner[1] != "1":
        return None
    done = subprocess.run(
        ["nsenter", "-t", str(pid), "-u", "uname", "-n"], capture_output=True, text=True, check=False
    )
    name = done.stdout.strip()
    return name if name.startswith("soak-") else None


def faketime_library() -> Path | None:
    """Debian's libfaketime, where it is installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


def stepped_clock(control: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is off by what the file `control` says."""
    library = faketime_library()
    assert library is not None
    control.write_text("+0\n")
    return {
        "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(control), "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
