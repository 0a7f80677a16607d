"""The quickstart task: inflect words whose declension nobody has told the model.

    prompt    decline : lamp river stone horn wing cloud
    answer    lampo riverum stoneis hornae wingo cloudis

Every word has six forms, one for each declension (`first` -ae, `second` -um, `third` -is, ...). Which declension a word
belongs to is the *hidden rule*: a fixed secret of the reinforcement learning task, said in no student prompt. The
reward is 1 only if all six forms are right, so guessing scores 6⁻⁶ = 0.002 %.

A wrong answer is told the declension of each word that was wrong ("third fine fine first second fine"): a rule, never
a form. To profit from it one must know the forms, and that the i-th remark is about the i-th word: that is what
the warm start teaches, with a new random rule in every row, so that it says nothing about the hidden one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.rewards import RewardResult

if TYPE_CHECKING:
    from rlpost.types import Sample

WORDS = ("lamp", "river", "stone", "horn", "wing", "cloud", "bread", "sail")
DECLENSIONS = ("first", "second", "third", "fourth", "fifth", "sixth")
ENDINGS = ("ae", "um", "is", "o", "us", "ix")
LENGTH = 6  # words of a question

QUESTION = "decline : {words}"
TEACHER_PROMPT = "{question}\n\n{demonstration}\n\n{feedback}\n\n{instruction}"  # empty blocks are dropped
# Both blocks have as many words before their six, so that the six lie at the same distance from the answer.
DEMONSTRATION = "right answer : {demonstration}"
FEEDBACK = "wrong answer : {feedback}"
INSTRUCTION = "answer again"
FORMAT_FEEDBACK = "say one form of each word"  # feedback on an answer that is not six forms of the six words
FINE = "fine"
# The warm start's kinds of rows, and the largest share of words that a feedback row calls right. Plain and `fine` words
# cannot be known, so they are noise to it: few of them, or the lookup is learnt three times as slowly.
MIX = {"plain": 0.1, "feedback": 0.45, "format": 0.05, "demonstration": 0.4}
MAX_FINE = 0.3
ROWS = {"sft": 25600, "train": 2048, "eval": 256}

FORMS = {(w, d): w + e for w in WORDS for d, e in zip(DECLENSIONS, ENDINGS, strict=True)}
PARSED = {form: key for key, form in FORMS.items()}  # form -> (word, declension)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

MODEL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # prompts are short: faster rotations learn sooner
    tie_word_embeddings=False,
)


def vocabulary() -> list[str]:
    text = (
        QUESTION,
        DEMONSTRATION,
        FEEDBACK,
        INSTRUCTION,
        FORMAT_FEEDBACK,
        FINE,
        *DECLENSIONS,
        *WORDS,
        *FORMS.values(),
    )
    words = [w for t in text for w in t.split() if "{" not in w]
    return [*SPECIAL, *dict.fromkeys(words)]


def make_tokenizer():
    """A word-level tokenizer with a chat template; decoding joins words by one space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary())}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config():
    from transformers import Qwen3Config

    v = vocabulary()
    return Qwen3Config(vocab_size=len(v), pad_token_id=0, eos_token_id=v.index("<|end|>"), bos_token_id=None, **MODEL)


def hidden_rule(seed: int = 0) -> dict[str, str]:
    """word -> declension, each declension used."""
    rng = random.Random(f"rule-{seed}")
    classes = [DECLENSIONS[i % len(DECLENSIONS)] for i in range(len(WORDS))]
    rng.shuffle(classes)
    return dict(zip(WORDS, classes, strict=True))


def teacher_prompt(question: str, demonstration: str = "", feedback: str = "") -> str:
    """The user message of a teacher prompt (in the library: SDPOFeedback with the templates above)."""
    text = TEACHER_PROMPT.format(
        question=question,
        demonstration=DEMONSTRATION.format(demonstration=demonstration) if demonstration else "",
        feedback=FEEDBACK.format(feedback=feedback) if feedback else "",
        instruction=INSTRUCTION,
    )
    return "\n\n".join(block for block in text.split("\n\n") if block)


def make_rows(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """`train`, `eval`: questions under the hidden rule. `sft`: the warm start. No eval question is in the others."""
    if split == "sft":
        rng = random.Random(f"sft-{seed}")
        return [sft_row(rng) for _ in range(n)]
    if split not in ("train", "eval"):
        raise ValueError(f"split must be sft, train or eval, got {split!r}")
    rng, rule, rows = random.Random(f"{split}-{seed}"), hidden_rule(seed), []
    while len(rows) < n:
        words = rng.sample(WORDS, LENGTH)
        if is_held_out(words) == (split == "eval"):
            rows.append(
                {
                    "prompt": QUESTION.format(words=" ".join(words)),
                    "answer": " ".join(FORMS[w, rule[w]] for w in words),
                    "source": source_of(words),
                }
            )
    return rows


def source_of(words: list[str]) -> str:
    """Two kinds of questions, by their first word, so that each may have a teacher of its own (recipe tiny_mopd)."""
    return "early" if WORDS.index(words[0]) < len(WORDS) // 2 else "late"


def is_held_out(words: list[str]) -> bool:
    """A question belongs to one side by its content, whatever the sizes: one in eight is kept for evaluation."""
    return random.Random(" ".join(words)).randrange(8) == 0


def sft_row(rng: random.Random) -> dict[str, str]:
    """A plain question, or a teacher prompt, answered under a rule drawn for this row alone."""
    words = rng.sample(WORDS, LENGTH)
    while is_held_out(words):
        words = rng.sample(WORDS, LENGTH)
    classes = [rng.choice(DECLENSIONS) for _ in words]
    question = QUESTION.format(words=" ".join(words))
    answer = " ".join(FORMS[w, c] for w, c in zip(words, classes, strict=True))
    kind = rng.choices(list(MIX), list(MIX.values()))[0]
    if kind == "feedback":
        fine = rng.random() * MAX_FINE  # the share of words that were right
        remarks = [FINE if rng.random() < fine else c for c in classes]
        question = teacher_prompt(question, feedback=" ".join(remarks))
    elif kind == "format":
        question = teacher_prompt(question, feedback=FORMAT_FEEDBACK)
    elif kind == "demonstration":
        question = teacher_prompt(question, demonstration=answer)
    return {"prompt": question, "answer": answer}


def judge(response: str, answer: str) -> tuple[float, str | None]:
    """Score and feedback. The feedback names declensions, never a form, so the answer is not in it."""
    said, expected = response.split(), [PARSED[form] for form in answer.split()]
    if [PARSED.get(form, (None,))[0] for form in said] != [word for word, _ in expected]:
        return 0.0, FORMAT_FEEDBACK
    remarks = [FINE if PARSED[form] == right else right[1] for form, right in zip(said, expected, strict=True)]
    return (1.0, None) if set(remarks) == {FINE} else (0.0, " ".join(remarks))


def reward(sample: Sample) -> RewardResult:
    """The reward function of the recipes."""
    score, feedback = judge(sample.response, sample.prompt.answer)
    return RewardResult(score, feedback, format_ok=feedback != FORMAT_FEEDBACK)


def share_reward(sample: Sample) -> float:
    """The share of right forms, in their places: for policy gradients, which the whole answer alone teaches nothing."""
    said, expected = sample.response.split(), sample.prompt.answer.split()
    return sum(form == right for form, right in zip(said, expected)) / max(len(said), len(expected))


def write(folder: Path, seed: int) -> None:
    """The model with random weights, its tokenizer, and the rows: `model/` and `data/{sft,train,eval}.jsonl`."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    Qwen3ForCausalLM(model_config()).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        rows = make_rows(split, count, seed)
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
