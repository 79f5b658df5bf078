"""The training engine for any model: learners that average their weights, with leases of any data set."""
