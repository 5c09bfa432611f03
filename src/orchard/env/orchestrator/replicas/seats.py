"""Seats: places in a shared state directory, each of which one service holds at a time.

    STATE/images/              shared by all
    STATE/seats/.choosing      held while a service looks for a seat
    STATE/seats/.claims/XX     held while something is created whose name hashes to XX
    STATE/seats/N/             what a service alone would keep in its state directory
    STATE/seats/N/seat.lock    held by the service that has the seat
    STATE/seats/N/http.sock    where that service answers for it, for its user alone
    STATE/seats/N/images       a link to the images

All locks are the kernel's: they end with their process, however it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from orchard.env.errors import Overloaded, SettingsError
from orchard.env.orchestrator.stores.sqlite import look_into

DATABASE = "orchestrator.db"
SOCKET = "http.sock"
#: Longer than a claim may be held while a dead service's seat is being taken over.
_CLAIM_WITHIN_S = 15.0
_CLAIM_PAUSE_MIN_S, _CLAIM_PAUSE_MAX_S = 0.001, 0.05


class State(Enum):
    """Of a seat, as another service sees it."""

    HELD = "held"
    #: Free, and something is recorded in it: a service has to take it.
    ABANDONED = "abandoned"
    EMPTY = "empty"


@dataclass(slots=True)
class Seat:
    """A seat that this process holds, until `release`."""

    number: int
    folder: Path
    _lock: int

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Seats:
    """The seats of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.folder = state_dir / "seats"
        self._claims = self.folder / ".claims"
        self._cluster = ""

    def prepare(self) -> None:
        """Make the directories. Raises `SettingsError`, also when a service that ran alone left sandboxes here."""
        try:
            for folder in (self._state_dir, self.folder, self._claims, self._state_dir / "images"):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                folder.chmod(0o700)
            self._cluster = self._read_cluster()
        except OSError as error:
            raise SettingsError(
                f"cannot use the state directory {self._state_dir}: {error}; choose another with --state-dir"
            ) from None
        if live := look_into(self._state_dir / DATABASE).live:
            raise SettingsError(
                f"{self._state_dir} holds {live} sandboxes of a service without --redis-url: start it once more without"
                " and delete them, or choose another --state-dir"
            )

    @property
    def cluster(self) -> str:
        """Names this state directory among all that may use one Redis."""
        return self._cluster

    def _read_cluster(self) -> str:
        file = self.folder / ".cluster"
        draft = file.with_name(f".cluster.{os.getpid()}")
        draft.write_text(secrets.token_hex(8), "ascii")
        try:
            os.link(draft, file)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return file.read_text("ascii").strip()

    def numbers(self) -> list[int]:
        """Of all seats that exist."""
        return sorted(int(entry.name) for entry in os.scandir(self.folder) if entry.name.isdigit())

    def folder_of(self, number: int) -> Path:
        return self.folder / str(number)

    # ------------------------------------------------------------------------------------------- taking

    def take_first(self) -> Seat:
        """The first free seat, with whatever it holds; a new one when none is free."""
        with self._choosing():
            known = self.numbers()
            for number in known:
                if (seat := self._take(number)) is not None:
                    return seat
            number = next(n for n in range(len(known) + 1) if n not in known)
            folder = self.folder_of(number)
            folder.mkdir(mode=0o700)
            seat = self._take(number)
            if seat is None:
                raise SettingsError(
                    f"the seat {folder} cannot be locked; is the state directory on a network?"
                )
            return seat

    def take_abandoned(self, own: Collection[int]) -> Seat | None:
        """A free seat that holds something, other than our own; None when there is none."""
        for number in self.numbers():
            if number in own:
                continue
            with self._choosing():
                seat = self._take(number)
                if seat is not None and look_into(seat.folder / DATABASE).anything:
                    return seat
                if seat is not None:
                    seat.release()
        return None

    def state(self, number: int) -> State:
        """Whether anybody holds a seat that is not ours."""
        with self._choosing():
            seat = self._take(number)
            if seat is None:
                return State.HELD
            try:
                return State.ABANDONED if look_into(seat.folder / DATABASE).anything else State.EMPTY
            finally:
                seat.release()

    def _take(self, number: int) -> Seat | None:
        folder = self.folder_of(number)
        lock = os.open(folder / "seat.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        link = folder / "images"
        if not link.is_symlink():
            link.symlink_to(Path("../../images"))
        return Seat(number, folder, lock)

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        """Whoever looks at a free seat holds it for a moment: nobody else may look meanwhile."""
        lock = os.open(self.folder / ".choosing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # ----------------------------------------------------------------------------------------- claiming

    @asynccontextmanager
    async def claim(self, names: Collection[str]) -> AsyncIterator[None]:
        """The sole right, among all services, to create what goes by these names. Names may share a lock, so none may
        be held for long."""
        files = sorted({hashlib.sha256(name.encode()).hexdigest()[:2] for name in names})
        locks: list[int] = []
        try:
            for file in files:
                lock = os.open(self._claims / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                locks.append(lock)
                await _lock(lock)
            yield
        finally:
            for lock in locks:
                os.close(lock)


async def _lock(lock: int) -> None:
    pause_s = _CLAIM_PAUSE_MIN_S
    deadline = time.monotonic() + _CLAIM_WITHIN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Overloaded(
                    "another service has been creating the same thing for long; try again in a moment",
                    retry_after_s=2.0,
                ) from None
            # Waiting in the kernel would hold a thread for each.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _CLAIM_PAUSE_MAX_S)
