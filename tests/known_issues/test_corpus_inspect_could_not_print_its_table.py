"""`starling corpus inspect` without --json failed on the first text among the numbers."""

from support import small_corpus
from typer.testing import CliRunner

from flows.cli.app import app


def test_inspect_prints_a_table(tmp_path, home):
    result = CliRunner().invoke(app, ["corpus", "inspect", str(small_corpus(tmp_path / "corpus"))])
    assert result.exit_code == 0, result.stderr
    assert "sample rate (Hz)" in result.stdout
