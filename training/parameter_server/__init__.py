"""The parameter server of `asgd` and `easgd`: processes beside the coordinator, each with a share of the weights."""
