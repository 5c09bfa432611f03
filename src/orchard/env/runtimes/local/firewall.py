"""The packet filter of the sandboxes' network, as text for `nft`. Each text is one transaction: it applies whole or not.

Sandboxes with a list (`allow_egress`) are decided on packet by packet before routing, so that a changed list holds for
connections that are there already, and what nobody could route is refused and told like the rest. Names are the gateway's
business: what goes to the addresses that stand for names, and to the sandboxes' name server, is turned to its sockets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from orchard.env.egress import DNS_PORT, SYNTHETIC, EgressEntry, parse_entry

#: On the gateway's sockets: only with it does the input chain let packets of sandboxes through. A program that took the
#: port of a gateway that is gone does not have it.
SOCKET_MARK = 0x0C4A4D
_NEVER = "0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/4, 255.255.255.255, 100.100.100.200"


@dataclass(frozen=True, slots=True)
class Wire:
    """The names that one service instance uses: its bridge, its table, its subnet."""

    bridge: str
    table: str
    subnet: ipaddress.IPv4Network

    @property
    def gateway(self) -> str:
        return str(self.subnet[1])


@dataclass(frozen=True, slots=True)
class Gate:
    """Where the gateway listens on the bridge's address, and the netfilter log group that it reads."""

    tcp_port: int
    dns_tcp_port: int
    dns_udp_port: int
    log_group: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The list of one sandbox, its address, and its interface on this side."""

    slot: int
    address: str
    veth: str
    entries: tuple[EgressEntry, ...]


def ruleset(wire: Wire, gate: Gate | None, policies: Iterable[Policy]) -> str:
    """Everything anew. Without a gate there are no lists."""
    parts = [f"table inet {wire.table}", f"delete table inet {wire.table}"]
    parts += [f"table bridge {wire.table}", f"delete table bridge {wire.table}"] if gate is not None else []
    parts.append(_base(wire, *(("", "") if gate is None else (_lists(gate), _input(wire.bridge, gate)))))
    if gate is not None:
        parts.append(_gated(wire, gate))
        parts.append(_ownership(wire))
        parts += [admission(wire, policy) for policy in policies]
    return "\n".join(parts) + "\n"


def example() -> str:
    """Rules with one of everything, to try out whether a kernel takes them."""
    wire = Wire("orcdoctor", "orchard_doctor", ipaddress.IPv4Network("10.192.0.0/19"))
    policy = Policy(0, "10.192.0.16", "ovdoctor0", (parse_entry("10.0.0.0/8:80"),))
    return ruleset(wire, Gate(1, 2, 3, 4), [policy]) + replacement(wire, policy) + removal(wire, policy)


def admission(wire: Wire, policy: Policy) -> str:
    """A further sandbox with a list."""
    table, chain, address = wire.table, f"p{policy.slot}", policy.address
    return "\n".join((
        f"add chain inet {table} {chain}",
        *replacement(wire, policy).splitlines(),
        f"add element inet {table} policies {{ {address} : goto {chain} }}",
        f"add element inet {table} filtered {{ {address} }}",
        f'add element bridge {table} owners {{ "{policy.veth}" . {address} }}',
        f'add element bridge {table} ports {{ "{policy.veth}" }}',
        f"add element bridge {table} addresses {{ {address} }}",
    )) + "\n"  # fmt: skip


def replacement(wire: Wire, policy: Policy) -> str:
    """Another list for a sandbox that has one."""
    rule = f"add rule inet {wire.table} p{policy.slot}"
    rules = [f"{rule} {_match(entry)} accept" for entry in policy.entries if entry.network is not None]
    return "\n".join([f"flush chain inet {wire.table} p{policy.slot}", *rules, f"{rule} goto refuse"]) + "\n"


def removal(wire: Wire, policy: Policy) -> str:
    """A sandbox with a list is gone: its address may be another's next."""
    table, chain, address = wire.table, f"p{policy.slot}", policy.address
    return "\n".join((
        f"delete element inet {table} filtered {{ {address} }}",
        f"delete element inet {table} policies {{ {address} }}",
        f"flush chain inet {table} {chain}",
        f"delete chain inet {table} {chain}",
        f'delete element bridge {table} owners {{ "{policy.veth}" . {address} }}',
        f'delete element bridge {table} ports {{ "{policy.veth}" }}',
        f"delete element bridge {table} addresses {{ {address} }}",
    )) + "\n"  # fmt: skip


def _match(entry: EgressEntry) -> str:
    # Without a port it is every port but that of DNS: whoever answers there would carry any name to anywhere.
    ports = f"!= {DNS_PORT}" if entry.ports is None else f"{entry.ports[0]}-{entry.ports[1]}"
    network = entry.network
    where = f"ip daddr {network} " if network is not None and network.prefixlen else ""
    return f"{where}meta l4proto {{ tcp, udp }} th dport {ports}"


def _base(wire: Wire, lists: str, gate_input: str) -> str:
    bridge, subnet = wire.bridge, wire.subnet
    return f"""table inet {wire.table} {{
{lists}  chain forward {{
    type filter hook forward priority -5; policy accept;
    iifname "{bridge}" oifname "{bridge}" drop
    iifname "{bridge}" ip saddr != {subnet} drop
    iifname "{bridge}" ip daddr {{ 169.254.0.0/16, 127.0.0.0/8, 224.0.0.0/4, 100.100.100.200 }} drop
    iifname "{bridge}" meta nfproto ipv6 drop
    oifname "{bridge}" ct state established,related accept
    oifname "{bridge}" drop
  }}
  chain input {{
    type filter hook input priority -5; policy accept;
{gate_input}    iifname "{bridge}" drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {subnet} oifname != "{bridge}" masquerade
  }}
}}"""


def _lists(gate: Gate) -> str:
    return f"""  set filtered {{
    type ipv4_addr
  }}
  set noise {{
    type ipv4_addr
    size 65535
    flags dynamic,timeout
    timeout 60s
  }}
  map policies {{
    type ipv4_addr : verdict
  }}
  chain refuse {{
    update @noise {{ ip saddr limit rate 100/second burst 200 packets }} log group {gate.log_group} snaplen 64
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
"""


def _input(bridge: str, gate: Gate) -> str:
    # A handshake under way has no full socket yet, hence no mark: its connection is known by then.
    ports = f"{{ {gate.tcp_port}, {gate.dns_tcp_port} }}"
    return f"""    ip saddr @filtered ct status dnat tcp dport {ports} ct state established accept
    ip saddr @filtered ct status dnat tcp dport {ports} socket mark {SOCKET_MARK} accept
    ip saddr @filtered ct status dnat udp dport {gate.dns_udp_port} socket mark {SOCKET_MARK} accept
    iifname "{bridge}" ip saddr @filtered goto refuse
"""


def _gated(wire: Wire, gate: Gate) -> str:
    bridge, gateway = wire.bridge, wire.gateway
    return f"""table inet {wire.table} {{
  chain decide {{
    type filter hook prerouting priority -150; policy accept;
    iifname "{bridge}" ip saddr @filtered goto listed
  }}
  chain listed {{
    ip daddr {gateway} meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
    ip daddr {SYNTHETIC} meta l4proto tcp accept
    ip daddr {{ {_NEVER}, {SYNTHETIC}, {wire.subnet} }} goto refuse
    fib daddr type {{ local, broadcast, multicast }} goto refuse
    ip saddr vmap @policies
    goto refuse
  }}
  chain turn {{
    type nat hook prerouting priority -100; policy accept;
    iifname "{bridge}" ip saddr @filtered ip daddr {SYNTHETIC} meta l4proto tcp redirect to :{gate.tcp_port}
    iifname "{bridge}" ip saddr @filtered ip daddr {gateway} tcp dport {DNS_PORT} redirect to :{gate.dns_tcp_port}
    iifname "{bridge}" ip saddr @filtered ip daddr {gateway} udp dport {DNS_PORT} redirect to :{gate.dns_udp_port}
  }}
}}"""


def _ownership(wire: Wire) -> str:
    """Who may send with which address: a sandbox with a list with its own alone, and nobody else with that."""
    return f"""table bridge {wire.table} {{
  set owners {{
    type ifname . ipv4_addr
  }}
  set ports {{
    type ifname
  }}
  set addresses {{
    type ipv4_addr
  }}
  chain senders {{
    type filter hook prerouting priority -300; policy accept;
    ether type ip iifname . ip saddr @owners accept
    ether type arp iifname . arp saddr ip @owners accept
    iifname @ports drop
    ether type ip ip saddr @addresses drop
    ether type arp arp saddr ip @addresses drop
  }}
}}"""
