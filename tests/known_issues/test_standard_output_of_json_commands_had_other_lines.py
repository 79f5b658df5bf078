"""MLflow's "View run at" and Prefect's tables went to standard output, before the one JSON object."""

import json

from support import tiny_document, write_config
from typer.testing import CliRunner

from flows import plain
from flows.cli import app


def test_output_of_libraries_goes_to_standard_error(tmp_path, home, monkeypatch):
    work = plain.run_plainly

    def printing(run, until):
        print("View run at http://…")
        work(run, until)

    monkeypatch.setattr(plain, "run_plainly", printing)
    path = write_config(tmp_path / "c.yaml", tiny_document())
    result = CliRunner().invoke(app.app, ["run", str(path), "--until", "features", "--no-prefect", "--json"])
    assert json.loads(result.stdout)["stages"]
    assert "View run" in result.stderr
