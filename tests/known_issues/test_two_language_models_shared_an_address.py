"""A language model trained at a constant learning rate had the address of one trained with `lm_train`'s own schedule.

Parts of a configuration that were empty without their defaults were dropped, although `lm_train.schedule` has another
default than the class `ScheduleConfig`: the run took the other model.
"""

from tasks.config.lm_training import LmTrainConfig, lm_training
from tasks.config.training import training_content
from training.config import ScheduleConfig


def test_a_part_with_the_defaults_of_its_class_is_not_the_default_of_the_field():
    default = training_content(lm_training(None))
    constant = training_content(LmTrainConfig(schedule=ScheduleConfig()))
    assert constant != default
    assert training_content(LmTrainConfig(schedule=LmTrainConfig().schedule)) == default
