import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlpost.data.reading import BadRows, read_rows
from rlpost.rewards import RewardResult
from rlpost.rewards.choice import Choice, named_letters, row_options
from rlpost.rewards.exact import Exact
from rlpost.rewards.judge import Judge, RewardError, build_judge, build_reward
from rlpost.types import Prompt, Sample

SCIKNOWEVAL = Path(__file__).parents[3] / "shared" / "data" / "sciknoweval"
QUESTION = "Which one?\n\nA: 0.8\nB: vitamin C\nC: a protein\nD: 1.4\nPlease reason step by step."


def sample(response, answer="A", question=QUESTION, number=0, group=0, finish="stop", **metadata):
    prompt = Prompt(group, [{"role": "user", "content": question}], [1], answer=answer, metadata=metadata)
    return Sample(prompt, group, number, response=response, finish_reason=finish)


def answered(text):
    return f"<reasoning>A or B?</reasoning>\n<answer>{text}</answer>"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("\nb\n", "B"),
        ("(B)", "B"),
        ("b.", "B"),
        ("A: 0.8", "A"),
        ("A:0.8", "A"),
        ("a) 0.8", "A"),
        ("**D**", "D"),
        (r"\boxed{\text{C}}", "C"),
        (r"$\boxed{C}$", "C"),
        (r"\textbf{B}", "B"),
        ("B: vitamin C", "B"),
        ("The answer is B.", "B"),
        ("the answer is b because of the mass", "B"),
        ("Option D", "D"),
        ("A\nThe mass is larger.", "A"),
        ("A is correct", "A"),
        ("B, as a protein folds", "B"),
        ("B B", "B"),
        ("C: a protein", "C"),
        ("not E but B", "B"),
        ("B: heated to 25 °C", "B"),
        # no letter
        ("", None),
        ("0.8", None),
        ("a protein", None),
        ("A protein that folds", None),
        ("it is a protein", None),
        ("The answer is a protein", None),
        ("E", None),
        ("AB", None),
        ("vitamins", None),
        # two letters
        ("A or B", ""),
        ("A, B", ""),
        ("A/B", ""),
        ("(A) (B)", ""),
        ("A: 0.8\nB: vitamin C", ""),
        ("A: B", ""),
        ("A: or B: ", ""),
        (r"\boxed{A} \boxed{B}", ""),
    ],
)
def test_choice_reads_the_letter(text, letter):
    result = Choice()(sample(answered(text), answer=letter or "A"))
    if letter:
        assert (result.score, result.format_ok, result.feedback) == (1.0, True, None)
        other = next(option for option in "ABCD" if option != letter)
        wrong = Choice()(sample(answered(text), answer=other))
        assert wrong.score == 0.0 and wrong.format_ok is True and wrong.feedback
    else:
        assert result.score == 0.0 and result.format_ok is False
        assert ("more than one" if letter == "" else "does not name") in result.feedback


def test_choice_takes_the_last_block_and_needs_one():
    assert Choice()(sample("<answer>B</answer> no: <ANSWER>A</ANSWER>")).score == 1.0
    assert Choice()(sample("<answer> open <answer>A</answer>")).score == 1.0
    for response in ("A", "<answer>A", "The answer is A", ""):
        result = Choice()(sample(response))
        assert (result.score, result.format_ok) == (0.0, False) and "<answer>" in result.feedback
    cut = Choice()(sample("Let me think", finish="length"))
    assert cut.format_ok is False and "cut off" in cut.feedback


def test_a_boxed_answer_counts_where_it_is_asked_for():
    response = r"So \boxed{\text{A}}"
    assert Choice()(sample(response)).format_ok is False
    assert Choice(boxed=True)(sample(response)).score == 1.0
    assert Choice()(sample(response, question=QUESTION + r" Put it in \boxed{}.")).score == 1.0
    assert Choice(boxed=False)(sample(response, question=QUESTION + r" Put it in \boxed{}.")).format_ok is False


def test_options_come_from_the_row():
    assert list(row_options(sample("", question="x\n\nA: 1\nB: 2\n"))) == ["A", "B"]
    assert row_options(sample("", question="Data\nC: 3\n\nA: x\n\nB: y\n\nC: z")) == {"A": "x", "B": "y", "C": "z"}
    assert row_options(sample("", question="x", options=["one", "two"])) == {"A": "one", "B": "two"}
    assert row_options(sample("", choices={"label": ["A", "B"], "text": ["1", "2"]})) == {"A": "1", "B": "2"}
    two = sample(answered("C"), question="x\n\nA: 1\nB: 2")
    assert Choice()(two).format_ok is False
    with pytest.raises(ValueError, match="the answer 'E' is none of"):
        Choice()(sample(answered("A"), answer="E"))
    assert Choice(options="ABCDE")(sample(answered("E"), answer="E", question="no lines")).score == 1.0


def test_wrong_answer_text_does_not_give_the_answer_away():
    assert Choice()(sample(answered("B"))).feedback == "Option B is not the right answer."
    two = Choice()(sample(answered("B"), question="x\n\nA: 1\nB: 2"))
    assert two.feedback == "The answer is wrong."


@pytest.mark.parametrize("domain", ["biology", "chemistry", "material", "physics"])
def test_real_rows_score_each_of_their_options(domain):
    path = SCIKNOWEVAL / domain / "train.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    for row in read_rows(str(path), BadRows())[:300]:
        one = sample("", answer=row.values["answer"], question=row.values["prompt"])
        options = row_options(one)
        assert list(options) in (list("ABCD"), list("AB")), row.where
        for label, text in options.items():
            for answer in (label, f"{label}: {text}"):
                assert named_letters(answer, options) == [label], (row.where, answer)


@pytest.mark.parametrize(
    "text", ["\n" * 20_000 + "?", "(" * 5_000, "\\boxed{" * 2_000, "A " * 5_000, "<answer>" * 2_000]
)
def test_no_response_takes_long_to_read(text):
    begun = time.monotonic()
    Choice(boxed=True)(sample(answered(text)))
    Choice(boxed=True)(sample(text))
    assert time.monotonic() - begun < 5


def test_nothing_to_score():
    assert Judge(length).score([]) == {"reward/errors": 0.0, "reward/timeouts": 0.0}


def test_exact():
    assert Exact()(sample(" 42 \n", answer=42)).score == 1.0
    assert Exact()(sample("Paris", answer="paris")).score == 0.0
    assert Exact(ignore_case=True)(sample("Paris", answer="paris")).score == 1.0
    tagged = Exact(tag="answer")
    assert tagged(sample("<answer>1</answer><answer> 2 </answer>", answer="2")).score == 1.0
    missing = tagged(sample("2", answer="2"))
    assert (missing.score, missing.format_ok) == (0.0, False) and "<answer>" in missing.feedback
    assert "7" not in Exact()(sample("8", answer="7")).feedback
    with pytest.raises(ValueError, match="no answer to compare with"):
        Exact()(sample("x", answer=None))


def length(sample):
    return len(sample.response)


async def slow_length(sample, scale=1):
    await asyncio.sleep(0)
    return RewardResult(scale * len(sample.response), feedback="length said", format_ok=True, details={"n": 1})


def ranks(samples):
    order = sorted(samples, key=lambda s: len(s.response))
    return [order.index(s) for s in samples]


def group_of(*responses, group=0):
    return [sample(text, number=i, group=group) for i, text in enumerate(responses)]


def test_every_form_of_reward():
    for fn, expected in (
        (length, 3),
        (slow_length, 3),
        (lambda s: True, 1),
        (lambda s: {"score": 0.5, "feedback": "f"}, 0.5),
        (lambda s: 0.0, 0),
    ):
        (one,) = group_of("abc")
        assert Judge(fn).score([one]) == {"reward/errors": 0.0, "reward/timeouts": 0.0}
        assert one.reward == expected and isinstance(one.reward, float)


def test_the_group_form_sees_one_whole_group_at_a_time():
    samples = group_of("aaa", "a", "aa", group=1) + group_of("bb", "b", group=2)
    Judge(ranks).score([samples[i] for i in (3, 0, 4, 2, 1)])
    assert [s.reward for s in samples] == [2, 0, 1, 1, 0]
    Judge([{"fn": lambda these: [1.0] * len(these), "name": "ones", "group": True}]).score(samples)
    assert {s.reward for s in samples} == {1.0}


def test_several_rewards_are_weighted_and_logged_by_name():
    (one,) = group_of("<answer>B</answer>")
    judge = Judge([{"name": "choice", "weight": 2}, {"fn": slow_length, "weight": 0.5, "scale": 2, "name": "long"}])
    judge.score([one])
    assert one.reward_details == {"choice": 0.0, "long": 36.0, "long/n": 1.0}
    assert one.reward == 18.0 and one.format_ok is True
    assert one.feedback == "Option B is not the right answer.\nlength said"


def raises(sample):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (raises, "KeyError"),
        (lambda s: None, "returned None"),
        (lambda s: float("nan"), "finite"),
        (lambda s: "high", "returned 'high'"),
        (lambda s: {"score": 1, "text": "x"}, "no argument 'text'"),
        (lambda samples: [1.0], "a list of 2 results"),
    ],
)
def test_a_reward_that_fails_is_counted_or_raises(fn, reason, caplog):
    samples = group_of("a", "b")
    assert Judge(fn, on_error=-1.0).score(samples)["reward/errors"] == 2.0
    assert [s.reward for s in samples] == [-1.0, -1.0] and reason in caplog.text
    assert all(value == 1.0 for s in samples for name, value in s.reward_details.items() if name.endswith("/error"))
    with pytest.raises(RewardError, match="on prompt 0, sample 0"):
        Judge(fn, on_error="raise").score(samples)


def test_a_reward_that_hangs_is_left_behind_and_the_others_score():
    release = threading.Event()

    def hangs_on_a(sample):
        if sample.response == "a":
            release.wait()
        return 1.0

    async def async_hang(sample):
        await asyncio.Event().wait()

    samples = group_of("a", "b", "a", "c")
    begun = time.monotonic()
    found = Judge(hangs_on_a, timeout=0.2, workers=2).score(samples)
    assert time.monotonic() - begun < 5
    assert found == {"reward/errors": 0.0, "reward/timeouts": 2.0}
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0, 1.0]
    release.set()
    assert Judge(async_hang, timeout=0.1).score(samples[:1])["reward/timeouts"] == 1.0
    with pytest.raises(RewardError, match="no result within 0.1 s"):
        Judge(async_hang, timeout=0.1, on_error="raise").score(samples[:1])


def test_a_few_threads_serve_all_calls_and_one_that_hangs_is_replaced():
    threads, release = set(), threading.Event()

    def reward(sample):
        threads.add(threading.current_thread())
        if sample.response == "hang":
            release.wait()
        return 1.0

    samples = group_of("hang", *["fine"] * 200)
    assert Judge(reward, timeout=0.2, workers=1).score(samples)["reward/timeouts"] == 1.0
    assert [s.reward for s in samples] == [0.0] + [1.0] * 200
    assert len(threads) == 2
    release.set()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_the_process_ends_though_a_reward_still_hangs():
    code = (
        "import threading\n"
        "from rlpost.rewards.judge import Judge\n"
        "from rlpost.types import Prompt, Sample\n"
        "judge = Judge(lambda sample: threading.Event().wait(), timeout=0.1)\n"
        "print(judge.score([Sample(Prompt(0, [], [1]), 0, 0)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "'reward/timeouts': 1.0" in done.stdout, done.stderr


def test_a_score_of_zero_is_a_reward_and_no_error():
    (one,) = group_of("abc")
    assert Judge(lambda s: 0.0, on_error=5.0).score([one])["reward/errors"] == 0.0
    assert one.reward == 0.0


def test_build_reward_from_a_configuration():
    (choice,) = build_reward({"name": "choice", "boxed": True})
    assert choice.name == "choice" and choice.fn.boxed is True
    (target,) = build_reward({"_target_": "rlpost.rewards.exact.Exact", "tag": "x"})
    assert target.name == "Exact" and target.fn.tag == "x"
    (function,) = build_reward({"_target_": f"{__name__}.slow_length", "scale": 3, "weight": 0.5})
    assert (function.name, function.weight) == ("slow_length", 0.5)
    assert [r.name for r in build_reward(["choice", f"{__name__}.length"])] == ["choice", "length"]
    assert build_reward(build_reward("choice"))[0].name == "choice"
    judge = build_judge({"rewards": ["choice"], "timeout": 5, "on_error": "raise"})
    assert (judge.timeout, judge.on_error) == (5, "raise")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"name": "choise"}, ValueError, "reward.name=choise does not exist. Did you mean 'choice'"),
        ({"name": "choice", "box": 1}, TypeError, "no argument 'box'.*Accepted are: options, boxed"),
        ({"_target_": f"{__name__}.slow_length", "factor": 1}, TypeError, "no argument 'factor'.*Accepted are: scale"),
        ({"_target_": "nowhere.fn"}, ImportError, "'nowhere.fn' cannot be imported"),
        ({"boxed": True}, ValueError, "neither name"),
        ([], ValueError, "empty list"),
        (["choice", "choice"], ValueError, "two are called 'choice'"),
        (3, TypeError, "neither a function nor a name"),
        ({"name": "choice", "weight": "x"}, ValueError, "reward.weight=x"),
    ],
)
def test_mistakes_in_a_reward_are_named(spec, error, message):
    with pytest.raises(error, match=message):
        build_reward(spec)


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"timeout": 0}, {"workers": 0}])
def test_mistakes_in_the_judges_options(options):
    with pytest.raises(ValueError, match="reward"):
        Judge(length, **options)
