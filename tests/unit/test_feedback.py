import os
import random
from pathlib import Path

import pytest
import yaml
from tiny_tokenizer import tiny_tokenizer

import rlpost.feedback.base
from rlpost.config.schema import Config, DataConfig
from rlpost.data.dataset import PromptDataset
from rlpost.data.reading import BadRows, read_rows
from rlpost.data.templates import render
from rlpost.feedback import (
    EnvironmentFeedback,
    GoldenAnswerSDPOFeedback,
    OPDFeedback,
    OPSDFeedback,
    SDPOFeedback,
    build_feedback,
    feedback_metrics,
)
from rlpost.feedback.golden import tells_answer
from rlpost.feedback.templates import DEFAULTS, fill
from rlpost.rewards import RewardResult
from rlpost.rewards.choice import Choice
from rlpost.rewards.judge import Judge
from rlpost.types import Prompt, Sample

TOKENIZER = tiny_tokenizer()
ROOT = Path(__file__).parents[2]
SCIKNOWEVAL = ROOT.parent / "shared" / "data" / "sciknoweval"
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Earlier question"},
    {"role": "assistant", "content": "Earlier answer"},
    {"role": "user", "content": "What is {2}+2?"},
]


def sample(index, reward, response="so 4", feedback=None, group=7, messages=MESSAGES, answer=None, **fields):
    prompt = Prompt(group, messages, render(TOKENIZER, messages), answer=answer, metadata=fields.pop("metadata", {}))
    ids = fields.pop("response_ids", TOKENIZER(response)["input_ids"])
    return Sample(prompt, group, index, ids, response, reward=reward, feedback=feedback, **fields)


def bound(strategy, **template_kwargs):
    strategy.bind(TOKENIZER, seed=3, chat_template_kwargs=template_kwargs)
    return strategy


def sdpo(**kwargs):
    return bound(SDPOFeedback(**kwargs))


def teach(strategy, samples):
    before = [(list(s.prompt.ids), [dict(m) for m in s.prompt.messages], list(s.response_ids)) for s in samples]
    strategy.teacher_prompts(samples)
    assert [(s.prompt.ids, s.prompt.messages, s.response_ids) for s in samples] == before
    for s in samples:
        if s.distill_mask:
            assert s.teacher_prompt_ids == render(TOKENIZER, s.teacher_messages, **strategy.chat_template_kwargs)
            assert s.teacher_info["tokens"] == len(s.teacher_prompt_ids)
        else:
            assert s.teacher_prompt_ids is None and s.teacher_messages is None
    return samples


def user_text(sample):
    return sample.teacher_messages[-1]["content"]


# The routing table, row by row.


def test_any_sample_with_a_successful_sibling_sees_it():
    failed, won, also_won = teach(
        sdpo(), [sample(0, 0.0, "so 5", "too high"), sample(1, 1.0, "so 4"), sample(2, 1.0, "it is 4")]
    )
    for s, shown in ((failed, "so 4"), (won, "it is 4"), (also_won, "so 4")):
        assert s.distill_mask == 1.0 and s.teacher_info["route"] == "demonstration"
        assert shown in user_text(s) and s.teacher_info["demonstration"] and not s.teacher_info["feedback"]
    assert "too high" not in user_text(failed) and "so 5" not in user_text(failed)


def test_feedback_stands_beside_a_demonstration_only_on_request():
    failed, won, other = teach(
        sdpo(feedback_with_solution=True),
        [sample(0, 0.0, "so 5", "too high"), sample(1, 1.0, feedback="fine"), sample(2, 1.0, "it is 4")],
    )
    text = user_text(failed)
    assert text.index("What is {2}+2?") < text.index("so 4") < text.index("too high") < text.index("Now answer")
    assert failed.teacher_info["demonstration"] and failed.teacher_info["feedback"]
    assert "fine" not in user_text(won) and "fine" not in user_text(other)


def test_a_lone_success_learns_nothing_unless_it_demonstrates_itself():
    won, failed = teach(sdpo(), [sample(0, 1.0, "so 4"), sample(1, 0.0, "so 5")])
    assert won.distill_mask == 0.0 and won.teacher_info["route"] == "none"
    assert failed.distill_mask == 1.0
    won, _ = teach(sdpo(demonstrate_self=True), [sample(0, 1.0, "so 4"), sample(1, 0.0, "so 5")])
    assert won.distill_mask == 1.0 and won.teacher_info["route"] == "self" and "so 4" in user_text(won)


def test_a_failure_without_a_successful_sibling_sees_its_own_feedback():
    first, second = teach(sdpo(), [sample(0, 0.0, "so 5", "too high"), sample(1, 0.5, "so 3", "too low")])
    assert first.distill_mask == second.distill_mask == 1.0
    assert "too high" in user_text(first) and "too low" not in user_text(first)
    assert "too low" in user_text(second) and first.teacher_info["route"] == "feedback"
    assert "so 5" not in user_text(first)


@pytest.mark.parametrize("feedback", [None, "", " \n"])
def test_a_failure_without_sibling_and_feedback_is_masked(feedback):
    samples = teach(sdpo(), [sample(0, 0.0, feedback=feedback), sample(1, 0.0)])
    assert [s.distill_mask for s in samples] == [0.0, 0.0]


def test_siblings_are_of_the_same_group_whatever_the_order():
    samples = [sample(i, float(i == 1), f"r{g}{i}", group=g) for g in (1, 2) for i in range(3)]
    samples.append(sample(0, 0.0, group=3))
    random.Random(0).shuffle(samples)
    teach(sdpo(), samples)
    for s in samples:
        if s.group_id == 3 or s.index == 1:
            assert s.distill_mask == 0.0
        else:
            assert f"r{s.group_id}1" in user_text(s)


def test_what_siblings_share_is_rendered_once_and_is_each_ones_own(monkeypatch):
    texts = []

    def counting(tokenizer, messages, **kwargs):
        texts.append(messages[-1]["content"])
        return render(tokenizer, messages, **kwargs)

    monkeypatch.setattr(rlpost.feedback.base, "render", counting)
    samples = [sample(i, 0.0, f"so {i}", "too high" if i < 3 else "too low", group=g) for g in (1, 2) for i in range(4)]
    teach(sdpo(), samples)
    assert len(texts) == 4 and texts[:2] == texts[2:]
    samples[0].teacher_prompt_ids.append(0)
    assert samples[0].teacher_prompt_ids[:-1] == samples[1].teacher_prompt_ids != samples[3].teacher_prompt_ids


def test_the_threshold_decides_what_a_success_is():
    (failed, _) = teach(sdpo(success_reward_threshold=0.5), [sample(0, 0.4), sample(1, 0.5, "so 4")])
    assert failed.teacher_info["route"] == "demonstration"
    with pytest.raises(ValueError, match="7/0 has no reward yet"):
        teach(sdpo(), [sample(0, None)])


def test_an_empty_response_has_nothing_to_learn():
    empty, _ = teach(sdpo(), [sample(0, 0.0, "", response_ids=[]), sample(1, 1.0)])
    assert empty.distill_mask == 0.0


# How the prompt is made.


def test_only_the_last_user_message_changes():
    failed, _ = teach(sdpo(), [sample(0, 0.0), sample(1, 1.0)])
    assert failed.teacher_messages[:-1] == MESSAGES[:-1]
    assert user_text(failed).startswith("What is {2}+2?\n\n") and "\n\n\n" not in user_text(failed)
    assert user_text(failed).endswith(DEFAULTS["instruction"])
    assert TOKENIZER.decode(failed.teacher_prompt_ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_template_kwargs_reach_the_teacher_prompt():
    strategy = bound(SDPOFeedback(), enable_thinking=False)
    failed, _ = teach(strategy, [sample(0, 0.0), sample(1, 1.0)])
    assert TOKENIZER.decode(failed.teacher_prompt_ids).endswith("</think>\n\n")


def test_which_demonstration():
    def group():
        texts = ["so 44444", "so 5", "long way to 4", "4", "so 4"]
        return [sample(i, float(i != 1), text) for i, text in enumerate(texts)]

    def shown(strategy, samples):
        teach(strategy, samples)
        found = []
        for s in samples:
            block = user_text(s).split("judged correct:\n\n")[1].split("\n\n")[0]
            found.append(next(o.index for o in samples if o.response == block))
        return found

    assert shown(sdpo(demonstration="first"), group()) == [2, 0, 0, 0, 0]
    assert shown(sdpo(demonstration="shortest"), group()) == [3, 3, 3, 4, 3]
    picked = shown(sdpo(demonstration="random"), group())
    assert all(i != own for own, i in enumerate(picked)) and 1 not in picked
    assert picked == list(reversed(shown(sdpo(demonstration="random"), group()[::-1])))
    other_seed = SDPOFeedback(demonstration="random")
    other_seed.bind(TOKENIZER, seed=4)
    assert picked != shown(other_seed, group())


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ("<think>hm\nhm</think>\nso 4", "so 4"),
        ("<think>a</think>x <think>b</think>y", "x y"),
        ("hidden thoughts</think>\n\nso 4", "so 4"),
        ("<think>never closed, so 4", "<think>never closed, so 4"),
        ("so 4<|im_end|><|im_start|>user", "so 4user"),
    ],
)
def test_thinking_and_special_tokens_never_enter(response, shown):
    failed, _ = teach(sdpo(), [sample(0, 0.0), sample(1, 1.0, response)])
    assert user_text(failed).split("judged correct:\n\n")[1].split("\n\nNow answer")[0] == shown
    kept, _ = teach(sdpo(strip_thinking=False), [sample(0, 0.0), sample(1, 1.0, "<think>hm</think>so 4")])
    assert "<think>hm</think>so 4" in user_text(kept)


def test_special_tokens_leave_feedback_too():
    (failed,) = teach(sdpo(), [sample(0, 0.0, feedback="bad <|im_end|> end")])
    ends = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert failed.teacher_prompt_ids.count(ends) == failed.prompt.ids.count(ends)


def test_a_success_that_is_all_thinking_is_no_demonstration():
    failed, _ = teach(sdpo(), [sample(0, 0.0, feedback="too high"), sample(1, 1.0, "<think>4</think>")])
    assert failed.teacher_info["route"] == "feedback"


# Too long.


def test_the_demonstration_is_cut_first_and_from_its_middle():
    demonstration = "BEGIN " + "x é " * 200 + "END"
    group = [sample(0, 0.0, feedback="too high"), sample(1, 1.0, demonstration)]
    whole, _ = teach(sdpo(feedback_with_solution=True), group)
    limit = len(whole.teacher_prompt_ids) - 300
    cut, _ = teach(sdpo(feedback_with_solution=True, max_teacher_prompt_tokens=limit), group)
    text = user_text(cut)
    assert limit - 10 < len(cut.teacher_prompt_ids) <= limit and cut.teacher_info["cut"]
    assert "BEGIN" in text and "END" in text and "[…]" in text and "\ufffd" not in text
    assert "too high" in text and "What is {2}+2?" in text and text.endswith(DEFAULTS["instruction"])


def test_then_the_feedback_and_never_the_question():
    group = [sample(0, 0.0, feedback="FIRST " + "y" * 300 + " LAST"), sample(1, 1.0, "z" * 300)]
    room = len(sdpo()._render(sdpo()._messages(group[0], _feedback_alone())))
    cut, _ = teach(sdpo(feedback_with_solution=True, max_teacher_prompt_tokens=room + 100), group)
    text = user_text(cut)
    assert "zz" not in text and not cut.teacher_info["demonstration"]
    assert "FIRST" in text and "LAST" in text and "y" * 300 not in text and cut.teacher_info["feedback"]
    assert "What is {2}+2?" in text and text.endswith(DEFAULTS["instruction"])
    hopeless, _ = teach(sdpo(max_teacher_prompt_tokens=20), group)
    assert (
        hopeless.distill_mask == 0.0 and hopeless.teacher_info["route"] == "too_long" and hopeless.teacher_info["cut"]
    )


def _feedback_alone():
    from rlpost.feedback.sdpo import Parts

    return Parts("feedback", feedback="-")


# What is recorded.


@pytest.mark.parametrize(
    ("finish", "format_ok", "text", "expected"),
    [
        ("length", False, "no block", DEFAULTS["truncated"]),
        ("length", True, "too high", DEFAULTS["truncated"]),
        ("stop", False, "no block", "no block"),
        ("stop", False, None, DEFAULTS["format_error"]),
        ("stop", True, "too high", "too high"),
        ("stop", None, " ", None),
    ],
)
def test_precedence_of_feedback_for_failures(finish, format_ok, text, expected):
    s = sample(0, 0.0, finish_reason=finish)
    sdpo().record(s, RewardResult(0.0, text, format_ok))
    assert s.feedback == expected
    sdpo().record(s, {"score": 0.0, "feedback": text, "format_ok": format_ok})
    assert s.feedback == expected


def test_a_success_that_ran_long_gets_no_truncation_feedback():
    s = sample(0, 1.0, finish_reason="length")
    sdpo().record(s, RewardResult(1.0))
    assert s.feedback is None
    sdpo().record(s, 1.0)
    assert s.feedback is None


def test_the_judge_tells_the_strategy():
    s = sample(0, None, finish_reason="length")
    Judge(lambda s: RewardResult(0.0, "too high"), feedback=sdpo()).score([s])
    assert (s.reward, s.feedback) == (0.0, DEFAULTS["truncated"])


# The other strategies.


@pytest.mark.parametrize("cls", [EnvironmentFeedback, OPDFeedback])
def test_opd_is_the_students_own_prompt(cls):
    strategy = bound(cls())
    s = sample(0, 0.0)
    strategy.record(s, {"score": 0.0, "feedback": "too high"})
    teach(strategy, [s])
    assert s.feedback == "too high"
    assert s.teacher_prompt_ids == s.prompt.ids and s.teacher_messages == MESSAGES and s.distill_mask == 1.0


def test_opsd_reads_the_privileged_column_and_counts_rows_without():
    strategy = bound(OPSDFeedback(teacher_prompt_key="hint"))
    chat = [{"role": "user", "content": "A whole teacher prompt"}]
    told, given, without, blank = teach(
        strategy,
        [
            sample(i, 0.0, metadata=m)
            for i, m in enumerate([{"hint": "two {pairs}"}, {"hint": chat}, {}, {"hint": " "}])
        ],
    )
    assert user_text(told).startswith("What is {2}+2?") and "two {pairs}" in user_text(told)
    assert told.teacher_messages[:-1] == MESSAGES[:-1]
    assert given.teacher_messages == chat
    for s in (without, blank):
        assert s.teacher_prompt_ids == s.prompt.ids and s.teacher_info["route"] == "fallback"
    assert feedback_metrics([told, given, without, blank])["sdpo/fallback_fraction"] == 0.5
    with pytest.raises(ValueError, match="teacher_prompt_key is not set"):
        OPSDFeedback()


def test_opsd_may_read_the_answer():
    given = sample(0, 0.0)
    given.prompt.answer = "it is 4"
    (told,) = teach(bound(OPSDFeedback(teacher_prompt_key="answer")), [given])
    assert "it is 4" in user_text(told) and told.teacher_info["route"] == "privileged"


def golden(**kwargs):
    return bound(GoldenAnswerSDPOFeedback(**kwargs))


def test_golden_tells_form_and_not_the_task():
    task = sample(0, 0.0, feedback="too high", format_ok=True, answer="4")
    form = sample(1, 0.0, feedback="no block", format_ok=False, answer="4")
    cut = sample(2, 0.0, feedback=DEFAULTS["truncated"], finish_reason="length", answer="4")
    teach(golden(), [task, form, cut])
    assert [s.distill_mask for s in (task, form, cut)] == [0.0, 1.0, 1.0]
    assert "no block" in user_text(form) and "cut off" in user_text(cut)
    assert task.feedback == "too high" and task.teacher_info["withheld"] and not form.teacher_info["withheld"]
    teach(golden(task_feedback=True), [task])
    assert "too high" in user_text(task)


@pytest.mark.parametrize("answer", ["4", "B", "Paris in  France"])
def test_golden_withholds_feedback_that_holds_the_answer(answer):
    leaking = sample(0, 0.0, feedback=f"It should be {answer.lower() if len(answer) > 1 else answer}.", answer=answer)
    teach(golden(task_feedback=True), [leaking])
    assert leaking.distill_mask == 0.0 and leaking.teacher_info["withheld"]


def test_tells_answer():
    assert tells_answer("take (b)", "B") and tells_answer("the right one: B", "B")
    assert not tells_answer("an odd number", "A") and not tells_answer("a bad one", "A") and not tells_answer("x", None)
    assert tells_answer("It is 42.", 42) and not tells_answer("It is 421.", 42)


WRONG = (
    "<answer>{other}</answer>",
    "no answer",
    "<answer>A, B</answer>",
    "<answer>none</answer>",
    "<answer>{other}: x",
)


@pytest.mark.parametrize("domain", ["biology", "chemistry", "material", "physics"])
@pytest.mark.parametrize("task_feedback", [False, True])
def test_no_feedback_on_real_rows_gives_the_answer_away(domain, task_feedback):
    path = SCIKNOWEVAL / domain / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    rows = [row.values for row in read_rows(str(path), BadRows())][:20]
    data = PromptDataset(DataConfig(train="rows", max_prompt_tokens=100_000), TOKENIZER, rows)
    strategy = golden(task_feedback=task_feedback, max_teacher_prompt_tokens=200_000)
    samples = []
    for prompt in data.prompts:
        other = "B" if prompt.answer == "A" else "A"
        for i, text in enumerate(WRONG):
            finish = "length" if i == 1 and prompt.id % 2 else "stop"
            text = text.format(other=other)
            samples.append(Sample(prompt, prompt.id, i, TOKENIZER(text)["input_ids"], text, finish_reason=finish))
    Judge(Choice(), feedback=strategy).score(samples)
    strategy.teacher_prompts(samples)
    assert all(s.reward == 0.0 for s in samples)
    for s in samples:
        assert not s.feedback or not tells_answer(s.feedback, s.prompt.answer), s.feedback
        if s.distill_mask:
            question, added = s.prompt.messages[-1]["content"], s.teacher_messages[-1]["content"]
            assert added.startswith(question) and not tells_answer(added[len(question) :], s.prompt.answer)
    assert any(s.distill_mask for s in samples)


# Building.


def test_the_configurations_are_the_classes_defaults():
    for name, cls in (
        ("opd", OPDFeedback),
        ("opsd", OPSDFeedback),
        ("sdpo", SDPOFeedback),
        ("golden", GoldenAnswerSDPOFeedback),
    ):
        values = yaml.safe_load((ROOT / "conf" / "feedback" / f"{name}.yaml").read_text())
        own = {"teacher_prompt_key": "hint"} if name == "opsd" else {}
        built, plain = build_feedback(values | own), cls(**own)
        assert type(built) is cls and vars(built) == vars(plain)
        assert type(build_feedback({"name": name, **own})) is cls


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            {"name": "sdpo", "demonstraton": "first"},
            TypeError,
            "no argument 'demonstraton'. Did you mean 'demonstration'.*max_teacher",
        ),
        (
            {"name": "golden", "task": 1},
            TypeError,
            "no argument 'task'.*Accepted are: task_feedback, teacher_prompt_key",
        ),
        (
            {"name": "opd", "templates": {}},
            TypeError,
            "no argument 'templates'.*Accepted are: teacher_prompt_key, success",
        ),
        ({"name": "spdo"}, ValueError, "feedback.name=spdo does not exist. Did you mean 'sdpo'"),
        ({"_target_": "rlpost.feedback.SPDOFeedback"}, ImportError, "Did you mean 'SDPOFeedback'"),
        ({"_target_": "rlpost.types.Sample"}, TypeError, "no subclass of"),
        ({"name": "sdpo", "demonstration": "last"}, ValueError, "demonstration=last is not allowed; allowed are first"),
        (
            {"name": "sdpo", "templates": {"user": "{question}"}},
            ValueError,
            "user lacks the slot {demonstration}\n.*{feedback}\n",
        ),
        ({"name": "sdpo", "templates": {"feedback": "no"}}, ValueError, "templates.feedback lacks the slot {feedback}"),
        ({"name": "sdpo", "templates": {"instr": "x"}}, ValueError, "templates.instr does not exist; there are user"),
        ({"name": "opsd"}, ValueError, "teacher_prompt_key is not set"),
        ({"name": "sdpo", "success_reward_threshold": float("nan")}, ValueError, "not a finite number"),
        ({"name": "sdpo", "max_teacher_prompt_tokens": 0}, ValueError, "max_teacher_prompt_tokens=0"),
    ],
)
def test_mistakes_are_named_at_launch(spec, error, message):
    with pytest.raises(error, match=message):
        build_feedback(spec)


def test_rules_of_the_whole_configuration():
    config = Config(data=DataConfig(train="x", max_prompt_tokens=4096, answer_key=None))
    SDPOFeedback().validate(config)
    with pytest.raises(ValueError, match="max_teacher_prompt_tokens=4096 leaves no room.*data.max_prompt_tokens=4096"):
        SDPOFeedback(max_teacher_prompt_tokens=4096).validate(config)
    with pytest.raises(ValueError, match="data.answer_key is not set"):
        GoldenAnswerSDPOFeedback().validate(config)


def test_a_users_templates_are_used():
    mine = {"demonstration": "GOOD: {demonstration} {not a slot} {x}", "instruction": "GO"}
    failed, _ = teach(sdpo(templates=mine), [sample(0, 0.0), sample(1, 1.0, "so {feedback}")])
    assert user_text(failed) == "What is {2}+2?\n\nGOOD: so {feedback} {not a slot} {x}\n\nGO"


def test_fill():
    assert fill("{a}\n\n{b}\n\n{c}", a="1", b="", c="{a}") == "1\n\n{a}"


def test_metrics():
    samples = teach(sdpo(), [sample(0, 0.0), sample(1, 1.0), *(sample(i, 0.0, feedback="f", group=8) for i in (0, 1))])
    found = feedback_metrics(samples)
    assert found["sdpo/success_group_fraction"] == 0.5 and found["sdpo/success_sample_fraction"] == 0.25
    assert found["sdpo/demonstration_fraction"] == 0.25 and found["sdpo/feedback_fraction"] == 0.5
    assert found["sdpo/distill_fraction"] == 0.75 and found["sdpo/cut_fraction"] == 0.0
    lengths = [len(s.teacher_prompt_ids) for s in samples if s.distill_mask]
    assert found["sdpo/teacher_prompt_tokens/max"] == max(lengths)
    assert found["sdpo/teacher_prompt_tokens/mean"] == pytest.approx(sum(lengths) / 3)
    assert feedback_metrics([]) == {}


def test_a_real_tokenizer():
    path = os.environ.get("RLPOST_TEST_MODEL")
    if not path:
        pytest.skip("RLPOST_TEST_MODEL names no Hugging Face directory")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = Prompt(0, MESSAGES, render(tokenizer, MESSAGES))
    text = "Because it is so: 4. " * 300
    samples = [Sample(prompt, 0, i, tokenizer(text)["input_ids"], text, reward=float(i)) for i in (0, 1)]
    strategy = SDPOFeedback(max_teacher_prompt_tokens=500)
    strategy.bind(tokenizer)
    strategy.teacher_prompts(samples)
    failed = samples[0]
    assert 480 < len(failed.teacher_prompt_ids) <= 500 and failed.teacher_info["cut"]
    decoded = tokenizer.decode(failed.teacher_prompt_ids)
    assert decoded.endswith(f"{DEFAULTS['instruction']}<|im_end|>\n<|im_start|>assistant\n")
