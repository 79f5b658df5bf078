from tasks.config.home import mlflow_uri, shown_mlflow_uri


def test_displayed_registry_address_has_no_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@db:5432/mlflow")
    assert "secret" in mlflow_uri()
    assert shown_mlflow_uri() == "postgresql://db:5432/mlflow"


def test_default_registry_is_sqlite_in_the_data_folder(home):
    assert shown_mlflow_uri() == f"sqlite:///{home}/mlflow/mlflow.db"
