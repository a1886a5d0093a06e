"""docker/kubernetes: what the chart renders is valid, restricted, and serves the pods of a node."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.pods import (
    DEADLINE_S,
    ClusterNode,
    Container,
    Image,
    container,
    needs_namespaces,
    run,
)

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "docker" / "kubernetes"
CHART = KUBERNETES / "gyre"
TOOLS = Path(sys.prefix) / "kubernetes"
OLDEST, NEWEST = "1.28", "1.37"  # Chart.yaml's, and the newest that the schemas have
TEAM = "team-a"
OPEN = {"node.volume": "hostPath", "node.prepare": "initContainer"}
OPENED = {"container folder: root", "container folder: capabilities"}
NUM_SAMPLES, SEQUENCE = 64, 8

pytestmark = pytest.mark.skipif(
    not (TOOLS / ".installed").exists(), reason="`make kubernetes` installs helm and kubectl"
)

Manifests = list[dict[str, Any]]


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLS / "bin" / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def render(values: Mapping[str, object] | None = None) -> Manifests:
    """What the chart renders with these values, whose keys are paths such as `node.volume`."""
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in (values or {}).items()]
    rendered = tool("helm", "template", "gyre", CHART, "--namespace", "gyre", *settings)
    assert rendered.returncode == 0, rendered.stderr
    return [each for each in yaml.safe_load_all(rendered.stdout) if each]


def of_kind(manifests: Manifests, kind: str) -> dict[str, Any]:
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found


def pod_of(manifests: Manifests) -> dict[str, Any]:
    pod: dict[str, Any] = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]
    return pod


def toml_of(manifests: Manifests) -> str:
    text: str = of_kind(manifests, "ConfigMap")["data"]["gyre.toml"]
    return text


def complaints(manifests: Manifests, folder: Path) -> str:
    """The complaints of kubernetes-validate, by the strict schemas of two versions."""
    path = folder / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    return "".join(
        judged.stdout + judged.stderr
        for version in (OLDEST, NEWEST)
        if (
            judged := subprocess.run(
                [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, path],
                env={"PYTHONPATH": str(TOOLS)},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        ).returncode
    )


def exceptions(pod: Mapping[str, Any]) -> set[str]:
    """What a pod has that the level `restricted` of the pod security standards forbids."""
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
    allowed |= {"persistentVolumeClaim", "projected", "secret"}
    found = {f"pod: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)}
    for volume in pod.get("volumes", ()):
        (kind,) = volume.keys() - {"name"}
        found |= set() if kind in allowed else {f"volume {volume['name']}: {kind}"}
    for each in (*pod.get("initContainers", ()), *pod["containers"]):
        context = {**pod["securityContext"], **each["securityContext"]}
        added = set(context["capabilities"].get("add", ()))
        keeps = context["capabilities"]["drop"] == ["ALL"]
        breaches = {
            "root": not context.get("runAsNonRoot") or not context.get("runAsUser"),
            "privileged": context.get("privileged"),
            "escalation": context.get("allowPrivilegeEscalation") is not False,
            "seccomp": context.get("seccompProfile", {}).get("type") != "RuntimeDefault",
            "capabilities": not keeps or added - {"NET_BIND_SERVICE"},
            "host port": any("hostPort" in port for port in each.get("ports", ())),
        }
        found |= {f"container {each['name']}: {name}" for name, is_so in breaches.items() if is_so}
    return found


def test_the_chart_passes_its_linter() -> None:
    linted = tool("helm", "lint", "--strict", CHART)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(
    ("values", "breaches"),
    [
        ({}, set()),
        ({"node.volume": "hostPath"}, {"volume node: hostPath"}),
        ({"node.prepare": "initContainer"}, OPENED),
        (OPEN, {"volume node: hostPath", *OPENED}),
        (
            {
                "clients.namespaces": [TEAM, "team-b"],
                "metricsPort": 9847,
                "cacheDisk": "1Ti",
                "memory.cache": "0Mi",
                "priority": 0,
                "nodeSelector": {"nvidia.com/gpu.present": "true"},
                "serviceAccountName": "reader",
                "secret": "credentials",
                "imagePullSecrets": [{"name": "registry"}],
                "supplementalGroups": [2000000],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
                "maxUnavailable": "10%",
            },
            set(),
        ),
    ],
    ids=["default", "host-path", "init-container", "open", "every-value"],
)
def test_the_chart_renders_valid_pods_that_are_restricted(
    tmp_path: Path, values: Mapping[str, object], breaches: set[str]
) -> None:
    """By default, all. Each other variant has the exceptions that are listed here alone."""
    manifests = render(values)
    assert complaints(manifests, tmp_path) == ""
    assert exceptions(pod_of(manifests)) == breaches


def test_schemas_reject_a_field_that_kubernetes_does_not_know(tmp_path: Path) -> None:
    manifests = render()
    pod_of(manifests)["containers"][0]["memoryLimit"] = "1Gi"
    assert "memoryLimit" in complaints(manifests, tmp_path)


def test_limit_grace_and_configuration_follow_from_the_same_values(tmp_path: Path) -> None:
    values = {
        "memory.batches": "1Gi",
        "memory.cache": "512Mi",
        "memory.daemon": "3Gi",
        "cpu": 6,
        "cacheDisk": "2Ti",
        "drainTimeoutSeconds": 45,
        "config": '[datasets.text]\nuri = "/data/*.bin"\nformat = "tokens"\nsequence_length = 8\n',
    }
    manifests = render(values)
    pod = pod_of(manifests)
    (gyred,) = pod["containers"]
    size = f"{1024 + 512 + 3 * 1024}Mi"
    assert gyred["resources"]["limits"] == {"memory": size}
    assert gyred["resources"]["requests"] == {"memory": size, "cpu": 6}
    assert pod["terminationGracePeriodSeconds"] == 45 + 20
    (tmp_path / "gyre.toml").write_text(toml_of(manifests))
    checked = subprocess.run(
        [
            Path(sys.executable).with_name("gyred"),
            "check-config",
            "--config",
            tmp_path / "gyre.toml",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    in_force = dict(re.findall(r"^(\w+) += +(.*?) +#", checked.stdout, re.MULTILINE))
    assert in_force["memory_budget"] == str(1 << 30)
    assert in_force["cache_memory"] == str(512 << 20)
    assert in_force["cache_disk"] == str(2 << 40)
    assert in_force["num_transform_workers"] == "6"
    assert in_force["drain_timeout_s"] == "45.0"


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("memory.batches=8GB", "at '/memory/batches': 'memory.batches'|'8GB' does not match"),
        ("node.volume=emptyDir", "at '/node/volume': value must be one of 'persistentVolumeClaim'"),
        ("node.folder=run/gyre", "at '/node/folder': 'run/gyre' does not match"),
        ("cpus=4", "additional properties 'cpus' not allowed"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(value: str, complaint: str) -> None:
    rendered = tool("helm", "template", "gyre", CHART, "--set", value)
    assert rendered.returncode != 0
    assert re.search(complaint, rendered.stderr)


def test_the_base_of_kustomize_is_what_the_chart_renders_with_a_host_path(tmp_path: Path) -> None:
    built = tool("kubectl", "kustomize", KUBERNETES / "base")
    assert built.returncode == 0, built.stderr
    base = list(yaml.safe_load_all(built.stdout))
    chart = render({"node.volume": "hostPath"})
    assert complaints(base, tmp_path) == ""
    config_map = of_kind(base, "ConfigMap")
    pod = pod_of(base)
    (mounted,) = [each["configMap"] for each in pod["volumes"] if "configMap" in each]
    assert mounted == {"name": config_map["metadata"]["name"]}, "a new text rolls out new pods"
    mounted["name"] = "gyre"
    assert pod == pod_of(chart)
    assert tomllib.loads(toml_of(base)) == tomllib.loads(toml_of(chart))
    assert of_kind(base, "PriorityClass")["value"] == of_kind(chart, "PriorityClass")["value"]
    labels = of_kind(base, "Namespace")["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "privileged"}


def example(name: str) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((KUBERNETES / name).read_text())
    return manifest


def training_pod(name: str) -> dict[str, Any]:
    """The pod of an example; that of a TrainJob with the container that its runtime makes."""
    spec = example(name)["spec"]
    if name == "jobset.yaml":
        (job,) = spec["replicatedJobs"]
        pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
        return pod
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["env"] = spec["trainer"]["env"]
    return pod


@pytest.mark.parametrize(
    ("name", "model"),
    [("jobset.yaml", "JobsetV1alpha2JobSet"), ("trainjob.yaml", "TrainerV1alpha1TrainJob")],
)
def test_an_example_is_whole_in_kubeflow_s_own_model(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    models: Any = importlib.import_module("kubeflow_trainer_api.models")
    assert getattr(models, model).from_dict(example(name)).to_dict() == example(name)


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_a_training_pod_is_restricted_and_mounts_the_claim_that_the_chart_makes(
    name: str, tmp_path: Path
) -> None:
    pod = training_pod(name)
    assert exceptions(pod) == set()
    (its,) = pod["containers"]
    valid = {**pod, "containers": [{"image": "image", **its}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": valid}
    assert complaints([manifest], tmp_path) == ""
    (claim,) = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]]
    namespace = example(name)["metadata"]["namespace"]
    rendered = render({"clients.namespaces": [namespace], "node.volume": "hostPath"})
    made = of_kind(rendered, "PersistentVolumeClaim")
    assert made["metadata"]["name"] == claim
    assert made["metadata"]["namespace"] == namespace


# The tests below play the pods of one node.


def daemon_image() -> Image:
    """Dockerfile.daemon's."""
    text = (ROOT / "docker" / "Dockerfile.daemon").read_text()
    return Image(
        passwd="gyre:x:10001:10001::/nonexistent:/usr/sbin/nologin",
        group="gyre:x:10001:",
        environment={"XDG_CACHE_HOME": "/var/cache", "PYTHONDONTWRITEBYTECODE": "1"},
        command=[
            word
            for instruction in ("ENTRYPOINT", "CMD")
            for word in json.loads(re.findall(rf"^{instruction} (\[.*)$", text, re.MULTILINE)[-1])
        ],
    )


CONFIG = f"""
[datasets.text]
uri = "/data/*.bin"
format = "tokens"
dtype = "uint16"
sequence_length = {SEQUENCE}
"""
# Reads two epochs, and waits for a line after the first batch.
READ = f"""
import sys
import numpy as np
from gyre_client import Loader
wanted = np.arange({NUM_SAMPLES * SEQUENCE}).reshape(-1, {SEQUENCE})
patience_s = float(sys.argv[1])
with Loader("text", batch_size=16, seed=1, epochs=2, reattach_timeout_s=patience_s) as loader:
    ids = []
    for batch in loader:
        assert (batch["tokens"].numpy() == wanted[batch["sample_id"].numpy()]).all()
        ids += batch["sample_id"].tolist()
        if len(ids) == 16:
            print("paused", flush=True)
            sys.stdin.readline()
assert sorted(ids) == sorted([*range({NUM_SAMPLES})] * 2), ids
print("complete")
"""


class PlayedNode:
    """A node with the chart's pods on it.

    Attributes:
        manifests: what the chart renders.
        pod: the daemon's.
        node: with the claims that the manifests bind.
        data: a folder with a dataset, which the daemon's container has at `/data`.
    """

    def __init__(self, folder: Path, values: Mapping[str, object]) -> None:
        settings = {"clients.namespaces": [TEAM], "config": CONFIG, "memory.batches": "256Mi"}
        self.manifests = render({**settings, **values, "memory.cache": "0Mi"})
        self.pod = pod_of(self.manifests)
        claims = {
            each["spec"]["claimRef"]["name"]: each["spec"]
            for each in self.manifests
            if each["kind"] == "PersistentVolume"
        }
        files = of_kind(self.manifests, "ConfigMap")
        self.node = ClusterNode(folder / "node", claims, {files["metadata"]["name"]: files["data"]})
        self.data = folder / "data"
        self.data.mkdir()
        np.arange(NUM_SAMPLES * SEQUENCE, dtype=np.uint16).tofile(self.data / "part.bin")

    @property
    def folder(self) -> Path:
        """The node's folder."""
        return self.node.path("/var/lib/gyre")

    def make_folder(self) -> None:
        """Makes the node's folder, as its administrator does."""
        self.folder.mkdir(parents=True)
        os.chown(self.folder, 10001, 10001)

    def daemon(self) -> AbstractContextManager[Container]:
        """A pod of the DaemonSet: its init containers run, then its container."""
        for each in self.pod.get("initContainers", ()):
            assert run(self.node, self.pod, each, daemon_image()) == (0, "")
        (gyred,) = self.pod["containers"]
        return container(
            self.node, self.pod, gyred, daemon_image(), extra_mounts={self.data: "/data"}
        )

    def trainer(self, pod: Mapping[str, Any], patience_s: float = DEADLINE_S) -> tuple[Any, ...]:
        """The arguments of `container` for a training pod that reads."""
        (its,) = pod["containers"]
        return self.node, pod, its, Image(), [sys.executable, "-c", READ, str(patience_s)]


def wait_until_ready(daemon: Container, pod: Mapping[str, Any]) -> None:
    """Asks as the kubelet does: by the readiness probe of the pod."""
    (gyred,) = pod["containers"]
    ask = gyred["readinessProbe"]["httpGet"]
    (port,) = [each["containerPort"] for each in gyred["ports"] if each["name"] == ask["port"]]
    deadline = time.monotonic() + DEADLINE_S
    while daemon.probe(port, ask["path"]) != 200:
        assert daemon.process.poll() is None, daemon.log()
        assert time.monotonic() < deadline, daemon.log()
        time.sleep(0.1)
    assert daemon.probe(port, gyred["livenessProbe"]["httpGet"]["path"]) == 200


def wait_for(pod: Container, line: str) -> None:
    """Waits for a line of a container's log."""
    deadline = time.monotonic() + DEADLINE_S
    while line not in pod.log():
        assert pod.process.poll() is None, pod.log()
        assert time.monotonic() < deadline, pod.log()
        time.sleep(0.05)


def without(pod: Mapping[str, Any], *, group: bool = False, user: bool = False) -> dict[str, Any]:
    """A training pod that lacks the daemon's group, or the daemon's user."""
    copy: dict[str, Any] = json.loads(json.dumps(pod))
    if group:
        del copy["securityContext"]["supplementalGroups"]
    if user:
        (its,) = copy["containers"]
        its["env"] = [each for each in its["env"] if each["name"] != "GYRE_DAEMON_USER"]
    return copy


@needs_namespaces
@pytest.mark.parametrize("values", [{}, OPEN], ids=["restricted", "init-container"])
def test_a_training_pod_reads_from_the_daemon_s_pod_and_its_next_version(
    tmp_path: Path, values: Mapping[str, object]
) -> None:
    played = PlayedNode(tmp_path, values)
    pod = training_pod("jobset.yaml")
    if not values:
        with pytest.raises(FileNotFoundError), played.daemon():  # its pod waits, too
            pass
        played.make_folder()
    with pytest.raises(FileNotFoundError):  # the kubelet has the pod wait for the daemon's folder
        run(*played.trainer(pod))
    with played.daemon() as daemon:
        wait_until_ready(daemon, played.pod)
        found = (played.folder / "socket").stat()
        assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o750, 10001, 10001)
        with container(*played.trainer(pod)) as trainer:
            wait_for(trainer, "paused")
            os.kill(daemon.pid, signal.SIGTERM)
            assert daemon.process.wait(DEADLINE_S) == 0
            with played.daemon() as updated:
                trainer.process.communicate(b"\n", timeout=DEADLINE_S)
                assert trainer.process.returncode == 0, trainer.log()
                assert trainer.log().splitlines()[-1] == "complete"
                wait_until_ready(updated, played.pod)


@needs_namespaces
def test_a_pod_without_the_daemon_s_group_or_user_does_not_read(tmp_path: Path) -> None:
    played = PlayedNode(tmp_path, {})
    played.make_folder()
    pod = training_pod("jobset.yaml")
    with played.daemon() as daemon:
        wait_until_ready(daemon, played.pod)
        with (
            container(*played.trainer(without(pod, group=True), 1.0)) as no_group,
            container(*played.trainer(without(pod, user=True), 1.0)) as no_user,
        ):
            assert no_group.process.wait(DEADLINE_S) == no_user.process.wait(DEADLINE_S) == 1
            assert "Permission denied" in no_group.log().splitlines()[-1]
            assert "GYRE_DAEMON_USER=10001" in no_user.log().splitlines()[-1]
