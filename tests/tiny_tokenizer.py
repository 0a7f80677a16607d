"""A byte-level tokenizer of 260 or so tokens with a chat template, made on the spot."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Qwen's markers; the two line feeds are one token, so that texts can merge across a boundary.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_tokenizer(*, template: str | None = TEMPLATE, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte. bos: the tokenizer itself puts <|bos|> before a text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|bos|>" if bos else None
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "tiny"
    return tokenizer
