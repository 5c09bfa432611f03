"""Refused packets, as netfilter's log group tells of them (nfnetlink_log)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 4
_PACKET, _CONFIG = _SUBSYSTEM << 8, _SUBSYSTEM << 8 | 1
_NLMSG_ERROR = 2
_REQUEST_ACK = 0x1 | 0x4
_CFG_CMD, _CFG_MODE, _CFG_TIMEOUT, _CFG_QTHRESH = 1, 2, 4, 5
_BIND, _COPY_PACKET = 1, 2
_PAYLOAD = 9
_COPIED_BYTES = 64
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_GROUPS = 1 << 16
_ATTEMPTS = 64
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp"}


@dataclass(frozen=True, slots=True)
class RefusedPacket:
    source: str
    destination: str
    protocol: str
    port: int | None


def open_log(seed: int) -> tuple[socket.socket, int]:
    """A socket that gets the packets of a group that nobody else reads, and the group. OSError when there is none."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    try:
        sock.bind((0, 0))
        # Under a flood packets are lost, not the socket.
        sock.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        for attempt in range(_ATTEMPTS):
            group = (seed + attempt) % (_GROUPS - 1) + 1
            if _configure(sock, group, _CFG_CMD, struct.pack("B", _BIND)) != errno.EBUSY:
                _configure(sock, group, _CFG_MODE, struct.pack(">IBx", _COPIED_BYTES, _COPY_PACKET))
                _configure(sock, group, _CFG_TIMEOUT, struct.pack(">I", 1))
                _configure(sock, group, _CFG_QTHRESH, struct.pack(">I", 1))
                sock.setblocking(False)
                return sock, group
        raise OSError(errno.EBUSY, "every netfilter log group is in use")
    except BaseException:
        sock.close()
        raise


def _configure(sock: socket.socket, group: int, attribute: int, value: bytes) -> int:
    """0 or EBUSY; any other answer is an OSError."""
    body = struct.pack(">BBH", 0, 0, group) + struct.pack("=HH", 4 + len(value), attribute) + value
    body += b"\0" * (-len(body) % 4)
    sock.send(struct.pack("=IHHII", 16 + len(body), _CONFIG, _REQUEST_ACK, 1, 0) + body)
    while True:
        answer = sock.recv(8192)
        if struct.unpack_from("=IH", answer)[1] == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", answer, 16)[0]
            if number not in (0, errno.EBUSY):
                raise OSError(number, os.strerror(number))
            return int(number)


def packets(data: bytes) -> Iterator[RefusedPacket]:
    """The packets that one read of the socket tells of."""
    offset = 0
    while offset + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, offset)
        if length < 16 or offset + length > len(data):
            return
        if kind == _PACKET:
            payload = _attribute(data[offset + 20 : offset + length], _PAYLOAD)
            packet = payload and _ipv4(payload)
            if packet:
                yield packet
        offset += length + (-length % 4)


def _attribute(data: bytes, wanted: int) -> bytes | None:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return None
        if kind & 0x3FFF == wanted:
            return data[offset + 4 : offset + length]
        offset += length + (-length % 4)
    return None


def _ipv4(packet: bytes) -> RefusedPacket | None:
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    header = (packet[0] & 15) * 4
    number = packet[9]
    has_port = number in (6, 17) and len(packet) >= header + 4
    port = struct.unpack_from(">H", packet, header + 2)[0] if has_port else None
    source, destination = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
    return RefusedPacket(source, destination, _PROTOCOLS.get(number, f"ip protocol {number}"), port)
