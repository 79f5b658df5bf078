"""`starling top NAME` found no training by the name of its configuration, and no list of trainings named them.

The name was looked for where a job does not have it; the test wrote a job of its own.
"""

from tasks.tracking.training_lookup import find_training, training_name


def test_training_is_found_by_the_name_of_its_configuration(finished):
    key = finished.result("train").key
    watched = find_training("tiny")
    watched.close()
    assert watched.name == training_name(watched.folder) == f"tiny (train-{key})"
