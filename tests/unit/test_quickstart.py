"""The quickstart's task: nothing leaks, and the warm start's teacher prompts are those that SDPO renders."""

import pytest
from omegaconf import OmegaConf

from rlpost.config.compose import files_root
from rlpost.feedback import build_feedback
from rlpost.quickstart import task
from rlpost.rewards import RewardResult
from rlpost.types import Prompt, Sample


def test_feedback_names_rules_and_never_a_form():
    for row in task.make_rows("train", 50):
        wrong = " ".join(task.FORMS[task.PARSED[form][0], "first"] for form in row["answer"].split())
        score, feedback = task.judge(wrong, row["answer"])
        assert score == 0.0
        assert not set(feedback.split()) & set(row["answer"].split())
        assert task.judge(row["answer"], row["answer"]) == (1.0, None)
        assert not set(row["prompt"].split()) & set(row["answer"].split())


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_questions_are_in_no_training(seed):
    held_out = {row["prompt"] for row in task.make_rows("eval", 256, seed)}
    assert not held_out & {row["prompt"] for row in task.make_rows("train", 2048, seed)}
    seen = {" : ".join(row["prompt"].split("\n\n")[0].split(" : ")) for row in task.make_rows("sft", 5000, seed)}
    assert not held_out & seen


def test_the_warm_start_does_not_know_the_rule():
    """Whatever word, its six forms are equally likely in the warm start's answers."""
    counts = dict.fromkeys(task.FORMS.values(), 0)
    for row in task.make_rows("sft", 4000):
        for form in row["answer"].split():
            counts[form] += 1
    expected = 4000 * task.LENGTH / len(counts)
    assert all(abs(count - expected) < 0.2 * expected for count in counts.values())


@pytest.mark.parametrize("kind", ["feedback", "demonstration"])
def test_the_teacher_prompt_is_the_one_that_the_warm_start_taught(kind):
    strategy = build_feedback(OmegaConf.to_container(OmegaConf.load(files_root() / "conf/feedback/quickstart.yaml")))
    tokenizer = task.make_tokenizer()
    strategy.bind(tokenizer)
    row = task.make_rows("train", 1)[0]
    prompt = Prompt(0, [{"role": "user", "content": row["prompt"]}], [1], answer=row["answer"])
    samples = [Sample(prompt, 0, i, response_ids=[1]) for i in range(2)]
    said = "first second third fine fine fine"
    samples[0].reward = 0.0
    strategy.record(samples[0], RewardResult(0.0, said))
    samples[1].reward = 1.0 if kind == "demonstration" else 0.0
    samples[1].response = row["answer"]
    strategy.teacher_prompts(samples)
    given = {"feedback": {"feedback": said}, "demonstration": {"demonstration": row["answer"]}}[kind]
    (message,) = samples[0].teacher_messages
    assert message["content"].split() == task.teacher_prompt(row["prompt"], **given).split()
