"""The Prefect block `storage-credentials`: key and secret of an S3-compatible object store.

    StorageCredentials(access_key_id="…", secret_access_key="…").save("lab")     # once, or in the UI

A configuration then says `storage: {credentials: lab}`. Register the type with a server by
`prefect block register -m tasks.config.credentials_block`.
"""

from prefect.blocks.core import Block
from pydantic import Field, SecretStr


class StorageCredentials(Block):
    """Key and secret of an S3-compatible object store; Prefect keeps them encrypted."""

    _block_type_name = "Storage Credentials"
    _block_type_slug = "storage-credentials"

    access_key_id: SecretStr = Field(description="Key, as in AWS_ACCESS_KEY_ID.")
    secret_access_key: SecretStr = Field(description="Secret, as in AWS_SECRET_ACCESS_KEY.")
    session_token: SecretStr | None = Field(default=None, description="Token of temporary credentials.")
    region: str = Field(default="", description="Region, as in AWS_DEFAULT_REGION.")
    endpoint_url: str = Field(default="", description="URL of the server, where it is not Amazon's.")

    def values(self) -> dict[str, str]:
        """Field to value, secrets in clear: for the environment of a process, for nothing else."""
        token = self.session_token.get_secret_value() if self.session_token else ""
        return {
            "access_key_id": self.access_key_id.get_secret_value(),
            "secret_access_key": self.secret_access_key.get_secret_value(),
            "session_token": token,
            "region": self.region,
            "endpoint_url": self.endpoint_url,
        }
