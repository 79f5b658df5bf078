"""The processes of a node: the agent that starts its ranks, a rank's training loop, and the steppers of strategies."""
