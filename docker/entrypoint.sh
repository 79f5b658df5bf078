#!/bin/sh
# Turn files into environment variables, for programs that read only these: NAME_FILE=/run/secrets/x gives NAME, and
# NAME_FILE itself goes. Nothing of it is printed, and nothing becomes an argument of a command.
set -eu

for name in \
    AWS_ACCESS_KEY_ID \
    AWS_SECRET_ACCESS_KEY \
    PREFECT_API_AUTH_STRING \
    PREFECT_SERVER_API_AUTH_STRING \
    PREFECT_SERVER_DATABASE_PASSWORD \
    MLFLOW_TRACKING_PASSWORD \
    MLFLOW_AUTH_ADMIN_PASSWORD \
    MLFLOW_FLASK_SERVER_SECRET_KEY \
    STARLING_STUDIES_PASSWORD \
    PGPASSWORD \
    STARLING_SERVE_TOKEN
do
    file=$(printenv "${name}_FILE" || true)
    if [ -n "$file" ]; then
        if [ ! -r "$file" ]; then
            echo "starling: ${name}_FILE is $file, which cannot be read: see docs/production.md, Secrets" >&2
            exit 1
        fi
        value=$(cat "$file")
        if [ -z "$value" ]; then
            echo "starling: $file is empty" >&2
            exit 1
        fi
        export "$name=$value"
        unset "${name}_FILE" value
    fi
done

# The ring's key has to be readable by its owner only; a mounted secret may not be.
if [ -n "${STARLING_RING_KEY_SECRET:-}" ]; then
    cp "$STARLING_RING_KEY_SECRET" /run/starling/ring.key.new
    chmod 600 /run/starling/ring.key.new
    mv /run/starling/ring.key.new /run/starling/ring.key
    unset STARLING_RING_KEY_SECRET
fi

exec "$@"
