"""The objects for Kubernetes, checked against its published schema."""

from __future__ import annotations

from dataclasses import replace

import kubernetes_validate
import pytest

from cellmesh.cli.manifest import KubernetesJob, kubernetes_objects
from tests.core.cli.test_manifest import JOB


@pytest.mark.parametrize("version", ["1.26", "1.30", "1.35"])
@pytest.mark.parametrize("job", [JOB, replace(JOB, ticket="", namespace="", num_gpus=0)])
def test_objects_are_valid(job: KubernetesJob, version: str) -> None:
    for each in kubernetes_objects(job):
        kubernetes_validate.validate(each, version, strict=True)


def test_schema_refuses_what_is_not_in_it() -> None:
    (*_, job) = kubernetes_objects(JOB)
    job["spec"]["completionModus"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.30", strict=True)
