"""Work pools of containers: the job templates that `starling deploy` writes."""

import json

import pytest
from support import ROOT

from flows.deploy.pools import docker_template, kubernetes_template


@pytest.mark.parametrize(
    ("package", "kind", "made"),
    [
        ("prefect-docker", "docker", docker_template()),
        ("prefect-kubernetes", "kubernetes", kubernetes_template()),
    ],
)
def test_job_templates_use_only_fields_of_prefects_workers(package, kind, made):
    from pathlib import Path

    import prefect

    known = json.loads(
        (Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json").read_text()
    )[package][kind]["default_base_job_configuration"]
    assert set(made["job_configuration"]) <= set(known["job_configuration"])
    variables = made["variables"]["properties"]
    text = json.dumps(made["job_configuration"])
    used = {name for name in variables if f"{{{{ {name} }}}}" in text}
    assert used == set(variables)
    for name in set(variables) & set(known["variables"]["properties"]):
        assert variables[name].get("type") == known["variables"]["properties"][name].get("type")
    for entry in variables.values():
        assert entry["title"]
        assert entry["description"]
        kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
        assert "default" not in entry or isinstance(entry["default"], kinds[entry["type"]])


def test_docker_container_is_unprivileged_with_read_only_secrets():
    template = docker_template()
    assert template["job_configuration"]["privileged"] is False
    (secrets,) = [volume for volume in template["variables"]["properties"]["volumes"]["default"] if "secrets" in volume]
    assert secrets.endswith(":/run/secrets:ro")


def test_kubernetes_job_has_secret_files_and_is_not_root():
    manifest = kubernetes_template()["job_configuration"]["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert [mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] == "secrets"] == [True]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] != 0
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["restartPolicy"] == "Never"
    assert manifest["spec"]["backoffLimit"] == 0


def test_containers_match_the_image_and_its_secrets():
    from flows.deploy.pools import IMAGE_FOLDER, IMAGE_USER, SECRET_FILES
    from flows.servers.credentials import NAMES

    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    entrypoint = (ROOT / "docker" / "entrypoint.sh").read_text(encoding="utf-8")
    assert f"useradd --uid {IMAGE_USER}" in dockerfile
    assert IMAGE_FOLDER.startswith("/opt/starling/")
    assert "/opt/starling/bin/pip install --no-deps" in dockerfile  # and not an editable one
    assert set(SECRET_FILES.values()) <= set(NAMES)
    assert all(f"    {name}" in entrypoint for name in SECRET_FILES)
