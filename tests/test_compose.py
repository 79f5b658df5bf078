"""docker-compose.yml and the Dockerfile, without a container engine: every name in them exists where it is used."""

import ast
import importlib.metadata
import importlib.util
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
import yaml

from flows.servers.credentials import NAMES, RING_KEY
from flows.servers.production import ARTIFACTS, BUCKETS, OBJECTS, auth_config

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "docker-compose.yml"
DOCUMENT = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES = DOCUMENT["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
ENTRYPOINT = (ROOT / "docker" / "entrypoint.sh").read_text(encoding="utf-8")
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("starling:"))
OFTEN = sorted(name for name in SERVICES if SERVICES[name]["restart"] == "unless-stopped")
each_service = pytest.mark.parametrize("name", sorted(SERVICES))
each_of_ours = pytest.mark.parametrize("name", OURS)


def default(text):
    """A value with every ${NAME:-default} replaced by its default."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", str(text))


def source_of(module):
    """Text of an installed module, which need not be imported for it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])
    folder = Path(spec.submodule_search_locations[0])
    path = folder.joinpath(*parts[1:])
    return (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text("utf-8")


def test_compose_file_follows_the_specification():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@each_service
def test_services_have_restart_policy_health_check_and_limits(name):
    service = SERVICES[name]
    assert service["restart"] in ("unless-stopped", "on-failure:5", "no")
    health = service["healthcheck"]
    assert health == {"disable": True} or {"test", "interval", "timeout", "retries", "start_period"} <= set(health)
    assert health != {"disable": True} or service["restart"] != "unless-stopped"
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert "no-new-privileges:true" in service["security_opt"]


@each_service
def test_everything_a_service_refers_to_is_defined(name):
    service = SERVICES[name]
    for other, wanted in service.get("depends_on", {}).items():
        assert wanted["condition"] in ("service_healthy", "service_completed_successfully")
        once = SERVICES[other]["healthcheck"] == {"disable": True}
        assert (wanted["condition"] == "service_completed_successfully") == once, f"{other} never gets so far"
        assert set(SERVICES[other].get("profiles", [])) <= set(service.get("profiles", []))
    assert set(service.get("networks", [])) <= set(DOCUMENT["networks"])
    assert set(service.get("secrets", [])) <= set(DOCUMENT["secrets"])
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (ROOT / source).is_file() if source.startswith(".") else source in DOCUMENT["volumes"]


def test_every_volume_secret_and_network_is_used():
    for kind in ("volumes", "secrets", "networks"):
        used = {str(item).split(":")[0] for service in SERVICES.values() for item in service.get(kind, [])}
        assert set(DOCUMENT[kind]) <= used


@each_service
def test_ports_are_published_on_loopback_only(name):
    for port in SERVICES[name].get("ports", []):
        assert default(port).startswith("127.0.0.1:"), f"{port} is open to the network"
        assert port.startswith("${STARLING_BIND:-127.0.0.1}:")  # unless asked
    assert "network_mode" not in SERVICES[name]
    assert not SERVICES[name].get("privileged")


def test_only_the_gateway_reaches_servers_without_passwords():
    assert DOCUMENT["networks"]["storage"]["internal"] is True
    assert [name for name, service in SERVICES.items() if "storage" in service["networks"]] == ["seaweedfs", "s3"]
    assert SERVICES["seaweedfs"]["networks"] == ["storage"]
    assert "ports" not in SERVICES["seaweedfs"]


def test_images_are_pinned_and_listed_on_the_page():
    images = {default(service["image"]) for service in SERVICES.values()}
    table = set(re.findall(r"^\| `([\w./-]+:[\w.-]+)` \|", PAGE, re.MULTILINE))
    assert images <= table
    assert not [image for image in images if image.endswith(":latest") or ":" not in image]
    version = importlib.metadata.version("starling")
    assert f"starling:{version}-cpu" in images
    assert f'image.version="{version}"' in DOCKERFILE
    python = re.search(r"^ARG PYTHON=(\S+)", DOCKERFILE, re.MULTILINE)[1]
    assert f"python:{python}" in table
    assert python.startswith("3.11-")  # constraints.txt is of this version


def test_postgres_and_the_programs_that_copy_it_are_of_one_version():
    major = re.fullmatch(r"postgres:(\d+)\.\d+-bookworm", SERVICES["postgres"]["image"])[1]
    assert f"postgresql-client-{major}" in DOCKERFILE


@each_of_ours
def test_our_containers_run_without_privileges(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    user = service["user"].split(":")[0]
    assert f"--uid {user}" in DOCKERFILE
    assert f"uid={user}" in " ".join(service["tmpfs"])
    assert service["build"]["args"]["VARIANT"] == "${STARLING_VARIANT:-cpu}"


# names


def prefect_variables():
    """Every environment variable that Prefect's settings read."""
    from prefect.settings import Settings
    from pydantic import BaseModel
    from pydantic_settings import BaseSettings

    names = set()

    def walk(model, prefix):
        for field, info in model.model_fields.items():
            kind = info.annotation
            if isinstance(kind, type) and issubclass(kind, BaseSettings | BaseModel) and hasattr(kind, "model_fields"):
                walk(kind, (getattr(kind, "model_config", {}).get("env_prefix") or f"{prefix}{field}_"))
                continue
            choices = getattr(info.validation_alias, "choices", [])
            names.update(str(choice).upper() for choice in choices if isinstance(choice, str))
            names.add(f"{prefix}{field}".upper())

    walk(Settings, "PREFECT_")
    return names


def mlflow_reads(name):
    sources = ("mlflow.environment_variables", "mlflow.cli", "mlflow.utils.cli_args", "mlflow.store.db.db_types")
    return any(re.search(rf"\b{name}\b", source_of(module)) for module in sources)


def botocore_reads(name):
    return name in {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} or any(
        f"'{name}'" in source_of(module) for module in ("botocore.configprovider", "botocore.credentials")
    )


def our_code_reads(name):
    files = [path for room in ("flows", "tasks", "training") for path in (ROOT / room).rglob("*.py")]
    return any(f'"{name}"' in path.read_text("utf-8") for path in files) or f"{name}:-" in ENTRYPOINT


def every_variable():
    own = {name for service in SERVICES.values() for name in service.get("environment", {})}
    image = re.findall(r"^(?:ENV )?\s*([A-Z][A-Z_]+)=\S", DOCKERFILE, re.MULTILINE)
    return sorted(own | set(image))


OF_LIBRARIES = {
    "POSTGRES_PASSWORD_FILE",  # the postgres image; read, not run
    "POSTGRES_INITDB_ARGS",
    "NVIDIA_VISIBLE_DEVICES",  # NVIDIA's container runtime; read, not run
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "DO_NOT_TRACK",
    "PATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PIP_DISABLE_PIP_VERSION_CHECK",
    "PIP_NO_CACHE_DIR",
}


@pytest.mark.parametrize("name", every_variable())
def test_every_environment_variable_is_read(name):
    if name in OF_LIBRARIES or name in ("PYTHON", "VARIANT"):
        return
    plain = name.removesuffix("_FILE")
    if plain != name and plain in entrypoint_names():
        name = plain
    if name.startswith("PREFECT_"):
        assert name in prefect_variables()
    elif name.startswith("MLFLOW_"):
        assert mlflow_reads(name)
    elif name.startswith("AWS_"):
        assert botocore_reads(name)
    elif name == "PGPASSWORD":
        return  # libpq's
    else:
        assert our_code_reads(name), f"nothing reads {name}"


def entrypoint_names():
    loop = re.search(r"for name in \\\n(.*?)\ndo", ENTRYPOINT, re.DOTALL)[1]
    return set(loop.replace("\\", " ").split())


@each_service
def test_services_get_exactly_the_secret_files_they_read(name):
    service = SERVICES[name]
    wanted = {
        Path(value).name
        for variable, value in service.get("environment", {}).items()
        if variable.endswith("_FILE") or variable == "STARLING_RING_KEY_SECRET"
    }
    given = set(service.get("secrets", []))
    assert wanted <= given
    whole_folder = "STARLING_SECRETS" in service.get("environment", {}) or name == "s3"
    assert whole_folder or given == wanted, "a service is given a secret that it has no use for"


def test_secrets_are_files_that_starling_makes_never_literal_values():
    files = {name: default(entry["file"]) for name, entry in DOCUMENT["secrets"].items()}
    assert files.pop("ring_key") == f"./secrets/{RING_KEY}"
    assert files == {name: f"./secrets/{name}" for name in NAMES}
    for service in SERVICES.values():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY", variable):
                assert str(value).startswith("/run/secrets"), f"{variable} has a value"
    assert not re.search(r"://[^/\s:]+:[^/\s@]+@", COMPOSE.read_text("utf-8") + DOCKERFILE)
    assert "secrets" not in (ROOT / ".dockerignore").read_text("utf-8").replace("no secrets", "")


# commands


def check_starling(words):
    from flows.cli.app import app

    command = typer.main.get_command(app).commands[words[1]]
    command.make_parser(click.Context(command, info_name=words[1])).parse_args(args=words[2:])


def check_module(words):
    module = words[2]
    if module == "uvicorn":
        target, function = next(word for word in words if ":" in word and not word.startswith("-")).split(":")
        assert re.search(rf"^def {function}\(", (ROOT / f"{target.replace('.', '/')}.py").read_text("utf-8"), re.M)
        options = source_of("uvicorn.main")
        assert all(f'"{word.split("=")[0]}"' in options for word in words[3:] if word.startswith("--"))
        return
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    assert any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)


def check_mlflow(words):
    options = source_of("mlflow.cli") + source_of("mlflow.utils.cli_args")
    for word in words[2:]:
        assert f'"{word.split("=")[0]}"' in options or f'"{word.split("=")[0]}/' in options, word
    name = next(word.partition("=")[2] for word in words if word.startswith("--app-name="))
    points = importlib.metadata.entry_points(group="mlflow.app")
    assert name in {point.name for point in points}


def check_worker(words):
    text = source_of("prefect.cli.worker")
    assert words[:3] == ["prefect", "worker", "start"]
    for word in words[3:]:
        assert not word.startswith("--") or f'"{word}"' in text or word.removeprefix("--").replace("-", "_") in text


@each_of_ours
def test_commands_of_services_exist_in_the_code(name):
    words = [default(word) for word in SERVICES[name]["command"]]
    if words[0] == "starling":
        check_starling(words)
    elif words[0] == "python":
        check_module(words)
    elif words[0] == "mlflow":
        check_mlflow(words)
    else:
        check_worker(words)


def test_pool_queues_buckets_and_paths_match_the_code():
    from flows.deploy.deployments import DEFAULT_QUEUE, POOL
    from tasks.orchestration.nodes import QUEUE

    text = COMPOSE.read_text("utf-8")
    commands = {name: " ".join(SERVICES[name]["command"]) for name in ("worker", "node-1", "node-2", "node-gpu")}
    assert f"--pool {POOL} --work-queue {DEFAULT_QUEUE} " in commands.pop("worker")
    assert all(f"--pool {POOL} --work-queue {QUEUE} " in command for command in commands.values())
    assert SERVICES["worker"]["environment"]["STARLING_OBJECTS"] == OBJECTS
    assert f"--artifacts-destination={ARTIFACTS}" in text
    assert {OBJECTS.split("/")[2], ARTIFACTS.split("/")[2]} == set(BUCKETS)
    ini = (ROOT / "docker" / "mlflow-auth.ini").read_text("utf-8")
    database = next(word for word in SERVICES["mlflow"]["command"] if "store-uri" in word).partition("=")[2]
    assert ini == auth_config(database)
    assert "COPY docker/mlflow-auth.ini " + SERVICES["mlflow"]["environment"]["MLFLOW_AUTH_CONFIG_PATH"] in DOCKERFILE


def test_compose_configuration_is_valid_and_its_nodes_match_the_containers():
    from tasks.config.pipeline import load_config
    from training.config import TrainConfig

    config = load_config(ROOT / "docker" / "demo.yaml")
    train: TrainConfig = config.train
    assert train.launch.key_file == "/run/starling/ring.key"
    assert train.launch.key_file in ENTRYPOINT
    assert train.nodes == sum("cpu" in SERVICES[name].get("profiles", []) for name in SERVICES)
    assert config.storage.url == OBJECTS
    assert SERVICES["deploy"]["command"][-1] == "${STARLING_CONFIG:-/configs/compose.yaml}"
    assert "COPY docker/demo.yaml /configs/compose.yaml" in DOCKERFILE


def test_recognition_is_watched_where_its_server_writes_its_log():
    from tasks.config.pipeline import load_config

    config = load_config(ROOT / "docker" / "demo.yaml")
    assert default(SERVICES["serve"]["command"][2]) == config.model_name
    assert SERVICES["serve"]["volumes"] == ["serve:/data"]  # the log is logs/serve-8000.jsonl there
    assert "STARLING_HOME=/data" in DOCKERFILE
    (place,) = [volume.split(":") for volume in SERVICES["worker"]["volumes"] if volume.startswith("serve:")]
    assert place[2] == "ro"
    assert config.monitor.logs == (f"{place[1]}/logs",)
    # a volume gets the owner of the image's folder that it is first mounted at
    assert re.search(rf"install -d -o starling .*{place[1]}\b", DOCKERFILE)


# image


def test_files_copied_by_the_dockerfile_exist_and_are_not_ignored():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), f"there is no {source}"
            assert source.split("/")[0] in allowed


def test_image_runs_without_root_and_installs_with_constraints():
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE) == ["starling"]
    installs = re.findall(r"pip install (.*)$", DOCKERFILE, re.MULTILINE)
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    stages = re.findall(r"^FROM (\S+) AS (\S+)", DOCKERFILE, re.MULTILINE)
    assert {"build", "runtime", "runtime-cpu", "runtime-cuda", "starling"} == {name for _, name in stages}


def test_package_layer_installs_all_requirements_of_the_extras():
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    command = [sys.executable, "docker/requirements.py", *extras.split(",")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["optional-dependencies"][extra] for extra in ("pipeline", *extras.split(","))]
    wanted = {line for group in groups for line in group if line != "starling[pipeline]"}
    assert set(done.stdout.splitlines()) == {*project["dependencies"], *wanted}, done.stderr
    assert len(done.stdout.splitlines()) == len(project["dependencies"]) + len(wanted)
    assert {"production", "espeak"} <= set(extras.split(","))  # docker/demo.yaml speaks with eSpeak NG


@pytest.mark.parametrize("name", ["entrypoint.sh", "s3.sh"])
def test_scripts_have_valid_syntax(name):
    for shell in (["bash", "-n"], ["sh", "-n"]):
        done = subprocess.run([*shell, str(ROOT / "docker" / name)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr


def run_entrypoint(folder, **env):
    """The entrypoint as a container runs it, but for the folder of the key."""
    script = folder / "entrypoint.sh"
    script.write_text(ENTRYPOINT.replace("/run/starling", str(folder)))
    code = "import os; print(sorted(n + '=' + v for n, v in os.environ.items() if 'PASS' in n or 'AUTH' in n))"
    return subprocess.run(
        ["sh", str(script), sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )


def test_the_entrypoint_turns_files_into_variables_and_copies_the_key(tmp_path):
    (tmp_path / "auth").write_text("starling:a 'quoted' $word\n")
    (tmp_path / "ring").write_text("key")
    done = run_entrypoint(
        tmp_path, PREFECT_API_AUTH_STRING_FILE=str(tmp_path / "auth"), STARLING_RING_KEY_SECRET=str(tmp_path / "ring")
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == ["PREFECT_API_AUTH_STRING=starling:a 'quoted' $word"]
    assert stat.S_IMODE((tmp_path / "ring.key").stat().st_mode) == 0o600


def test_entrypoint_refuses_missing_or_empty_secrets_and_prints_no_value(tmp_path):
    (tmp_path / "empty").write_text("")
    missing = run_entrypoint(tmp_path, PGPASSWORD_FILE="/nowhere")
    assert missing.returncode == 1
    assert "PGPASSWORD_FILE is /nowhere" in missing.stderr
    assert run_entrypoint(tmp_path, PGPASSWORD_FILE=str(tmp_path / "empty")).returncode == 1
