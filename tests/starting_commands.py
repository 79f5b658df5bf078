"""Prints what each command of the list on standard input has imported: a program for tests/test_starts.py.

One interpreter imports what all commands need, and a fork of it runs each of them: the list costs little more than the
libraries that are in the table. An entry is a command's words, or `-m` and a module to import. The lines are JSON: the
entry's name, the exit status, the libraries.
"""

import importlib
import json
import os
import sys

LIBRARIES = (
    *("fsspec", "matplotlib", "mlflow", "numba", "onnxruntime", "pandas", "prefect", "pyarrow", "scipy", "sqlalchemy"),
    *("torch", "torchaudio", "transformers"),
)


def run(name, words, results):
    """Run an entry in this process, with its output on standard error, and write what it has imported."""
    status = 0
    sys.argv = ["starling", *words]
    os.dup2(2, 1)
    try:
        if words[0] == "-m":
            importlib.import_module(words[1])
        else:
            main()
    except SystemExit as end:
        status = end.code or 0
    finally:
        found = " ".join(library for library in LIBRARIES if library in sys.modules)
        os.write(results, json.dumps([name, status, found]).encode() + b"\n")
        os._exit(0)


if __name__ == "__main__":
    from flows.cli.app import main

    standard_output = os.dup(1)
    for entry in json.load(sys.stdin).items():
        if (child := os.fork()) == 0:
            run(*entry, standard_output)
        os.waitpid(child, 0)
