"""The objects for Kubernetes; tests/hosts checks them against its published schema."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cellmesh.cli.main import main
from cellmesh.cli.manifest import KubernetesJob, as_yaml, check_job, kubernetes_objects
from cellmesh.errors import MeshUsageError

KEY = "a" * 40
TICKET = json.dumps(
    {"mesh": "train", "endpoint": "tcp://10.0.0.1:4000", "public_key": KEY, "secret": "b" * 40}
)
JOB = KubernetesJob("train", "team/train:1.2", 2, 4, 4, "ml", TICKET)


def test_yaml_reads_as_the_objects() -> None:
    objects = kubernetes_objects(JOB)
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects


def test_pods_are_hosts_that_find_each_other() -> None:
    service, secret, job = kubernetes_objects(JOB)
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "4"}}
    assert [each["metadata"]["namespace"] for each in (service, secret, job)] == ["ml"] * 3


def test_ticket_is_in_the_secret_only() -> None:
    service, secret, job = kubernetes_objects(JOB)
    assert secret["stringData"] == {"join.json": TICKET}
    assert KEY not in json.dumps([service, job])
    assert "env" not in job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "Train"}, "--name 'Train' is no name in Kubernetes"),
        ({"namespace": "a b"}, "--namespace 'a b' is no name"),
        ({"image": ""}, "--image '' is no image"),
        ({"ticket": "{}"}, "--ticket names no file"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        check_job(replace(JOB, **changed))


def test_command_writes_yaml_and_how_to_use_it(tmp_path: Path) -> None:
    arguments = ["manifest", "k8s", "--image", "team/train:1.2", "--nproc-per-host", "4"]
    bare = CliRunner().invoke(main, arguments)
    assert bare.exit_code == 0
    assert "# kubectl apply -f FILE" in bare.output
    assert "--launch 'kubectl exec -i {host} -- {command}'" in bare.output
    assert [each["kind"] for each in yaml.safe_load_all(bare.output)] == ["Service", "Job"]
    path = tmp_path / "join.json"
    path.write_text(TICKET)
    os.chmod(path, 0o600)
    full = CliRunner().invoke(main, [*arguments, "--ticket", str(path)])
    assert [each["kind"] for each in yaml.safe_load_all(full.output)] == [
        *("Service", "Secret", "Job"),
    ]
    assert "%dist_start --launch hand --nodes 2 --nproc-per-host 4" in full.output
    os.chmod(path, 0o644)
    refused = CliRunner().invoke(main, [*arguments, "--ticket", str(path)])
    assert refused.exit_code == 1
    assert "chmod 600" in refused.output
