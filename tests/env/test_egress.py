"""The entries of `allow_egress`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.egress import canonical_name, normalised, parse_entry, parse_resolver


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("example.org", "example.org"),
        ("Example.ORG.", "example.org"),
        ("*.Example.org:443", "*.example.org:443"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("_srv.example:8000-8999", "_srv.example:8000-8999"),
        ("intranet", "intranet"),
        ("10.1.2.0/24", "10.1.2.0/24"),
        ("93.184.216.34/32:80", "93.184.216.34:80"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("10.0.0.1:1-65535", "10.0.0.1:1-65535"),
    ],
)
def test_an_entry_is_kept_in_one_form(written: str, kept: str) -> None:
    assert normalised([written]) == [kept]
    assert normalised([kept]) == [kept]


def test_the_same_twice_is_once() -> None:
    assert normalised(["a.example", "A.example."]) == ["a.example"]


@pytest.mark.parametrize("entry", ["::1", "[::1]:80", "2001:db8::/32"])
def test_ipv6_is_named_as_the_reason(entry: str) -> None:
    with pytest.raises(ValueError, match="IPv6"):
        parse_entry(entry)


def test_everything_is_another_setting() -> None:
    with pytest.raises(ValueError, match="block_network=false"):
        parse_entry("*")


def test_names_below_are_at_any_depth_and_not_the_name_itself() -> None:
    entry = parse_entry("*.a.example")
    assert entry.names("x.a.example") and entry.names("y.x.a.example")
    assert not entry.names("a.example") and not entry.names("ba.example") and not entry.names("x.b.example")


def test_ports_are_a_range_with_both_ends() -> None:
    entry = parse_entry("a.example:10-12")
    assert [port for port in range(8, 15) if entry.has_port(port)] == [10, 11, 12]
    assert parse_entry("a.example").has_port(1)


@given(st.text(max_size=80))
def test_any_text_is_an_entry_or_a_value_error(text: str) -> None:
    try:
        entry = parse_entry(text)
    except ValueError:
        return
    assert parse_entry(str(entry)) == entry


@given(st.text(max_size=300))
def test_a_canonical_name_stays_as_it_is(text: str) -> None:
    name = canonical_name(text)
    assert name is None or canonical_name(name) == name


def test_a_resolver_is_an_address_with_or_without_a_port() -> None:
    assert parse_resolver("1.2.3.4") == ("1.2.3.4", 53)
    assert parse_resolver("1.2.3.4:5353") == ("1.2.3.4", 5353)
    for text in ("", "dns.example", "1.2.3.4:0", "1.2.3.4:x", "1.2.3.4:", "::1"):
        with pytest.raises(ValueError, match="ADDR"):
            parse_resolver(text)


@pytest.mark.parametrize("entry", ["http://example.org", "https://example.org:443/path"])
def test_a_url_is_told_to_leave_its_scheme_out(entry: str) -> None:
    with pytest.raises(ValueError, match="is a URL"):
        parse_entry(entry)
