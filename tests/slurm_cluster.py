"""A Slurm cluster on loopback: munge, a controller, and nodes that are namespaces of this machine.

All of it is in one network namespace, whose loopback no other process sees, and in one mount
namespace, where /etc, /opt, /var and /run may be written without a trace, and /srv is shared by all
nodes. A node is a namespace of processes: its first one is `slurmd`, and the kernel kills the steps
of its jobs with it. It has its own /tmp, which outlives it, and its own /run/gyre.

Slurm puts steps into control groups where the machine has those of version 1. Elsewhere it finds
their processes by their parents, and does not count the memory of a step.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.waiting import until

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "ip")
DEADLINE_S = 240.0
_USERS = {"gyre": 21001, "alice": 21002}  # with groups of the same names; alice is in gyre's, too
_CGROUPS = Path("/sys/fs/cgroup")

# A node is down after 5 s. A job that was requeued waits until its old credential has expired.
_CONFIGURATION = """
ClusterName=loopback
SlurmctldHost=controller(127.0.0.1)
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/run/state
SlurmctldPidFile=/run/controller.pid
SlurmdPidFile=/run/disks/%n/slurmd.pid
SlurmdSpoolDir=/run/disks/%n/spool
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
ReturnToService=2
MailProg=/bin/true
NodeName=DEFAULT CPUs=4 RealMemory=8000
NodeName=n[1-{num}] NodeAddr=127.0.0.[2-{num_and_one}] Port=[17001-{last_port}]
PartitionName=all Nodes=ALL Default=YES MaxTime=60
"""

_SET_UP = """
hostname controller
ip link set lo up
for number in $(seq $num_nodes); do ip address add 127.0.0.$((number + 1))/8 dev lo; done
mount --bind "$folder" /srv
mount -t tmpfs -o mode=755 tmpfs /run
for path in /etc /opt /var $closed; do
  layer=/run/layers$path
  mkdir -p $layer/upper $layer/work
  mount -t overlay -o lowerdir=$path,upperdir=$layer/upper,workdir=$layer/work overlay $path
done
for path in $closed; do chmod o+x $path; done
mkdir -p /run/munge /run/gyre /etc/munge /etc/slurm /etc/gyre /opt/gyre
cp /srv/munge.key /etc/munge/
cp /srv/slurm.conf /srv/cgroup.conf /etc/slurm/
cat /srv/passwd >>/etc/passwd
cat /srv/group >>/etc/group
cp /srv/hosts /etc/hosts
ln -s "$environment/bin" /opt/gyre/bin
touch /srv/set-up
exec sleep infinity
"""

_NODE = """
hostname $name
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run/gyre
disk=/run/disks/$name
mkdir -p $disk/tmp $disk/work $disk/spool
chmod 1777 $disk/tmp
mount -t overlay -o lowerdir=/tmp,upperdir=$disk/tmp,workdir=$disk/work overlay /tmp
slurmd -D -N $name
exit # so the shell is the first process of the node, and reaps orphans
"""


class Cluster:
    """A cluster that runs.

    Attributes:
        folder: Which is /srv there.
        names: Of the nodes.
        has_control_groups: Whether each step has one.
    """

    def __init__(self, folder: Path, num_nodes: int, settings: str = "") -> None:
        """Starts it, and waits until all nodes are idle.

        Args:
            folder: Which is /srv there, empty.
            num_nodes: How many.
            settings: More lines of slurm.conf.
        """
        self.folder = folder
        self.names = [f"n{number + 1}" for number in range(num_nodes)]
        self.has_control_groups = all((_CGROUPS / each).is_dir() for each in ("memory", "freezer"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._write_files(settings)
        environment = {
            "folder": str(folder),
            "num_nodes": str(num_nodes),
            "environment": sys.prefix,
            "closed": " ".join(map(str, _closed_to_users())),
        }
        unshare = ["unshare", "--mount", "--net", "--uts", "sh", "-euc", _SET_UP]
        self._first = self._started("set-up", unshare, environment)
        try:
            until(lambda: (folder / "set-up").exists() or self._first.poll() is not None)
            assert self._first.poll() is None, (folder / "set-up.log").read_text()
            munged = ["munged", "--foreground", "--force", "--num-threads=2"]
            self._started("munged", self._inside(munged))
            self._started("slurmctld", self._inside(["slurmctld", "-D", "-c"]))
            for name in self.names:
                self.start_node(name)
            until(lambda: self.states() == dict.fromkeys(self.names, "idle"), DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def start_node(self, name: str) -> None:
        """Starts a node; one that was killed has its /tmp again."""
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        command = self._inside([*unshare, "sh", "-euc", _NODE])
        self._nodes[name] = self._started(name, command, {"name": name})

    def kill_node(self, name: str) -> None:
        """Kills `slurmd`, and the kernel all other processes of the node."""
        node = self._nodes.pop(name)
        node.kill()
        node.wait(DEADLINE_S)

    def states(self) -> dict[str, str]:
        """Returns the state of each node, as `sinfo` shows it."""
        found = self.run(["sinfo", "--Node", "--noheader", "--format=%N %t"], check=False)
        return dict(line.split() for line in found.splitlines())

    def run(
        self,
        command: Sequence[str],
        *,
        user: str = "root",
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Returns what a command printed in the cluster, outside of its nodes.

        Args:
            command: With its arguments.
            user: Who runs it.
            check: Whether it must end with status 0.
            environment: More variables.
        """
        become: list[str] = []
        if user in _USERS:
            number = _USERS[user]
            become = ["setpriv", f"--reuid={number}", f"--regid={number}", "--init-groups"]
        done = subprocess.run(
            self._inside([*become, *command]),
            env={**os.environ, "TMPDIR": "/tmp", **(environment or {})},
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=check,
        )
        return done.stdout

    def files(self, name: str) -> list[str]:
        """Returns the paths in a node's /tmp that it wrote."""
        return self.run(
            ["find", f"/run/disks/{name}/tmp", "-mindepth", "1", "-printf", "%P\n"]
        ).split()

    def close(self) -> None:
        """Ends all processes, and with them all mounts; removes the control groups of Slurm."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(DEADLINE_S)
        for name in self.names:
            for root in _CGROUPS.glob(f"*/slurm_{name}"):
                for folder, _, _ in os.walk(root, topdown=False):
                    until(partial(_removed, Path(folder)))

    def _started(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, "TMPDIR": "/tmp", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self._first.pid}", "--mount", "--net", "--uts", *command]

    def _write_files(self, settings: str) -> None:
        num = len(self.names)
        text = _CONFIGURATION.format(
            proctrack="cgroup" if self.has_control_groups else "linuxproc",
            task="cgroup" if self.has_control_groups else "none",
            num=num,
            num_and_one=num + 1,
            last_port=17000 + num,
        )
        hosts = [f"127.0.0.{number + 2} {name}" for number, name in enumerate(self.names)]
        files = {
            "slurm.conf": f"{text}{settings}\n",
            "cgroup.conf": "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n",
            "hosts": "\n".join(["127.0.0.1 localhost controller", *hosts, ""]),
            "passwd": "".join(f"{name}:x:{n}:{n}::/srv:/bin/bash\n" for name, n in _USERS.items()),
            "group": f"gyre:x:{_USERS['gyre']}:alice\nalice:x:{_USERS['alice']}:\n",
        }
        for name, content in files.items():
            (self.folder / name).write_text(content)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))


@contextlib.contextmanager
def cluster(num_nodes: int, settings: str = "") -> Iterator[Cluster]:
    """A cluster with a folder that all of its users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-slurm-"))
    folder.chmod(0o755)
    try:
        running = Cluster(folder, num_nodes, settings)
        try:
            yield running
        finally:
            running.close()
    finally:
        shutil.rmtree(folder)


def why_none() -> str:
    """Returns why this machine can have no cluster; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian packages slurm-wlm, munge and iproute2)"
    if os.getuid() != 0:
        return "needs root, to make the namespaces of nodes"
    attempt = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "true"]
    if subprocess.run(attempt, capture_output=True, check=False).returncode:
        return "this machine makes no namespaces"
    return ""


def _closed_to_users() -> list[Path]:
    """The folders above this environment and checkout that other users may not enter."""
    ours = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix, REPOSITORY)]
    above = {folder for each in ours for folder in (each, *each.parents)}
    return sorted(folder for folder in above if not folder.stat().st_mode & 0o001)


def _removed(group: Path) -> bool:
    """Removes a control group; false while the kernel still ends processes there."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
