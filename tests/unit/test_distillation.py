"""On-policy distillation as a loss and as an advantage, the entropy gate, and the blend with a policy gradient."""

import pytest
import torch
from test_algorithms import SDPO, Step, check, make_samples

from rlpost.algorithms import build_algorithm
from rlpost.losses.distill import divergence
from rlpost.losses.policy import ppo_clip


def taught(cfg):
    step = Step(build_algorithm(cfg), make_samples())
    step.teach()
    return step


def at_sampled(sample, Q):
    return Q.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def test_opd_as_a_loss_is_the_weighted_divergence():
    step = taught({"name": "opd", "mode": "full", "loss_coef": 0.3})
    check(step, lambda s, S, Q, logp: 0.3 * s.distill_mask * divergence(S, Q, 1.0))


@pytest.mark.parametrize("old", [False, True])
def test_opd_as_an_advantage(old):
    step = taught({"name": "opd", "loss_coef": 0, "advantage_coef": 0.7, "clip_high": 0.3})
    if old:
        for sample, _, S, _ in step.dense():
            sample.tokens["old_logprobs"] = at_sampled(sample, S.detach()) + 0.2

    def token_loss(sample, S, Q, logp):
        before = sample.tokens.get("old_logprobs", logp.detach())
        advantages = -0.7 * (before - at_sampled(sample, Q)) * sample.distill_mask
        return ppo_clip(logp, before, advantages, clip_low=0.2, clip_high=0.3)[0]

    check(step, token_loss)
    assert step.algorithm.needs == {"rollout", "teacher", "old_logprobs"}


@pytest.mark.parametrize(
    "way", [{"loss_coef": 0, "advantage_coef": 1.0}, {"mode": "sampled"}], ids=["advantage", "loss"]
)
def test_the_expected_update_of_the_sampled_token_is_that_of_the_reverse_kl(way):
    """Over all one-token responses, weighted by their probability."""
    from test_variants import response

    from rlpost.data.packing import pack
    from rlpost.policy.logits import Head

    student = torch.tensor([0.5, 0.0, -0.5, 0.2], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1.0, 0.3, 1.5, 0.0], dtype=torch.float64).log_softmax(0)
    algorithm = build_algorithm({"name": "opd", **way})
    expected = torch.zeros(4, dtype=torch.float64)
    for symbol, probability in enumerate(student.detach().softmax(0)):
        sample = response([symbol], 0, 0, 0.0, teacher_logprobs=teacher[[symbol]])
        sample.distill_mask, sample.teacher_info = 1.0, dict.fromkeys(("success", "demonstration", "feedback"), False)
        sample.teacher_info |= {"cut": False, "tokens": 1, "route": "student"}
        algorithm.prepare([sample])
        one = torch.ones(1, dtype=torch.float64)
        sample.tokens |= {"weights": one, "loss_mask": one, "h": one[:, None]}
        (micro,) = pack([sample], 100)
        weight_V1 = student.detach()[:, None].clone().requires_grad_()
        loss = algorithm.loss(Head(micro.fields["h"], weight_V1, vocab_size=4), micro).loss_N.sum()
        expected += probability * torch.autograd.grad(loss, weight_V1)[0][:, 0]
    reverse_kl = divergence(student.log_softmax(0), teacher, 1.0)
    torch.testing.assert_close(expected, torch.autograd.grad(reverse_kl, student)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["full", "topk"])
def test_the_entropy_gate_adds_the_forward_kl_where_the_teacher_is_undecided(mode):
    k = 23  # the whole vocabulary, so that both modes are the same numbers
    step = taught({**SDPO, "mode": mode, "top_k": k, "alpha": 1.0, "entropy_gate": 1.5})
    entropies = []

    def token_loss(sample, S, Q, logp):
        entropy = -(Q.exp() * Q).sum(1)
        entropies.append(entropy)
        return sample.distill_mask * (divergence(S, Q, 1.0) + (entropy > 1.5) * divergence(S, Q, 0.0))

    check(step, token_loss)
    share = (torch.cat(entropies) > 1.5).double().mean()
    assert 0.1 < share < 0.9


def blend(weight, **more):
    grpo = {"clip_high": 0.28, "kl_loss_coef": 0.1}
    return {"name": "blend", "reward_weight": weight, "grpo": grpo, "sdpo": {"mode": "full"}, **more}


def test_the_blend_is_the_weighted_sum_of_its_parts():
    steps = [
        taught(cfg)
        for cfg in (
            blend(0.3, reduction="sequence_mean"),
            {"name": "grpo", "reduction": "sequence_mean", **blend(0)["grpo"]},
            {"name": "sdpo", "reduction": "sequence_mean", "mode": "full"},
        )
    ]
    for step in steps:
        for sample in step.samples:
            sample.tokens["reference_logprobs"] = torch.tensor(sample.rollout_logprobs).double()
    both, grpo, sdpo = (step.run(20) for step in steps)
    torch.testing.assert_close(both[0], 0.3 * grpo[0] + 0.7 * sdpo[0])
    torch.testing.assert_close(both[1], 0.3 * grpo[1] + 0.7 * sdpo[1])
    for b, g, s in zip(both[2], grpo[2], sdpo[2]):
        torch.testing.assert_close(b, 0.3 * g + 0.7 * s)
    assert {"policy/clip_fraction", "sdpo/distill_loss"} <= set(both[3])
    algorithm = steps[0].algorithm
    assert algorithm.needs == steps[1].algorithm.needs | steps[2].algorithm.needs
    assert algorithm.group_relative and algorithm.top_k_needed == 0


def test_the_blend_has_a_signal_where_a_weighted_part_has_one():
    samples = make_samples()
    for sample in samples:
        sample.reward = 1.0  # nothing for GRPO without its KL
    for weight, signal in ((0.5, True), (1.0, False)):
        algorithm = build_algorithm({"name": "blend", "reward_weight": weight})
        algorithm.prepare(samples)
        assert algorithm.has_signal(samples) == signal


def test_the_blend_resumes_its_parts():
    cfg = {"name": "blend", "grpo": {"advantage": "reinforce"}}
    first, second = build_algorithm(cfg), build_algorithm(cfg)
    first.prepare(make_samples())
    second.load_state_dict(first.state_dict())
    assert second.parts[0].baseline.value == first.parts[0].baseline.value is not None


@pytest.mark.parametrize(
    ("cfg", "lines"),
    [
        ({"name": "opd", "advantage_coef": 1.0}, ["loss_coef=1.0 and algorithm.advantage_coef=1.0"]),
        ({"name": "opd", "loss_coef": 0}, ["loss_coef=0 and algorithm.advantage_coef=0.0", "exactly one"]),
        ({**SDPO, "mode": "sampled", "alpha": 1.0, "entropy_gate": 1.0}, ["algorithm.entropy_gate=1.0"]),
        ({"name": "sdpo", "mode": "sampled"}, ["alpha=0.5 is not allowed with algorithm.mode=sampled"]),
        ({**SDPO, "alpha": 0.0, "entropy_gate": 1.0}, ["algorithm.entropy_gate=1.0"]),
        (
            {"name": "blend", "reward_weight": 2, "grpo": {"clip": 1}, "sdpo": {"mode": "all"}},
            ["reward_weight=2", "algorithm.grpo has no field 'clip'", "algorithm.sdpo.mode=all"],
        ),
        ({"name": "blend", "sdpo": {"reduction": "token_mean"}}, ["algorithm.sdpo.reduction is not allowed"]),
        ({"name": "blend", "reduction": "mean"}, ["algorithm.reduction=mean is not allowed"]),
    ],
    ids=str,
)
def test_wrong_distillation_is_refused(cfg, lines):
    with pytest.raises(ValueError) as error:
        build_algorithm(cfg)
    for line in lines:
        assert line in str(error.value)
