"""What a person reads who made a mistake: the field, the value, what is allowed; before anything is loaded."""

import json

import pytest
from overrides import command

from rlpost.__main__ import main


@pytest.fixture
def say(capsys, tmp_path, tiny):
    def said(algorithm, *more):
        given = command(tiny, tmp_path, algorithm, *more)
        if "reward=none" in more:
            given.remove("reward._target_=toy_rewards.variety")
        code = main(given)
        captured = capsys.readouterr()
        assert code != 0, captured.out + captured.err
        assert "Traceback" not in captured.err
        return captured.err

    return said


CASES = {
    "unknown field": (["optim.lrr=1"], ["no field 'optim.lrr'", "Did you mean 'optim.lr'?"]),
    "wrong type": (["optim.lr=fast"], ["optim.lr=fast", "Float"]),
    "wrong choice": (["model.dtype=fp8"], ["model.dtype=fp8 is not allowed; allowed are fp32, bf16, fp16"]),
    "unknown group choice": (["algorithm=gpro"], ["no algorithm 'gpro'", "Did you mean 'grpo'?"]),
    "too small": (["train.max_tokens_per_micro_batch=0"], ["train.max_tokens_per_micro_batch=0", "at least 1"]),
    "temperature": (["rollout.temperature=0"], ["rollout.temperature=0", "above 0"]),
    "missing model": (["model.path=/no/such/model"], ["model.path=/no/such/model does not exist"]),
    "missing data": (["data.train=nowhere.jsonl"], ["data.train=nowhere.jsonl does not exist"]),
    "alpha": (["teacher.alpha=0"], ["teacher.alpha=0", "0 < alpha ≤ 1"]),
    "unknown teacher field": (["teacher.speed=1"], ["teacher has no field 'speed'", "alpha"]),
    "unknown feedback kwarg": (["feedback.treshold=1"], ["treshold", "success_reward_threshold"]),
    "unknown algorithm field": (["algorithm.topk=4"], ["no field 'topk'", "Did you mean 'top_k'?"]),
    "top-k beyond the vocabulary": (["algorithm.top_k=9999"], ["algorithm.top_k=9999", "vocabulary"]),
    "no reward": (["reward=none"], ["needs a reward"]),
    "a field of no teacher": (["teacher=none"], ["teacher.alpha=0.1", "a group that is none"]),
    "phases of another algorithm": (["phases=grpo"], ["phases lacks teach, teacher_update"]),
    "unknown reward": (["reward._target_=toy_rewards.varety"], ["varety", "Did you mean 'variety'?"]),
    "heads": (["parallel.tensor=3"], ["TP 3"]),
    "experts of a dense model": (["parallel.expert_tensor=2"], ["parallel.expert_tensor=2: the model has no experts"]),
    "loss scale": (["critic.initial_loss_scale=0"], ["critic.initial_loss_scale=0.0 is not allowed; it is at least 1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_mistake(case, say, monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    overrides, expected = CASES[case]
    said = say("sdpo", *overrides)
    for words in expected:
        assert words in said, said


def test_experts_that_are_not_wide_enough(say, tmp_path):
    experts = {"num_experts": 4, "moe_intermediate_size": 33, "num_hidden_layers": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    said = say("sdpo", f"model.path={tmp_path}", "parallel.expert_tensor=2")
    assert "parallel.expert_tensor=2 does not divide the width 33 of the model's experts" in said


def test_all_mistakes_at_once(say):
    said = say("sdpo", "model.dtype=fp8", "teacher.alpha=2", "rollout.temperature=-1", "algorithm.top_k=0")
    assert "3 mistakes" in said, said


def test_an_algorithm_without_its_teacher(capsys, tiny, tmp_path):
    given = [o for o in command(tiny, tmp_path, "sdpo") if not o.startswith(("teacher", "feedback"))]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "needs a teacher" in said and "needs feedback" in said


def test_group_of_one(say):
    assert "rollout.samples_per_prompt=1" in say("grpo", "rollout.samples_per_prompt=1")


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        ([{"question": "why?"}], [], ["data.prompt_key=prompt", "Columns: question"]),
        ([{"prompt": "a"}, {"prompt": None}], [], ["rows.jsonl:2: "]),
        ([{"prompt": "a"}, "{not json"], [], ["rows.jsonl:2: "]),
        ([], [], ["rows.jsonl"]),
    ],
)
def test_bad_data(rows, more, expected, say, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    said = say("grpo", f"data.train={file}", *more)
    for words in expected:
        assert words in said, said


def test_help_and_cfg(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for words in ("torchrun", "recipe=", "quickstart_sdpo", "prepare", "algorithm=", "|grpo|"):
        assert words in shown
    assert main(["recipe=quickstart_sdpo", "--cfg", "job", "optim.lr=3e-4"]) == 0
    assert "lr: 0.0003" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err
