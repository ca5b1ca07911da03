"""The objects for Kubernetes in docs/hosts.md, checked against the published schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs/hosts.md"


def documented() -> list[dict[str, Any]]:
    """Return the objects of the section on Kubernetes."""
    section = DOCS.read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", ["1.26", "1.30", "1.35"])
def test_objects_are_valid(version: str) -> None:
    for each in documented():
        kubernetes_validate.validate(each, version, strict=True)


def test_pods_are_hosts_that_find_each_other_and_read_the_ticket() -> None:
    service, job = documented()
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert f"agent < {mounts['ticket']}/join.json" in container["command"][-1]
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    assert secrets["ticket"]["defaultMode"] == 0o400
    name = secrets["ticket"]["secretName"]
    assert f"kubectl create secret generic {name} --from-file=join.json" in DOCS.read_text()
