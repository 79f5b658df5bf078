"""How many cores a process may use: by its affinity, as Slurm sets it, and by its container's limit."""

import os
from pathlib import Path

import pytest

from devices import compute_threads
from devices.compute_threads import limit_libraries, usable_cores


@pytest.fixture
def groups(monkeypatch, tmp_path) -> Path:
    """An empty tree of groups in place of the machine's, in which this process belongs to `/pods/one`."""
    own = tmp_path / "own"
    own.write_text("1:cpu:/elsewhere\n0::/pods/one\n")
    tree = tmp_path / "groups"
    (tree / "pods" / "one").mkdir(parents=True)
    monkeypatch.setattr(compute_threads, "_GROUPS", tree)
    monkeypatch.setattr(compute_threads, "_OWN_GROUP", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return tree


def test_all_cores_of_the_affinity_without_a_limit(groups):
    assert usable_cores() == 16
    (groups / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 16


def test_a_machine_without_groups(groups, monkeypatch, tmp_path):
    monkeypatch.setattr(compute_threads, "_OWN_GROUP", tmp_path / "none")
    assert usable_cores() == 16


@pytest.mark.parametrize(
    ("limit", "cores"), [("400000 100000", 4), ("350000 100000", 4), ("50000 100000", 1), ("6400000 100000", 16)]
)
def test_a_container_s_limit_counts(groups, limit, cores):
    (groups / "pods" / "one" / "cpu.max").write_text(limit + "\n")
    assert usable_cores() == cores


def test_the_smallest_limit_of_the_groups_around_it_counts(groups):
    (groups / "pods" / "one" / "cpu.max").write_text("800000 100000\n")
    (groups / "pods" / "cpu.max").write_text("300000 100000\n")
    (groups / "cpu.max").write_text("600000 100000\n")
    assert usable_cores() == 3


def test_in_a_container_its_own_group_is_the_root(groups, tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    (groups / "cpu.max").write_text("200000 100000\n")
    assert usable_cores() == 2


@pytest.mark.parametrize("damaged", ["", "soon", "1 0", "two 100000"])
def test_a_limit_that_cannot_be_read_is_none(groups, damaged):
    (groups / "pods" / "one" / "cpu.max").write_text(damaged)
    assert usable_cores() == 16


def test_libraries_are_told_of_a_container_s_limit_only(groups, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that it is put back
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_libraries()
    assert "OMP_NUM_THREADS" not in os.environ  # they find the affinity by themselves
    (groups / "pods" / "one" / "cpu.max").write_text("300000 100000\n")
    limit_libraries()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_that_a_user_has_set_stay(groups, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (groups / "pods" / "one" / "cpu.max").write_text("300000 100000\n")
    limit_libraries()
    assert os.environ["OMP_NUM_THREADS"] == "7"
