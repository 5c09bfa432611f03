"""What connections have to do with the process: its descriptors, and its forks."""

from __future__ import annotations

#: Descriptors left to the rest of the program.
_SPARE_DESCRIPTORS = 128


def connection_limit() -> int:
    """As many connections as the descriptor limit allows: beyond it requests queue instead of failing."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else max(32, soft - _SPARE_DESCRIPTORS)


def make_immortal(thing: object) -> None:
    """Keep `thing` from ever being finalised.

    A child of fork shares its parent's sockets and epoll instance: finalising the inherited session would
    unregister the parent's live connections.
    """
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
