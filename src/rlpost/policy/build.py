"""From a Hugging Face directory to a Megatron model: configuration, layers, data-parallel wrapper, optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlpost.config.checks import against_compiled
from rlpost.observe.logs import NOTICE
from rlpost.parallel import virtual_stages
from rlpost.policy.attention import PackedAttention, PackedSequences
from rlpost.policy.compiled import CompiledLayer
from rlpost.policy.hf_config import DTYPES, make_map
from rlpost.policy.hf_map import is_expert, padded_vocabulary
from rlpost.policy.layers import RMSNorm, SwiGLU
from rlpost.policy.megatron_config import transformer_config

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from torch.distributed import ProcessGroup

    from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
    from rlpost.policy.tokens import LocalTokens

log = logging.getLogger(__name__)

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # without Transformer Engine, Megatron's router asks for a name that it lacks


def layers_of(impl: str, config: TransformerConfig, overlap: bool) -> str:
    """Whose layers `model.impl` means here: local, compiled or transformer_engine. `auto` on CUDA: compiled ones where
    they can be, else Transformer Engine's where they can be imported.

    Raises ValueError for layers that cannot be had, with the reason.
    """
    if impl in ("auto", "compiled") and (impl == "compiled" or torch.cuda.is_available()):
        experts = config.num_moe_experts is not None
        against = against_compiled(config.tensor_model_parallel_size, experts, config.recompute_granularity, overlap)
        if against is None:
            return "compiled"
        if impl == "compiled":
            raise ValueError(f"model.impl=compiled is not possible with {against}; use auto")
    return "transformer_engine" if uses_transformer_engine(impl) else "local"


def uses_transformer_engine(impl: str) -> bool:
    """Whether `model.impl` means Transformer Engine's layers here: `auto` does where they can be imported.

    Raises ValueError for `transformer_engine` where they cannot.
    """
    if impl == "local" or (impl == "auto" and not torch.cuda.is_available()):
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library that it is linked to is missing
        if impl == "auto":
            log.log(NOTICE, "model.impl=auto: local layers, as Transformer Engine cannot be imported (%s)", error)
            return False
        raise ValueError(f"model.impl={impl}: Transformer Engine cannot be imported ({error}); use local") from error
    if not torch.cuda.is_available():
        raise ValueError(f"model.impl={impl} needs CUDA; use local")
    return True


def _local_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """(a layer of Megatron's own linear modules, the final norm)."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    mlp = parts.mlp if config.num_moe_experts is None else parts.mlp.submodules.experts
    mlp.submodules.activation_func = SwiGLU
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def _fused_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """The same of Transformer Engine's modules, whose linear layers hold the norm before them, and whose experts are
    one grouped matrix product. The attention is ours, as it knows packing and context parallelism."""
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.num_moe_experts is not None,
        qk_layernorm=config.qk_layernorm,
    )
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer, TENorm


class PackedGPT(GPTModel):
    """Megatron's GPT over packed sequences; gives the hidden states after the final norm, not logits.

    Of a pipeline it is one chunk of the layers: the one of this rank, or one of several (`chunk` counts them).
    Rotary angles are Transformers' own (all of its rope types), computed once per micro-batch. value_head: one number
    for each position (`value_head`, fp32) in the place of the vocabulary.
    """

    def __init__(
        self,
        hf: PreTrainedConfig,
        config: TransformerConfig,
        chunk: int | None = None,
        *,
        impl: str = "local",
        value_head: bool = False,
    ) -> None:
        layer, final_norm = _fused_layer(config) if impl == "transformer_engine" else _local_layer(config)
        if impl == "compiled":
            layer.module = CompiledLayer
        layers = get_num_layers_to_build(config, vp_stage=chunk)
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules([layer] * layers, layer_norm=final_norm),
            vocab_size=padded_vocabulary(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not value_head,
            position_embedding_type="none",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            vp_stage=chunk,
        )
        self.rope = LlamaRotaryEmbedding(hf)
        if value_head and self.post_process:
            del self.output_layer
            # Its numbers are read or made with all others; torch's own would advance this stage's random state alone.
            where = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
            self.value_head = torch.nn.utils.skip_init(
                torch.nn.Linear, hf.hidden_size, 1, device=where, dtype=torch.float32
            )

    def forward_packed(self, tokens: LocalTokens, context_group: ProcessGroup | None = None) -> Tensor:
        """Hidden states [T, 1, H]; with sequence parallelism this rank's part [T / TP, 1, H]."""
        positions = tokens.position_ids_T
        like = torch.empty((), dtype=self.config.params_dtype, device=positions.device)
        cos, sin = self.rope(like, positions.unsqueeze(0))
        half = cos.shape[-1] // 2  # both halves of a head turn by the same angles
        cos_TD, sin_TD = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        packed = PackedSequences.of(tokens, cos_TD, sin_TD, context_group)
        ids = tokens.input_ids_T.unsqueeze(0)
        return self(ids, None, None, packed_seq_params=packed)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor | None:
        if not self.post_process:
            return None
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def global_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under the names of the whole model: layers are counted over all chunks."""
        for name, parameter in self.named_parameters():
            if local := re.match(r"decoder\.layers\.(\d+)\.", name):
                number = self.decoder.layers[int(local.group(1))].layer_number - 1
                name = f"decoder.layers.{number}.{name[local.end() :]}"
            # Experts lie one by one, or, with grouped matrix products, as numbered weights of one layer.
            name = re.sub(r"\.experts\.(linear_fc\d)\.weight(\d+)$", r".local_experts.\2.\1.weight", name)
            name = name.replace(".experts.local_experts.", ".local_experts.")
            if local := re.search(r"\.local_experts\.(\d+)\.", name):
                here = self.config.num_moe_experts // self.config.expert_model_parallel_size
                first = here * parallel_state.get_expert_model_parallel_rank()
                name = name.replace(local.group(), f".experts.{first + int(local.group(1))}.")
            yield name, parameter


def build_model(
    hf: PreTrainedConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    recompute: str = "none",
    *,
    trainable: bool = True,
    value_head: bool = False,
    overlap: bool = False,
) -> list[DistributedDataParallel]:
    """This rank's chunks of the model, each in Megatron's data-parallel wrapper, which has gradient buffers where they
    are trainable. Their weights are not read yet."""
    if model.dtype not in DTYPES:
        raise ValueError(f"model.dtype={model.dtype!r}: allowed are {', '.join(DTYPES)}")
    if trainable and model.router_aux_loss and getattr(hf, "num_local_experts", None) is None:
        raise ValueError(f"model.router_aux_loss={model.router_aux_loss}: the model ({hf.model_type}) has no experts")
    config = transformer_config(hf, DTYPES[model.dtype], parallel, recompute)
    impl = layers_of(model.impl, config, overlap)
    log.info("%s: %s layers", model.path, impl)
    config.moe_grouped_gemm = impl == "transformer_engine" and config.num_moe_experts is not None
    hf_map = make_map(hf)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    chunks = []
    for chunk in range(virtual_stages(parallel) or 1):
        module = PackedGPT(hf, config, chunk if virtual_stages(parallel) else None, impl=impl, value_head=value_head)
        module.requires_grad_(trainable)
        for name, parameter in module.global_parameters():
            # Without its own initialisation Megatron forgets to mark weights as cut, and the gradient norm would then
            # count them on the first tensor-parallel rank only.
            cut = hf_map.rule(name)[0].cut
            if cut is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
            if is_expert(name):
                # Summed over the ranks that have the same expert. Without expert parallelism Megatron takes the ranks
                # of the other weights for these, which leaves out the tensor-parallel ones that share no expert.
                parameter.allreduce = False
        chunks.append(DistributedDataParallel(config, ddp, module))
    return chunks


def build_optimizer(chunks: list[DistributedDataParallel], optim: OptimConfig) -> MegatronOptimizer:
    """Megatron's distributed Adam with fp32 masters; the learning rate is set at each step."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=chunks[0].config.bf16,  # fp16 stays off: each part would scale its loss by itself (loss_scale.py)
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=True,
    )
    with torch.no_grad():  # else the shards of fp32 parameters are no leaves, and torch warns at each look at .grad
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if not any(part.model_float16_groups):  # fp32 parameters are their own masters: a copy of each onto itself
            part._copy_main_params_to_model_params = lambda: None
    for group in optimizer.param_groups:
        # Megatron's own scheduler would apply these multipliers (no decay of norms and biases).
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        if "foreach" in group:  # torch's Adam: one fused pass over memory
            group.update(fused=True, foreach=False)
    return optimizer
