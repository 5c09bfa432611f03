"""The network interfaces of a sandbox, brought up from inside its namespace."""

from __future__ import annotations

import fcntl
import socket
import struct

from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.runtimes.local.spec import NetworkSpec

_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCADDRT = 0x8914, 0x8916, 0x891C, 0x890B
_IFF_UP_RUNNING = 0x41


def _address(text: str) -> bytes:
    """A sockaddr_in with this IPv4 address."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, bytes(int(part) for part in text.split(".")))


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", _IFF_UP_RUNNING))


def set_network_sysctls(net: str, last_gid: int) -> None:
    """Low ports and ping for everyone, no IPv6 on interfaces to come, in the network namespace of this process.

    last_gid: the highest one there is. `net`: /proc/sys/net of the sandbox's own /proc. In the machine's, one name has
    an entry for every network namespace, and looking it up takes time in their number.
    """
    # The namespace belongs to the machine: capabilities inside do not count for ports below 1024.
    kernel.write_control(f"{net}/ipv4/ip_unprivileged_port_start", "0")
    kernel.write_control(f"{net}/ipv4/ping_group_range", f"0 {last_gid}")
    try:
        kernel.write_control(f"{net}/ipv6/conf/default/disable_ipv6", "1")
    except FileNotFoundError:
        return  # the machine has no IPv6


def bring_up_interface(network: NetworkSpec) -> None:
    """Address and state of eth0, and the default route."""
    mask = (0xFFFFFFFF << (32 - network.prefix_len)) & 0xFFFFFFFF
    dotted = ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))
    any_address = _address("0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fd = sock.fileno()
        fcntl.ioctl(fd, _SIOCSIFADDR, struct.pack("=16s16s8x", b"eth0", _address(network.address)))
        fcntl.ioctl(fd, _SIOCSIFNETMASK, struct.pack("=16s16s8x", b"eth0", _address(dotted)))
        fcntl.ioctl(fd, _SIOCSIFFLAGS, struct.pack("=16sH22x", b"eth0", _IFF_UP_RUNNING))
        # struct rtentry: pad1, dst, gateway, genmask, flags (up | gateway), and fields that stay zero.
        route = struct.pack("=Q16s16s16sH", 0, any_address, _address(network.gateway), any_address, 0x3)
        fcntl.ioctl(fd, _SIOCADDRT, route.ljust(120, b"\0"))
