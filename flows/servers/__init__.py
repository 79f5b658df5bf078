"""The servers that `starling up` runs: Prefect, MLflow, PostgreSQL, S3; their supervision and backup."""
