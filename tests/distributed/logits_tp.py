"""Run by test_logits_tp.py under torchrun: the head over two vocabulary shards against the same head in one piece."""

import torch
import torch.distributed as dist
from launch import say

from rlpost.policy.logits import Head, HiddenTargets

N, H, V, K, T = 19, 12, 61, 6, 0.7


def outputs(hidden, weight, teacher_hidden, teacher_weight, ids, extra, group):
    """Every output of the head, and the gradients of a mixture of them."""
    options = {"temperature": T, "vocab_size": V, "tp_group": group}
    teacher_lse = Head(teacher_hidden, teacher_weight, **options).lse_N
    teacher = HiddenTargets(teacher_hidden, teacher_lse, teacher_weight, V, temperature=T, tp_group=group)
    head = Head(hidden, weight, chunk_tokens=3, **options)
    out = head.logprobs(ids, top_k=K, extra_ids_NK=extra, entropy=True)
    values = {
        "logprobs": out.logprobs_N,
        "topk": out.topk_logprobs_NK,
        "extra": out.extra_logprobs_NK,
        "entropy": out.entropy_N,
        **{f"divergence {alpha}": head.divergence(teacher, alpha)[0] for alpha in (0.0, 0.4, 1.0)},
    }
    g = torch.Generator().manual_seed(3)
    mixture = sum((v * torch.randn(v.shape, generator=g, dtype=v.dtype)).sum() for v in values.values())
    d_hidden, d_weight = torch.autograd.grad(mixture, (hidden, weight))
    values |= {"lse": out.lse_N, "topk ids": out.topk_ids_NK, "kl": head.divergence(teacher, 0.4)[1]}
    values |= {"teacher": teacher.logprobs_at(extra), "teacher top": teacher.topk(K)[1]}
    return {name: value.detach() for name, value in values.items()}, d_hidden, d_weight


def compare(rows_per_rank, dtype, tolerance):
    """rows_per_rank: of the padded vocabulary; where it is large, the last shard has only padding."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(N, H, generator=g).to(dtype) for _ in range(2))
    whole = [torch.randn(rows_per_rank * ranks, H, generator=g).to(dtype) for _ in range(2)]
    for weight in whole:
        weight[V:] = 50.0  # padding that would win every softmax
    ids, extra = torch.randint(0, V, (N,), generator=g), torch.randint(0, V, (N, 4), generator=g)

    def run(weights, group):
        h, w = hidden.clone().requires_grad_(), weights[0].clone().requires_grad_()
        return outputs(h, w, teacher_hidden, weights[1], ids, extra, group)

    shard = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    want, d_hidden, d_weight = run(whole, None)
    got, d_part, d_shard = run([w[shard] for w in whole], dist.group.WORLD)
    dist.all_reduce(d_part)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, name=name: f"{name}: {m}", **tolerance)
    torch.testing.assert_close(d_part, d_hidden, **tolerance)
    torch.testing.assert_close(d_shard, d_weight[shard], **tolerance)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for rows_per_rank in (31, 32, 64):
        compare(rows_per_rank, torch.float64, {"rtol": 1e-10, "atol": 1e-10})
        compare(rows_per_rank, torch.float32, {"rtol": 1e-4, "atol": 1e-5})
    say(f"rank {dist.get_rank()} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
