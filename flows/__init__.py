"""What runs: Prefect flows, deployments and schedules, and the `starling` command line."""

from flows.cli.early_interrupt import hear_interrupts, is_command
from flows.cli.exit_status import leave_last

hear_interrupts()
if is_command():
    leave_last()

from tasks.orchestration.logs import install  # noqa: E402 - its imports take a while

install()  # before the import of Prefect, which configures logging
