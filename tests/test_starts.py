"""Which libraries each command and each process of a training imports: most of their start. The tables only shrink."""

COMMANDS = {
    "--version": "",
    "init": "",
    "config check": "pyarrow",
    "config show": "pyarrow",
    "corpus list": "",
    "corpus inspect": "pyarrow",
    "score": "",
    "models": "",
    "transcribe": "",
}
"""Libraries that a command imports. Another one is a mistake; remove one that is no longer imported."""
