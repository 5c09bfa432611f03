"""Network of the sandboxes that may have one: a bridge, NAT, and rules that keep them apart.

A sandbox reaches the outside through masquerading and nothing else: not this machine, not its neighbours, not
link-local (metadata) addresses; and nothing outside can open a connection to it. Sandboxes without network have
only a loopback and never come here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchard.env.egress import EgressEntry
from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.local import firewall
from orchard.env.runtimes.local.gateway.listening import Listening
from orchard.env.runtimes.local.interfaces import bring_up_interface
from orchard.env.runtimes.local.kernel import CLONE_NEWNET, setns
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
        self._gate: Listening | None = None
        self._policies: dict[int, firewall.Policy] = {}

    def spec(self, slot: int, *, listed: bool = False) -> NetworkSpec:
        """The address of a slot. listed: it has a list of what it may reach, and the gateway as its name server.
        RuntimeRefused when the subnet has no room for it."""
        with self._lock:
            self._connect()
            subnet = self._subnet
        number = slot + _RESERVED_ADDRESSES
        if number >= subnet.num_addresses - 1:
            raise RuntimeRefused(
                f"the sandbox network {subnet} has no address left; delete sandboxes with a network"
            )
        gateway = str(subnet[1])
        servers = [gateway] if listed else nameservers()
        return NetworkSpec(str(subnet[number]), subnet.prefixlen, gateway, servers)

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

    def join(self, slot: int, pid: int, network: NetworkSpec) -> None:
        """Give a sandbox that lives without one its `eth0`, ready for use. RuntimeRefused when it cannot be done."""
        self.attach(slot, pid)
        failure: list[OSError] = []

        def inside() -> None:
            try:
                fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    setns(fd, CLONE_NEWNET)
                finally:
                    os.close(fd)
                bring_up_interface(network)
            except OSError as error:
                failure.append(error)

        # A thread of its own, which ends in there: no other work may come to run in the sandbox's namespace.
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failure:
            self.detach(slot)
            raise RuntimeRefused(f"the sandbox's network interface could not be brought up: {failure[0]}")

    # ---------------------------------------------------------------------------------------------- lists

    def listen(self) -> Listening:
        """The gateway's sockets, opened at the first call. RuntimeRefused when lists cannot be enforced here."""
        with self._lock:
            if self._gate is None:
                # Where an earlier run left the bridge, its rules stay as they are until there are new ones.
                self._make_bridge()
                gate = Listening.open(str(self._subnet[1]), int(self._instance[:8], 16))
                self._gate = gate
                try:
                    self._rules()
                    self._raise_bridge()
                except BaseException:
                    self._gate = None
                    gate.close()
                    raise
            return self._gate

    def restore(self, lists: Mapping[int, tuple[EgressEntry, ...]]) -> Listening:
        """At a restart: all lists in one step, before any other rule is touched. As `listen`."""
        for slot, entries in lists.items():
            self._policies[slot] = self._policy(slot, entries)
        return self.listen()

    def allow(self, slot: int, entries: tuple[EgressEntry, ...]) -> str:
        """From now on the sandbox of this slot, which may be still to come, reaches these networks, and the gateway
        for names; its address. Call after `listen`."""
        policy = self._policy(slot, entries)
        with self._lock:
            known = slot in self._policies
            _nft((firewall.replacement if known else firewall.admission)(self._wire, policy))
            self._policies[slot] = policy
        return policy.address

    def unlist(self, slot: int) -> None:
        """The sandbox of this slot is gone, its interface too; none is fine."""
        with self._lock:
            policy = self._policies.get(slot)
            if policy is not None:
                _nft(firewall.removal(self._wire, policy))
                del self._policies[slot]

    def _policy(self, slot: int, entries: tuple[EgressEntry, ...]) -> firewall.Policy:
        return firewall.Policy(slot, self.spec(slot, listed=True).address, self.veth(slot), entries)

    @property
    def _wire(self) -> firewall.Wire:
        return firewall.Wire(self._bridge, self._table, self._subnet)

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
                    for family in ("inet", "bridge"):
                        subprocess.run(
                            ["nft", "delete", "table", family, self._table], capture_output=True, check=False
                        )
            if self._gate is not None:
                self._gate.close()
                self._gate = None
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
            try:
                self._ip.link("del", index=index)
            except Exception as error:  # that of pyroute2, which is loaded late
                # It goes by itself with the sandbox's end of it, maybe just now.
                if getattr(error, "code", None) != errno.ENODEV:
                    raise

    def _prepare(self) -> None:
        if self._ready:
            return
        self._make_bridge()
        # The rules stand before the bridge comes up: there is no moment in which it is open.
        self._rules()
        self._raise_bridge()

    def _raise_bridge(self) -> None:
        self._ip.link("set", index=self._ip.link_lookup(ifname=self._bridge)[0], state="up")
        self._ready = True

    def _make_bridge(self) -> None:
        self._connect()
        if shutil.which("nft") is None:
            raise RuntimeRefused(
                "a sandbox with a network needs `nft` on this machine: install the package nftables"
            )
        gateway = self._subnet[1]
        found = self._ip.link_lookup(ifname=self._bridge)
        if not found:
            self._ip.link("add", ifname=self._bridge, kind="bridge")
            found = self._ip.link_lookup(ifname=self._bridge)
            self._ip.addr("add", index=found[0], address=str(gateway), prefixlen=self._subnet.prefixlen)
        # Said even if it has it: otherwise it takes another whenever that of an interface which comes or goes is lower,
        # and other sandboxes send to the old one until they ask anew, for ten seconds.
        address = Path(f"/sys/class/net/{self._bridge}/address").read_text().strip()
        self._ip.link("set", index=found[0], address=address)
        for path, value in (
            (f"/proc/sys/net/ipv6/conf/{self._bridge}/disable_ipv6", "1"),
            ("/proc/sys/net/ipv4/ip_forward", "1"),
        ):
            if Path(path).exists():
                Path(path).write_text(value)

    def _rules(self) -> None:
        _nft(firewall.ruleset(self._wire, self._gate.listed if self._gate else None, self._policies.values()))


def _nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeRefused(f"nft refused the sandbox network's rules: {done.stderr.strip()}")
