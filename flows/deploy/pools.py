"""Work pools: where runs of deployments are started: as processes, Docker containers or Kubernetes Jobs.

The templates name the image, the environment and the secrets of a container. Values of secrets are in none of them: a
container finds files below /run/secrets, or a Kubernetes Secret by its name.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

POOL = "starling"
"""Work pool of every deployment, unless another is given."""
DEFAULT_QUEUE = "default"
"""Work queue of everything but nodes; every pool has it."""
KINDS = ("process", "docker", "kubernetes")
IMAGE = "starling:0.1.0-cpu"
"""Image of containers, unless another is given."""
IMAGE_FOLDER = "/opt/starling/lib/python3.11/site-packages"
"""Where an image has the code."""
IMAGE_USER = 10001
"""Number of the image's user, who is not root."""
SECRETS_FOLDER = "/run/secrets"
DATA_FOLDER = "/data"
KUBERNETES_SECRET = "starling-secrets"  # noqa: S105 - a name
SECRET_FILES = {
    "PREFECT_API_AUTH_STRING": "prefect_auth",
    "MLFLOW_TRACKING_PASSWORD": "mlflow_admin_password",
    "AWS_ACCESS_KEY_ID": "s3_access_key",
    "AWS_SECRET_ACCESS_KEY": "s3_secret_key",
}
"""What the image's entrypoint makes variables of, and the files of `starling secrets` that hold it."""
_STRING: dict[str, Any] = {"type": "string"}


class PoolError(ValueError):
    """A work pool that cannot be what was asked for."""


@dataclass(frozen=True)
class WorkPool:
    """A work pool."""

    name: str = POOL
    kind: str = "process"
    """One of KINDS."""
    image: str = ""
    """For containers; empty takes IMAGE."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PoolError(f"{self.kind!r} is no type of pool: use {', '.join(KINDS)}")
        if self.image and self.kind == "process":
            raise PoolError(f"an image ({self.image}) is for containers: add --pool-type docker or kubernetes")

    def renamed(self, name: str) -> "WorkPool":
        """The same under another name."""
        return replace(self, name=name)

    def job_variables(self, heartbeat_s: int) -> dict[str, Any]:
        """What every deployment in this pool says of its jobs.

        Args:
            heartbeat_s: Seconds between signs of life, on which the automation that finds crashed runs counts.
        """
        env = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(heartbeat_s)}
        return {"env": env} if self.kind == "process" else {"env": env, "image": self.image or IMAGE}

    def template(self) -> dict[str, Any]:
        """Its base job template; empty leaves it to Prefect."""
        made = {"process": dict, "docker": docker_template, "kubernetes": kubernetes_template}[self.kind]
        return made()


def _variable(title: str, about: str, default: Any = None, **schema: Any) -> dict[str, Any]:
    found = {"title": title, "description": about, **(schema or _STRING)}
    return found if default is None else {**found, "default": default}


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
        "command": _variable("Command", "Empty: what the worker starts a flow run with."),
        "labels": _variable("Labels", "Labels of what is started.", **strings),
        "env": _variable("Environment", "Variables that are no secrets.", env, **strings),
        "image": _variable("Image", "The image that has this package.", IMAGE),
    }


def docker_template() -> dict[str, Any]:
    """Base job template of a pool of type `docker`: data in a volume, secrets as files that cannot be written."""
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
            "The data folder, and the folder of the host with one file for each secret.",
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
        "namespace": _variable("Namespace", "Where Jobs are made.", "starling"),
        "secret": _variable("Secret", "Secret whose keys become files for the container.", KUBERNETES_SECRET),
        "claim": _variable("Claim", "PersistentVolumeClaim of the data folder.", "starling-data"),
        "service_account_name": _variable("Service account", "Of the Jobs.", "default"),
        "finished_job_ttl": _variable("Keep", "Seconds that a finished Job stays.", 86400, type="integer"),
        "memory": _variable("Memory", "Request and limit.", "8Gi"),
        "cpu": _variable("CPU", "Request.", "2"),
        "gpus": _variable("GPUs", "How many.", "0"),
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
        # weights pass between a learner and its exchange there, and a container has 64 MB of it by default
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
        # a run that died is retried by Prefect, which knows why it ended, and not by Kubernetes
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": "{{ finished_job_ttl }}", "template": {"spec": pod}},
    }


def _object(variables: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": variables}


def make_pool(api: Any, pool: WorkPool, queue: str = DEFAULT_QUEUE) -> None:
    """Make a work pool and a queue of it, unless they are there; a pool of the same type is left as it has been set up.

    Args:
        api: Prefect's synchronous client.
        pool: The pool.
        queue: A work queue of it.

    Raises:
        PoolError: The pool is there and has another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    try:
        api.create_work_pool(WorkPoolCreate(name=pool.name, type=pool.kind, base_job_template=pool.template()))
    except ObjectAlreadyExists:
        found = api.read_work_pool(pool.name)
        if found.type != pool.kind:
            raise PoolError(
                f"the work pool {pool.name!r} is there and starts runs as {found.type}, not {pool.kind}: "
                f"name another with --pool, or delete it (prefect work-pool delete {pool.name})"
            ) from None
    if queue != DEFAULT_QUEUE:
        with suppress(ObjectAlreadyExists):
            api.create_work_queue(name=queue, work_pool_name=pool.name)
