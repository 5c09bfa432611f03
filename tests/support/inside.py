"""Programs that try to break out, run inside a sandbox with its own Python."""

from __future__ import annotations

import json
from typing import Any

from tests.support.rest import Box

#: Raw system calls. `call(name, …)` gives "OK" or the name of the error; children keep the parent unharmed.
PRELUDE = r'''
import ctypes, errno, json, os, socket, stat, struct, sys, time
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_MACHINE = 0 if os.uname().machine == "x86_64" else 1
NR = {
 "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "fsopen": (430, 430),
 "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "move_mount": (429, 429),
 "open_tree": (428, 428), "mount_setattr": (442, 442), "unshare": (272, 97), "clone": (56, 220),
 "clone3": (435, 435), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
 "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
 "request_key": (249, 218), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
 "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
 "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
 "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
 "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "acct": (163, 89),
 "quotactl": (179, 60), "iopl": (172, None), "ioperm": (173, None), "ptrace": (101, 117), "kcmp": (312, 272),
 "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_open": (434, 434),
 "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "kill": (62, 129), "tgkill": (234, 131),
 "mknodat": (259, 33), "socket": (41, 198), "personality": (135, 92), "vhangup": (153, 58),
 "fanotify_init": (300, 262), "move_pages": (279, 239), "migrate_pages": (256, 238), "prlimit64": (302, 261),
 "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "setpriority": (141, 140),
 "memfd_secret": (447, 447), "lookup_dcookie": (212, 18), "uselib": (134, None), "sysfs": (139, None),
 "process_madvise": (440, 440), "ioprio_set": (251, 30), "setuid": (105, 146), "capset": (126, 91),
 "get_mempolicy": (239, 236), "modify_ldt": (154, None), "landlock_create_ruleset": (444, 444),
}
REFUSED = {"EPERM", "EACCES", "ENOSYS", "EROFS"}
NEWUSER, NEWNS, NEWPID, NEWNET = 0x10000000, 0x20000, 0x20000000, 0x40000000
NEWUTS, NEWIPC, NEWCGROUP = 0x4000000, 0x8000000, 0x2000000

def _arg(value):
    if isinstance(value, str): value = value.encode()
    if isinstance(value, bytes): return ctypes.c_char_p(value)
    if value is None: return ctypes.c_void_p(0)
    return ctypes.c_long(value) if isinstance(value, int) else value

def raw(name, *args):
    nr = NR[name][_MACHINE]
    if nr is None: return -1, errno.ENOSYS
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(nr), *map(_arg, args))
    return result, ctypes.get_errno()

def call(name, *args):
    result, number = raw(name, *args)
    return "OK" if result >= 0 else errno.errorcode.get(number, str(number))

def attempt(function):
    """What became of `function()`: its result as JSON, or the name of its OSError."""
    try: return function()
    except OSError as error: return errno.errorcode.get(error.errno, str(error.errno))

def opened(path, flags):
    def inner():
        fd = os.open(path, flags | os.O_NONBLOCK)
        os.close(fd)
        return "OK"
    return attempt(inner)

def written(path, data=b"1"):
    def inner():
        fd = os.open(path, os.O_WRONLY)
        try: os.write(fd, data)
        finally: os.close(fd)
        return "OK"
    return attempt(inner)

def report(value):
    print(json.dumps(value)); sys.stdout.flush(); os._exit(0)
'''


def inside(box: Box, program: str, *argv: str, **fields: Any) -> Any:
    """What `program` reports, with the prelude before it. `fields` are those of exec."""
    fields.setdefault("timeout_seconds", 60)
    job = box.python(PRELUDE + program, *argv, **fields)
    assert job["exit_code"] == 0, job
    return json.loads(job["stdout"])


#: Errors that mean "refused" and not "asked wrongly".
REFUSED = frozenset({"EPERM", "EACCES", "ENOSYS", "EROFS"})
