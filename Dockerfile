# syntax=docker/dockerfile:1
# One image for all of Starling's containers: Prefect server and workers, MLflow, trainer nodes, backups.
#
#   docker build -t starling:0.1.0-cpu .
#   docker build -t starling:0.1.0-cuda --build-arg VARIANT=cuda .
#
# Both variants install the same wheels: the regular build of torch, which brings CUDA's libraries and is the only one
# that torchaudio's extension loads beside. `cpu` hides GPUs from them, `cuda` asks the container runtime for them.
ARG PYTHON=3.11-slim-bookworm
ARG VARIANT=cpu
# `espeak` (GPL) is for the demo's synthetic speech and for pronunciations: --build-arg EXTRAS=production,serve leaves it out.
ARG EXTRAS=production,serve,espeak

FROM python:${PYTHON} AS build
ARG EXTRAS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/starling
WORKDIR /src
# the packages change less often than the code: a layer of their own
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docker/requirements.py docker/requirements.py
RUN python docker/requirements.py $(echo $EXTRAS | tr , " ") > requirements.txt \
    && /opt/starling/bin/pip install -r requirements.txt -c constraints.txt
COPY flows flows
COPY configs configs
COPY configurable configurable
COPY devices devices
COPY recognition recognition
COPY speech speech
COPY starling starling
COPY storage storage
COPY tasks tasks
COPY training training
RUN /opt/starling/bin/pip install --no-deps ".[${EXTRAS}]" -c constraints.txt

FROM python:${PYTHON} AS runtime
# pg_dump and pg_restore of the server's version; tini reaps and passes signals on
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql-client-15 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 starling \
    && useradd --uid 10001 --gid starling --home-dir /data --no-create-home --shell /usr/sbin/nologin starling \
    && install -d -o starling -g starling -m 0750 /data /run/starling /backups /serve
COPY --from=build /opt/starling /opt/starling
COPY docker/entrypoint.sh /usr/local/bin/starling-entrypoint
COPY docker/mlflow-auth.ini /etc/starling/mlflow-auth.ini
COPY configs /configs
COPY docker/demo.yaml /configs/compose.yaml
ENV PATH=/opt/starling/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    STARLING_HOME=/data \
    PREFECT_HOME=/data/prefect \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_RESULTS_DEFAULT_SERIALIZER=json \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false \
    DO_NOT_TRACK=1
USER starling
WORKDIR /data
VOLUME /data
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "/bin/sh", "/usr/local/bin/starling-entrypoint"]
CMD ["starling", "--help"]

FROM runtime AS runtime-cpu
ENV CUDA_VISIBLE_DEVICES=""

FROM runtime AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${VARIANT} AS starling
ARG VARIANT
LABEL org.opencontainers.image.title="starling" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      starling.variant="${VARIANT}"
