"""Code blocks of the docs: Python runs, YAML configures, and shell lines use existing commands and options."""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
import yaml
from forks import Forkable

from tasks.config.pipeline import ConfigError, parse_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in [
        *(ROOT / f"{name}.md" for name in ("README", "RESULTS", "CONTRIBUTING", "CHANGELOG")),
        *(ROOT / "docs").glob("*.md"),
    ]
    if path.is_file()
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
REMARK = "<!-- not run"
"""A page says so right before a Python block that needs what a test does not have."""


def blocks(kind):
    """Blocks of a kind: page, line and text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            skipped = text[: match.start()].rstrip().rpartition("\n")[2].startswith(REMARK)
            if match[1] in kind and not (skipped and "python" in kind):
                where = f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
                yield pytest.param(match[2], id=where)


def shell_lines():
    for param in blocks(("bash", "sh", "console", "shell")):
        text = param.values[0].replace("\\\n", " ")
        for line in text.splitlines():
            line = line.strip().removeprefix("$ ")
            if line and not line.startswith("#"):
                yield pytest.param(line, id=f"{param.id} {line[:50]}")


def words_of(line):
    """Words of a command, without comment, environment assignments and what follows a pipe."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = []
    for word in lexer:
        if set(word) <= set("|;&<>"):
            break
        words.append(word)
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        words.pop(0)
    if words and words[0] == "srun" and "starling" in words:  # what a launcher runs is a command line, too
        words = words[words.index("starling") :]
    return words


def make_targets():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


@functools.cache
def built_command():
    """The command `starling`: Typer builds it in 0.015 s, for each of some hundred lines."""
    from flows.cli.app import app

    return typer.main.get_command(app)


def check_starling(words):
    """Parse a `starling` line without running it."""
    command = built_command()
    context = click.Context(command, info_name="starling")
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        plain = [word for word in words if not word.startswith("-")]
        if not plain:
            assert set(words) <= {"--help", "-h", "--version"}
            return
        name = plain[0]
        assert name in command.commands, f"there is no command {name!r}"
        words = words[words.index(name) + 1 :]
        command = command.commands[name]
        context = click.Context(command, parent=context, info_name=name)
    if "--help" not in words and not {"…", "..."} & set(words):
        parser = command.make_parser(context)
        parser.parse_args(args=list(words))
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file(), f"there is no {word}"
    for position, word in enumerate(words[:-1]):
        if word == "--set":
            assert "=" in words[position + 1]
            check_field(words[position + 1])


def check_benchmark(words):
    """A benchmark exists, and it or a module of the benchmarks that it imports has the options."""
    path = ROOT / words[0].replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert path.is_file(), f"there is no {words[0]}"
    text = path.read_text(encoding="utf-8")
    for module in re.findall(r"from benchmarks\.([\w.]+) import", text):
        text += (ROOT / "benchmarks" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert [option for option in sorted(options) if f'"{option}"' not in text] == []


def check_field(assignment):
    """An override in the docs names a field that exists."""
    document = {"name": "docs", "data": {"sources": [{"kind": "table", "path": "x"} for _ in range(4)]}}
    node = document
    *parents, last = assignment.partition("=")[0].split(".")
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[last] = yaml.safe_load(assignment.partition("=")[2])
    try:
        parse_config(document)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    assert "there is no such field" not in message


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_name_existing_commands_and_options(line):
    words = words_of(line)
    if not words:
        return
    name = Path(words[0]).name
    if name == "starling":
        check_starling(words[1:])
    elif name == "make":
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(targets) <= make_targets()
    elif name in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
    elif name in ("python", "python3") and words[1:2] == ["-m"] and words[2].startswith("benchmarks."):
        check_benchmark(words[2:])
    elif name == "pytest":
        paths = [word.partition("::")[0] for word in words[1:] if word.startswith("tests/")]
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("text", blocks(("bash", "sh")))
def test_shell_blocks_are_valid_scripts(text):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    done = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def manifests():
    """Kubernetes objects of all pages, each block's together."""
    for param in blocks(("yaml", "yml")):
        documents = list(yaml.safe_load_all(param.values[0]))
        if any("apiVersion" in (document or {}) for document in documents):
            yield pytest.param(documents, id=param.id)


KINDS = {"Service": "v1", "PersistentVolumeClaim": "v1", "Job": "batch/v1"}
SOURCES = {"configMap": ("configmap", "name"), "secret": ("secret generic", "secretName")}


def made_by_commands(page="kubernetes.md"):
    """What `kubectl create` lines make: kind and name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return set(re.findall(r"kubectl (?:-n \S+ )?create (secret generic|configmap|namespace) (\S+)", text))


@pytest.mark.parametrize("documents", manifests())
def test_kubernetes_manifests_are_consistent(documents):
    jobs = [document["spec"]["template"] for document in documents if document["kind"] == "Job"]
    claims = {document["metadata"]["name"] for document in documents if document["kind"] == "PersistentVolumeClaim"}
    assert len({(document["kind"], document["metadata"]["name"]) for document in documents}) == len(documents)
    for document in documents:
        assert document["apiVersion"] == KINDS[document["kind"]]
        assert ("namespace", document["metadata"]["namespace"]) in made_by_commands()
        spec = document["spec"]
        if document["kind"] == "Service":
            behind = [job for job in jobs if spec["selector"].items() <= job["metadata"]["labels"].items()]
            ports = {port["containerPort"] for job in behind for port in job["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif document["kind"] == "Job":
            if spec.get("completionMode") == "Indexed":
                assert spec["completions"] == spec["parallelism"]  # all nodes at a time
            else:
                assert "backoffLimitPerIndex" not in spec
            check_pod(spec["template"]["spec"], claims)


def check_pod(pod, claims):
    """A pod's volumes, secrets and commands exist."""
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    made, volumes = made_by_commands(), {volume["name"]: volume for volume in pod["volumes"]}
    for volume in volumes.values():
        for field, (kind, name) in SOURCES.items():
            assert field not in volume or (kind, volume[field][name]) in made
        assert "persistentVolumeClaim" not in volume or volume["persistentVolumeClaim"]["claimName"] in claims
    for container in pod["containers"]:
        assert {"name", "image", "command", "resources"} <= set(container)
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert all(isinstance(entry["value"], str) for entry in container["env"])
        assert all(("secret generic", entry["secretRef"]["name"]) in made for entry in container.get("envFrom", []))
        shell, flag, line = container["command"]
        assert (shell, flag) == ("sh", "-c")
        words = shlex.split(line)
        check_starling(words[words.index("starling") + 1 :])


@pytest.mark.parametrize("text", blocks(("yaml", "yml")))
def test_yaml_blocks_are_valid_configurations_or_parts(text):
    if "apiVersion:" in text:
        return
    document = yaml.safe_load(text)
    assert isinstance(document, dict)
    document.setdefault("name", "docs")
    data = document.setdefault("data", {})
    data.setdefault("sources", [{"kind": "table", "path": "corpus.csv"}])
    parse_config(document)


@pytest.mark.parametrize("text", blocks(("python", "py")))
def test_python_blocks_run(text, tmp_path):
    env = None
    if "models:/" in text or "load_model" in text or ".wav" in text:
        env = registry_environment(text, tmp_path)
    if "Path.home()" in text:  # libraries read it while they are imported, so that it would prevent a fork
        text = f"import os\nos.environ['HOME'] = {str(tmp_path)!r}\n{text}"
    command = [sys.executable, "-c", Forkable(text), "run1"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_starts_of_the_sample_ring_train_together(tmp_path):
    (text,) = [text for kind, text in FENCE.findall((ROOT / "docs" / "own-model.md").read_text()) if kind == "python"]
    command = [
        sys.executable,
        "-c",
        Forkable(text.replace("folder=sys.argv[1]", "folder=sys.argv[1], learners=2")),
        "run1",
    ]
    start = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ends = [process.communicate(timeout=240) for process in [subprocess.Popen(command, **start) for _ in range(2)]]
    ended = sorted(re.fullmatch(r"learner (\d): (\d+) steps, loss 0\.0\d\d\d\n", said).groups() for said, _ in ends)
    assert [node for node, _ in ended] == ["0", "1"], ends
    # together: in a training of a second, one learner may have taken every row before the other one asks
    assert sum(int(steps) for _, steps in ended) == 20 * 400 // 20
    lines = map(json.loads, (tmp_path / "run1" / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    epochs = [(line["utterances"], line["repeated"]) for line in lines if line["kind"] == "epoch"]
    assert epochs == [(400, 0)] * 20  # and not a second training


def registry_environment(text, folder):
    """A registry that has a model under the names that a block uses, and the audio files that it mentions."""
    import importlib.util
    import os

    if "support" not in sys.modules:
        spec = importlib.util.spec_from_file_location("support", ROOT / "tests" / "support.py")
        sys.modules["support"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["support"])
    import mlflow
    import support

    # others read the finished run's registry: models are added to a copy
    home = folder / ".starling"  # the default, for blocks that name the registry
    support.copy_database(support.finished()[0] / "mlflow" / "mlflow.db", home / "mlflow" / "mlflow.db")
    for name in re.findall(r"""["'](\w[\w./-]*\.(?:wav|flac|ogg|mp3))["']""", text):
        support.write_tone(folder / name, seconds=1.0)
    uri = f"sqlite:///{home}/mlflow/mlflow.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)  # a new version's source is looked up there, whatever the client was given
    try:
        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        source = client.get_model_version("tiny", "1").source
        for name in set(re.findall(r"models:/([\w-]+)", text)) - {"tiny"}:
            if not client.search_model_versions(f"name='{name}'"):
                client.create_registered_model(name)
                version = client.create_model_version(name, source)
                for alias in ("champion", "challenger"):
                    client.set_registered_model_alias(name, alias, version.version)
    finally:
        mlflow.set_tracking_uri(before)
    return {**os.environ, "STARLING_HOME": str(home), "MLFLOW_TRACKING_URI": uri}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_readme_names_the_registry_before_it_loads_a_model():
    """Without an address, MLflow makes an empty mlflow.db in the current folder, and finds no model."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = [text for kind, text in FENCE.findall(text) if kind == "python" and "load_model" in text]
    address = 'mlflow.set_tracking_uri(f"sqlite:///{Path.home()}/.starling/mlflow/mlflow.db")'
    assert block.index(address) < block.index("load_model(")
