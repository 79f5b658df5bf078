"""The training engine: learners, strategies, exchange, coordinator, processes, and the simulator of all that."""
