"""docs/add_an_algorithm.md does what it says: its blocks are run as they stand, on the untrained tiny model."""

import re
import shutil
from pathlib import Path

import pytest

from rlpost import Trainer
from rlpost.algorithms import build_algorithm
from rlpost.config.compose import load_config
from rlpost.observe.metrics import read_metrics

GUIDE = Path(__file__).parents[2] / "docs" / "add_an_algorithm.md"


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """The working directory of a reader who ran the quickstart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "runs" / "quickstart_seed0"
    shutil.copytree(tiny / "model", run / "sft" / "export")
    shutil.copytree(tiny / "data", run / "data")
    rows = (run / "data" / "eval.jsonl").read_text().splitlines(keepends=True)
    (run / "data" / "eval.jsonl").write_text("".join(rows[:4]))
    return run


def test_the_guide(folder, tmp_path):
    names = {}
    for language, block in re.findall(r"```(python|yaml)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        if language == "yaml":
            (tmp_path / "recipes").mkdir()
            (tmp_path / "recipes" / "raft.yaml").write_text(block)
        elif match := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / match[1]).write_text(block)
        else:
            exec(compile(block, str(GUIDE), "exec"), names)
    for run in ("raft", "mine", "hinted"):
        assert (folder / run / "export" / "config.json").exists()
    # The untrained model has no response that the guide's own run could learn: with another reward it has.
    given = {"algorithm": names["RAFT"](threshold=0.2), "reward": names["around"].reward}
    trainer = Trainer.from_recipe("tiny_grpo", [f"run.dir={folder}", "run.name=variety"], **given)
    metrics = trainer.step()
    trainer.close()
    assert metrics["raft/chosen_fraction"] == 1.0
    assert metrics["train/loss"] == pytest.approx(metrics["raft/nll"]) and metrics["train/grad_norm"] > 0
    (row, *_) = [row for row in read_metrics(folder / "hinted") if "train/loss" in row]
    assert 0 < row["sdpo/feedback_fraction"] <= 1
    config = load_config("raft", ["run.dir=runs/quickstart_seed0"])
    algorithm = build_algorithm(config.algorithm)
    assert (type(algorithm).__module__, algorithm.name, algorithm.threshold) == ("raft", "raft", 0.2)
