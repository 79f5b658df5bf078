"""`starling doctor`: checks this machine and suggests remedies."""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

import typer
from rich.table import Table

from configurable.extras import install_remedy
from flows.cli.common import JsonOption, out, print_json
from training.processes.logs import redact


@dataclass(frozen=True)
class Finding:
    """One check's outcome."""

    check: str
    state: Literal["ok", "warning", "error"]
    found: str
    remedy: str = ""


def doctor(json_output: JsonOption = False) -> None:
    """Check versions, torchaudio, speech synthesis, ports, stores and GPU, and show how to fix what is wrong."""
    findings = [finding for check in CHECKS for finding in _guarded(check)]
    healthy = all(finding.state != "error" for finding in findings)
    if json_output:
        print_json({"healthy": healthy, "checks": [asdict(finding) for finding in findings]})
    else:
        table = Table("", "check", "found", "remedy", header_style="bold")
        marks = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "error": "[red]error[/red]"}
        for finding in findings:
            table.add_row(marks[finding.state], finding.check, finding.found, finding.remedy)
        out.print(table)
    if not healthy:
        raise typer.Exit(1)


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a failed check is a finding, too; the others still run
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(name, "error", f"{type(error).__name__}: {error}", "install again: make setup")]


def check_python() -> list[Finding]:
    """Check Python's version."""
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding("python", "ok" if good else "error", version, "" if good else "use Python 3.11 or 3.12")]


def check_packages() -> list[Finding]:
    """Check installed packages against the bounds of this version of Starling."""
    from packaging.requirements import Requirement

    findings = []
    for line in metadata.requires("starling") or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": "pipeline"}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append(
                Finding(requirement.name, "error", "missing", f"pip install '{requirement}' -c constraints.txt")
            )
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            remedy = f"pip install '{requirement}' -c constraints.txt"
            findings.append(Finding(requirement.name, "error", f"{version}, not {requirement.specifier}", remedy))
    return findings or [Finding("packages", "ok", f"starling {metadata.version('starling')}, all within bounds")]


def check_torchaudio() -> list[Finding]:
    """Check that torchaudio's extension loads: it needs the regular torch build of the same version."""
    import torch
    import torchaudio

    versions = f"torch {torch.__version__}, torchaudio {torchaudio.__version__}"
    try:
        log_probs = torch.zeros(1, 3, 3).log_softmax(-1)
        torchaudio.functional.forced_align(log_probs, torch.tensor([[1]]))
    except Exception as error:
        remedy = "pip install 'torch==2.11.*' 'torchaudio==2.11.*' (the regular build, not a CPU-only one)"
        return [Finding("torchaudio", "error", f"{versions}: {error}", remedy)]
    return [Finding("torchaudio", "ok", versions)]


def check_gpu() -> list[Finding]:
    """List the GPUs that torch finds, or say why it finds none; training never falls back to the CPU silently."""
    import torch

    from devices.choice import inventory
    from devices.compute_threads import usable_cores

    machine = inventory()
    if machine.gpus:
        names = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
        return [Finding("gpu", "ok", ", ".join(names))]
    if machine.trouble:
        cause, _, remedy = machine.trouble.partition(": ")
        return [Finding("gpu", "warning", cause, remedy)]
    if shutil.which("nvidia-smi"):
        return [Finding("gpu", "warning", "NVIDIA's tools are installed, but no GPU found", "run `nvidia-smi`")]
    return [Finding("gpu", "ok", f"none; training uses {usable_cores()} CPU cores")]


def check_audio() -> list[Finding]:
    """Check the formats that soundfile decodes, and the speech synthesizer of the demo."""
    import soundfile

    formats = set(soundfile.available_formats())
    missing = {"WAV", "FLAC", "OGG", "MP3"} - formats
    findings = [
        Finding("soundfile", "error", f"no {', '.join(sorted(missing))}", "pip install -U soundfile")
        if missing
        else Finding("soundfile", "ok", f"libsndfile {soundfile.__libsndfile_version__}: wav, flac, ogg/opus, mp3")
    ]
    findings.append(_check_espeak())
    return findings


def _check_espeak() -> Finding:
    from speech.synthesis import Engine, SynthesizerMissingError

    try:
        with Engine() as engine:
            return Finding("espeak-ng", "ok", f"version {engine.version}")
    except SynthesizerMissingError as error:
        remedy = f"{install_remedy('espeak')}, for the demo and for pronunciations of any language"
        return Finding("espeak-ng", "warning", str(error).partition(": pip install")[0], remedy)


def check_ports() -> list[Finding]:
    """Check that the ports of `starling up` are free or used by it."""
    from flows.servers.services import LOOPBACK, running_services

    running = running_services()
    findings = []
    for name, port in (("prefect", 4200), ("mlflow", 5000)):
        with socket.socket() as probe:
            taken = probe.connect_ex((LOOPBACK, port)) == 0
        if name in running:
            findings.append(Finding(f"{name} server", "ok", f"running at {running[name]}"))
        elif taken:
            remedy = f"starling up --{name}-port OTHER"
            findings.append(Finding(f"port {port}", "warning", f"taken, needed for {name}", remedy))
        else:
            findings.append(Finding(f"port {port}", "ok", f"free for {name}"))
    return findings


def check_home() -> list[Finding]:
    """Check that the data folder is writable and has 5 GiB of free space."""
    from tasks.config.home import home

    folder = home()
    probe = folder / ".doctor"
    probe.write_bytes(b"")
    probe.unlink()
    free = shutil.disk_usage(folder).free / 2**30
    low = free < 5
    return [
        Finding(
            "data folder",
            "warning" if low else "ok",
            f"{folder}, {free:.0f} GiB free",
            "free some space" if low else "",
        )
    ]


def check_servers() -> list[Finding]:
    """Check that the MLflow and Prefect servers set in the environment answer."""
    from tasks.config.home import shown_mlflow_uri
    from tasks.orchestration.reachable import check_mlflow, check_prefect

    findings = []
    if os.environ.get("MLFLOW_TRACKING_URI"):
        fine = Finding("MLFLOW_TRACKING_URI", "ok", shown_mlflow_uri())
        findings.append(_unreachable(fine.check, check_mlflow) or fine)
    if os.environ.get("PREFECT_API_URL"):
        fine = Finding("PREFECT_API_URL", "ok", redact(os.environ["PREFECT_API_URL"]))
        findings.append(_unreachable(fine.check, check_prefect) or fine)
    return findings


def _unreachable(name: str, check: Callable[[], None]) -> Finding | None:
    """Run a server's check; returns a finding if the server cannot be reached."""
    from tasks.orchestration.reachable import UnreachableError

    try:
        check()
    except UnreachableError as error:
        return Finding(name, "error", error.trouble, error.remedy)
    return None


def check_store() -> list[Finding]:
    """Check that the default object store returns what was written."""
    from storage.objects import ObjectStore
    from tasks.config.home import objects_url
    from tasks.orchestration.reachable import check_store

    if trouble := _unreachable("object store", check_store):
        return [trouble]
    store = ObjectStore(objects_url(""))
    store.write("doctor/probe", b"starling")
    same = store.read("doctor/probe") == b"starling"
    store.delete("doctor/probe")
    return [Finding("object store", "ok" if same else "error", store.url, "" if same else "check the disk")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_packages,
    check_torchaudio,
    check_audio,
    check_gpu,
    check_home,
    check_store,
    check_servers,
    check_ports,
)
