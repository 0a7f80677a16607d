"""Which checkpoint a run starts from, and which it refuses."""

from copy import deepcopy

import pytest

from rlpost.config.compose import ConfigError, config_values, to_config
from rlpost.config.schema import Config
from rlpost.persist import find_checkpoint
from rlpost.weights.checkpoint import CheckpointStore
from rlpost.weights.checkpoint_reader import CheckpointError


@pytest.fixture
def config(tmp_path):
    """Of a run that has saved steps 1 and 2."""
    config = Config()
    config.run.dir, config.run.name = str(tmp_path), "run"
    (tmp_path / "model").mkdir()
    config.model.path, config.data.train = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    config.algorithm = {"name": "grpo", "clip": [0.2, 0.2]}
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        store.save(step, {}, {"step": step}, config=config_values(config))
    return config


def test_a_configuration_survives_the_manifest(config):
    saved = find_checkpoint(config).config
    assert saved == config_values(config) == config_values(to_config(saved))


def test_the_latest_is_found_and_any_by_its_path(config, tmp_path):
    assert find_checkpoint(config).step == 2
    config.run.name = "another"
    assert find_checkpoint(config) is None
    config.trainer.resume = str(tmp_path / "run" / "checkpoints" / "step_000001")
    assert find_checkpoint(config).step == 1
    config.trainer.resume = str(tmp_path / "run")
    assert find_checkpoint(config).step == 2
    config.trainer.resume = str(tmp_path / "model")
    with pytest.raises(ConfigError, match="model holds no checkpoint"):
        find_checkpoint(config)


def test_never_refuses_a_directory_with_checkpoints(config):
    config.trainer.resume = "never"
    with pytest.raises(ConfigError, match=r"holds checkpoints: choose another run\.name"):
        find_checkpoint(config)
    config.run.name = "another"
    assert find_checkpoint(config) is None


def test_hyperparameters_may_change_and_what_a_run_is_may_not(config):
    changed = deepcopy(config)
    changed.algorithm["clip"], changed.optim.lr, changed.parallel.tensor = [0.1, 0.3], 1.0, 2
    assert find_checkpoint(changed).step == 2
    changed.algorithm["name"], changed.run.seed, changed.rollout.samples_per_prompt = "sdpo", 7, 5
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(changed)
    for part in (
        "holds another run",
        "algorithm.name was 'grpo' and is now 'sdpo'",
        "run.seed was 0 and is now 7",
        "rollout.samples_per_prompt was 4 and is now 5",
    ):
        assert part in str(caught.value)
    assert "optim.lr" not in str(caught.value)


def test_a_path_may_move_but_not_be_exchanged(config, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    changed = deepcopy(config)
    changed.model.path = str(other)
    with pytest.raises(ConfigError, match=r"model\.path was"):
        find_checkpoint(changed)
    (tmp_path / "model").rmdir()
    assert find_checkpoint(changed).step == 2


def test_a_checkpoint_without_configuration_is_refused(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path)
    CheckpointStore(tmp_path / "run" / "checkpoints").save(1, {}, {"step": 1})
    with pytest.raises(CheckpointError, match="holds no configuration"):
        find_checkpoint(config)
