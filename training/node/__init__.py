"""The processes of a node: the agent that starts its ranks, and what a rank does beside computing gradients."""
