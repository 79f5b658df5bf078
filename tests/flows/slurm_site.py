"""A Slurm cluster of the test's own: a controller and machines in network namespaces, with one shared disk.

The daemons are Debian's (`slurm-wlm`, `munge`), with a configuration, key and folders of the test's own; the system's
are neither used nor changed. GPUs are empty files: Slurm counts and hands them out, nothing computes on them.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support import ROOT, end_processes, processes_naming, wait_until

from benchmarks.netns import Switch, address, enter, why_not

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
MACHINES = ("machine1", "machine2")
LOGIN = "login"
GPUS, CPUS = 4, 16
NAMED = 'hostname "$0"; exec "$@"'
"""A shell's command, in a namespace of host names: what it starts is on a machine of this name."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
{machines}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_no_slurm():
    """Why no cluster can be made here; empty if one can."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"there is no {', '.join(missing)} here (Debian: apt-get install slurm-wlm munge)"
    reason = why_not()
    return reason and f"network namespaces cannot be made here: {reason}"


class SlurmSite:
    """A controller, and machines that run jobs.

    Args:
        folder: For configuration, state and logs. Its path must be short: sockets lie in it.
    """

    def __init__(self, folder):
        self.folder = folder
        # the thread that makes the switch moves to its namespace: not this one
        with ThreadPoolExecutor(1) as pool:
            switch = pool.submit(Switch, len(MACHINES) + 1, "1gbit").result()
        self._namespaces = dict(zip((*MACHINES, LOGIN), switch.machines, strict=True))
        self._daemons = {}
        self._configure()

    def _configure(self):
        names = ["state", *(f"spool-{name}" for name in MACHINES)]
        for name in names:
            (self.folder / name).mkdir()
        for number in range(GPUS):
            (self.folder / f"gpu{number}").touch()
        lines = [
            f"NodeName={name} NodeAddr={address(number)} CPUs={CPUS} RealMemory=1000 Gres=gpu:{GPUS}"
            for number, name in enumerate(MACHINES)
        ]
        text = CONFIGURATION.format(
            folder=self.folder, login=LOGIN, login_address=address(len(MACHINES)), machines="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, but not used
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _popen(self, machine, command, **options):
        """Start a command on a machine."""
        return subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", NAMED, machine, *map(str, command)],
            preexec_fn=lambda: enter(self._namespaces[machine]),
            **options,
        )

    def _start_daemon(self, machine, *command):
        name = f"{machine}.{command[0]}"
        with (self.folder / f"{name}.out").open("ab") as out:
            environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
            self._daemons[name] = self._popen(
                machine, command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def start(self):
        """Start all daemons, and wait until the machines are idle."""
        munge = {name: self.folder / f"munge.{name}" for name in ("key", "sock", "pid", "seed", "log")}
        options = [f"--{'socket' if name == 'sock' else f'{name}-file'}={path}" for name, path in munge.items()]
        # --force: it would refuse a socket in a folder that only its own user can enter
        self._start_daemon(LOGIN, "munged", "--foreground", "--force", *options)
        wait_until(munge["sock"].exists, 60)
        self._start_daemon(LOGIN, "slurmctld", "-D")
        wait_until(lambda: "is UP" in self.command("scontrol", "ping", check=False), 120, 0.5)
        self.recover()

    def recover(self):
        """Cancel all jobs, start the machines that are lost, and wait until all are idle."""
        self.command("scancel", "--user=root")
        self.start_machines()
        wait_until(lambda: self.states() == ["idle"] * len(MACHINES), 240, 0.5)

    def start_machines(self):
        """Start those that are lost, or were never started."""
        for machine in MACHINES:
            daemon = self._daemons.get(f"{machine}.slurmd")
            if daemon is None or daemon.poll() is not None:
                self._start_daemon(machine, "slurmd", "-D", "-N", machine)

    def lose_machine(self, machine):
        """Kill every process of a machine, as when its power fails."""
        there = os.fstat(self._namespaces[machine]).st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "ns" / "net").stat().st_ino == there:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue

    def states(self):
        """State of each machine."""
        return self.command("sinfo", "-N", "-h", "-o", "%T", check=False).split()

    def command(self, *words, check=True, cwd=None, **environment):
        """Run one of Slurm's commands on the login machine; what it prints."""
        process = self._popen(
            LOGIN,
            words,
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text, _ = process.communicate(timeout=60)
        assert not check or process.returncode == 0, text
        return text

    def job(self, number):
        """What the controller knows of a job; fields and values, as texts."""
        words = self.command("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def steps(self, number):
        """Names of a job's steps that are running, and their ids."""
        lines = self.command("squeue", "--steps", "--jobs", number, "-h", "-o", "%j %i").splitlines()
        return dict(line.split() for line in lines)

    def stop(self):
        """End all daemons, and what jobs have left."""
        for process in reversed(self._daemons.values()):
            process.terminate()
        for process in self._daemons.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        end_processes(processes_naming(str(self.folder)))
        for namespace in self._namespaces.values():
            os.close(namespace)


@contextmanager
def slurm_site(folder):
    """A running cluster for the block."""
    site = SlurmSite(folder)
    try:
        site.start()
        yield site
    finally:
        site.stop()


def install_starling(folder):
    """Write the command `starling` of this checkout; the folder to put into PATH."""
    folder.mkdir(parents=True)
    command = folder / "starling"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} -m starling "$@"\n')
    command.chmod(0o755)
    return folder
