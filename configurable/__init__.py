"""What configurations are made of: choices between kinds of a component, torch imported at first use, messages."""
