"""The algorithms over a small head with random weights, against dense autograd."""

import math

import pytest
import torch

from rlpost.algorithms import ALGORITHMS, build_algorithm
from rlpost.data.packing import pack
from rlpost.losses.correction import correction_weights
from rlpost.losses.distill import close_tail, divergence, sampled_loss
from rlpost.losses.reduce import token_weights
from rlpost.policy.logits import Head, teacher_fields
from rlpost.types import Prompt, Sample

H, V, T = 8, 23, 0.8
LENGTHS = [5, 1, 9, 3, 1, 7, 2, 4]  # two one-token responses
G = torch.Generator


def weight(seed):
    return torch.randn(V, H, generator=G().manual_seed(seed), dtype=torch.float64)


def make_samples(lengths=LENGTHS):
    """A step's samples: interleaved groups of two, some tool tokens, three samples that nobody teaches."""
    g = G().manual_seed(7)
    samples = []
    for i, length in enumerate(lengths):
        mask = [0 if length > 4 and j in (1, 2) else 1 for j in range(length)]
        samples.append(
            Sample(
                Prompt(i, [], [1, 2]),
                group_id=i % 4,
                index=i // 4,
                response_ids=torch.randint(0, V, (length,), generator=g).tolist(),
                rollout_logprobs=[-2.0 - 0.1 * j if mask[j] else 0.0 for j in range(length)],
                loss_mask=mask,
                reward=float(i % 3 == 0),
                distill_mask=0.0 if i in (1, 3, 6) else 1.0,
                teacher_info={
                    "route": "demonstration",
                    "success": i % 3 == 0,
                    "demonstration": i % 2 == 0,
                    "feedback": i == 3,
                    "cut": i == 5,
                    "tokens": 10 + i,
                },
            )
        )
        for name, seed in (("student", 11), ("teacher", 22)):
            rows = torch.randn(length, H, generator=G().manual_seed(seed + 100 * i), dtype=torch.float64)
            samples[-1].tokens[f"{name}_rows"] = rows
    return samples


class Step:
    """One optimizer step on a policy that is nothing but its head; the hidden states are inputs."""

    def __init__(self, algorithm, samples):
        self.algorithm, self.samples = algorithm, samples
        self.metrics = algorithm.prepare(samples)
        masks = algorithm.loss_masks(samples)
        for sample, mask, weights in zip(samples, masks, token_weights(masks, algorithm.reduction, 16)):
            sample.tokens["weights"], sample.tokens["loss_mask"] = weights.double(), torch.tensor(mask).double()
        self.student, self.teacher = weight(1).requires_grad_(), weight(2)

    def teach(self):
        for sample in self.samples:
            (micro,) = pack([sample], 10**6)
            head = Head(sample.tokens["teacher_rows"], self.teacher, temperature=T, vocab_size=V)
            sample.tokens |= teacher_fields(head, micro)

    def run(self, max_tokens):
        """(loss, gradient to the head, gradients to each sample's hidden states, metrics of the last micro-batch)."""
        total, d_weight, d_rows = 0.0, torch.zeros_like(self.student), {}
        for micro in pack(self.samples, max_tokens):
            micro.teacher_head = self.teacher
            rows = micro.fields["student_rows"].clone().requires_grad_()
            output = self.algorithm.loss(Head(rows, self.student, temperature=T, vocab_size=V), micro)
            loss = (output.loss_N * micro.fields["weights"]).sum()
            d, r = torch.autograd.grad(loss, (self.student, rows))
            total, d_weight = total + loss.detach(), d_weight + d
            parts = r.split([len(s.response_ids) for s in micro.samples])
            d_rows |= {(s.group_id, s.index): part for s, part in zip(micro.samples, parts)}
            for name, value in output.metrics.items():
                assert value.shape == micro.target_N.shape and not value.requires_grad, name
                assert value[micro.fields["loss_mask"] > 0].isfinite().all(), name
        return total, d_weight, [d_rows[s.group_id, s.index] for s in self.samples], output.metrics

    def dense(self):
        """Per sample (S, Q) over the whole vocabulary, S from rows that want a gradient."""
        for sample in self.samples:
            rows = sample.tokens["student_rows"].clone().requires_grad_()
            S = (rows @ self.student.t() / T).log_softmax(-1)
            Q = (sample.tokens["teacher_rows"] @ self.teacher.t() / T).log_softmax(-1)
            yield sample, rows, S, Q

    def oracle(self, token_loss):
        total, d_weight, d_rows = 0.0, torch.zeros_like(self.student), []
        for sample, rows, S, Q in self.dense():
            ids = torch.tensor(sample.response_ids)[:, None]
            loss_R = token_loss(sample, S, Q, S.gather(1, ids)[:, 0])
            loss = (loss_R * sample.tokens["weights"]).sum()
            d, r = torch.autograd.grad(loss, (self.student, rows))
            total, d_weight, d_rows = total + loss.detach(), d_weight + d, [*d_rows, r]
        return total, d_weight, d_rows


def check(step, token_loss):
    want = step.oracle(token_loss)
    for max_tokens in (1, 20, 10**6):  # a sequence each, a few, all in one
        got = step.run(max_tokens)
        torch.testing.assert_close(got[:3], want, rtol=1e-6, atol=1e-8)
    return got


SDPO = {"name": "sdpo", "top_k": 4}
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def test_sft_is_cross_entropy_over_the_live_tokens():
    for reduction in REDUCTIONS:
        check(
            Step(build_algorithm({"name": "sft", "reduction": reduction}), make_samples()), lambda s, S, Q, logp: -logp
        )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["full", "student/bucket", "student/renormalize", "teacher/bucket", "union/bucket"])
def test_sdpo_against_dense_autograd(alpha, mode):
    ids_from, _, tail = mode.partition("/")
    cfg = {"mode": "full"} if mode == "full" else {"top_k_ids": ids_from, "tail": tail}
    step = Step(build_algorithm({**SDPO, **cfg, "alpha": alpha}), make_samples())
    step.teach()

    def listed(S, Q):
        if mode == "full":
            return torch.stack([S, Q])
        chosen = torch.zeros_like(S, dtype=torch.bool)
        if ids_from in ("student", "union"):
            chosen.scatter_(1, S.topk(4).indices, True)
        if ids_from in ("teacher", "union"):
            chosen.scatter_(1, Q.topk(4).indices, True)
        return torch.stack([close_tail(x.masked_fill(~chosen, -torch.inf), tail) for x in (S, Q)])

    check(step, lambda s, S, Q, logp: s.distill_mask * divergence(*listed(S, Q), alpha))


def test_sdpo_on_sampled_tokens():
    step = Step(build_algorithm({**SDPO, "mode": "sampled", "alpha": 1.0}), make_samples())
    step.teach()

    def token_loss(sample, S, Q, logp):
        return sample.distill_mask * sampled_loss(logp, Q.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0])

    check(step, token_loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sdpo_samples_without_a_teacher_count_and_get_exactly_zero(reduction):
    step = Step(build_algorithm({**SDPO, "reduction": reduction}), make_samples())
    step.teach()
    _, _, d_rows, _ = step.run(10**6)
    for sample, d in zip(step.samples, d_rows):
        assert bool(d.ne(0).any()) == (sample.distill_mask > 0)
        masked = torch.tensor(sample.loss_mask) == 0
        assert d[masked].eq(0).all()
    one_token = d_rows[LENGTHS.index(1, 2)]
    assert one_token.ne(0).any()


def test_sdpo_reads_nothing_of_a_sample_that_is_not_taught():
    step = Step(build_algorithm(SDPO), make_samples())
    step.teach()
    before = step.run(10**6)[:3]
    for sample in step.samples:
        for name in ("teacher_hidden", "teacher_lse", "teacher_logprobs", "teacher_entropy"):
            if sample.distill_mask == 0:
                sample.tokens[name] = torch.full_like(sample.tokens[name], 10.0)
    torch.testing.assert_close(step.run(10**6)[:3], before, rtol=0, atol=0)


def test_sdpo_with_the_lists_of_an_engine():
    step = Step(build_algorithm({**SDPO, "top_k_ids": "teacher"}), make_samples())
    step.teach()
    want = step.run(20)
    for sample, _, _, Q in step.dense():
        logprobs, ids = Q.topk(4)
        sample.tokens |= {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
        del sample.tokens["teacher_hidden"], sample.tokens["teacher_lse"]
    torch.testing.assert_close(step.run(20)[:3], want[:3])
    for cfg in ({"mode": "full"}, {"top_k_ids": "student"}, {"top_k_ids": "union"}):
        step.algorithm = build_algorithm({**SDPO, **cfg})
        with pytest.raises(ValueError, match=r"teacher.backend=swap"):
            step.run(20)


def test_sdpo_metrics():
    step = Step(build_algorithm({**SDPO, "top_k_ids": "union", "top_k": V}), make_samples())
    step.teach()
    assert step.metrics["sdpo/distill_fraction"] == 5 / 8
    assert step.metrics["sdpo/success_sample_fraction"] == 3 / 8
    assert step.metrics["sdpo/demonstration_fraction"] == 0.5
    assert step.metrics["sdpo/feedback_fraction"] == step.metrics["sdpo/cut_fraction"] == 1 / 8
    assert step.metrics["sdpo/teacher_prompt_tokens/max"] == 17
    metrics = step.run(10**6)[3]
    # Pooled over live tokens, as the policy does, they are means over the tokens that have a teacher.
    order = pack(step.samples, 10**6)[0].samples
    live = torch.cat([torch.tensor(s.loss_mask) > 0 for s in order])
    dense = {(s.group_id, s.index): (S.detach(), Q) for s, _, S, Q in step.dense()}
    kl = torch.cat([divergence(*dense[s.group_id, s.index], 0.0) for s in order])
    taught = torch.cat([torch.full((len(s.response_ids),), s.distill_mask > 0) for s in order])
    assert metrics["sdpo/teacher_student_kl"][live].mean() == pytest.approx(kl[live & taught].mean().item(), rel=1e-5)
    assert metrics["sdpo/topk_overlap"][live].mean() == pytest.approx(1.0)
    S = torch.cat([dense[s.group_id, s.index][0] for s in order])
    torch.testing.assert_close(metrics["sdpo/student_entropy"], -(S.exp() * S).sum(1))


def test_sdpo_clips_and_corrects():
    cfg = {"is_clip": 1.5, "correction": "tis", "correction_high": 1.2}
    step = Step(build_algorithm({**SDPO, **cfg, "mode": "full", "alpha": 1.0}), make_samples())
    step.teach()
    for sample, _, _, _ in step.dense():
        offset = torch.linspace(-1, 1, len(sample.response_ids)).double()
        sample.tokens["old_logprobs"] = torch.tensor(sample.rollout_logprobs).double() + offset

    def token_loss(sample, S, Q, logp):
        old = sample.tokens["old_logprobs"]
        ratio = (logp.detach() - old).exp().clamp(max=1.5)
        gap = (old - torch.tensor(sample.rollout_logprobs).double()).exp().clamp(0, 1.2)
        return sample.distill_mask * divergence(S, Q, 1.0) * ratio * gap

    check(step, token_loss)


@pytest.mark.parametrize(
    "cfg",
    [
        {},
        {"clip_high": 0.28, "dual_clip": 2.0},
        {"policy_loss": "gspo", "clip_low": 0.05},
        {"policy_loss": "cispo"},
        {"policy_loss": "reinforce", "advantage": "rloo"},
        {"policy_loss": "sapo", "normalize_std": False},
        {"kl_loss_coef": 0.1, "kl_estimator": "k3", "kl_unbiased": True, "entropy_coef": 0.02},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"correction": "mis", "correction_low": 0.5, "correction_high": 1.5},
        {"correction": "icepop", "correction_low": 0.5, "correction_high": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("old", [False, True])
def test_grpo_against_dense_autograd(cfg, old):
    from rlpost.losses import kl, policy

    algorithm = build_algorithm({"name": "grpo", "reduction": "sequence_mean", **cfg})
    step = Step(algorithm, make_samples())
    for sample, _, S, _ in step.dense():
        ids = torch.tensor(sample.response_ids)[:, None]
        logp = S.detach().gather(1, ids)[:, 0]
        g = G().manual_seed(sample.group_id * 10 + sample.index)
        noise = torch.randn(2, len(logp), generator=g).double() * 0.3
        if old:
            sample.tokens["old_logprobs"] = logp + noise[0]
        sample.tokens["reference_logprobs"] = logp + noise[1]

    def token_loss(sample, S, Q, logp):
        t = sample.tokens
        mask, sequence = t["loss_mask"], torch.zeros(len(logp), dtype=torch.int64)
        before = t.get("old_logprobs", logp.detach())
        advantages = t["advantages"].double()
        if algorithm.kl_coef:
            advantages = advantages - algorithm.kl_coef * kl.kl(before, t["reference_logprobs"], "k1")
        clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
        loss, _ = {
            "ppo_clip": lambda: policy.ppo_clip(logp, before, advantages, **clip, dual_clip=algorithm.dual_clip),
            "gspo": lambda: policy.gspo(logp, before, advantages, sequence_N=sequence, mask_N=mask, **clip),
            "cispo": lambda: policy.cispo(logp, before, advantages, **clip),
            "reinforce": lambda: policy.reinforce(logp, advantages),
            "sapo": lambda: policy.sapo(logp, before, advantages),
        }[algorithm.policy_loss]()
        if algorithm.correction:
            rollout = torch.tensor(sample.rollout_logprobs)
            bounds = {"low": algorithm.correction_low, "high": algorithm.correction_high}
            options = {"sequence_N": sequence, "mask_N": mask, **bounds}
            loss = loss * correction_weights(algorithm.correction, before, rollout, **options)[0]
        if algorithm.kl_loss_coef:
            estimate = kl.kl(logp, t["reference_logprobs"], "k3", unbiased=True, old_N=before)
            loss = loss + algorithm.kl_loss_coef * estimate
        return loss + algorithm.entropy_coef * (S.exp() * S).sum(1)

    check(step, token_loss)


def test_first_step_identities_are_exact():
    step = Step(build_algorithm({"name": "grpo", "kl_loss_coef": 0.1}), make_samples())
    for sample in step.samples:
        (micro,) = pack([sample], 10**6)
        head = Head(sample.tokens["student_rows"], step.student, temperature=T, vocab_size=V)
        with torch.no_grad():
            sample.tokens["reference_logprobs"] = head.logprobs(micro.target_N).logprobs_N
    metrics = step.run(1)[3]
    assert metrics["policy/ppo_kl"].eq(0).all() and metrics["policy/clip_fraction"].eq(0).all()
    assert metrics["policy/kl"].eq(0).all()


@pytest.mark.parametrize("policy_loss", ["ppo_clip", "gspo", "cispo", "reinforce", "sapo"])
@pytest.mark.parametrize("value", [10.0, float("nan")])
def test_grpo_never_reads_masked_slots(policy_loss, value):
    cfg = {"name": "grpo", "policy_loss": policy_loss, "correction": "mis", "kl_loss_coef": 0.1}
    step = Step(build_algorithm(cfg), make_samples())
    for sample in step.samples:
        for name in ("old_logprobs", "reference_logprobs"):
            sample.tokens[name] = torch.tensor(sample.rollout_logprobs).double()
    before = step.run(20)
    for sample in step.samples:
        masked = torch.tensor(sample.loss_mask) == 0
        for name in ("old_logprobs", "reference_logprobs", "rollout_logprobs", "advantages"):
            sample.tokens[name][masked] = value
    torch.testing.assert_close(step.run(20)[:3], before[:3], rtol=0, atol=0)


def test_grpo_prepares_advantages_by_group():
    algorithm = build_algorithm({"name": "grpo"})
    samples = make_samples()
    metrics = algorithm.prepare(samples)
    # Rewards 1 0 0 1 | 0 0 1 0 of groups 0 1 2 3 | 0 1 2 3: group 1 is flat.
    assert metrics == {"grpo/zero_std_groups": 1.0, "grpo/zero_std_fraction": 0.25}
    want = math.sqrt(0.5) / (1 + 1e-6)
    for sample in samples:
        expected = 0.0 if sample.group_id == 1 else want * (1 if sample.reward else -1)
        assert sample.tokens["advantages"].shape == (len(sample.response_ids),)
        assert sample.tokens["advantages"].tolist() == pytest.approx([expected] * len(sample.response_ids), rel=1e-5)
    samples[3].reward = None
    with pytest.raises(ValueError, match="1 of 8 samples have no reward"):
        algorithm.prepare(samples)


def test_the_running_baseline_survives_a_resume():
    first, second = (build_algorithm({"name": "grpo", "advantage": "reinforce"}) for _ in range(2))
    first.prepare(make_samples())
    second.load_state_dict(first.state_dict())
    a, b = make_samples(), make_samples()
    for sample in (*a, *b):
        sample.reward += 1
    first.prepare(a)
    second.prepare(b)
    assert all(torch.equal(x.tokens["advantages"], y.tokens["advantages"]) for x, y in zip(a, b))
    assert build_algorithm({"name": "grpo"}).state_dict() == {}


@pytest.mark.parametrize(
    ("cfg", "needs"),
    [
        ({"name": "sft"}, set()),
        ({"name": "grpo"}, {"rollout", "reward", "old_logprobs"}),
        ({"name": "grpo", "policy_loss": "reinforce"}, {"rollout", "reward"}),
        ({"name": "grpo", "kl_loss_coef": 0.1}, {"rollout", "reward", "old_logprobs", "reference_logprobs"}),
        ({"name": "grpo", "kl_coef": 0.1}, {"rollout", "reward", "old_logprobs", "reference_logprobs"}),
        ({"name": "sdpo"}, {"rollout", "reward", "teacher", "teacher_distribution"}),
        ({"name": "sdpo", "mode": "sampled", "alpha": 1.0}, {"rollout", "reward", "teacher"}),
        (
            {"name": "sdpo", "is_clip": 2.0},
            {"rollout", "reward", "teacher", "teacher_distribution", "old_logprobs"},
        ),
        ({"name": "opd"}, {"rollout", "teacher", "teacher_distribution"}),
        ({"name": "opd", "loss_coef": 0.0, "advantage_coef": 1.0}, {"rollout", "teacher", "old_logprobs"}),
    ],
    ids=lambda value: str(
        sorted(value) if isinstance(value, set) else value
    ),  # a set has another order in every process
)
def test_needs(cfg, needs):
    assert build_algorithm(cfg).needs == needs


def test_group_relative():
    alone = {name for name in ALGORITHMS if not build_algorithm({"name": name}).group_relative}
    assert alone == {"reinforce", "reinforce_pp", "ppo", "opd", "sdpo", "sft"}
    assert not build_algorithm({"name": "grpo", "advantage": "reinforce"}).group_relative


@pytest.mark.parametrize(
    ("cfg", "lines"),
    [
        ({"name": "gpro"}, ["algorithm.name=gpro does not exist. Did you mean 'grpo'?"]),
        ({}, ["algorithm has neither name"]),
        (
            {"name": "grpo", "clip_hig": 0.3, "clip_low": -1, "advantage": "gae", "entropy_coef": "much"},
            ["'clip_hig' (algorithm.name=grpo). Did you mean 'clip_high'?", "clip_low=-1", "advantage=gae", "=much"],
        ),
        ({"name": "grpo", "kl_coef": 0.1, "kl_loss_coef": 0.2}, ["kl_coef=0.1 and algorithm.kl_loss_coef=0.2"]),
        ({"name": "grpo", "correction": "is"}, ["correction=is is not allowed; allowed are null, tis, icepop, mis"]),
        ({"name": "grpo", "correction_low": 0.5}, ["which is null"]),
        ({"name": "grpo", "correction": "tis", "correction_low": 3.0}, ["correction_low=3.0"]),
        (
            {"name": "sdpo", "alpha": 2, "mode": "some", "top_k": 0, "tail": "cut", "top_k_ids": "any", "is_clip": 0},
            ["alpha=2", "mode=some", "top_k=0", "tail=cut", "top_k_ids=any", "is_clip=0"],
        ),
        ({"name": "sft", "reduction": "mean"}, ["algorithm.reduction=mean is not allowed; allowed are token_mean"]),
    ],
    ids=str,
)
def test_wrong_configurations_name_every_field(cfg, lines):
    with pytest.raises(ValueError) as error:
        build_algorithm(cfg)
    for line in lines:
        assert line in str(error.value)


def test_an_algorithm_of_ones_own():
    algorithm = build_algorithm({"_target_": "rlpost.algorithms.sft.SFT", "reduction": "sequence_sum"})
    assert algorithm.name == "sft" and algorithm.reduction == "sequence_sum"
