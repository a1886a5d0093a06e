"""Pods without a cluster: containers with the users, groups, capabilities and mounts of their YAML.

A container is a process in its own namespaces: mounts, processes, network, IPC. Its root has this
machine's programs and packages, read-only, and the volumes of the pod. Folders of volumes get the
owner and mode that the kubelet gives them.
"""

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DEADLINE_S = 300.0
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
# Brings loopback up in a network namespace, and asks another of its addresses than 127.0.0.1, since
# the kubelet does not reach a port that listens only there.
_PROBE = """
import fcntl, http.client, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
connection = http.client.HTTPConnection("127.0.0.2", int(sys.argv[1]), timeout=5)
connection.request("GET", sys.argv[2])
print(connection.getresponse().status)
"""


def _why_not() -> str:
    """Returns why this machine cannot play pods; empty if it can."""
    for program in ("unshare", "setpriv", "nsenter", "chroot"):
        if not shutil.which(program):
            return f"{program} is not installed (Debian packages util-linux and coreutils)"
    namespaces = ("--mount", "--pid", "--fork", "--net", "--ipc")
    command = ["unshare", *namespaces, "setpriv", "--clear-groups", "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return "only root may make the namespaces of a pod"
    return ""


_REASON = _why_not()
needs_namespaces = pytest.mark.skipif(bool(_REASON), reason=_REASON)


@dataclass
class ClusterNode:
    """A node: its folders, and the volumes that claims are bound to.

    Attributes:
        root: holds the node's folders.
        claims: volumes by the names of claims.
        config_maps: files by the names of config maps.
    """

    root: Path
    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    config_maps: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """A path of the node, on this machine."""
        return self.root / name.lstrip("/")

    def source(self, volume: Mapping[str, Any], pod_folder: Path) -> Path:
        """Prepares a volume as the kubelet does.

        Raises:
            FileNotFoundError: a pod would wait, because the node lacks the folder.
        """
        if claim := volume.get("persistentVolumeClaim"):
            return self.source(self.claims[claim["claimName"]], pod_folder)
        if host := volume.get("hostPath"):
            path = self.path(host["path"])
            if host["type"] == "DirectoryOrCreate" and not path.exists():
                path.mkdir(parents=True)
                path.chmod(0o755)
            if not path.is_dir():
                raise FileNotFoundError(path)
            return path
        folder = pod_folder / str(volume["name"])
        folder.mkdir(exist_ok=True)
        if config_map := volume.get("configMap"):
            for name, text in self.config_maps[config_map["name"]].items():
                (folder / name).write_text(text)
                (folder / name).chmod(0o644)
            folder.chmod(0o755)
        else:
            assert "emptyDir" in volume
            folder.chmod(0o777)
        return folder


@dataclass(frozen=True)
class Image:
    """A container image, as far as a pod depends on it.

    Attributes:
        passwd, group: lines of the files in `/etc`, besides root's.
        environment: its variables.
        command: that a container without one runs.
    """

    passwd: str = ""
    group: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass
class Container:
    """A container that runs.

    Attributes:
        process: `unshare`, with the container's input and status. Its child is process 1 there.
        log_path: its output.
    """

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        """The container's process 1, as this machine numbers it; 0 if there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0]) if children else 0

    def log(self) -> str:
        return self.log_path.read_text()

    def probe(self, port: int, path: str) -> int:
        """The status with which the container answers a probe of the kubelet; 0 for none."""
        asked = subprocess.run(
            [
                "nsenter",
                f"--net=/proc/{self.pid}/ns/net",
                sys.executable,
                "-c",
                _PROBE,
                str(port),
                path,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return int(asked.stdout or 0)


@contextlib.contextmanager
def container(
    node: ClusterNode,
    pod: Mapping[str, Any],
    spec: Mapping[str, Any],
    image: Image,
    command: Sequence[str] = (),
    extra_mounts: Mapping[Path, str] | None = None,
) -> Iterator[Container]:
    """A container of a pod, killed at the end of the block.

    Args:
        node: where the pod is.
        pod: the specification of the pod.
        spec: that of the container.
        image: its image.
        command: runs in place of the container's own.
        extra_mounts: read-only folders of this machine, and where the container finds them.
    """
    folder = Path(tempfile.mkdtemp(prefix="gyre-pod-"))
    try:
        script = _script(node, pod, spec, image, command, extra_mounts or {}, folder)
        log_path = folder / "log"
        # the container ends with this process, also if it is killed
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork"]
        unshare += ["--mount", "--pid", "--net", "--ipc"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*unshare, "sh", "-euc", script],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": _PATH},
            )
        try:
            yield Container(process, log_path)
        finally:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
    finally:
        shutil.rmtree(folder)


def run(*arguments: Any, **options: Any) -> tuple[int, str]:
    """Runs a container to its end; takes the arguments of `container`.

    Returns:
        Its exit status and output.
    """
    with container(*arguments, **options) as running:
        status = running.process.wait(DEADLINE_S)
        return status, running.log()


def _script(
    node: ClusterNode,
    pod: Mapping[str, Any],
    spec: Mapping[str, Any],
    image: Image,
    command: Sequence[str],
    extra_mounts: Mapping[Path, str],
    folder: Path,
) -> str:
    """The script that root runs in the new namespaces: it mounts, and becomes the container."""
    root = folder / "root"
    root.mkdir()
    volumes = {each["name"]: node.source(each, folder) for each in pod.get("volumes", ())}
    lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {root}"]

    def bind(source: Path, target: str, *, read_only: bool) -> None:
        place = shlex.quote(f"{root}{target}")
        lines.append(f"mkdir -p {place}")
        lines.append(f"mount --rbind {shlex.quote(str(source))} {place}")
        if read_only:
            lines.append(f"mount -o remount,bind,ro {place}")

    for path in _host_folders():
        bind(path, str(path), read_only=True)
    links = [name for name in _PROGRAMS if Path(name).is_symlink()]
    lines += [f"ln -s {Path(name).readlink()} {root}{name}" for name in links]
    bind(Path("/dev"), "/dev", read_only=False)
    lines += [f"mkdir -p {root}/proc {root}/etc", f"mount -t proc proc {root}/proc"]
    lines.append(f"[ ! -e /etc/ld.so.cache ] || cp /etc/ld.so.cache {root}/etc")
    for name, text in (("passwd", image.passwd), ("group", image.group)):
        first = "root:x:0:0::/root:/bin/sh" if name == "passwd" else "root:x:0:"
        lines.append(f"printf '%s\\n' {shlex.quote(first)} {shlex.quote(text)} > {root}/etc/{name}")
    for mount in spec.get("volumeMounts", ()):
        bind(volumes[mount["name"]], mount["mountPath"], read_only=mount.get("readOnly", False))
    for path, target in extra_mounts.items():
        bind(path, target, read_only=True)
    context = {**pod.get("securityContext", {}), **spec.get("securityContext", {})}
    if context.get("readOnlyRootFilesystem"):
        lines.append(f"mount -o remount,ro {root}")
    else:
        lines.append(f"mkdir -p {root}/tmp && chmod 1777 {root}/tmp")
    variables = {**image.environment, "PATH": _PATH}
    variables |= {each["name"]: each["value"] for each in spec.get("env", ())}
    program = [*(command or spec.get("command") or image.command), *spec.get("args", ())]
    become = [
        "chroot",
        str(root),
        "env",
        "-i",
        *(f"{key}={value}" for key, value in variables.items()),
    ]
    lines.append(f"exec {shlex.join([*become, *_setpriv(context), *program])}")
    return "\n".join(lines)


def _setpriv(context: Mapping[str, Any]) -> list[str]:
    """The command that takes on the user, groups and capabilities of a security context."""
    groups = sorted({context["runAsGroup"], *context.get("supplementalGroups", ())})
    capabilities = context.get("capabilities", {})
    assert capabilities.get("drop") == ["ALL"], "other containers keep the runtime's default ones"
    bounding = ",".join(["-all", *(f"+{each.lower()}" for each in capabilities.get("add", ()))])
    command = [
        "setpriv",
        "--reuid",
        str(context["runAsUser"]),
        "--regid",
        str(context["runAsGroup"]),
    ]
    command += ["--groups", ",".join(map(str, groups))]
    command += ["--bounding-set", bounding, "--inh-caps", "-all"]
    command += ["--pdeathsig", "KILL"]  # with `unshare`, whose --kill-child a new user undoes
    return command + ([] if context.get("allowPrivilegeEscalation", True) else ["--no-new-privs"])


def _host_folders() -> list[Path]:
    """The folders with programs, the interpreter and its packages; none inside another."""
    wanted = {
        Path(name) for name in _PROGRAMS if Path(name).is_dir() and not Path(name).is_symlink()
    }
    wanted |= {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
    wanted |= {Path(each) for each in sys.path if Path(each).is_dir()}
    return [each for each in sorted(wanted) if not any(parent in wanted for parent in each.parents)]
