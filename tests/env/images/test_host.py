"""What the image `host` shows of a machine, and what it does not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from orchard.env.images import ImageStore
from orchard.env.images.view import is_opaque, is_whiteout
from tests.env.images.archives import tree


def _root(store: ImageStore) -> Path:
    (layer,) = store.resolve("host").layers
    return layer


def test_usr_is_the_machines_own_and_the_links_into_it_are_kept(store: ImageStore, machine: Path) -> None:
    image = store.resolve("host")
    (usr,) = image.mounts
    assert usr.target == "/usr"
    assert usr.layers[-1] == machine / "usr"
    assert (image.layers[0] / "bin").readlink() == Path("usr/bin")
    assert "PATH" in image.env


def test_a_machine_without_merged_usr_has_its_directories_mounted(store: ImageStore, machine: Path) -> None:
    (machine / "bin").unlink()
    (machine / "bin").mkdir()
    assert [mount.target for mount in store.resolve("host").mounts] == ["/usr", "/bin"]


def test_homes_service_data_and_state_are_empty(store: ImageStore) -> None:
    root = _root(store)
    for name in ("home", "root", "opt", "srv", "mnt", "var/lib", "var/log", "run/lock", "tmp", "proc", "dev"):
        assert list((root / name).iterdir()) == []
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert stat.S_IMODE((root / "root").stat().st_mode) == 0o700


def test_etc_holds_the_allowlist_and_nothing_else(store: ImageStore) -> None:
    assert set(tree(_root(store) / "etc")) == {
        "alternatives", "alternatives/tool", "fstab", "group", "hostname", "hosts", "mtab", "nsswitch.conf",
        "os-release", "passwd", "profile", "profile.d", "profile.d/lang.sh", "resolv.conf", "services", "skel",
        "skel/.bashrc", "ssl", "ssl/certs", "ssl/certs/ca.pem", "ssl/certs/linked.pem", "ssl/openssl.cnf",
    }  # fmt: skip


def test_accounts_are_those_of_every_installation(store: ImageStore) -> None:
    etc = _root(store) / "etc"
    assert (etc / "passwd").read_text().splitlines() == [
        "root:x:0:0:root:/root:/bin/bash",
        "daemon:x:1:1::/usr/sbin:/usr/sbin/nologin",
        "mail:x:8:8::/nonexistent:/usr/sbin/nologin",
        "nobody:x:65534:65534::/nonexistent:/usr/sbin/nologin",
    ]
    assert (etc / "group").read_text().splitlines() == [
        "root:x:0:",
        "daemon:x:1:",
        "users:x:100:",
        "nogroup:x:65534:",
    ]


def test_names_of_the_machines_network_are_not_copied(store: ImageStore) -> None:
    etc = _root(store) / "etc"
    assert "internal" not in (etc / "hosts").read_text()
    assert "ldap" not in (etc / "nsswitch.conf").read_text()


def test_what_not_everyone_may_read_below_usr_is_hidden(store: ImageStore) -> None:
    (usr,) = store.resolve("host").mounts
    mask = usr.layers[0]
    assert is_whiteout((mask / "bin/admin-only").lstat())
    assert is_whiteout((mask / "share/private").lstat())
    assert set(tree(mask)) == {"bin", "bin/admin-only", "share", "share/private", "local", "local/etc"}
    fd = os.open(mask / "local/etc", os.O_RDONLY)
    try:
        assert is_opaque(fd)
    finally:
        os.close(fd)


def test_the_mask_is_absent_where_nothing_needs_hiding(store: ImageStore, machine: Path) -> None:
    for name in ("usr/bin/admin-only", "usr/local/etc/service.conf", "usr/share/private/key"):
        (machine / name).unlink()
    (machine / "usr/share/private").rmdir()
    (usr,) = store.resolve("host").mounts
    assert usr.layers == (machine / "usr",)


def test_every_entry_of_the_skeleton_is_readable_by_all_and_holds_no_setuid(store: ImageStore) -> None:
    for path in (_root(store) / "etc").rglob("*"):
        mode = path.lstat().st_mode
        assert mode & 0o044 == 0o044
        assert not mode & (stat.S_ISUID | stat.S_ISGID)


def test_a_skeleton_is_reused_by_the_next_process(state: Path, machine: Path, store: ImageStore) -> None:
    first = store.resolve("host")
    again = ImageStore(state / "images", machine=machine).resolve("host")
    assert again == first
    assert len([path for path in (state / "images/host").iterdir() if path.is_dir()]) == 1


def test_a_change_of_the_machine_makes_a_new_skeleton_and_keeps_the_old(
    store: ImageStore, machine: Path
) -> None:
    before = store.resolve("host")
    (machine / "etc/services.new").write_text("http 81/tcp\n")
    (machine / "etc/services.new").rename(machine / "etc/services")
    after = store.resolve("host")
    assert after.digest != before.digest
    assert (after.layers[0] / "etc/services").read_text() == "http 81/tcp\n"
    assert (before.layers[0] / "etc/services").read_text() == "http 80/tcp\n"


@pytest.mark.skipif(not Path("/etc/passwd").exists(), reason="needs a Linux machine with /etc")
def test_this_machine_gives_nothing_private_away(tmp_path: Path) -> None:
    image = ImageStore(tmp_path / "state/images", durable=False).resolve("host")
    etc = image.layers[0] / "etc"
    names = {path.name for path in etc.rglob("*")}
    assert not names & {"shadow", "gshadow", "sudoers", "private", "ssh", "machine-id"}
    assert b"PRIVATE KEY-----" not in b"".join(path.read_bytes() for path in etc.rglob("*") if _is_file(path))
    assert "/usr" in {mount.target for mount in image.mounts}


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
