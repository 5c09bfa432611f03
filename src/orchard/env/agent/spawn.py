"""Starting a command: which program, which environment, which user; without a copying fork where possible."""

from __future__ import annotations

import _posixsubprocess
import errno
import os

from orchard.env.agent.terminal import take_terminal

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    from orchard.env.agent.accounts import Account

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Where the real stderr of an interactive login shell waits while the shell starts (see `_login_argv`).
_LATE_STDERR_FD = 198


class SpawnError(Exception):
    """The program could not be started; `number` is the errno, `stage` is "chdir", "exec" or "fork"."""

    def __init__(self, number: int, stage: str, program: str) -> None:
        super().__init__(f"{program}: {os.strerror(number)}")
        self.number = number
        self.stage = stage


class Command:
    """What to execute: candidates of the program's path are tried in order."""

    __slots__ = ("argv", "candidates", "late_stderr")

    def __init__(self, argv: list[bytes], candidates: list[bytes], late_stderr: bool) -> None:
        self.argv = argv
        self.candidates = candidates
        self.late_stderr = late_stderr


def _executable(path: str) -> bool:
    try:
        return os.path.isfile(path) and os.access(path, os.X_OK)
    except (OSError, ValueError):
        return False


def _shell(name: str) -> str | None:
    for folder in ("/bin", "/usr/bin", "/usr/local/bin"):
        path = f"{folder}/{name}"
        if _executable(path):
            return path
    return None


def _login_argv(command: str) -> tuple[list[str], bool]:
    """Argv of a login shell that reads profile and bashrc, and whether stderr must be handed over late.

    bashrc files return early in a shell that is not interactive, so bash is started interactive; what it says
    at start ("no job control in this shell") goes to /dev/null, the command's own stderr does not.
    """
    bash = _shell("bash")
    if bash is None:
        shell = _shell("sh")
        if shell is None:
            raise SpawnError(errno.ENOENT, "exec", "sh")
        return [shell, "-l", "-c", command], False
    start = f"exec 2>&{_LATE_STDERR_FD} {_LATE_STDERR_FD}>&-; set +m; PS1=; unset PS1; trap - TERM\n"
    return [bash, "-l", "-i", "-c", start + command], True


def session_shell() -> str:
    """The shell of sessions. Raises `SpawnError` when the image has none."""
    shell = _shell("bash") or _shell("sh")
    if shell is None:
        raise SpawnError(errno.ENOENT, "exec", "sh (this image has no shell: sessions need one)")
    return shell


def resolve(command: str | list[str], login_shell: bool, path: str) -> Command:
    """The program for a command: a list is exact argv, a string goes to a shell. Raises `SpawnError`."""
    late = False
    if isinstance(command, str):
        if login_shell:
            argv, late = _login_argv(command)
        else:
            shell = _shell("bash") or _shell("sh")
            if shell is None:
                raise SpawnError(
                    errno.ENOENT, "exec", "sh (this image has no shell: give the command as a list)"
                )
            argv = [shell, "-c", command]
    elif login_shell:
        # The environment of a login shell, then exactly this argv.
        argv, late = _login_argv('exec "$@"')
        argv += ["orchard", *command]
    else:
        argv = command
    program = argv[0]
    folders = [program] if "/" in program else [f"{folder or '.'}/{program}" for folder in path.split(":")]
    return Command([_bytes(arg) for arg in argv], [_bytes(name) for name in folders], late)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def spawn(
    command: Command,
    *,
    env: list[bytes],
    directory_fd: int,
    account: Account,
    stdin_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    null_fd: int,
    terminal: bool = False,
    keep_fds: tuple[int, ...] = (),
    hold: Callable[[int], None] | None = None,
) -> int:
    """Start `command` in its own session; the pid. Raises `SpawnError`.

    directory_fd: where it starts. keep_fds: further descriptors that it has under the same numbers. terminal: its
    standard input is a terminal, which becomes the one that controls its session. hold: called with the pid of the new
    process before that executes anything. vfork is used for the agent's own user without a terminal and without
    `hold`; else a copying fork is needed, in which the rest is set.
    """
    go_read, go_write = os.pipe2(os.O_CLOEXEC) if hold is not None else (-1, -1)

    def prepare() -> None:
        if go_read >= 0:
            os.read(go_read, 1)
        if terminal:
            take_terminal()

    plain = hold is None and not terminal
    pass_fds = keep_fds
    start_stderr = stderr_fd
    if command.late_stderr:
        os.dup2(stderr_fd, _LATE_STDERR_FD, inheritable=False)
        pass_fds = (*keep_fds, _LATE_STDERR_FD)
        start_stderr = null_fd
    same_user = (
        account.uid == os.geteuid()
        and account.gid == os.getegid()
        and set(account.groups) == set(os.getgroups())
    )
    err_read, err_write = os.pipe2(os.O_CLOEXEC)
    keep = tuple(sorted((err_write, *pass_fds)))
    try:
        try:
            pid = _posixsubprocess.fork_exec(
                command.argv, command.candidates, True, keep, b"/proc/self/fd/%d" % directory_fd,  # type: ignore[arg-type]
                env,
                stdin_fd, -1, -1, stdout_fd, -1, start_stderr, err_read, err_write,
                True, True, -1,
                None if same_user else account.gid,
                None if same_user else list(account.groups),
                None if same_user else account.uid,
                0o022, None if plain else prepare, plain,  # type: ignore[arg-type]
            )  # fmt: skip
        except OSError as error:
            raise SpawnError(error.errno or errno.EAGAIN, "fork", os.fsdecode(command.argv[0])) from None
        finally:
            os.close(err_write)
        if hold is not None:
            try:
                hold(pid)
            finally:
                os.write(go_write, b"1")
        # A copying fork runs beside us and writes its report in pieces: read to the end.
        report = b""
        while piece := os.read(err_read, 4096):
            report += piece
    finally:
        for fd in (err_read, go_read, go_write):
            if fd >= 0:
                os.close(fd)
        if command.late_stderr:
            os.close(_LATE_STDERR_FD)
    if report:
        # "OSError:<errno in hex>:<empty, or what failed before exec>"
        os.waitpid(pid, 0)
        parts = report.split(b":", 2)
        number = int(parts[1] or b"0", 16) if len(parts) > 1 else errno.EIO
        # Before exec only the change of directory can fail here ("noexec", newer: "noexec:chdir").
        stage = "chdir" if len(parts) > 2 and parts[2].startswith(b"noexec") else "exec"
        raise SpawnError(number, stage, os.fsdecode(command.argv[0]))
    return pid
