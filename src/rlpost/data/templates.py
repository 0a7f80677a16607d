"""Chat templates: messages to token ids, for generation and for whole conversations; and ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jinja2

from rlpost.types import Message, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **kwargs: Any) -> list[int]:
    """Token ids of messages with the generation prompt, exactly one BOS where the tokenizer adds one.

    kwargs go to the template (enable_thinking=…; chat_template=… replaces the tokenizer's own).
    Raises ValueError where there is no chat template or the template refuses the messages.
    """
    return render_batch(tokenizer, [messages], **kwargs)[0]


def render_batch(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]], **kwargs: Any
) -> list[list[int]]:
    if not conversations:
        return []
    texts = [render_text(tokenizer, messages, **kwargs) for messages in conversations]
    batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [_one_bos(tokenizer, list(ids)) for ids in batch]


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    if tokenizer.chat_template is None and kwargs.get("chat_template") is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: "
            "give one as data.chat_template_kwargs.chat_template"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except jinja2.TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses messages with roles {roles}: {error}"
        ) from error
    return str(text)


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A template may write BOS, the tokenizer may add it, or both, or neither (Qwen): the sequence begins with one
    where either does. Some tokenizers (SmolLM2) use the same token at every turn: only leading ones are counted."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    leading = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    if leading == 0 and tokenizer("")["input_ids"][:1] == [bos]:
        return [bos, *ids]
    return ids[leading - 1 :] if leading > 1 else ids


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **kwargs: Any
) -> tuple[list[int], list[int], list[int]]:
    """A whole conversation as (prompt ids, response ids, loss mask of the response ids).

    The prompt ends where the first assistant turn begins; the mask is 1 on every assistant turn up to and with its
    end-of-turn token. prompt + response are exactly the ids of the whole render.
    Raises ValueError where there is no assistant turn, where the template rewrites what came before it, or ends
    assistant turns with no token (such a model would never learn to stop).
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1 or turns[0] == 0:
        raise ValueError("a conversation to learn from begins with another turn and ends with an assistant turn")
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no offsets (it is not a fast one)")
    whole = render_text(tokenizer, messages, add_generation_prompt=False, **kwargs)
    begins = []
    for turn in turns:
        head = render_text(tokenizer, messages[:turn], **kwargs)
        if not whole.startswith(head):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} renders the turns before message {turn} differently "
                "in the whole conversation: split it into conversations of one assistant turn"
            )
        begins.append(len(head))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, ends = list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
    mask = _assistant_mask(ids, ends, begins, _end_of_turn(tokenizer, messages[: turns[0]], kwargs))
    full = _one_bos(tokenizer, ids)
    shift = len(full) - len(ids)  # BOS added (1) or doubled ones removed (negative)
    first = next(i for i, end in enumerate(ends) if end > begins[0])
    return full[: first + shift], full[first + shift :], mask[first:]


def _assistant_mask(ids: list[int], ends: list[int], begins: list[int], end_of_turn: int) -> list[int]:
    mask = [0] * len(ids)
    for begin in begins:
        token = next(i for i, end in enumerate(ends) if end > begin)
        while token < len(ids):
            mask[token] = 1
            if ids[token] == end_of_turn:
                break
            token += 1
    return mask


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], kwargs: dict[str, Any]) -> int:
    """The id that the template writes right after an assistant's words."""
    probe = "probe"
    text = render_text(
        tokenizer, [*before, {"role": "assistant", "content": probe}], add_generation_prompt=False, **kwargs
    )
    tail = text[text.rindex(probe) + len(probe) :]
    special = special_ids(tokenizer)
    token = next((i for i in tokenizer(tail, add_special_tokens=False)["input_ids"] if i in special), None)
    if token is None:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} ends an assistant turn with no special token: "
            "the model would never learn to stop"
        )
    return token


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)


def without_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text without anything that would tokenise to a special token (a turn marker in a demonstration would end
    the user's turn)."""
    names = sorted(tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))), key=len, reverse=True)
    before = None
    while before != text:  # taking one out can put another together
        before = text
        for name in names:
            text = text.replace(name, "")
    return text


def decode_all(tokenizer: Any, responses: Sequence[list[int]]) -> list[str]:
    """Each as `tokenizer.decode(ids, skip_special_tokens=True)` has it; where that is no more than the Rust tokenizer's
    decoding, all of them on all cores (one by one, 2 M tokens of a step take a second)."""
    if _decodes_plainly(tokenizer):
        return tokenizer.backend_tokenizer.decode_batch(responses, skip_special_tokens=True)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]


def _decodes_plainly(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    if type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return False
    # Transformers cleans spaces up, but not those of a BPE tokenizer, unless it is made to.
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return not tokenizer.clean_up_tokenization_spaces or (is_bpe and not forced)


def with_answer_block(prompt: str, row: Mapping[str, Any]) -> list[Message]:
    """A `data.transform` for SFT: the question, and its answer in the block where `reward=choice` looks for it."""
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": f"<answer>\n{row['answer']}\n</answer>"},
    ]


def sft_samples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], first_group_id: int, **kwargs: Any
) -> list[Sample]:
    """One sample for each prompt whose messages hold the whole conversation (`PromptDataset(…, responses=True)`)."""
    conversations = [conversation(tokenizer, prompt.messages, **kwargs) for prompt in prompts]
    texts = decode_all(tokenizer, [response_ids for _, response_ids, _ in conversations])
    return [
        Sample(
            replace(prompt, ids=prompt_ids),
            group_id=first_group_id + number,
            index=0,
            response_ids=response_ids,
            response=text,
            loss_mask=mask,
        )
        for number, (prompt, (prompt_ids, response_ids, mask), text) in enumerate(zip(prompts, conversations, texts))
    ]
