"""One step of a flow each: Prefect tasks, MLflow, artifacts; thin, over training, speech and storage."""
