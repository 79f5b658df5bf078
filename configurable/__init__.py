"""What every room may need: choices between kinds of a component, torch imported at first use, messages, files."""
