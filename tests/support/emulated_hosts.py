"""Hosts on one machine: each has a network, a name, processes and temporary files of its own, behind one switch.

    with Network() as network:
        first, second = network.host("node0"), network.host("node1")
        process = first.start(["torchrun", ...], log)        # as subprocess.Popen
        second.kill()                                        # all of its processes at once, and its network
        second = network.host("node1")                       # the same host, started again

Linux namespaces, which root may make; they vanish with the processes in them, so nothing is left on the machine. Files
are shared except for `network.own_files`, /dev/shm and /etc/hosts. As on a Debian host, its own name is a loopback
address there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SUBNET = "10.77.0"
_NAMES = [f"node{number}" for number in range(8)]
_KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")


def why_not() -> str | None:
    """Why this machine has no emulated hosts; or None."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (util-linux and iproute2)"
    try:
        with Network() as network:
            network.host("node0")
    except (OSError, RuntimeError) as error:
        return f"cannot make network namespaces: {error}"
    return None


class Network:
    """own_files: a folder that is another one on each host, empty at its start."""

    def __init__(self) -> None:
        self._switch = _Holder(["--net"], "ip link add br0 type bridge && ip link set br0 up")
        self.own_files = Path(tempfile.mkdtemp())
        self._hosts: list[Host] = []

    def host(self, name: str) -> Host:
        """name: node0, node1, ..., node7."""
        started = Host(name, f"{SUBNET}.{_NAMES.index(name) + 1}", self.own_files)
        self._hosts.append(started)
        cable, eth0 = f"cable{len(self._hosts)}", f"eth0 netns {started.pid}"
        self._switch.run(f"ip link add {cable} type veth peer {eth0}")
        self._switch.run(f"ip link set {cable} master br0 up")
        for words in ("link set lo up", f"addr add {started.address}/24 dev eth0", "link set eth0 up"):
            started.run(f"ip {words}")
        return started

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        for holder in (*self._hosts, self._switch):
            holder.kill()
        self.own_files.rmdir()


class _Holder:
    """A process whose namespaces others enter. It ends with this one, however this one ends: it reads from a pipe."""

    def __init__(self, kinds: Sequence[str], prepare: str) -> None:
        words = ["unshare", *kinds, "sh", "-c", f"{prepare} && echo ready && exec cat"]
        pipe = subprocess.PIPE
        self._outer = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.pid = self._outer.pid
        assert self._outer.stdout is not None
        if (said := self._outer.stdout.readline().strip()) != "ready":
            self.kill()
            raise RuntimeError(said or "unshare said nothing")

    def run(self, words: str) -> None:
        """In its network."""
        found = subprocess.run(["nsenter", "-t", str(self.pid), "-n", *words.split()], capture_output=True, text=True)
        if found.returncode:
            raise RuntimeError(f"{words}: {found.stderr.strip()}")

    def kill(self) -> None:
        if self._outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()
        for stream in (self._outer.stdin, self._outer.stdout):
            assert stream is not None
            stream.close()


class Host(_Holder):
    def __init__(self, name: str, address: str, own_files: Path) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []
        others = "".join(f"{SUBNET}.{at} {other}\\n" for at, other in enumerate(_NAMES, 1) if other != name)
        names = f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n{others}"
        prepare = f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && printf '{names}' > /dev/shm/hosts && "
        prepare += f"mount --bind /dev/shm/hosts /etc/hosts && mount -t tmpfs tmpfs {own_files}"
        super().__init__([*_KINDS, "--mount-proc", "--fork"], prepare)
        (self.pid,) = map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())

    def start(self, words: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Its output is added to `log`."""
        enter = ["nsenter", "-t", str(self.pid), *_KINDS, *map(str, words)]
        with log.open("a") as file:
            process = subprocess.Popen(enter, stdout=file, stderr=file, env=dict(environment))
        self._started.append(process)
        return process

    def kill(self) -> None:
        """All of its processes at once: the kernel ends them with the first one of their namespace. Their connections
        are closed, which those of a host without power would not be."""
        super().kill()
        for process in self._started:
            process.wait()
