"""What runs: Prefect flows, deployments and schedules, and the `starling` command line."""
