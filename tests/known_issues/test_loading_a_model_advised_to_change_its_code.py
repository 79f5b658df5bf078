"""Loading a registered model printed a warning that its code should have type hints, which users cannot change."""

import subprocess
import sys

from forks import Forkable

from tasks.tracking import pyfunc_model


def test_code_of_the_model_runs_without_a_warning():
    # MLflow sets its own filters for warnings: they can only be observed on standard error
    program = Forkable(f"import runpy; runpy.run_path({pyfunc_model.__file__!r})")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
