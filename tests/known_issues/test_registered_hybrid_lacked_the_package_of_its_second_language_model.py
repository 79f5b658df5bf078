"""A registered model that ranks hypotheses again did not require the package that reads its second language model."""

import subprocess
import sys

from speech.decoding import GraphConfig

# the import name of a package, and what reads an ARPA file for ranking again
SCRIPT = """
import sys
from pathlib import Path
from speech.decoding.rescoring import Rescorer
Rescorer(sys.argv[1], sys.argv[1], ["a"])
print("\\n".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n-1\t<unk>\n-99\t<s>\n-0.5\t</s>\n-0.5\ta\n\n\\end\\\n"


def test_all_packages_that_ranking_again_imports_are_required(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=True, timeout=100)
    assert "flashlight" in done.stdout.split()
    assert "flashlight-text" in GraphConfig.packages
