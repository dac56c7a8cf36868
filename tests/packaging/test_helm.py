"""deploy/helm: rendered and linted by Helm's own library, validated by the schemas that Kubernetes publishes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_session_proxy.http.server import LAST_RESORT
from cli_session_proxy.settings import load

from ..conftest import ROOT
from ..matrix import half

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk, of the extra [dev]")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra [dev]")

CHART = ROOT / "deploy" / "helm"
VERSIONS = ("1.29", "1.31", "1.34", "1.37")
NEEDED: dict[str, Any] = {
    "postgresql": {"url": "postgresql://proxy@db/chains", "passwordSecret": {"name": "pg"}},
    "clusterKeySecret": {"name": "cluster"},
    "keysSecret": {"name": "keys"},
}
EVERYTHING: dict[str, Any] = {
    **NEEDED,
    "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
    "config": 'lease = 60\n[profiles.coder]\ntools = ["Read"]\n',
    "env": [{"name": "CLI_SESSION_PROXY_LOG_LEVEL", "value": "debug"}],
    "redis": {"urlSecret": {"name": "redis"}},
    "keysSecret": {"name": ""},
    "gateway": {"header": "X-Forwarded-User", "from": ["10.1.2.0/24"]},
    "providerSecret": "provider",
    "archive": {"to": "s3://chains/of", "afterDays": 90, "keySecret": {"name": "age"}, "credentialsSecret": "aws"},
    "drainSeconds": 120,
    "persistence": {"storageClass": "fast", "retain": False},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
    "autoscaling": {"enabled": True, "selector": {"matchLabels": {"a": "b"}}},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"name": "gateway"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}}]}],
    },
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}
CASES = {
    "least": NEEDED,
    "everything": EVERYTHING,
    "external": {**NEEDED, "autoscaling": {"enabled": True, "metric": "External"}},
    "open": {**NEEDED, "networkPolicy": {"enabled": False}},
}


def every(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        for text in chart.render(dict(values), name="csp", namespace="prod").values():
            yield from filter(None, yaml.safe_load_all(text))


def of_kind(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next(one for one in every(values) if one["kind"] == kind)


def pod(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(values, "StatefulSet")["spec"]["template"]["spec"]
    return found


def environment(values: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod(values)["containers"][0]["env"] if "value" in one}


@pytest.mark.parametrize(("case", "version"), half(list(CASES), VERSIONS))
def test_what_is_rendered_is_valid_for_kubernetes(case: str, version: str) -> None:
    kinds = set()
    for one in every(CASES[case]):
        kubernetes_validate.validate(one, version, strict=True)
        kinds.add(one["kind"])
    always = {"StatefulSet", "Service", "ConfigMap", "ServiceAccount", "PodDisruptionBudget"}
    more = {
        "least": {"NetworkPolicy"}, "everything": {"NetworkPolicy", "HorizontalPodAutoscaler"},
        "external": {"NetworkPolicy", "HorizontalPodAutoscaler"}, "open": set(),
    }[case]  # fmt: skip
    assert kinds == always | more


def test_a_misspelt_field_would_be_seen() -> None:
    wrong = of_kind(NEEDED, "StatefulSet")
    wrong["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_helm_finds_nothing_wrong_with_it() -> None:
    found = helm.lint(str(CHART), values=NEEDED)
    assert found["errors"] == []
    assert [one for one in found["messages"] if one["severity"] > 1] == []  # 1: there is no icon


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "postgresql.url is needed"),
        ({**NEEDED, "postgresql": {"url": "postgresql://proxy:secret@db/chains"}}, "holds a password"),
        ({**NEEDED, "clusterKeySecret": {"name": ""}}, "clusterKeySecret.name is needed"),
        ({**NEEDED, "keysSecret": {"name": ""}}, "nobody is let in"),
        ({**NEEDED, "gateway": {"header": "X-User", "from": ["10.0.0.1"]}}, "two ways"),
        ({**NEEDED, "keysSecret": {"name": ""}, "gateway": {"header": "X-User"}}, "gateway.from"),
        ({**NEEDED, "archive": {"to": "s3://x"}}, "chains are encrypted"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmError, match=why):
        list(every(values))


@pytest.mark.parametrize("case", ["least", "everything"])
def test_serve_reads_the_settings_of_the_pod(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = CASES[case]
    config = tmp_path / "config.toml"
    config.write_text(of_kind(values, "ConfigMap")["data"]["config.toml"])
    for name, value in environment(values).items():
        if name.startswith("CLI_SESSION_PROXY_"):
            monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.1.2.3"))
    monkeypatch.setenv("CLI_SESSION_PROXY_CONFIG", str(config))
    monkeypatch.setenv("CLI_SESSION_PROXY_HOST", "0.0.0.0")  # of the image
    settings = load()
    assert settings.advertise == "http://10.1.2.3:8787"
    assert (settings.keys_file is None) == (settings.trusted_header is not None) == (case == "everything")
    assert settings.archive_after_days == (90 if case == "everything" else None)
    assert settings.drain_timeout == (120 if case == "everything" else 30)
    secrets = {settings.keys_file, settings.cluster_key_file, settings.archive_key_file} - {None}
    (volume,) = (one for one in pod(values)["volumes"] if one["name"] == "secrets")
    paths = {item["path"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
    assert {path.name for path in secrets if path is not None} == paths
    assert volume["projected"]["defaultMode"] == 0o440  # what `settings.read_secret` takes of root's


@pytest.mark.parametrize("case", ["least", "everything"])
def test_a_pod_has_the_time_that_a_drain_takes(case: str) -> None:
    spec = pod(CASES[case])
    told = environment(CASES[case])
    pause = float(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(told["CLI_SESSION_PROXY_DRAIN_TIMEOUT"])
    assert spec["terminationGracePeriodSeconds"] > pause + drain + LAST_RESORT


def test_no_pod_runs_as_root_or_has_a_token() -> None:
    spec = pod(NEEDED)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    inner = spec["containers"][0]["securityContext"]
    assert inner == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_the_metric_of_the_scaling_is_one_of_ours() -> None:
    name = of_kind(EVERYTHING, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    source = (ROOT / "cli_session_proxy" / "http" / "metrics.py").read_text()
    assert name == "cli_session_proxy_queue_depth"
    assert '{NAMESPACE}_queue_depth"' in source


# Values that Kubernetes itself defines: documented as one.
WHOLE = {"podSecurityContext", "securityContext", "resources.requests", "resources.limits"}


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and path not in WHOLE:
            yield from leaves(value, f"{path}.")
        else:
            yield path


def test_every_value_is_documented_and_nothing_else() -> None:
    table = re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
