"""Megatron's configuration of a Hugging Face model under a layout of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig

from rlpost.parallel import expert_tensor, layers_of_stages, virtual_stages
from rlpost.policy.hf_config import head_dim
from rlpost.policy.hf_map import padded_groups

if TYPE_CHECKING:
    from rlpost.config.schema import ParallelConfig


def _check_cuts(hf: PreTrainedConfig, parallel: ParallelConfig) -> None:
    if hf.intermediate_size % parallel.tensor:
        raise ValueError(
            f"parallel.tensor={parallel.tensor} does not divide the model's intermediate_size={hf.intermediate_size}"
        )
    experts = getattr(hf, "num_local_experts", None)
    if experts is None and parallel.expert > 1:
        raise ValueError(f"parallel.expert={parallel.expert}: the model ({hf.model_type}) has no experts")
    if experts is not None and experts % parallel.expert:
        raise ValueError(f"parallel.expert={parallel.expert} does not divide the model's {experts} experts")
    width = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
    if expert_tensor(parallel) > 1 and (experts is None or width % expert_tensor(parallel)):
        what = "has no experts" if experts is None else f"has experts of width {width}, which it does not divide"
        raise ValueError(f"parallel.expert_tensor={parallel.expert_tensor}: the model ({hf.model_type}) {what}")
    if experts is not None and parallel.tensor > 1 and not parallel.sequence:
        raise ValueError(f"experts with parallel.tensor={parallel.tensor} need parallel.sequence=true")
    virtual = virtual_stages(parallel)
    if virtual and hf.num_hidden_layers % (parallel.pipeline * virtual):
        raise ValueError(
            f"parallel.pipeline={parallel.pipeline} × parallel.virtual_pipeline={virtual} = "
            f"{parallel.pipeline * virtual} does not divide the model's num_hidden_layers={hf.num_hidden_layers}"
        )


def transformer_config(
    hf: PreTrainedConfig, dtype: torch.dtype, parallel: ParallelConfig, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's configuration of the model. Fusions that need CUDA are on only there."""
    _check_cuts(hf, parallel)
    on_cuda = torch.cuda.is_available()
    groups = padded_groups(hf.num_key_value_heads, parallel.tensor)
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=groups * (hf.num_attention_heads // hf.num_key_value_heads),
        num_query_groups=groups,
        kv_channels=head_dim(hf),
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        **_uneven_stages(hf.num_hidden_layers, parallel.pipeline),
        # Stages tell each other the length of every micro-batch, but not with virtual stages: Megatron's exchange of
        # lengths then mixes up two messages of one peer, or waits for ever where there are few micro-batches.
        variable_seq_lengths=parallel.pipeline > 1 and virtual_stages(parallel) is None,
        moe_token_dispatcher_type="alltoall",  # the one that takes varying lengths
        **_expert_options(hf, parallel),
        **_recompute_options(recompute, experts=getattr(hf, "num_local_experts", None) is not None),
        # Batched sends of a stage with two chunks to a peer that is both its neighbours get mixed up, silently.
        batch_p2p_comm=virtual_stages(parallel) is None,
        overlap_p2p_comm=False,
        use_cpu_initialization=not on_cuda,
        perform_initialization=False,  # every parameter is read from the checkpoint
        bias_activation_fusion=on_cuda,
        use_te_activation_func=not on_cuda,  # Megatron's name for "the spec brings the activation": layers.SwiGLU
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # The weights of the tokens hold the denominator of the whole step, so gradients are plainly summed: over
        # micro-batches by this switch (no 1/n), over ranks by `_finalize`, which withholds the token count.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
    )


def _uneven_stages(layers: int, stages: int) -> dict[str, int]:
    counts = layers_of_stages(layers, stages)
    if len(set(counts)) == 1:
        return {}
    return {"num_layers_in_first_pipeline_stage": counts[0], "num_layers_in_last_pipeline_stage": counts[-1]}


def _expert_options(hf: PreTrainedConfig, parallel: ParallelConfig) -> dict[str, Any]:
    if getattr(hf, "num_local_experts", None) is None:
        return {}
    return {
        "num_moe_experts": hf.num_local_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": expert_tensor(parallel),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        # The chosen experts' probabilities add up to 1: the softmax may as well be over their logits alone.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
    }


def _recompute_options(recompute: str, experts: bool) -> dict[str, Any]:
    """What the backward computes again instead of keeping it. `selective`: the attention itself and the MLP or the
    experts of each layer; `full`: all of a layer but its input."""
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": recompute, "recompute_modules": ["core_attn", "moe" if experts else "mlp"]}
    if recompute == "full":
        return {"recompute_granularity": recompute, "recompute_method": "uniform", "recompute_num_layers": 1}
    raise ValueError(f"train.recompute={recompute!r}: allowed are none, selective, full")


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)
