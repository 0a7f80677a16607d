"""Every algorithm: the gradient of a step does not depend on how it is cut into micro-batches and ranks."""

import pytest
import torch
from test_algorithms import Step, make_samples

from rlpost.algorithms import ALGORITHMS, build_algorithm
from rlpost.data.batching import Batcher

SFT, SDPO, OPD = ({"name": name} for name in ("sft", "sdpo", "opd"))
CASES = {name: {"name": name} for name in ALGORITHMS if name not in ("sdpo", "opd", "blend")}
CASES |= {
    "grpo, everything on": {
        **{"name": "grpo", "kl_loss_coef": 0.2, "kl_unbiased": True, "kl_estimator": "low_var_kl"},
        **{"entropy_coef": 0.1, "dual_clip": 3.0, "clip_high": 0.28, "correction": "tis"},
    },
    "grpo, KL in the reward, icepop": {"name": "grpo", "kl_coef": 0.2, "kl_estimator": "k2", "correction": "icepop"},
    "grpo, mis": {"name": "grpo", "correction": "mis", "correction_low": 0.5, "correction_high": 2.0},
    "reinforce_pp, group baseline": {"name": "reinforce_pp", "advantage": "reinforce_pp_baseline", "kl_coef": 0.1},
    "sdpo, full": {**SDPO, "mode": "full"},
    "sdpo, top-k of the student": {**SDPO, "top_k": 4},
    "sdpo, top-k of the teacher": {**SDPO, "top_k": 4, "top_k_ids": "teacher", "tail": "renormalize"},
    "sdpo, union": {**SDPO, "top_k": 4, "top_k_ids": "union", "is_clip": 1.5},
    "sdpo, entropy gate": {**SDPO, "mode": "full", "entropy_gate": 2.5},
    "opd, sampled": {**OPD, "mode": "sampled"},
    "opd, advantage": {**OPD, "loss_coef": 0.0, "advantage_coef": 1.0, "correction": "tis"},
    "blend": {"name": "blend", "grpo": {"kl_loss_coef": 0.1}, "sdpo": {"top_k": 4}, "reduction": "sequence_mean"},
}


def scored(cfg):
    """A step whose samples have everything that any algorithm wants, and which is finished as one rank does it."""
    step = Step(build_algorithm(cfg), make_samples())
    step.teach()
    for number, sample in enumerate(step.samples):
        g = torch.Generator().manual_seed(number)
        sample.teacher_prompt_ids = [1, 2, 3]
        rollout = torch.tensor(sample.rollout_logprobs).double()
        for name, scale in (("old_logprobs", 0.3), ("reference_logprobs", 0.6)):
            sample.tokens[name] = rollout + scale * torch.randn(len(rollout), generator=g, dtype=torch.float64)
        sample.tokens["values"] = torch.randn(len(rollout), generator=g, dtype=torch.float64)
    step.algorithm.finish(step.samples, lambda x: x)
    return step


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_equal_under_every_cut(name):
    step = scored(CASES[name])
    assert step.algorithm.has_signal(step.samples)
    loss, gradient, *_ = step.run(10**6)
    assert gradient.abs().max() > 1e-4
    everybody = step.samples
    for max_tokens, ranks in ((1, 1), (20, 1), (20, 2), (10**6, 3)):
        summed_loss, summed = torch.zeros_like(loss), torch.zeros_like(gradient)
        for rank in range(ranks):
            batcher = Batcher(
                step.algorithm,
                updates_per_rollout=1,
                max_tokens=max_tokens,
                max_response_tokens=16,
                dp_rank=rank,
                dp_size=ranks,
            )
            (update,) = batcher.updates(everybody)
            step.samples = update.samples
            for sample in everybody:
                sample.tokens["weights"] = sample.tokens["weights"].double()
                sample.tokens["loss_mask"] = sample.tokens["loss_mask"].double()
            part = step.run(max_tokens)
            summed_loss, summed = summed_loss + part[0], summed + part[1]
        torch.testing.assert_close(summed, gradient, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(summed_loss, loss, rtol=1e-6, atol=1e-8)
