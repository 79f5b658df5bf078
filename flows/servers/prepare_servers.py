"""Creates the roles, databases and buckets that the servers of docker-compose.yml need; safe to repeat.

Run as `python -m flows.servers.prepare_servers` with STARLING_POSTGRES (HOST:PORT), STARLING_SECRETS (folder) and the
S3 server's AWS_… variables. It also applies changed passwords, so a password is rotated by a new file and a restart.
`starling up --profile production` does the same for its own servers.
"""

import os
import sys

from flows.servers.backup import POSTGRES
from flows.servers.credentials import secrets_folder
from flows.servers.postgres import DATABASES, PostgresServer
from flows.servers.production import BUCKETS, make_buckets
from flows.servers.services import ServiceError


def main() -> None:
    """Prepare PostgreSQL and the buckets.

    Raises:
        ServiceError: If a variable is missing, or a server does not answer.
    """
    given = os.environ.get(POSTGRES, "")
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit():
        raise ServiceError(f"{POSTGRES} is {given!r}: set it to HOST:PORT of PostgreSQL")
    server = PostgresServer(host=host, port=int(port), secrets=secrets_folder())
    server.make_databases()
    server.renew_mlflow_admin()
    make_buckets()
    sys.stdout.write(f"databases {', '.join(DATABASES)}, buckets {' and '.join(BUCKETS)}: ready\n")


if __name__ == "__main__":
    main()
