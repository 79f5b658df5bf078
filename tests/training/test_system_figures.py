"""A machine's figures: from /proc, left out if missing, and without blocking training."""

import threading
from types import SimpleNamespace

import pytest
from support import wait_until

from devices.gpus import Gpus
from training.coordinator.messages import CoordinatorError
from training.node.system_figures import Machine, SystemFigures

NET = "Inter-|   Receive |  Transmit\n face |bytes packets\n"
NET += "    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n  eth0: 3000000 1 0 0 0 0 0 0 1000000 1 0 0 0 0 0 0\n"


def proc(folder, busy, idle, wait=0):
    (folder / "net").mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} {wait} 0 0 0 0 0\ncpu0 1 1 1 1\n")
    (folder / "meminfo").write_text("MemTotal:  4000000 kB\nMemFree: 1 kB\nMemAvailable:  3000000 kB\n")
    (folder / "net" / "dev").write_text(NET)


def test_figures_match_proc(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    proc(tmp_path, 100, 100)
    machine = Machine()
    proc(tmp_path, 130, 150, 20)
    figures = machine.sample()
    assert figures["cpu"] == pytest.approx(30.0)  # time waiting for a disk does not count as busy
    assert (figures["memory"], figures["memory_mb"]) == (25.0, 1024.0)
    assert (figures["received_mb_per_s"], figures["sent_mb_per_s"]) == (0.0, 0.0)  # no work since the first sample


def test_network_traffic_is_a_rate_over_the_elapsed_time(tmp_path, monkeypatch):
    clock = iter([100.0, 104.0, 105.0])
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr("training.node.system_figures.time", SimpleNamespace(monotonic=lambda: next(clock)))
    proc(tmp_path, 100, 100)
    machine = Machine()
    (tmp_path / "net" / "dev").write_text(NET.replace("3000000", "11000000"))
    traffic = machine._network()
    assert (traffic["received_mb_per_s"], traffic["sent_mb_per_s"]) == (2.0, 0.0)
    (tmp_path / "net" / "dev").write_text(NET.partition("  eth0")[0])  # the interface has gone
    assert machine._network() == {}


def test_unavailable_figures_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "nowhere"))
    assert {name for name in Machine().sample() if name != "gpus"} == set()


def test_this_machine_reports_memory_and_numbers_its_gpus():
    assert {"memory", "memory_mb"} <= set(Machine().sample())
    for number, gpu in enumerate(Gpus().sample()):
        assert gpu["gpu"] == number


def test_samples_start_after_joining_and_stop_on_close():
    lines, joined = [], threading.Event()

    def journal(line):
        if not joined.is_set():
            raise CoordinatorError("a node that has not joined cannot write to the journal")
        lines.append(dict(line))

    figures = SystemFigures(3, journal, lambda: 7.25, every_s=0.02)
    joined.set()
    wait_until(lambda: len(lines) > 2, every_s=0.01)
    figures.close()
    assert not figures._thread.is_alive()
    assert {(line["kind"], line["node"]) for line in lines} == {("system", 3)}
    assert all(line["host"] for line in lines)
    # the training's clock stands still while it waits for nodes, that of the samples does not
    assert [line["elapsed"] for line in lines] == [round(7.25 + n / 1000, 3) for n in range(len(lines))]
