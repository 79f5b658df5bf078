"""`starling doctor` on machines with problems; test_cli.py has one without."""

import io
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli.app import app


def run_checks(check):
    return [(finding.check, finding.state, finding.found, finding.remedy) for finding in check()]


def test_doctor_reports_gpus(monkeypatch):
    import torch

    from devices.gpus import Driver, Gpus
    from flows.cli import doctor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Gpus, "driver", lambda self: Driver())
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    ((check, state, detail, remedy),) = run_checks(doctor.check_gpu)
    assert (check, state) == ("gpu", "warning")
    assert "no GPU" in detail
    assert "nvidia-smi" in remedy
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    ((_, state, detail, remedy),) = run_checks(doctor.check_gpu)
    assert (state, remedy) == ("ok", "")
    assert "CPU cores" in detail
    monkeypatch.setattr("devices.choice._has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert run_checks(doctor.check_gpu) == [("gpu", "ok", "GPU 0, GPU 1", "")]


def test_doctor_reports_a_driver_too_old_for_torch(monkeypatch):
    import torch

    from devices.gpus import Driver, Gpus
    from flows.cli import doctor

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(Gpus, "driver", lambda self: Driver(1, "535.104", (12, 2)))
    ((_, state, detail, remedy),) = run_checks(doctor.check_gpu)
    assert state == "warning"
    assert detail == "the NVIDIA driver 535.104 is for CUDA 12.2, too old for this torch (CUDA 13.0)"
    assert remedy.startswith("install a driver of version 580 or later")


def test_doctor_reports_taken_ports(home, monkeypatch):
    from flows.cli import doctor

    class Probe(io.BytesIO):
        def connect_ex(self, address):
            return 0 if address == ("127.0.0.1", 5000) else 111

    monkeypatch.setattr(doctor.socket, "socket", Probe)
    monkeypatch.setattr("flows.servers.services.running_services", dict)
    assert run_checks(doctor.check_ports) == [
        ("port 4200", "ok", "free for prefect", ""),
        ("port 5000", "warning", "taken, needed for mlflow", "starling up --mlflow-port OTHER"),
    ]
    monkeypatch.setattr("flows.servers.services.running_services", lambda: {"mlflow": "http://127.0.0.1:5000"})
    assert run_checks(doctor.check_ports)[1] == ("mlflow server", "ok", "running at http://127.0.0.1:5000", "")


@pytest.mark.parametrize(
    ("free", "state", "remedy"), [(4, "warning", "free some space"), (5, "ok", ""), (50, "ok", "")]
)
def test_doctor_reports_an_unusable_data_folder(home, monkeypatch, free, state, remedy):
    from flows.cli import doctor

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 2**30))
    assert run_checks(doctor.check_home) == [("data folder", state, f"{home}, {free} GiB free", remedy)]
    assert list(home.iterdir()) == []


def test_doctor_reports_missing_packages(monkeypatch):
    from flows.cli import doctor

    wanted = [
        "numpy>=1",
        "torch<1",
        "no-such-package",
        "never; extra == 'x'",
        "nor-this; extra == 'pipeline'",
        "pytest<1; python_version < '3'",
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    packages = {check: (state, text, remedy) for check, state, text, remedy in run_checks(doctor.check_packages)}
    assert packages.keys() == {"torch", "no-such-package", "nor-this"}
    assert packages["no-such-package"] == ("error", "missing", "pip install 'no-such-package' -c constraints.txt")
    assert packages["torch"][0] == "error"
    assert packages["torch"][1].endswith(", not <1")
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: None)
    assert [row[:2] for row in run_checks(doctor.check_packages)] == [("packages", "ok")]


def test_doctor_reports_audio_formats_and_python(monkeypatch):
    import soundfile

    from flows.cli import doctor

    monkeypatch.setattr(soundfile, "available_formats", lambda: ["WAV", "FLAC"])
    monkeypatch.setattr("espeakng_loader.get_library_path", lambda: "/nowhere/libespeak.so")
    soundfile_found, (check, state, detail, remedy) = run_checks(doctor.check_audio)
    assert soundfile_found == ("soundfile", "error", "no MP3, OGG", "pip install -U soundfile")
    assert (check, state) == ("espeak-ng", "warning")
    assert detail.startswith("eSpeak NG does not load: /nowhere/libespeak.so")
    assert remedy.startswith("pip install '.[espeak]'")
    for version, state in (((3, 10, 9), "error"), ((3, 11, 0), "ok"), ((3, 12, 1), "ok"), ((3, 13, 0), "error")):
        monkeypatch.setattr(doctor.sys, "version_info", version)
        ((_, python_state, text, remedy),) = run_checks(doctor.check_python)
        assert (python_state, text) == (state, ".".join(map(str, version)))
        assert bool(remedy) == (state == "error")


def test_doctor_prints_a_readable_table(monkeypatch):
    from flows.cli import doctor

    finding = doctor.Finding("disk", "warning", "little room", "free some")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [finding],))
    monkeypatch.setattr("flows.cli.common.out.width", 200, raising=False)
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert all(word in shown for word in ("warning", "disk", "little room", "free some"))
