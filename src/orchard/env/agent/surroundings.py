"""What a command starts in: its directory, its user, its environment."""

from __future__ import annotations

import os

from orchard.env.agent import accounts, spawn
from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import open_inside

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent.job import Defaults, JobSpec


def _assignments(env: dict[str, str]) -> dict[str, bytes]:
    return {name: f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()}


class Surroundings:
    """Finds them, from what the command asks for and the sandbox's defaults. Raises `AgentError`."""

    def __init__(self, defaults: Defaults) -> None:
        self.defaults = defaults
        self._accounts = accounts.Accounts()
        self._default_account: accounts.Account | None = None
        self._base_env: dict[str, tuple[dict[str, bytes], str]] = {}
        self._root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root_fd)

    def limit_ids(self, ids: int) -> None:
        """Only the users and groups 0 to `ids` - 1 exist here."""
        self._accounts = accounts.FewAccounts(ids)

    def default_account(self) -> accounts.Account:
        """The sandbox's own user. Raises `UnknownUser`."""
        if self._default_account is None:
            self._default_account = self._accounts.lookup(self.defaults.user)
        return self._default_account

    def directory(self, spec: JobSpec) -> int:
        """A descriptor of the directory to start in. Looked up at the command's turn, since an earlier one may have made
        it, and entered by the descriptor, so that it cannot be exchanged in between."""
        cwd = spec.cwd or self.defaults.working_dir
        if cwd == "/":
            return os.dup(self._root_fd)
        try:
            return open_inside(cwd.encode("utf-8", "surrogateescape"), os.O_PATH | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            detail = f"the working directory {cwd!r} cannot be entered ({why}); it must exist in the sandbox"
            raise AgentError("cwd_not_found", detail) from None

    def account(self, spec: JobSpec) -> accounts.Account:
        """Who runs it. The sandbox's own user is looked up once, any other anew when the image's files changed."""
        try:
            if spec.user is not None and spec.user != self.defaults.user:
                return self._accounts.lookup(spec.user)
            return self.default_account()
        except accounts.UnknownUser as error:
            raise AgentError("user_not_found", str(error)) from None

    def environment(self, spec: JobSpec, account: accounts.Account) -> tuple[list[bytes], str]:
        """`NAME=value` of every variable, and the search path."""
        base = self._base_env.get(account.name)
        if base is None:
            env = {
                "PATH": spawn.DEFAULT_PATH,
                "HOME": account.home,
                "USER": account.name,
                "LOGNAME": account.name,
            }
            env.update(self.defaults.env)
            base = self._base_env[account.name] = (_assignments(env), env["PATH"])
        assignments, path = base
        if not spec.env:
            return list(assignments.values()), path
        return list({**assignments, **_assignments(spec.env)}.values()), spec.env.get("PATH", path)
