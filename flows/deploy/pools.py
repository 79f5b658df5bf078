"""Work pools, which start runs of deployments as processes, Docker containers or Kubernetes Jobs.

The templates define the image, the environment and the secrets of a container. They contain no values of secrets: a
container reads them from files in /run/secrets, which Kubernetes mounts from a Secret.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

POOL = "starling"
"""Default work pool of deployments."""
DEFAULT_QUEUE = "default"
"""Work queue of all deployments but nodes; every pool has it."""
KINDS = ("process", "docker", "kubernetes")
IMAGE = "starling:0.1.0-cpu"
"""Default image of containers."""
IMAGE_FOLDER = "/opt/starling/lib/python3.11/site-packages"
"""Folder of the code in the image."""
IMAGE_USER = 10001
"""User id in the image; not root."""
SECRETS_FOLDER = "/run/secrets"
DATA_FOLDER = "/data"
KUBERNETES_SECRET = "starling-secrets"  # noqa: S105 - a name
SECRET_FILES = {
    "PREFECT_API_AUTH_STRING": "prefect_auth",
    "MLFLOW_TRACKING_PASSWORD": "mlflow_admin_password",
    "AWS_ACCESS_KEY_ID": "s3_access_key",
    "AWS_SECRET_ACCESS_KEY": "s3_secret_key",
}
"""Variables that the image's entrypoint sets, and the files of `starling secrets` with their values."""
_STRING: dict[str, Any] = {"type": "string"}


class PoolError(ValueError):
    """A work pool has an invalid type or options, or exists with another type."""


@dataclass(frozen=True)
class WorkPool:
    """A work pool."""

    name: str = POOL
    kind: str = "process"
    """One of KINDS."""
    image: str = ""
    """Image of containers; empty takes IMAGE."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PoolError(f"{self.kind!r} is not a type of pool: use {', '.join(KINDS)}")
        if self.image and self.kind == "process":
            raise PoolError(f"an image ({self.image}) is for containers: add --pool-type docker or kubernetes")

    def renamed(self, name: str) -> "WorkPool":
        """This pool with another name."""
        return replace(self, name=name)

    def job_variables(self, heartbeat_s: int) -> dict[str, Any]:
        """Job variables of every deployment in this pool.

        Args:
            heartbeat_s: Seconds between heartbeats; the automation for crashed runs relies on them.
        """
        env = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(heartbeat_s)}
        return {"env": env} if self.kind == "process" else {"env": env, "image": self.image or IMAGE}

    def template(self) -> dict[str, Any]:
        """Base job template; if empty, Prefect's default applies."""
        made = {"process": dict, "docker": docker_template, "kubernetes": kubernetes_template}[self.kind]
        return made()


def _variable(title: str, about: str, default: Any = None, **schema: Any) -> dict[str, Any]:
    variable = {"title": title, "description": about, **(schema or _STRING)}
    return variable if default is None else {**variable, "default": default}


def _common() -> dict[str, Any]:
    strings = {"type": "object", "additionalProperties": _STRING}
    env = {
        "STARLING_HOME": DATA_FOLDER,
        "STARLING_SECRETS": SECRETS_FOLDER,
        **{f"{name}_FILE": f"{SECRETS_FOLDER}/{file}" for name, file in SECRET_FILES.items()},
        "MLFLOW_TRACKING_USERNAME": "admin",
        "OMP_NUM_THREADS": "1",
        "DO_NOT_TRACK": "1",
    }
    return {
        "name": _variable("Name", "Name of the container or Job."),
        "command": _variable("Command", "If empty, the worker's command for flow runs."),
        "labels": _variable("Labels", "Labels of the container or Job.", **strings),
        "env": _variable("Environment", "Variables without secrets.", env, **strings),
        "image": _variable("Image", "Image that contains this package.", IMAGE),
    }


def docker_template() -> dict[str, Any]:
    """Base job template of a pool of type `docker`: data in a volume, secrets as read-only files."""
    texts = {"type": "array", "items": _STRING}
    variables = _common() | {
        "image_pull_policy": _variable(
            "Pull policy",
            "When to pull the image.",
            "IfNotPresent",
            type="string",
            enum=["IfNotPresent", "Always", "Never"],
        ),
        "networks": _variable("Networks", "Networks with Prefect, MLflow and the object store.", ["starling"], **texts),
        "volumes": _variable(
            "Volumes",
            "The data folder, and the host's folder with one file for each secret.",
            [f"starling-data:{DATA_FOLDER}", f"/etc/starling/secrets:{SECRETS_FOLDER}:ro"],
            **texts,
        ),
        "mem_limit": _variable("Memory limit", "Such as 8g.", "8g"),
        "auto_remove": _variable("Remove", "Remove containers that have ended.", True, type="boolean"),
        "stream_output": _variable("Stream output", "Show the output in the worker's log.", True, type="boolean"),
    }
    job = {name: f"{{{{ {name} }}}}" for name in variables}
    return {"job_configuration": {**job, "privileged": False}, "variables": _object(variables)}


def kubernetes_template() -> dict[str, Any]:
    """Base job template of a pool of type `kubernetes`; its containers are not root."""
    variables = _common() | {
        "namespace": _variable("Namespace", "Namespace of the Jobs.", "starling"),
        "secret": _variable("Secret", "Secret whose keys become files in the container.", KUBERNETES_SECRET),
        "claim": _variable("Claim", "PersistentVolumeClaim of the data folder.", "starling-data"),
        "service_account_name": _variable("Service account", "Service account of the Jobs.", "default"),
        "finished_job_ttl": _variable("Keep", "Seconds that a finished Job is kept.", 86400, type="integer"),
        "memory": _variable("Memory", "Request and limit.", "8Gi"),
        "cpu": _variable("CPU", "Request.", "2"),
        "gpus": _variable("GPUs", "Number of GPUs.", "0"),
        "job_watch_timeout_seconds": _variable("Watch", "Seconds without any event of a Job.", type="integer"),
        "pod_watch_timeout_seconds": _variable("Start", "Seconds until a pod runs.", 600, type="integer"),
        "stream_output": _variable("Stream output", "Show the output in the worker's log.", True, type="boolean"),
    }
    passed = ["name", "command", "labels", "env", "namespace", "stream_output"]
    passed += ["job_watch_timeout_seconds", "pod_watch_timeout_seconds"]
    job = {name: f"{{{{ {name} }}}}" for name in passed}
    return {"job_configuration": {**job, "job_manifest": _manifest()}, "variables": _object(variables)}


def _manifest() -> dict[str, Any]:
    mounts = [("secrets", SECRETS_FOLDER), ("data", DATA_FOLDER), ("shm", "/dev/shm")]  # noqa: S108 - in a container
    container = {
        "name": "prefect-job",
        "image": "{{ image }}",
        "env": "{{ env }}",
        "args": "{{ command }}",
        "resources": {
            "requests": {"cpu": "{{ cpu }}", "memory": "{{ memory }}"},
            "limits": {"memory": "{{ memory }}", "nvidia.com/gpu": "{{ gpus }}"},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if name == "secrets" else {})}
            for name, path in mounts
        ],
    }
    volumes = [
        {"name": "secrets", "secret": {"secretName": "{{ secret }}", "defaultMode": 0o440}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "{{ claim }}"}},
        # learners and exchanges share weights through it; the default size is 64 MB
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
    ]
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": "{{ service_account_name }}",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {"runAsNonRoot": True, "runAsUser": IMAGE_USER, "fsGroup": IMAGE_USER},
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"labels": "{{ labels }}", "namespace": "{{ namespace }}", "generateName": "{{ name }}-"},
        # a run that died is retried by Prefect, which knows the reason, not by Kubernetes
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": "{{ finished_job_ttl }}", "template": {"spec": pod}},
    }


def _object(variables: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": variables}


def make_pool(api: Any, pool: WorkPool, queue: str = DEFAULT_QUEUE) -> None:
    """Create a work pool and one of its queues unless they exist; an existing pool of the same type is not changed.

    Args:
        api: Prefect's synchronous client.
        pool: The pool.
        queue: A work queue of the pool.

    Raises:
        PoolError: If the pool exists with another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    try:
        api.create_work_pool(WorkPoolCreate(name=pool.name, type=pool.kind, base_job_template=pool.template()))
    except ObjectAlreadyExists:
        existing = api.read_work_pool(pool.name)
        if existing.type != pool.kind:
            raise PoolError(
                f"the work pool {pool.name!r} exists and has the type {existing.type}, not {pool.kind}: "
                f"choose another with --pool, or delete it (prefect work-pool delete {pool.name})"
            ) from None
    if queue != DEFAULT_QUEUE:
        with suppress(ObjectAlreadyExists):
            api.create_work_queue(name=queue, work_pool_name=pool.name)
