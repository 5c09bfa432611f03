"""The agent's wire protocol: frames, operations and their fields. Standard library only.

A frame is two unsigned 32-bit big-endian lengths, then a JSON header of the first length, then a raw payload
of the second. Requests carry `id` (an integer unique on the connection) and `op`; the answer carries the same
`id` and either `ok: true` with result fields, or `error: {code, detail, …}` with a code of the error table.
Answers may come in any order. The first request must be `hello` with the sandbox's token; anything else
closes the connection. Any number of connections may be open; a job belongs to the agent, not to one of them.

Paths are absolute or start at the working directory; where a `root` is given, they are below it and use no link.

Operations (→ answer fields; `+ payload` marks raw bytes):

    hello     token, configure {env, working_dir, user}?, use?  → version, pid, boot_id, jobs (count)
              `configure` sets the defaults of every later command: once, by the first peer after creation
              With `use: "tunnels"` (told back) the connection is from then on that of `orchard.env.agent.links`.
    ping                                              → now
    exec      job_id, command, timeout_s, grace_s, cwd, env, user, login_shell, stdin_size, stdin_open,
              max_output_bytes, max_spool_bytes, background, concurrent, wait, internal,
              session (name), pty [rows, cols]   + payload: stdin bytes
              → job [+ payload: stdout then stderr when finished]
              `wait: false` answers once accepted (status queued or running); `wait: true` when finished.
              A known job_id attaches to that job instead of starting one (`attached: true`); another command
              under the same id is `conflict`. `internal` jobs are not listed.
              With `pty` it has a terminal: what it shows is its stdout.
    job       job_id, wait, timeout_s                 → job + payload (so far); `wait_timeout` when it ends first
    output    job_id, stdout_offset?, stderr_offset?, limit, timeout_s
              → finished, and of each stream asked for: stdout_offset (later than asked for where bytes are
              gone), stdout_size, stdout_total; + payload: stdout then stderr
              Answers when there is something from the offsets on, when the command has finished, or after
              timeout_s with nothing. Asking is what makes it send: who does not read is sent nothing.
    jobs                                              → jobs (no output)
    cancel    job_id, reason                          → job; stops it like a timeout does (grace, then kill)
    signal    job_id, signal (number)                 → (to every process of the job)
    stdin     job_id, eof              + payload      → (waits for room: back-pressure)
    resize    job_id, rows, cols                      → (of the terminal of a command started with `pty`)
    sessions                                          → sessions [{name, created_at, used_at, busy}]
    end_session name                                  → existed
    read      path, root, offset, limit, identity     → size, mode, eof, identity  + payload (at most 4 MiB)
              `identity` of an earlier piece: `conflict` if the name holds another file by now
    write     path, root, upload, offset, last, mode, modified_ns → size   + payload; chunks of one `upload` in
              order; the file appears under its name, atomically, with the `last` one
    abort     upload                                  → (drops the temporary file); the end of the last
              connection drops them all
    list      path, root, raw, after, limit           → path, files [{name, type, size, modified, mode, target}],
              more (the last name looked at, if there are others). `raw`: undecodable bytes as lone surrogates,
              and modified_ns
    stat      path, follow                            → type, size, modified, modified_ns, mode, target
    mkdir     path, root, parents, mode               → (nothing; `conflict` when it exists and not `parents`)
    symlink   path, root, target, modified_ns         → (replaces what is there, but for a directory)
    attributes path, root, mode, modified_ns          → (of a directory)
    move      source, target, overwrite               → (in one step; `conflict` when the target exists)
    remove    path, recursive                         → more: there is something left, ask again
    log                                               → lines
    tunnels   ports, exactly                          → ports; listens on these of the loopback too (0: a free one)
              `exactly`: and on no others. `port_in_use` or `port_not_allowed` when it cannot listen on one: then
              nothing is changed. What connects is told on the connection of the tunnels.
    untunnel  port                                    → existed; listens no more and resets what came by it
    forget    job_ids                                 → (frees finished jobs' memory)

A `job` is: job_id, command and background (in `jobs` only), status (queued, running, succeeded, failed),
exit_code, signal (name without SIG), created_at, started_at, completed_at (Unix seconds), duration_s, queue_s,
timed_out, oom_killed, error, error_code (timeout, cancelled, command_not_found, infrastructure_error),
stdout_bytes, stderr_bytes (true totals), stdout_truncated, stderr_truncated, stdout_size, stderr_size (lengths of
the two parts of the payload).
What has its default value is left out; `whole_job` puts it in.
"""

from __future__ import annotations

import json
import struct

WIRE_VERSION = 1
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20

_LENGTHS = struct.Struct(">II")
# json.dumps would make a new encoder for every frame.
_make_encoder = getattr(json.encoder, "c_make_encoder", None)
_encoder = _make_encoder and _make_encoder(
    None, None, json.encoder.encode_basestring, None, ":", ",", False, False, False
)
# json.loads would look for white space around, by a regular expression.
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

_JOB_DEFAULTS: dict[str, object] = {
    "exit_code": None, "signal": None, "started_at": None, "completed_at": None, "duration_s": None, "queue_s": None,
    "error": None, "error_code": None, "timed_out": False, "oom_killed": False, "session_reset": False,
    "stdout_bytes": 0, "stderr_bytes": 0, "stdout_size": 0, "stderr_size": 0,
    "stdout_truncated": False, "stderr_truncated": False,
}  # fmt: skip


def whole_job(job: dict) -> dict:  # type: ignore[type-arg]
    """A job as received, with all fields."""
    return {**_JOB_DEFAULTS, **job}


def _encode(header: dict) -> str:  # type: ignore[type-arg]
    if _encoder is None:
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    return "".join(_encoder(header, 0))


def _decode(head: bytes) -> dict:  # type: ignore[type-arg]
    try:
        text = head.decode("utf-8", "surrogatepass")
        header, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration) as error:
        raise WireError(f"header is not JSON: {error}") from None
    if end != len(text):
        raise WireError("header is not JSON: something follows the object")
    if not isinstance(header, dict):
        raise WireError("header is not an object")
    return header


class WireError(Exception):
    """The peer broke the protocol: the connection is closed."""


def frame(header: dict, payload: bytes | memoryview = b"") -> bytes:  # type: ignore[type-arg]
    """One frame as bytes."""
    # Lone surrogates (from undecodable file names) survive as surrogatepass on both sides.
    head = _encode(header).encode("utf-8", "surrogatepass")
    return b"".join((_LENGTHS.pack(len(head), len(payload)), head, payload))


class FrameReader:
    """Cuts a byte stream into frames: `feed` bytes, iterate over what is complete."""

    def __init__(self, max_header: int = MAX_HEADER_BYTES, max_payload: int = MAX_PAYLOAD_BYTES) -> None:
        self._buffer = bytearray()
        self._need = 8
        self._max_header = max_header
        self._max_payload = max_payload

    def feed(self, data: bytes | memoryview) -> list[tuple[dict, bytes]]:  # type: ignore[type-arg]
        """Frames completed by `data`, in order. Raises `WireError` on anything malformed or too large."""
        buffer = self._buffer
        buffer += data
        frames = []
        while len(buffer) >= self._need:
            head_len, payload_len = _LENGTHS.unpack_from(buffer)
            if head_len > self._max_header or payload_len > self._max_payload:
                raise WireError("frame too large")
            total = 8 + head_len + payload_len
            if len(buffer) < total:
                self._need = total
                break
            with memoryview(buffer) as view:
                head = bytes(view[8 : 8 + head_len])
                payload = bytes(view[8 + head_len : total])
            del buffer[:total]
            self._need = 8
            frames.append((_decode(head), payload))
        return frames
