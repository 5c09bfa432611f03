"""Sessions: what one command leaves of its shell to the next of the same name.

Every command of a session is a shell of its own that first takes over what the last one left (directory, variables,
functions, aliases, options, umask) and at its end leaves the same in turn. So nothing that a command does can hang or
poison the session: a time-out, `exec`, `exit`, a syntax error or a killed shell end that command, and the session is
what it was before it.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

#: Where a shell of a session finds what it takes over, and where it leaves it.
_STATE_FD, _LEAVE_FD = 196, 197
_MAX_STATE_BYTES = 4 << 20
_MAX_SESSIONS = 256
_END = b"\n# end of session state\n"

# $1 is "eval" or "run", $2 whether to go "back" to the session's directory; the command follows. What is left ends with a
# mark, so that half of it is never taken for all. Tracing, and ending at errors, must not see this script: they are
# switched on with the command's own text, and off before anything is left.
# Options are set before functions are read, which may need them (extglob), and aliases work only after that: in what is
# left of functions, theirs are expanded already. `builtin`, because users call functions cd or echo; who calls one
# builtin leaves no mark. All is one group: after it is read, neither aliases nor a quote that a command left open change
# how the rest of it is understood.
_BASH = r"""
__orchard_leave() {
    __orchard_code=$? __orchard_flags=$-
    builtin trap - EXIT DEBUG ERR RETURN
    builtin set +xveu
    builtin unset __orchard_text __orchard_how __orchard_place
    __orchard_dir=$PWD __orchard_opts=$(builtin set +o; builtin shopt -p)
    for __orchard_name in xtrace verbose errexit nounset noexec; do
        __orchard_opts=${__orchard_opts//set -o $__orchard_name/:}
    done
    __orchard_late=
    for __orchard_name in 'set -o posix' 'shopt -s expand_aliases'; do
        [[ $__orchard_opts = *"$__orchard_name"* ]] || continue
        __orchard_late+="builtin $__orchard_name;" __orchard_opts=${__orchard_opts//$__orchard_name/:}
    done
    { builtin declare -p; builtin alias -p; builtin echo "$__orchard_opts"; builtin umask -p; builtin declare -f
      builtin echo "$__orchard_late"; builtin echo; builtin echo '# end of session state'; } >&197
    builtin exit "$__orchard_code"
}
{
builtin . /dev/fd/196 >/dev/null 2>&1
builtin exec 196<&-
__orchard_how=$1 __orchard_place=$2; builtin shift 2
if [[ $__orchard_place = back && -n ${__orchard_dir-} ]]; then
    builtin cd -- "$__orchard_dir" 2>/dev/null ||
        builtin echo "orchard: the directory $__orchard_dir of the session is gone" >&2
fi
builtin trap '{ __orchard_leave; } >/dev/null 2>&1' EXIT
case ${__orchard_flags-} in *x*) builtin set -- 'set -x; ' "$@" ;; *) builtin set -- '' "$@" ;; esac
case ${__orchard_flags-} in *u*) builtin set -- "set -u; $1" "${@:2}" ;; esac
case ${__orchard_flags-} in *e*) builtin set -- "set -e; $1" "${@:2}" ;; esac
if [[ $__orchard_how = eval ]]; then
    __orchard_text=$1$2; builtin shift 2
else
    __orchard_text=$1'"$@"'; builtin shift
fi
(builtin exit "${__orchard_code:-0}"); builtin eval "$__orchard_text"
{ __orchard_leave; } >/dev/null 2>&1
}
"""
_SH = r"""
__orchard_leave() {
    __orchard_code=$?; set +xveu; trap - 0
    { export -p; command echo "umask $(command umask)"
      command echo "__orchard_dir='$(command pwd | command sed "s/'/'\\\\''/g")'"
      command echo; command echo '# end of session state'; } >&197
    exit "$__orchard_code"
}
{
. /dev/fd/196 2>/dev/null
exec 196<&-
__orchard_how=$1; __orchard_place=$2; shift 2
if [ "$__orchard_place" = back ] && [ -n "${__orchard_dir-}" ]; then
    cd "$__orchard_dir" 2>/dev/null || echo "orchard: the directory $__orchard_dir of the session is gone" >&2
fi
trap '{ __orchard_leave; } >/dev/null 2>&1' 0
if [ "$__orchard_how" = eval ]; then eval "$1"; else "$@"; fi
}
"""


class SessionsFull(Exception):
    """There are as many sessions as are kept at once."""


class Session:
    """What the next command takes over. busy: one of its commands runs."""

    __slots__ = ("busy", "created_at", "name", "state", "used_at")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = b""
        self.busy = False
        self.created_at = self.used_at = time.time()


def _export(pair: tuple[str, str]) -> bytes:
    name, value = pair
    quoted = value.replace("'", "'\\''")
    return f"export {name}='{quoted}'\n".encode("utf-8", "surrogateescape")


class Turn:
    """One command of a session: the descriptors through which it takes over and leaves."""

    __slots__ = ("_leave_fd", "_state_fd", "session")

    def __init__(self, session: Session, env: dict[str, str]) -> None:
        """env: variables that this command is given beyond those of the session."""
        self.session = session
        self._state_fd = os.memfd_create("state", os.MFD_CLOEXEC)
        self._leave_fd = os.memfd_create("left", os.MFD_CLOEXEC)
        os.write(self._state_fd, session.state + b"".join(map(_export, env.items())))
        session.busy = True
        session.used_at = time.time()

    def argv(self, command: str | list[str], shell: str, *, back: bool) -> list[str]:
        """What to execute: `shell`, with the command inside. back: it goes to the session's directory."""
        script = _BASH if shell.endswith("bash") else _SH
        how, words = ("eval", [command]) if isinstance(command, str) else ("run", command)
        return [shell, "-c", script, "orchard", how, "back" if back else "stay", *words]

    def show(self) -> tuple[int, ...]:
        """Put the descriptors where the shell looks for them; to be hidden after the start."""
        os.dup2(self._state_fd, _STATE_FD, inheritable=False)
        os.dup2(self._leave_fd, _LEAVE_FD, inheritable=False)
        return _STATE_FD, _LEAVE_FD

    def hide(self) -> None:
        os.close(_STATE_FD)
        os.close(_LEAVE_FD)

    def end(self) -> bool:
        """Take what was left; False when it was not, and the session is what it was before."""
        try:
            left = os.pread(self._leave_fd, _MAX_STATE_BYTES + 1, 0)
        finally:
            os.close(self._state_fd)
            os.close(self._leave_fd)
            self.session.busy = False
        if len(left) > _MAX_STATE_BYTES or not left.endswith(_END):
            return False
        self.session.state = left
        return True


class Sessions:
    """The sessions of a sandbox, by name."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def get(self, name: str) -> Session:
        """The session of that name, made when it is new. Raises `SessionsFull`."""
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= _MAX_SESSIONS:
                raise SessionsFull
            session = self._sessions[name] = Session(name)
        return session

    def remove(self, name: str) -> bool:
        """Forget what it has left; whether it was there. A command of it that runs goes on."""
        return self._sessions.pop(name, None) is not None

    def listing(self) -> list[dict[str, Any]]:
        return [
            {"name": s.name, "created_at": s.created_at, "used_at": s.used_at, "busy": s.busy}
            for s in self._sessions.values()
        ]
