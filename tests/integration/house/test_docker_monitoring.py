"""Dashboard and alert rules: a running daemon has each metric and label that they use."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gyre_client import Loader
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import StartDaemon
from tests.secure_daemons import write_secret
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "docker" / "prometheus" / "rules.yaml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docker" / "grafana" / "gyre.json").read_text())
METRIC = re.compile(r"\b(?:gyre|process)_[a-z_]+\b|\bgyre:[a-z0-9_:]+|\bup\b")
OF_TARGETS = {"instance", "job"}  # labels that Prometheus itself adds
promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool comes with Debian's package prometheus"
)


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def dashboard_expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(found) > 10
    return found


@pytest.fixture
def live(gyred: StartDaemon, token_files: Path, tmp_path: Path) -> Mapping[str, set[str]]:
    """The labels of each metric of a daemon that a job reads from."""
    dataset = {
        "uri": str(token_files),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 10,
    }
    token = write_secret(tmp_path / "token", "x" * 32 + " 2100-01-01T00:00:00Z")
    daemon = gyred(
        {
            "metrics_listen": "tcp:127.0.0.1:0",
            "cache_memory": "1MiB",
            "tokens": {"ci": str(token)},
            "datasets": {"tokens": dataset},
        }
    )
    ready = next(event for event in daemon.events() if event["event"] == "ready")
    url = f"http://{ready['metrics'].removeprefix('tcp:')}/metrics"

    def scraped() -> str:
        with urllib.request.urlopen(url, timeout=120) as response:
            found: str = response.read().decode()
            return found

    with Loader("tokens", batch_size=20, address=daemon.address) as loader:
        next(loader)
        until(
            lambda: (
                {"gyre_mount_read_seconds{", "gyre_expires_timestamp_seconds{"}
                <= set(re.findall(r"^\w+\{", scraped(), re.MULTILINE))
            )
        )
        text = scraped()
    labels = defaultdict[str, set[str]](set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric of an expression, with the labels that it is selected by."""
    for match in re.finditer(rf"({METRIC.pattern})(\{{[^}}]*\}})?", expression):
        yield match[1], set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[2] or ""))


def grouped_by(expression: str) -> set[str]:
    return {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")
    }


def test_the_daemon_has_all_metrics_of_the_rules(
    rules: list[dict[str, Any]], live: Mapping[str, set[str]]
) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    known = set().union(*live.values()) | OF_TARGETS
    num_asked = 0
    for rule in rules:
        for name, labels in selectors(rule["expr"]):
            num_asked += 1
            assert name in live or name in recorded or name == "up", f"{name} in {rule}"
            assert labels <= live.get(name, set()) | OF_TARGETS, f"{name} in {rule}"
        assert grouped_by(rule["expr"]) <= known
        used = re.findall(r"\$labels\.(\w+)", json.dumps(rule.get("annotations", {})))
        assert set(used) <= known
    assert num_asked > 10


def test_the_daemon_has_all_metrics_of_the_dashboard(live: Mapping[str, set[str]]) -> None:
    known = set().union(*live.values()) | OF_TARGETS
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            asked = list(selectors(target["expr"]))
            assert asked
            for name, labels in asked:
                assert name in live, f"{name} in the panel {panel['title']}"
                assert labels <= live[name] | OF_TARGETS, f"{name} in the panel {panel['title']}"
            by = grouped_by(target["expr"])
            assert by <= known
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= by | OF_TARGETS
    for variable in DASHBOARD["templating"]["list"]:
        for name, _ in selectors(json.dumps(variable.get("query", ""))):
            assert name in live


def test_the_dashboard_shows_every_metric_of_a_job(live: Mapping[str, set[str]]) -> None:
    asked = {name for expression in dashboard_expressions() for name, _ in selectors(expression)}
    assert {name for name in live if name.startswith("gyre_job_")} <= asked


def test_panels_of_the_dashboard_do_not_overlap_and_have_titles() -> None:
    panels = DASHBOARD["panels"]
    assert (
        len({panel["id"] for panel in panels})
        == len({panel["title"] for panel in panels})
        == len(panels)
    )
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "as wide as Grafana's grid"


@promtool
def test_promtool_accepts_configuration_and_expressions(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(dashboard_expressions())
    ]
    (tmp_path / "panels.yaml").write_text(
        json.dumps({"groups": [{"name": "panels", "rules": rules}]})
    )
    for arguments in (
        ["config", str(RULES.with_name("prometheus.yaml"))],
        ["rules", str(tmp_path / "panels.yaml")],
    ):
        checked = subprocess.run(
            ["promtool", "check", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_section_that_its_runbook_url_leads_to(
    rules: list[dict[str, Any]],
) -> None:
    prometheus = yaml.safe_load(RULES.with_name("prometheus.yaml").read_text())
    assert "gyre_docs" in prometheus["global"]["external_labels"]
    pages = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    alerts = [rule for rule in rules if "alert" in rule]
    for rule in alerts:
        url = rule["annotations"]["runbook_url"]
        found = re.fullmatch(r"\{\{ \$externalLabels\.gyre_docs \}\}/(\w+)/#(\w+)", url)
        assert found, url
        headings = re.findall(r"^## (.*)$", pages[found[1]], re.MULTILINE)
        assert found[2] in [heading.lower() for heading in headings], url
        assert found[2] == rule["alert"].lower()
    assert len({rule["annotations"]["runbook_url"] for rule in alerts}) == len(alerts)


@promtool
def test_every_alert_fires_when_it_should_and_only_then(
    rules: list[dict[str, Any]],
) -> None:
    cases = Path(__file__).with_name("gyre_rules_test.yaml")
    tested = subprocess.run(
        ["promtool", "test", "rules", str(cases)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    fired = {
        entry["alertname"]
        for test in yaml.safe_load(cases.read_text())["tests"]
        for entry in test["alert_rule_test"]
        if entry["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules if "alert" in rule}
