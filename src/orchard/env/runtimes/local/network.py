"""Network of the sandboxes that may have one: a bridge, NAT, and rules that keep them apart.

A sandbox reaches the outside through masquerading and nothing else: not this machine, not its neighbours, not
link-local (metadata) addresses; and nothing outside can open a connection to it. Sandboxes without network have
only a loopback and never come here.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.local.spec import NetworkSpec

_RESERVED_ADDRESSES = 16
#: Every service instance takes one subnet of this range, by a hash of its state directory.
_SUBNETS = ipaddress.IPv4Network("10.192.0.0/10")
_SUBNET_PREFIX = 19


def nameservers(files: Iterable[str] = ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf")) -> list[str]:
    """The machine's IPv4 name servers that a sandbox could reach: none on loopback."""
    for file in files:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        found = []
        for line in lines:
            parts = line.split()
            if len(parts) >= 2 and parts[0] == "nameserver":
                try:
                    address = ipaddress.ip_address(parts[1])
                except ValueError:
                    continue
                if address.version == 4 and not address.is_loopback:
                    found.append(parts[1])
        if found:
            return found
    return []


class Network:
    """The bridge of one service instance. Blocking: call from a thread; `attach` and `detach` are serialised."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._bridge = f"orc{instance[:8]}"
        self._table = f"orchard_{instance}"
        self._subnet_chosen: ipaddress.IPv4Network | None = None
        self._ready = False
        self._lock = threading.Lock()
        self._ip: Any = None

    def spec(self, slot: int) -> NetworkSpec:
        """The address of a slot. RuntimeRefused when the subnet has no room for it."""
        with self._lock:
            self._connect()
            subnet = self._subnet
        number = slot + _RESERVED_ADDRESSES
        if number >= subnet.num_addresses - 1:
            raise RuntimeRefused(
                f"the sandbox network {subnet} has no address left; delete sandboxes with a network"
            )
        return NetworkSpec(str(subnet[number]), subnet.prefixlen, str(subnet[1]), nameservers())

    @property
    def _subnet(self) -> ipaddress.IPv4Network:
        """This instance's own subnet: that of its bridge if it is there, else one that no route knows."""
        if self._subnet_chosen is None:
            self._subnet_chosen = self._bridge_subnet() or self._free_subnet()
        return self._subnet_chosen

    def _bridge_subnet(self) -> ipaddress.IPv4Network | None:
        for index in self._ip.link_lookup(ifname=self._bridge):
            for address in self._ip.get_addr(index=index, family=2):
                return ipaddress.IPv4Network(
                    f"{address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}", strict=False
                )
        return None

    def _free_subnet(self) -> ipaddress.IPv4Network:
        taken = []
        for route in self._ip.get_routes(family=2):
            destination = route.get_attr("RTA_DST")
            if destination is not None:
                taken.append(ipaddress.IPv4Network(f"{destination}/{route['dst_len']}", strict=False))
        candidates = list(_SUBNETS.subnets(new_prefix=_SUBNET_PREFIX))
        first = int(self._instance[:8], 16) % len(candidates)
        for subnet in candidates[first:] + candidates[:first]:
            if not any(subnet.overlaps(other) for other in taken):
                return subnet
        raise RuntimeRefused(f"no free network left in {_SUBNETS} for the sandboxes")

    def veth(self, slot: int) -> str:
        return f"ov{self._instance[:6]}{slot:x}"

    def attach(self, slot: int, pid: int) -> None:
        """Give the network namespace of `pid` an `eth0` on the bridge. RuntimeRefused when it cannot be done."""
        with self._lock:
            self._prepare()
            name = self.veth(slot)
            self._delete_link(name)
            try:
                self._ip.link("add", ifname=name, kind="veth", peer={"ifname": "eth0", "net_ns_pid": pid})
                index = self._ip.link_lookup(ifname=name)[0]
                bridge = self._ip.link_lookup(ifname=self._bridge)[0]
                self._ip.link("set", index=index, master=bridge)
                self._ip.brport("set", index=index, isolated=1)
                self._ip.link("set", index=index, state="up")
            except Exception as error:
                self._delete_link(name)
                raise RuntimeRefused(f"the sandbox's network interface could not be made: {error}") from error

    def detach(self, slot: int) -> None:
        """Remove the interface of a slot; none is fine."""
        with self._lock:
            if self._connect():
                self._delete_link(self.veth(slot))

    def leftovers(self, slots_in_use: set[int]) -> list[str]:
        """Remove interfaces of slots that are not in use; their names."""
        keep = {self.veth(slot) for slot in slots_in_use}
        prefix = f"ov{self._instance[:6]}"
        gone = [p.name for p in Path("/sys/class/net").glob(f"{prefix}*") if p.name not in keep]
        with self._lock:
            if gone and self._connect():
                for name in gone:
                    self._delete_link(name)
        return gone

    def close(self, *, remove: bool) -> None:
        """Close the netlink socket; with `remove` also take down the bridge and its rules."""
        with self._lock:
            if (
                remove
                and (self._ready or Path(f"/sys/class/net/{self._bridge}").exists())
                and self._connect()
            ):
                self._delete_link(self._bridge)
                if shutil.which("nft"):
                    subprocess.run(
                        ["nft", "delete", "table", "inet", self._table], capture_output=True, check=False
                    )
            if self._ip is not None:
                self._ip.close()
                self._ip = None
            self._ready = False

    # ------------------------------------------------------------------------------------------- internals

    def _connect(self) -> bool:
        if self._ip is None:
            from pyroute2 import IPRoute  # heavy, and needed only where a sandbox has a network

            self._ip = IPRoute()
        return True

    def _delete_link(self, name: str) -> None:
        for index in self._ip.link_lookup(ifname=name):
            self._ip.link("del", index=index)

    def _prepare(self) -> None:
        self._connect()
        if self._ready:
            return
        if shutil.which("nft") is None:
            raise RuntimeRefused(
                "block_network=false needs `nft` on this machine: install the package nftables"
            )
        gateway = self._subnet[1]
        found = self._ip.link_lookup(ifname=self._bridge)
        if not found:
            self._ip.link("add", ifname=self._bridge, kind="bridge")
            found = self._ip.link_lookup(ifname=self._bridge)
            self._ip.addr("add", index=found[0], address=str(gateway), prefixlen=self._subnet.prefixlen)
        for path, value in (
            (f"/proc/sys/net/ipv6/conf/{self._bridge}/disable_ipv6", "1"),
            ("/proc/sys/net/ipv4/ip_forward", "1"),
        ):
            if Path(path).exists():
                Path(path).write_text(value)
        # The rules stand before the bridge comes up: there is no moment in which it is open.
        self._rules()
        self._ip.link("set", index=found[0], state="up")
        self._ready = True

    def _rules(self) -> None:
        bridge = self._bridge
        script = f"""
table inet {self._table}
delete table inet {self._table}
table inet {self._table} {{
  chain forward {{
    type filter hook forward priority -5; policy accept;
    iifname "{bridge}" oifname "{bridge}" drop
    iifname "{bridge}" ip saddr != {self._subnet} drop
    iifname "{bridge}" ip daddr {{ 169.254.0.0/16, 127.0.0.0/8, 224.0.0.0/4, 100.100.100.200 }} drop
    iifname "{bridge}" meta nfproto ipv6 drop
    oifname "{bridge}" ct state established,related accept
    oifname "{bridge}" drop
  }}
  chain input {{
    type filter hook input priority -5; policy accept;
    iifname "{bridge}" drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {self._subnet} oifname != "{bridge}" masquerade
  }}
}}
"""
        done = subprocess.run(["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeRefused(f"nft refused the sandbox network's rules: {done.stderr.strip()}")
