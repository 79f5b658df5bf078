"""MLflow: runs, metrics, the model registry and promotion."""
