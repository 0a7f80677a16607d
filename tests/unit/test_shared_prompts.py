"""What several sequences begin with runs once, and nothing else changes."""

import pytest
import torch
from tiny_models import load_model, make_policy, save_model

from rlpost.data.packing import micro_batch_count, pack, run_tokens, unpack
from rlpost.policy.tokens import local_tokens
from rlpost.types import LossOutput, Prompt, Sample


def samples(groups, shared=True, header=0):
    """groups: (prompt length, response lengths) each. Not shared: the first prompt token differs. header: tokens before
    all prompts."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, (length, responses) in enumerate(groups):
        prompt = list(range(1, header + 1)) + torch.randint(1, 90, (length,), generator=generator).tolist()
        for index, response in enumerate(responses):
            ids = prompt if shared else [90 + len(made), *prompt[1:]]
            sample = Sample(Prompt(number, [], ids), number, index)
            sample.response_ids = torch.randint(1, 90, (response,), generator=generator).tolist()
            sample.tokens = {"weights": torch.rand(response, generator=generator), "loss_mask": torch.ones(response)}
            made.append(sample)
    return made


GROUPS = [(7, [3, 1, 5]), (4, [2]), (1, [4, 4]), (9, [1, 0, 2])]


def test_every_token_runs_once_and_predicts_from_its_own_prompt(tmp_path):
    axis = make_policy(save_model("qwen3", tmp_path)).mesh.cp
    (micro,) = pack(samples(GROUPS), 1000)
    tokens = local_tokens(micro, axis, multiple=4)
    run = sum(prompt + sum(responses) for prompt, responses in GROUPS)
    run += 9  # a sample without a response predicts nothing, so it has nothing to share
    assert len(tokens.input_ids_T) == -(-run // 4) * 4 < len(micro.input_ids_T)
    assert sum(tokens.query_lengths) == len(tokens.input_ids_T)
    assert torch.equal(tokens.input_ids_T[tokens.predict_N], micro.input_ids_T[micro.predict_N])
    assert torch.equal(tokens.position_ids_T[tokens.predict_N], micro.position_ids_T[micro.predict_N])


def test_nothing_is_shared_where_prompts_differ(tmp_path):
    axis = make_policy(save_model("qwen3", tmp_path)).mesh.cp
    (micro,) = pack(samples(GROUPS[:2], shared=False), 1000)
    tokens = local_tokens(micro, axis)
    assert tokens.keys_K is None and torch.equal(tokens.input_ids_T, micro.input_ids_T)


def hinted(groups, header):
    """The same samples with a teacher's prompt each: header, question and a hint of their own."""
    made = samples(groups, header=header)
    for number, sample in enumerate(made):
        sample.teacher_prompt_ids = [*sample.prompt.ids, 60 + number % 3, 50 + number % 2, 40 + number]
        sample.distill_mask = 1.0
    return made


def test_a_tree_of_beginnings_runs_each_branch_once(tmp_path):
    """Header, question, hint: three forks."""
    policy = make_policy(save_model("qwen3", tmp_path))
    made = hinted([(9, [3, 1, 5, 2]), (12, [2, 6])], header=11)
    (micro,) = pack(made, 1000, use="teacher")
    tokens = local_tokens(micro, policy.mesh.cp)
    branches = {tuple(s.teacher_prompt_ids[:n]) for s in made for n in range(1, len(s.teacher_prompt_ids) + 1)}
    assert len(branches) == 11 + 9 + 12 + 6 * 3 - 1  # two hints begin alike
    assert len(tokens.input_ids_T) == len(branches) + 19 < len(micro.input_ids_T)
    assert torch.equal(tokens.input_ids_T[tokens.place_M], micro.input_ids_T)
    assert torch.equal(tokens.position_ids_T[tokens.place_M], micro.position_ids_T)
    together = policy.score([micro], logprobs)
    alone = pack(made, 1, use="teacher")
    assert len(alone) == 6
    expected = by_sample(alone, policy.score(alone, logprobs))
    assert torch.allclose(by_sample([micro], together), expected, atol=1e-5)


def test_what_is_packed_is_what_runs():
    made = hinted([(40, [3, 1, 5, 2]), (30, [2, 6, 1])], header=0)
    assert run_tokens(made, "teacher") == 40 + 4 * 3 + 11 + 30 + 3 * 3 + 9
    micros = pack(made, 70, use="teacher")
    assert [len(micro.samples) for micro in micros] == [4, 3] and micro_batch_count(made, 70, "teacher") == 2
    assert all(run_tokens(micro.samples, "teacher") <= 70 for micro in micros)
    for sample in made:
        sample.teacher_prompt_ids = [sample.index + 1, *sample.teacher_prompt_ids]  # nothing in common
    assert run_tokens(made, "teacher") == sum(len(s.teacher_prompt_ids) + len(s.response_ids) for s in made)


def loss(head, micro):
    return LossOutput(-head.logprobs(micro.target_N).logprobs_N)


def logprobs(head, micro):
    return {"logp": head.logprobs(micro.target_N).logprobs_N}


def by_sample(micros, results):
    rows = {}
    for micro, result in zip(micros, results):
        rows |= {(s.group_id, s.index): row for s, row in zip(micro.samples, unpack(micro, result["logp"]))}
    return torch.cat([rows[key] for key in sorted(rows)])


@pytest.mark.parametrize("header", [0, 8])
def test_loss_and_gradients_are_those_of_whole_sequences(header, tmp_path):
    """Against Transformers, sequence by sequence."""
    path = save_model("llama-tied", tmp_path)
    made = samples(GROUPS, header=header)
    model = load_model(path)
    total = 0.0
    for sample in made:
        if sample.response_ids:
            ids = torch.tensor(sample.ids)
            scored = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)[len(sample.prompt.ids) - 1 : -1]
            picked = scored.gather(1, ids[len(sample.prompt.ids) :, None])[:, 0]
            total = total - (picked * sample.tokens["weights"]).sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    policy = make_policy(path)
    for max_tokens in (1000, 14 + header):
        metrics = make_policy(path).train_step(pack(made, max_tokens), loss)
        assert abs(metrics["train/loss"] - total.item()) < 1e-5 * abs(total.item())
        assert abs(metrics["train/grad_norm"] - norm) < 1e-5 * norm
    together, alone = (policy.score(pack(made, size), logprobs) for size in (1000, 1))
    assert torch.allclose(by_sample(pack(made, 1000), together), by_sample(pack(made, 1), alone), atol=1e-5)
