"""What is said of overrides that Hydra cannot read, does not know, or may not set."""

import pytest

from rlpost.config.compose import ConfigError, compose_config

SAID = {
    "--lr=1": "'--lr=1' is no override: write group.key=value",
    "optim.lr 3": "'optim.lr 3' is no override: write group.key=value",
    "data.train=a=b": "data.train=a=b cannot be read: a value with such signs stands in quotes, "
    "as in 'data.train=\"a=b\"'",
    "optim.betas=1,2": "optim.betas=1,2 is several values: a list is 'optim.betas=[1,2]'",
    "optim.lr=fast": "optim.lr=fast is not allowed: Value 'fast'",
    "optim.lr=": "optim.lr= is not allowed: Value ''",
    "optim.lrr=1": "There is no field 'optim.lrr'. Did you mean 'optim.lr'? There are: optim.lr, ",
    "trainerr.steps=1": "There is no field 'trainerr.steps'. Did you mean 'trainer.steps'?",
    "foo=1": "There is no field 'foo'. There are: ",
    "algorithm=sdpoo": "There is no algorithm 'sdpoo'. Did you mean 'sdpo'?",
}


@pytest.mark.parametrize("override", SAID)
def test_a_mistaken_override_is_a_sentence(override):
    with pytest.raises(ConfigError) as error:
        compose_config("tiny_grpo", [override])
    (said,) = error.value.mistakes
    assert said.startswith(SAID[override]) and "hydra" not in said.lower() and "\n" not in said


def test_groups_are_listed_where_one_is_unknown():
    with pytest.raises(ConfigError, match="There are: run, trainer, data, model, engine"):
        compose_config("tiny_grpo", ["foo=1"])


def test_what_the_sentence_shows_is_taken():
    assert compose_config("tiny_grpo", ['data.train="a=b"']).data.train == "a=b"
    assert compose_config("tiny_grpo", ["optim.betas=[1,2]"]).optim.betas == [1, 2]
