"""What sandboxes with a list try, seen from inside and from outside."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.support.inside import PRELUDE, inside
from tests.support.machine import descendants, namespace_init, pids_with_argument
from tests.support.outside import ECHO
from tests.support.rest import Box
from tests.support.service import Service
from tests.support.waiting import eventually

UNREACHED = {"ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "ECONNRESET", "EACCES"}

#: `talk` says something and hears all of the answer, or gives the name of the error.
TALK = r"""
import ssl
def talk(host, port, said, patience=20):
    try:
        s = socket.create_connection((host, port), patience)
        s.sendall(said)
        s.shutdown(socket.SHUT_WR)
        heard = b""
        while True:
            piece = s.recv(65536)
            if not piece: return heard.decode("latin-1")
            heard += piece
    except TimeoutError: return "TIMEOUT"
    except socket.gaierror: return "UNRESOLVED"
    except OSError as error: return errno.errorcode.get(error.errno, str(error))

def request(host, named=None, port=80):
    return talk(host, port, f"GET / HTTP/1.1\r\nHost: {named or host}\r\nConnection: close\r\n\r\n".encode())

def secure(host, named, certificate, port=443):
    context = ssl.create_default_context(cadata=certificate)
    if not named: context.check_hostname = False
    try:
        raw = socket.create_connection((host, port), 20)
        with context.wrap_socket(raw, server_hostname=named) as s:
            s.sendall(f"GET / HTTP/1.1\r\nHost: {named}\r\n\r\n".encode())
            return s.recv(65536).decode()
    except ssl.SSLError as error: return "TLS " + str(error.reason)
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
"""


def talk(box: Box, expression: str, **fields: Any) -> Any:
    return inside(box, TALK + f"report({expression})", **fields)


def start_talking(box: Box, program: str) -> str:
    """The job of a program that may use `talk`, beside other commands. A lost lookup is repeated after a second."""
    command = ["/usr/bin/python3", "-I", "-c", PRELUDE + TALK + program]
    return box.start(command, concurrent=True, env={"RES_OPTIONS": "timeout:1"})


CUT = """
s = socket.create_connection(({host!r}, {port}), 20)
s.sendall(b"here\\n"); assert s.recv(100)
open("/tmp/connected", "w").close()
while not os.path.exists("/tmp/changed"): time.sleep(0.02)
def go_on():
    for _ in range(1000):
        s.sendall(b"more\\n"); s.settimeout(20)
        if not s.recv(100): return "ended"
        time.sleep(0.02)
report(attempt(go_on))
"""


def cut(box: Box, host: str, entries: list[str]) -> str:
    """What becomes of an open connection when the list is changed to `entries`."""
    job = start_talking(box, CUT.format(host=host, port=ECHO))
    box.until("test -e /tmp/connected")
    box.rest.patch(box.path, {"allow_egress": entries}).expect(200)
    box.out("touch /tmp/changed", concurrent=True)
    return str(box.rest.wait_job(job)["stdout"]).strip()


def denials(box: Box) -> list[str]:
    """The lines of its log about the network."""
    lines = box.rest.get(f"{box.path}/logs").expect(200)["lines"]
    return [line["message"] for line in lines if line["source"] == "network"]


def sandbox_pid(box: Box) -> int:
    """Its first process, seen from outside."""
    tag = f"3{abs(hash(box.id)) % 10**7}.25"
    job = box.running(["/bin/sleep", tag], background=True)
    (pid, *_) = eventually(lambda: pids_with_argument(tag), "it is seen")
    first = namespace_init(pid)
    box.rest.delete(f"/jobs/{job}")
    return first


def address_of(box: Box) -> str:
    """Of its eth0."""
    command = ["nsenter", "-t", str(sandbox_pid(box)), "-n", "ip", "-4", "-o", "addr", "show", "eth0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[3].split("/")[0]


def gateways(service: Service) -> list[int]:
    """The processes of its gateway."""
    return [
        pid for pid in descendants(service.pid)
        if "gateway/main.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]  # fmt: skip


def packet_rules() -> str:
    return subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout
