"""The `starling` command line: one file a group of commands."""
