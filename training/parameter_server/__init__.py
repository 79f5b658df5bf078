"""The parameter server of `asgd` and `easgd`: processes beside the store that hold a share of the weights each."""
