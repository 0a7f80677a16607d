import pytest
import torch
from tiny_models import CONFIGS, VOCABULARY, weights_on_disk
from transformers import AutoModelForCausalLM

from rlpost.policy.hf_map import MIXTRAL_NAMES, HFMap, padded_vocabulary

LAYER = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def megatron_names(kind: str, fused: bool = False) -> list[str]:
    layer = list(LAYER)
    if kind.startswith("qwen2"):
        layer.append("self_attention.linear_qkv.bias")
    if kind.startswith("qwen3"):
        layer += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    if "moe" in kind or kind == "mixtral":
        dense = [name for name in layer if name.startswith("mlp.")]
        experts = [name.replace("mlp.", f"mlp.experts.{e}.") for e in range(4) for name in dense]
        layer = [name for name in layer if name not in dense] + ["mlp.router.weight", *experts]
    if fused:
        layer = [FUSED_NORMS.get(name, name) for name in layer]
    names = [f"decoder.layers.{i}.{name}" for i in range(CONFIGS[kind]().num_hidden_layers) for name in layer]
    return ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight", *names]


def make(kind: str) -> tuple[HFMap, dict[str, torch.Tensor]]:
    config = CONFIGS[kind]()
    torch.manual_seed(0)
    weights = weights_on_disk(AutoModelForCausalLM.from_config(config))
    tensors = {name: torch.randn_like(t) for name, t in weights.items()}
    tied = config.tie_word_embeddings
    if tied:
        del tensors["lm_head.weight"]
    renames = MIXTRAL_NAMES if kind == "mixtral" else ()
    return HFMap(query_groups=4, heads_per_group=2, vocab_size=VOCABULARY, tied=tied, renames=renames), tensors


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_is_bit_exact_and_complete(kind, tp_size, fused):
    hf_map, tensors = make(kind)
    back = []
    for name in megatron_names(kind, fused):
        shards = [hf_map.from_hf(name, tensors.__getitem__, rank, tp_size) for rank in range(tp_size)]
        back += hf_map.to_hf(name, shards)
    assert sorted(name for name, _ in back) == sorted(tensors)  # each once: a tied head is not sent again
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)


def test_qkv_is_interleaved_by_query_group_and_cut_between_groups():
    hf_map, tensors = make("qwen3")
    q, k, v = (tensors[f"model.layers.1.self_attn.{p}_proj.weight"].view(-1, 16, 64) for p in "qkv")
    rows = [torch.cat([q[2 * g], q[2 * g + 1], k[g], v[g]]) for g in range(4)]
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(hf_map.from_hf(name, tensors.__getitem__), torch.cat(rows))
    assert torch.equal(hf_map.from_hf(name, tensors.__getitem__, 1, 2), torch.cat(rows[2:]))


def test_each_rank_has_its_slice_of_gate_over_its_slice_of_up():
    hf_map, tensors = make("llama")
    gate, up = (tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    shard = hf_map.from_hf("decoder.layers.0.mlp.linear_fc1.weight", tensors.__getitem__, 1, 2)
    assert torch.equal(shard, torch.cat([gate[48:], up[48:]]))


def test_row_parallel_weights_are_cut_by_columns():
    hf_map, tensors = make("llama")
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    shard = hf_map.from_hf("decoder.layers.0.mlp.linear_fc2.weight", tensors.__getitem__, 1, 2)
    assert torch.equal(shard, down[:, 48:])


def test_the_vocabulary_is_padded_with_zero_rows():
    hf_map, tensors = make("llama")
    last = hf_map.from_hf("output_layer.weight", tensors.__getitem__, 3, 4)
    assert padded_vocabulary(VOCABULARY, 4) == 104
    assert last.shape == (26, 64)
    assert torch.equal(last[:23], tensors["lm_head.weight"][78:])
    assert not last[23:].any()


def test_a_tied_head_of_its_own_stage_reads_the_embedding_and_is_not_sent():
    hf_map, tensors = make("llama-tied")
    head = hf_map.from_hf("output_layer.weight", tensors.__getitem__)
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
    assert hf_map.to_hf("output_layer.weight", [head]) == []


def test_unknown_parameters_and_impossible_cuts_are_named():
    hf_map, tensors = make("llama")
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.mlp\.gate\.weight"):
        hf_map.rule("decoder.layers.0.mlp.gate.weight")
    with pytest.raises(ValueError, match=r"gate_proj\.weight: dimension 0 is 96, not a multiple of parallel\.tensor=5"):
        hf_map.from_hf("decoder.layers.0.mlp.linear_fc1.weight", tensors.__getitem__, 0, 5)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_query_groups_are_padded_with_zeros_and_come_back_bit_exactly(tp_size):
    hf_map = HFMap(query_groups=3, heads_per_group=2, vocab_size=10, tied=True)
    head, hidden = 4, 8
    attention = "model.layers.0.self_attn."
    tensors = {f"{attention}{p}_proj.weight": torch.randn(n * head, hidden) for p, n in (("q", 6), ("k", 3), ("v", 3))}
    tensors[f"{attention}o_proj.weight"] = torch.randn(hidden, 6 * head)
    for name in ("linear_qkv", "linear_proj"):
        name = f"decoder.layers.0.self_attention.{name}.weight"
        shards = [hf_map.from_hf(name, tensors.__getitem__, rank, tp_size) for rank in range(tp_size)]
        assert len({shard.shape for shard in shards}) == 1
        assert not shards[-1].flatten(1)[-head:, -head:].any()
        for part, whole in hf_map.to_hf(name, shards):
            assert torch.equal(whole, tensors[part]), part
