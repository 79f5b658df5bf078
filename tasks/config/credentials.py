"""Credentials of an object store from a Prefect block.

The configuration names the block; its values go into the environment of this process, where `storage` looks for them
and from where child processes inherit them. They are never written anywhere else.
"""

import os
from threading import Lock
from typing import Any

from tasks.config.pipeline import StorageConfig

_VARIABLES = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
    "region": "AWS_DEFAULT_REGION",
    "endpoint_url": "AWS_ENDPOINT_URL",
}
_loaded: set[tuple[int, str]] = set()
_lock = Lock()


class CredentialsError(ValueError):
    """The block that `storage.credentials` names cannot be used."""


def export_credentials(config: StorageConfig, again: bool = False) -> None:
    """Put the credentials of the configured block into this process's environment, once; nothing without a block.

    What the environment had under these names is replaced; a value that the block leaves empty is left as it is,
    except a session token, which belongs to one key only.

    Args:
        config: Names the block, or none.
        again: Load it even if this process has done so: its values may have changed.

    Raises:
        CredentialsError: The block does not exist, or the Prefect server does not answer.
    """
    name = config.credentials
    if not name:
        return
    with _lock:
        if (os.getpid(), name) in _loaded and not again:
            return
        values = _load(name)
        os.environ.pop("AWS_SESSION_TOKEN", None)
        os.environ.update({_VARIABLES[field]: value for field, value in values.items() if value})
        _loaded.add((os.getpid(), name))


def _load(name: str) -> dict[str, str]:
    from tasks.config.credentials_block import StorageCredentials  # Prefect takes seconds to import

    blocks: Any = StorageCredentials  # its types know nothing of `_sync`
    try:
        block = blocks.load(name, _sync=True)
    except Exception as error:
        # the cause may quote what the server sent: it is left out
        raise CredentialsError(
            f"storage.credentials: the Prefect block 'storage-credentials/{name}' cannot be loaded "
            f"({type(error).__name__}). Make it in the Prefect UI under Blocks, or with StorageCredentials(...)"
            f".save({name!r}), and see that PREFECT_API_URL names the server that has it."
        ) from None
    return dict(block.values())
