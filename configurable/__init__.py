"""What configurations are made of: choices between kinds of a component, and torch imported at first use."""
