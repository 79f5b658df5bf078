"""Runs the coordinator of a ring whose learners are on several machines."""

from pathlib import Path

from training.coordinator.core import Settings
from training.coordinator.server import NOTE, CoordinatorServer
from training.processes.children import on_termination
from training.processes.keys import RingKey
from training.processes.sockets import listening_endpoint
from training.ring.config import RingConfig
from training.ring.folder import ring_job


def serve(
    listen: str,
    folder: str | Path,
    key: str | Path | None = None,
    *,
    config: RingConfig | None = None,
    fresh: bool = False,
) -> None:
    """Run a ring's coordinator until SIGTERM or SIGINT; call this in the main thread of a process of its own.

    It may be killed and started again with the same folder: learners go on meanwhile.

    Args:
        listen: HOST:PORT; hosts other than loopback need a key.
        folder: Folder of its state and of the journal.
        key: File of the ring's key, which every learner needs (`starling key FILE` makes one).
        config: Membership and seed of the ring.
        fresh: Start another training; otherwise one that is in the folder is continued.

    Raises:
        ValueError: If the address or the key cannot be used.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    settings = Settings.from_job(ring_job(place, config or RingConfig()))
    endpoint = listening_endpoint(listen, place / NOTE, fresh)
    server = CoordinatorServer(settings, place, endpoint, RingKey.load(Path(key)) if key else None, fresh)
    on_termination(server.stop)
    server.run()
