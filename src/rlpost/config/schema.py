"""The typed configuration: one dataclass per Hydra group, defaults beside the field.

A notebook and the command line build the same `Config`. Cross-field rules are in `checks.py`.
`algorithm`, `teacher`, `feedback` and `reward` hold the fields of the class they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class RunConfig:
    name: str = "run"
    dir: str = "runs"  # the run lives in <dir>/<name>
    seed: int = 0


@dataclass
class TrainerConfig:
    steps: int = 10
    eval_every: int = 0  # 0: only at the end
    eval_at_start: bool = True
    save_every: int = 0  # 0: only at the end
    keep: int = 2  # checkpoints
    async_save: bool = False  # save_every copies to host memory and goes on; a thread of each rank writes meanwhile
    resume: str = "auto"  # auto | never | a checkpoint or run directory
    plots: bool = True
    # Residents (see phases) that never leave the device, as policy.optimizer where it fits beside the KV cache.
    keep_on_device: list[str] = field(default_factory=list)
    # A phase, a save, an evaluation that takes longer ends the run and leaves every rank's stacks; 0: never.
    phase_timeout_s: float = 3600.0


@dataclass
class DataConfig:
    train: Any = MISSING  # a path, a Hugging Face data set id, or a list of them; or {source: any of these}
    eval: dict[str, Any] = field(default_factory=dict)  # name: path, or {path, samples, temperature, top_p, limit}
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    system_key: str | None = "system"
    source_key: str | None = "source"
    max_prompt_tokens: int = 2048
    on_bad_row: str = "error"  # error | skip
    on_long_prompt: str = "skip"  # error | skip
    shuffle: bool = True
    last_batch: str = "wrap"  # wrap | drop | keep
    domain: str | None = None  # for a recipe's paths
    transform: str | None = None  # import path: fn(prompt, row) -> prompt
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    path: str = MISSING
    impl: str = "auto"  # auto | local | compiled (dense, parallel.tensor=1) | transformer_engine
    dtype: str = "fp32"  # fp32 | bf16 | fp16 (with a loss scale); masters are fp32
    warm_page_cache: bool = True  # one rank of each node reads the files before all map them into memory
    router_aux_loss: float = 0.0  # of a mixture of experts: times each layer's load-balancing loss, per sequence
    head_chunk_tokens: int = 0  # rows of logits alive at once; 0: chosen from the vocabulary


@dataclass
class EngineConfig:
    name: str = "torch"  # torch | sglang
    dtype: str = "auto"  # auto: the model's
    tensor_parallel: int = 1
    memory_fraction: float = 0.5
    max_batch: int = 256  # sequences decoded together
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    prompts_per_step: int = 8
    samples_per_prompt: int = 4
    max_response_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] = field(default_factory=list)  # beside the eos ids of the model
    mask_truncated: bool = False
    filter: str | None = None  # nonzero_std, or an import path: fn(samples of a group) -> bool; see rollout/filters.py
    canary: str = "first"  # off | first | always: compare log-probs of engine and trainer before sampling
    max_rounds: int = 4  # of sampling in a step, to get prompts_per_step groups that pass the filter


@dataclass
class TrainConfig:
    updates_per_rollout: int = 1
    max_tokens_per_micro_batch: int = 4096  # per GPU
    recompute: str = "none"  # none | selective (attention and MLP) | full: activations computed again
    overlap: bool = False  # reduce gradients while the backward runs, gather weights while the next forward does
    skip_nonfinite: bool = True
    max_skipped: int = 5  # that many skipped steps in a row stop the run


@dataclass
class OptimConfig:
    lr: float = 1e-6
    warmup_steps: int = 0
    schedule: str = "constant"  # constant | linear | cosine
    min_lr: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    offload: bool = False  # the optimizer's state is on the device only while it steps
    initial_loss_scale: float = 65536.0  # of model.dtype=fp16; see policy/loss_scale.py
    loss_scale_window: int = 200  # steps in a row with finite gradients after which it doubles
    loss_scale_hysteresis: int = 1  # steps with others after which each halves it


@dataclass
class CriticConfig(OptimConfig):
    """Of an algorithm with a critic (ppo): its weights to begin with, and its optimizer, as in `optim`."""

    lr: float = 1e-5
    path: str | None = None  # a Hugging Face directory, with or without a value head (`score`); null: model.path
    alone_steps: int = 0  # the first steps, in which the critic learns and the policy stays as it is


@dataclass
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False


@dataclass
class PublishConfig:
    bucket_bytes: int = 512 * 2**20
    verify: str = "off"  # off | first | always
    retries: int = 1


@dataclass
class TrackerConfig:
    tensorboard: bool = True
    wandb: bool = False
    progress: bool = True
    rollouts: bool = True  # write rollouts/{train,eval}/{step}.jsonl


@dataclass
class GuardsConfig:
    """Collapse, as the means of `window` steps show it; see observe/guards.py."""

    action: str = "warn"  # off | warn | stop (after a checkpoint) | fallback (to the checkpoint best in evaluation)
    max_fallbacks: int = 3  # then the run stops
    window: int = 20  # steps
    reward_drop: float = 0.5  # the share of the best window's reward that may be lost
    length_factor: float = 4.0  # times as many response tokens as in the first window, or as few
    min_entropy: float = 0.0  # nats per token
    max_teacher_distance: float | None = None  # ema/distance


@dataclass
class PhaseConfig:
    name: str = MISSING
    residents: list[str] = field(default_factory=list)  # what must be on the device meanwhile
    timeout_s: float | None = None  # null: trainer.phase_timeout_s
    retries: int = 0  # on all ranks together; only for rollout and judge, which keep nothing of a failed try


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: dict[str, Any] = field(default_factory=dict)
    teacher: dict[str, Any] | None = None
    feedback: dict[str, Any] | None = None
    reward: Any = None
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    phases: list[PhaseConfig] = field(default_factory=list)
    publish: PublishConfig = field(default_factory=PublishConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)

    @property
    def engine_dtype(self) -> str:
        return self.model.dtype if self.engine.dtype == "auto" else self.engine.dtype
