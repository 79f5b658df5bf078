"""The parameter server of `asgd` and `easgd`: processes next to the coordinator, each with a share of the weights."""
