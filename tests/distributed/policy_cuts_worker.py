"""Runs under torchrun: one fixed step under several cuts, each against plain PyTorch. Writes results.json.

Arguments: directory, then layouts such as `dp2`, `tp2`, `tp2-sp`, `tp2-sp-dp2`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig as DDPConfig
from tiny_critic import CriticOracle, critic_loss, make_critic
from tiny_models import (
    OPTIM,
    Oracle,
    largest_difference,
    load_model,
    make_policy,
    pack,
    policy_loss,
    random_sequences,
    token_mean,
    weights_on_disk,
)
from torch import Tensor

from rlpost.algorithms import build_algorithm
from rlpost.config.schema import OptimConfig
from rlpost.data.batching import Batcher
from rlpost.parallel import init_distributed
from rlpost.policy import build
from rlpost.policy.loss_scale import scale_is_settling
from rlpost.policy.megatron import MegatronPolicy
from rlpost.types import LossOutput, MicroBatch, Prompt, Sample, groups

DENSE, EXPERTS = ("llama-tied", "qwen2", "qwen3"), ("qwen3-moe",)
DEEP, ODD = ("qwen3-deep",), ("qwen3-odd",)
UPDATES = ("ep1", "dp2", "tp2", "pp2-dp2")
OVERLAP = ("dp2", "ep2", "pp2-vpp2", "pp2-dp2", "tp2-sp-ep1")
KINDS = DENSE + EXPERTS + DEEP + ODD
# Very unequal shares of two or four ranks: a few tokens, many, and only one-token responses.
SHARES = [[(3, 4), (1, 1)], [(5, 60), (12, 33), (2, 30)], [(9, 4), (6, 6), (4, 11)], [(3, 1), (8, 1)]]


FIELDS = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert"}
FIELDS |= {"etp": "expert_tensor"}


def parallel(layout: str) -> dict:
    """`tp2-sp-dp2` → {"tensor": 2, "sequence": True}; what is left of the ranks is data parallel."""
    cuts = dict(re.fullmatch(r"([a-z]+)(\d*)", part).groups() for part in layout.split("-"))
    sizes = {FIELDS[name]: int(size) for name, size in cuts.items() if name in FIELDS}
    return {**sizes, "sequence": "sp" in cuts}


def recompute(layout: str) -> str:
    return next((part for part in layout.split("-") if part in ("selective", "full")), "none")


def steps_only(layout: str) -> bool:
    """What else is tested does not depend on recomputation."""
    return recompute(layout) != "none"


def kinds_of(layout: str) -> tuple[str, ...]:
    """Layouts with `ep` cut a model that has experts, those with eight chunks one of eight layers, those with `odd` one
    of five."""
    if "odd" in layout.split("-"):
        return ODD
    if layout == "pp4-vpp2":
        return DEEP
    if "ep" in re.findall("[a-z]+", layout):
        return EXPERTS
    return DENSE[-1:] if steps_only(layout) else DENSE


def sequences_of(seed: int) -> list[list[dict]]:
    return [random_sequences(seed * 10 + i, share) for i, share in enumerate(SHARES)]


def micros_of(policy: MegatronPolicy, shares: list[list[dict]]) -> list[MicroBatch]:
    """This data-parallel rank's shares, one micro-batch each; of all four, the first two in one: an odd number."""
    total = token_mean([sequence for share in shares for sequence in share])
    per_rank = len(shares) // policy.mesh.dp.size
    mine = shares[policy.mesh.dp.rank * per_rank : (policy.mesh.dp.rank + 1) * per_rank]
    if len(mine) == 4:
        mine = [mine[0] + mine[1], *mine[2:]]
    return [pack(share, total) for share in mine]


def flat(shares: list[list[dict]]) -> list[dict]:
    return [sequence for share in shares for sequence in share]


def relative(metrics: dict, expected: dict) -> float:
    return max(abs(metrics[name] - value) / abs(value) for name, value in expected.items())


def shares_of_step(step: int, dp_size: int, masked: int = 1) -> list[list[dict]]:
    """In the step `masked` the last of several data-parallel ranks has no live token."""
    shares = sequences_of(step)
    if step == masked and dp_size > 1:
        for sequence in flat(shares[-(len(shares) // dp_size) :]):
            sequence["loss_mask"].zero_()
    return shares


@cache
def expected_steps(path: Path, router_aux_loss: float, dp_size: int) -> tuple[dict, Tensor, list[dict], dict]:
    """Plain PyTorch's weights, logits of the fifth batch, metrics of the two steps, and weights after them."""
    oracle = Oracle(path, router_aux_loss=router_aux_loss)
    before = {name: tensor.clone() for name, tensor in oracle.weights().items()}
    with torch.no_grad():
        logits = torch.cat([oracle.logits(sequence) for sequence in flat(sequences_of(5))])
    metrics = [oracle.step(flat(shares_of_step(step, dp_size))) for step in range(2)]
    return before, logits, metrics, oracle.weights()


def check_steps(path: Path, layout: str) -> dict:
    aux = 0.05 if path.name in EXPERTS else 0.0
    policy = make_policy(path, recompute=recompute(layout), router_aux_loss=aux, **parallel(layout))
    dp_size = policy.mesh.dp.size
    before, logits, expected, after = expected_steps(path, aux, dp_size)
    full_micro = pack(flat(sequences_of(5)), 1.0)
    full_micro.predict_N = torch.arange(len(full_micro.input_ids_T))
    full_micro.target_N = ids = full_micro.input_ids_T.clamp_max(50)
    full_micro.sequence_N = torch.arange(len(flat(SHARES))).repeat_interleave(full_micro.cu_seqlens.diff())
    full_micro.fields = {}
    probe = policy.score([full_micro], lambda head, m: {"logp": head.logprobs(m.target_N).logprobs_N})[0]["logp"]
    result = {
        "logp": float((probe - (logits / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0]).abs().max()),
        "loaded": largest_difference(policy.hf_tensors(), before),
    }
    for step in range(2):
        metrics = policy.train_step(micros_of(policy, shares_of_step(step, dp_size)), policy_loss)
        result[f"metrics{step}"] = relative(metrics, expected[step])
    result["weights"] = largest_difference(policy.hf_tensors(), after)
    return result


def has_critic(layout: str) -> bool:
    """The critic of the tests is dense and has four layers."""
    return kinds_of(layout) == DENSE


def check_critic(path: Path, layout: str) -> dict:
    """The same two steps with a value head."""
    critic, oracle = make_critic(path, **parallel(layout)), CriticOracle(path)
    dp = critic.model.mesh.dp
    result = {"loaded": largest_difference(critic.model.hf_tensors(), oracle.model.state_dict())}
    for step in range(2):
        shares = shares_of_step(step, dp.size)
        micros = micros_of(critic.model, shares)
        values = torch.cat([row["values"] for row in critic.score(micros)])
        each = len(shares) // dp.size
        with torch.no_grad():
            expected = [oracle.values(sequence) for sequence in flat(shares[dp.rank * each : (dp.rank + 1) * each])]
        result[f"values{step}"] = float((values - torch.cat(expected)).abs().max())
        result[f"metrics{step}"] = relative(critic.train_step(micros, critic_loss), oracle.step(flat(shares)))
    result["weights"] = largest_difference(critic.model.hf_tensors(), oracle.model.state_dict())
    return result


def check_skip(path: Path, layout: str) -> dict:
    """A NaN on the last rank's tokens alone: nobody moves."""
    policy = make_policy(path, **parallel(layout))
    poison = math.nan if policy.mesh.dp.rank == policy.mesh.dp.size - 1 else 1.0

    def poisoned(head, micro) -> LossOutput:
        return LossOutput(policy_loss(head, micro).loss_N * poison)

    metrics = policy.train_step(micros_of(policy, sequences_of(0)), poisoned)
    return {
        "skipped": metrics["train/skipped"],
        "moved": largest_difference(policy.hf_tensors(), weights_on_disk(load_model(path))),
    }


def check_reshard(path: Path, layout: str, others: tuple[str, ...], directory: Path) -> dict:
    """Two steps, save, and a third: in the same layout, and in others that these ranks can form."""
    optim = OptimConfig(lr=1e-2, eps=OPTIM.eps, warmup_steps=3)
    policy = make_policy(path, optim, **parallel(layout))
    for step in range(2):
        policy.train_step(micros_of(policy, sequences_of(step)), policy_loss)
    kinds = ("master", "exp_avg", "exp_avg_sq")
    state = {kind: {n: t.clone() for n, t in policy.optimizer_tensors(kind)} for kind in kinds}
    scalars = policy.optimizer_scalars()
    third = policy.train_step(micros_of(policy, sequences_of(2)), policy_loss)
    after = {name: t.clone() for name, t in policy.hf_tensors()}
    if dist.get_rank() == 0:
        torch.save(
            {"state": state, "scalars": scalars, "metrics": third, "after": after}, directory / f"state-{layout}.pt"
        )
    result = {}
    for other in (layout, *others):
        resumed = make_policy(path, optim, **parallel(other))
        for kind in kinds:
            resumed.load_optimizer_tensors(kind, state[kind].__getitem__)
        resumed.load_optimizer_scalars(scalars)
        exact = max(largest_difference(resumed.optimizer_tensors(kind), state[kind]) for kind in kinds)
        metrics = resumed.train_step(micros_of(resumed, sequences_of(2)), policy_loss)
        drift = largest_difference(resumed.hf_tensors(), after)
        same = "same-" if other == layout else ""
        gap = relative(metrics, {name: value for name, value in third.items() if value})
        result[f"{same}{other}"] = {"exact": exact, "metrics": gap, "weights": drift}
    return result


def check_average(path: Path, layout: str) -> dict:
    """An average of the masters survives gathering and scattering, and can be swapped in."""
    policy = make_policy(path, **parallel(layout))
    start = {name: shard.clone() for name, shard in policy.masters().items()}
    policy.train_step(micros_of(policy, sequences_of(0)), policy_loss)
    whole = {name: t.clone() for name, t in policy.gather_masters(start)}
    back = policy.scatter_masters(whole.__getitem__)
    for name, shard in policy.masters().items():
        shard.copy_(back[name])
    policy.sync_from_masters()
    initial = weights_on_disk(load_model(path))
    return {
        "gathered": largest_difference(whole.items(), initial),
        "scattered": largest_difference(back.items(), start),
        "swapped": largest_difference(policy.hf_tensors(), initial),
    }


def check_overlap(path: Path, layout: str) -> dict:
    """Five steps, with scoring and swapped weights between them and one of them skipped, in small buckets, beside those
    of a policy that overlaps nothing: rounding apart (the gradient norm is summed by buckets)."""
    aux = 0.05 if path.name in EXPERTS else 0.0
    runs = []
    for overlap in (False, True):
        with patch.object(build, "DistributedDataParallelConfig", partial(DDPConfig, bucket_size=5_000)):
            policy = make_policy(path, router_aux_loss=aux, overlap=overlap, **parallel(layout))
        before = {name: shard.clone() for name, shard in policy.masters().items()}
        metrics, scores = [], []

        def score(policy=policy, scores=scores) -> None:
            row = policy.score(
                micros_of(policy, sequences_of(9)), lambda head, m: {"logp": head.logprobs(m.target_N).logprobs_N}
            )
            scores.append(sum(float(r["logp"].double().sum()) for r in row))

        def poisoned(head, micro) -> LossOutput:
            return LossOutput(policy_loss(head, micro).loss_N * math.nan)

        for step in range(5):
            shares = shares_of_step(step, policy.mesh.dp.size, masked=2)
            metrics.append(policy.train_step(micros_of(policy, shares), poisoned if step == 3 else policy_loss))
            if step in (1, 3):  # weights of another time, as a teacher has them, straight after the step
                now = {name: shard.clone() for name, shard in policy.masters().items()}
                for shards in (before, now):
                    for name, shard in policy.masters().items():
                        shard.copy_(shards[name])
                    policy.sync_from_masters()
                    score()
            if step == 2:
                score()
                score()
        weights = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
        buckets = len(policy._chunks[0].bucket_groups)
        runs.append((metrics, scores, weights))
    (plain, plain_scores, plain_weights), (got, scores, weights) = runs
    apart = [
        abs(one[name] / value - 1)
        for row, one in zip(plain, got)
        for name, value in row.items()
        if value and math.isfinite(value)
    ]
    return {
        "metrics": max(apart),
        "skipped": [row["train/skipped"] for row in got],
        "scores": max(abs(a / b - 1) for a, b in zip(scores, plain_scores)),
        "swapped": scores[0] == scores[4] != scores[1],
        "weights": largest_difference(weights.items(), plain_weights),
        "buckets": buckets,
    }


def check_low_precision(path: Path, layout: str) -> dict:
    """A step in bf16 and one in fp16, here after one in which the last rank's losses, a hundred million times as large,
    overflow fp16."""
    shares, result = sequences_of(0), {}
    expected = Oracle(path).step(flat(shares))
    for dtype in ("bf16", "fp16"):
        policy = make_policy(path, dtype=dtype, **parallel(layout))
        if dtype == "fp16":
            factor = 1e8 if policy.mesh.dp.rank == policy.mesh.dp.size - 1 else 1.0

            def huge(head, micro, factor=factor) -> LossOutput:
                return LossOutput(policy_loss(head, micro).loss_N * factor)

            overflow = policy.train_step(micros_of(policy, shares), huge)
            settling = scale_is_settling(overflow, "train")
            result["overflow"] = [overflow["train/skipped"], overflow["train/loss_scale"], settling]
        metrics = policy.train_step(micros_of(policy, shares), policy_loss)
        distances = [relative(metrics, {name: expected[name]}) for name in ("train/loss", "train/grad_norm")]
        result[dtype] = [metrics["train/skipped"], metrics.get("train/loss_scale"), *distances]
    return result


def check_updates(path: Path, layout: str) -> dict:
    """One and two updates of a rollout, as the batcher cuts them, in small and in large micro-batches."""
    sequences, result = flat(sequences_of(0)), {}
    for updates in (1, 2):
        oracle = Oracle(path)
        for max_tokens in (24, 10_000):
            policy = make_policy(path, **parallel(layout))
            batcher = Batcher(
                build_algorithm({"name": "grpo"}),
                updates_per_rollout=updates,
                max_tokens=max_tokens,
                max_response_tokens=64,
                dp_rank=policy.mesh.dp.rank,
                dp_size=policy.mesh.dp.size,
            )
            everybody = samples_of(sequences)
            whole = groups(everybody)
            steps = batcher.updates(everybody)
            cuts = [round(i * len(whole) / updates) for i in range(updates + 1)]
            metrics = [policy.train_step(batcher.pack(update), policy_loss) for update in steps]
            if max_tokens == 24:
                of_updates = [[s.index for g in whole[a:b] for s in g] for a, b in itertools.pairwise(cuts)]
                expected = [oracle.step([sequences[i] for i in indices]) for indices in of_updates]
            result[f"{updates} of {max_tokens}"] = {
                "updates": len(steps),
                "micro_batches": min(update.micro_batches for update in steps),
                "metrics": max(relative(*pair) for pair in zip(metrics, expected, strict=True)),
                "weights": largest_difference(policy.hf_tensors(), oracle.weights()),
            }
    return result


def samples_of(sequences: list[dict]) -> list[Sample]:
    """In groups of two."""
    found = []
    for i, sequence in enumerate(sequences):
        prompt, response = sequence["ids"].tensor_split([int(sequence["prompt"])])
        found.append(
            Sample(
                Prompt(i, [], prompt.tolist()),
                group_id=i // 2,
                index=i,
                response_ids=response.tolist(),
                loss_mask=sequence["loss_mask"].int().tolist(),
                tokens={"advantages": sequence["advantages"]},
            )
        )
    return found


def main() -> None:
    directory, layouts = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    init_distributed(timeout_s=120)
    models = {kind: directory / "models" / kind for kind in KINDS}
    results = {}
    for layout in layouts:
        kinds = kinds_of(layout)
        for kind in kinds:
            results[f"steps/{layout}/{kind}"] = check_steps(models[kind], layout)
        if steps_only(layout):
            continue
        if has_critic(layout):
            results[f"critic/{layout}"] = check_critic(directory / "models" / "qwen3-1", layout)
        if layout in OVERLAP:
            results[f"overlap/{layout}"] = check_overlap(models[kinds[-1]], layout)
        results[f"skip/{layout}"] = check_skip(models[kinds[0]], layout)
        results[f"average/{layout}"] = check_average(models[kinds[-1]], layout)
        results[f"low/{layout}"] = check_low_precision(models[kinds[-1]], layout)
        if layout in UPDATES:
            results[f"updates/{layout}"] = check_updates(models[kinds[-1]], layout)
    if "dp2" in layouts:
        results["reshard/dp2"] = check_reshard(models["qwen2"], "dp2", ("tp2", "tp2-sp", "pp2", "cp2"), directory)
    if "ep2" in layouts:
        others = ("ep1-dp2", "tp2-sp-ep1", "tp2-sp-ep2", "pp2-ep1", "ep1-etp2")
        results["reshard/ep2"] = check_reshard(models["qwen3-moe"], "ep2", others, directory)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        (directory / "results.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
