"""What runs: Prefect flows, deployments and schedules, and the `starling` command line."""

from flows.importing import hear_interrupts

hear_interrupts()

from tasks.logs import install  # noqa: E402 - its imports take a while

install()  # before anything imports Prefect, which configures logging then
