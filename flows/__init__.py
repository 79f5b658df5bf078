"""What runs: Prefect flows, deployments and schedules, and the `starling` command line."""

from tasks.logs import install

install()  # before anything imports Prefect, which configures logging then
