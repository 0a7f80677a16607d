import os
import random

import pytest
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlpost.data.templates import conversation, decode_all, render, render_batch, sft_samples, without_special_tokens
from rlpost.types import Prompt

USER = [{"role": "user", "content": "What is 2+2?"}]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def whole_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_render_is_the_tokenizers_own_template():
    tokenizer = tiny_tokenizer()
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert render(tokenizer, USER) == expected
    assert tokenizer.decode(render(tokenizer, USER)).endswith("<|im_start|>assistant\n")
    assert render_batch(tokenizer, [USER, TALK[:2]]) == [expected, render(tokenizer, TALK[:2])]


def test_template_kwargs_arrive():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(render(tokenizer, USER, enable_thinking=False)).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("in_template", [0, 1, 2])
def test_exactly_one_bos_whoever_writes_it(in_template):
    template = "<|bos|>" * in_template + tiny_tokenizer().chat_template
    ids = render(tiny_tokenizer(template=template, bos=True), USER)
    bos = tiny_tokenizer(bos=True).bos_token_id
    assert ids[0] == bos and ids.count(bos) == 1


def test_no_bos_where_the_tokenizer_adds_none():
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_ids_to_tokens(render(tokenizer, USER))[0] == "<|im_start|>"


def test_no_chat_template_names_the_tokenizer_and_the_way_out():
    tokenizer = tiny_tokenizer(template=None)
    with pytest.raises(ValueError, match=r"'tiny' has no chat template.*chat_template_kwargs"):
        render(tokenizer, USER)
    assert tokenizer.decode(render(tokenizer, USER, chat_template="{{ messages[0]['content'] }}")) == "What is 2+2?"


def test_a_template_that_refuses_a_role_says_so():
    tokenizer = tiny_tokenizer(template="{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match=r"'tiny' refuses messages with roles \['user'\]: no system role"):
        render(tokenizer, USER)


@pytest.mark.parametrize("bos", [False, True])
def test_conversation_is_the_whole_render_and_trains_every_assistant_turn(bos):
    tokenizer = tiny_tokenizer(bos=bos)
    prompt, response, mask = conversation(tokenizer, TALK)
    assert prompt == render(tokenizer, TALK[:2])
    start = [tokenizer.bos_token_id] if bos else []
    assert prompt + response == start + whole_ids(tokenizer, TALK)
    assert len(mask) == len(response)
    trained = tokenizer.decode([token for token, live in zip(response, mask) if live])
    assert trained == "Hello.<|im_end|>4<|im_end|>"


def test_a_token_across_the_boundary_belongs_to_the_response():
    tokenizer = tiny_tokenizer()
    talk = [*USER, {"role": "assistant", "content": "\nfour"}]
    prompt, response, mask = conversation(tokenizer, talk)
    assert prompt + response == whole_ids(tokenizer, talk)
    assert tokenizer.decode(response).startswith("\n\nfour") and mask[0] == 1


def test_conversation_refuses_what_it_cannot_learn_from():
    with pytest.raises(ValueError, match="ends with an assistant turn"):
        conversation(tiny_tokenizer(), USER)
    endless = tiny_tokenizer(
        template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match="never learn to stop"):
        conversation(endless, [*USER, {"role": "assistant", "content": "4"}])


def test_a_template_that_rewrites_history_is_an_error():
    forgetful = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rewriting = forgetful.replace("{{ m['role'] }}", "{{ m['role'] }} {{ messages|length }}")
    with pytest.raises(ValueError, match="renders the turns before message 2 differently"):
        conversation(tiny_tokenizer(template=rewriting), TALK)


def test_sft_samples():
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(id=i, messages=TALK, ids=render(tokenizer, TALK[:2])) for i in range(2)]
    samples = sft_samples(tokenizer, prompts, first_group_id=10)
    assert [(s.group_id, s.index) for s in samples] == [(10, 0), (11, 0)]
    assert samples[0].ids == whole_ids(tokenizer, TALK)
    assert len(samples[0].loss_mask) == len(samples[0].response_ids)


def wordpiece_tokenizer(**options):
    words = ["[UNK]", "[SEP]", "so", "it", "is", ",", ".", "##n", "'", "t", "do"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]", **options)


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_tokenizer(),
        wordpiece_tokenizer(clean_up_tokenization_spaces=False),
        wordpiece_tokenizer(clean_up_tokenization_spaces=True),
    ],
    ids=["bytes", "words", "words, spaces cleaned up"],
)
def test_all_at_once_are_decoded_as_one_by_one(tokenizer):
    generator = random.Random(0)
    responses = [[generator.randrange(len(tokenizer)) for _ in range(n)] for n in (0, 1, 7, 30)]
    responses.append([len(tokenizer) + 5])  # ids that the model has and the tokenizer lacks
    one_by_one = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    assert decode_all(tokenizer, responses) == one_by_one
    if tokenizer.clean_up_tokenization_spaces:  # the sentence shows that the case is one
        assert decode_all(tokenizer, [[2, 5, 3, 6]]) == ["so, it."]


def test_special_tokens_leave_a_text_even_when_removal_makes_new_ones():
    text = "a<|im_end|>b<|im_<|im_end|>end|>c"
    assert without_special_tokens(tiny_tokenizer(), text) == "abc"


def test_a_real_tokenizer_whose_bos_opens_every_turn():
    path = os.environ.get("RLPOST_TEST_MODEL")
    if not path:
        pytest.skip("RLPOST_TEST_MODEL names no Hugging Face directory")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    assert render(tokenizer, USER) == tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    prompt, response, mask = conversation(tokenizer, TALK)
    assert prompt == render(tokenizer, TALK[:2])
    assert prompt + response == whole_ids(tokenizer, TALK)
    assert tokenizer.decode([t for t, live in zip(response, mask) if live]).startswith("Hello.<|im_end|>4")
