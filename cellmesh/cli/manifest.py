"""Writes the objects by which Kubernetes runs the hosts of a mesh. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import MeshUsageError
from ..wire.rendezvous import parse_invitation

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_TICKET = "join.json"
_MOUNT = "/etc/cellmesh"


@dataclass(frozen=True)
class KubernetesJob:
    """What runs in Kubernetes.

    Attributes:
        name: of the Job, the Service and the Secret.
        image: with Python, torch and cellmesh.
        num_nodes: how many pods, each on a node of its own.
        nproc_per_host: how many ranks a pod runs; for its CPUs, and for the line that starts the
            mesh.
        num_gpus: of each pod.
        namespace: "" for the one that kubectl uses.
        ticket: the text of the file that ``%dist_start --launch hand`` has written; "" for pods
            that wait for ``kubectl exec``.
    """

    name: str
    image: str
    num_nodes: int
    nproc_per_host: int
    num_gpus: int = 0
    namespace: str = ""
    ticket: str = field(default="", repr=False)


def check_job(job: KubernetesJob) -> None:
    """Check what Kubernetes would refuse, or what could not become a mesh.

    Raises:
        MeshUsageError: a name or the ticket is wrong.
        HostError: the ticket is damaged.
    """
    for option, value in (("--name", job.name), ("--namespace", job.namespace)):
        if value and not _NAME.fullmatch(value):
            raise MeshUsageError(
                f"{option} {value!r} is no name in Kubernetes: small letters, digits and -, a "
                "letter first, at most 52"
            )
    if not job.image or re.search(r"\s", job.image):
        raise MeshUsageError(f"--image {job.image!r} is no image: write it like team/train:1.2")
    if job.ticket and parse_invitation(job.ticket.encode()) is None:
        raise MeshUsageError("--ticket names no file that `%dist_start --launch hand` has written")


def kubernetes_objects(job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the headless Service, the Secret with the ticket, if there is one, and the Indexed
    Job.

    A pod has the host name NAME-INDEX.NAME. With a ticket it runs its agent, which announces itself
    to the notebook; without, it waits for agents to be started in it. Pods are never on one node.
    """
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/part-of": "cellmesh"}
    metadata = {"name": job.name, "labels": labels}
    if job.namespace:
        metadata["namespace"] = job.namespace
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # Hosts find each other while they start, and no port is named: agents choose theirs.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    objects: list[dict[str, Any]] = [service]
    if job.ticket:
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "type": "Opaque",
                "stringData": {_TICKET: job.ticket},
            }
        )
    return [*objects, _job(job, metadata, labels)]


def _job(
    job: KubernetesJob, metadata: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    resources: dict[str, Any] = {"requests": {"cpu": str(job.nproc_per_host)}}
    if job.num_gpus:
        resources["limits"] = {"nvidia.com/gpu": str(job.num_gpus)}
    container: dict[str, Any] = {
        "name": "agent",
        "image": job.image,
        # By standard input, as files of a Secret are links.
        "command": ["sh", "-c", f"exec python -m cellmesh agent < {_MOUNT}/{_TICKET}"]
        if job.ticket
        else ["sleep", "infinity"],
        "resources": resources,
        # gloo and NCCL share memory between the ranks of a pod.
        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    if job.ticket:
        container["volumeMounts"].append({"name": "ticket", "mountPath": _MOUNT, "readOnly": True})
        volumes.append({"name": "ticket", "secret": {"secretName": job.name, "defaultMode": 0o400}})
    apart = {
        "labelSelector": {"matchLabels": dict(labels)},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            "backoffLimit": 100,  # a host that returns heals the mesh
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "subdomain": job.name,
                    "restartPolicy": "OnFailure",
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 10,
                    "affinity": {
                        "podAntiAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": [apart]
                        }
                    },
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def describe_use(job: KubernetesJob) -> str:
    """Say what to do with the manifest, as a comment at its head."""
    where = f" -n {job.namespace}" if job.namespace else ""
    pods = ",".join(f"{job.name}-{index}" for index in range(job.num_nodes))
    lines = [f"kubectl apply{where} -f FILE"]
    if job.ticket:
        lines += [
            "Each pod announces itself to the notebook that has written the ticket:",
            f"  %dist_start --launch hand --nodes {job.num_nodes} --nproc-per-host "
            f"{job.nproc_per_host}",
        ]
    else:
        lines += [
            "Each pod waits. Once all run, in a notebook whose host reaches the pods' addresses",
            f"(`kubectl get pods{where} -l app.kubernetes.io/name={job.name}` names them):",
            f"  %dist_start --hosts POD,POD --nproc-per-host {job.nproc_per_host} --launch "
            f"'kubectl exec -i{where} {{host}} -- {{command}}'",
            f"Pods are {pods} with a suffix that Kubernetes chooses.",
        ]
    lines.append(f"The end: kubectl delete{where} job,service,secret {job.name}")
    return "\n".join(f"# {line}" for line in lines)


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Write objects as YAML documents; every text stands in quotes, as JSON has them."""
    return "".join("---\n" + "\n".join(_lines(each)) + "\n" for each in objects)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        lines = []
        for key, inner in value.items():
            nested = _lines(inner)
            if isinstance(inner, Mapping | list) and inner:
                lines += [f"{key}:", *(f"  {line}" for line in nested)]
            else:
                lines.append(f"{key}: {nested[0]}")
        return lines
    if isinstance(value, list) and value:
        lines = []
        for inner in value:
            first, *rest = _lines(inner)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [json.dumps(value)]
