"""A prompt that several samples share runs once, and nothing else changes."""

import torch
from tiny_models import load_model, make_policy, save_model

from rlpost.data.packing import pack, unpack
from rlpost.policy.tokens import local_tokens
from rlpost.types import LossOutput, Prompt, Sample


def samples(groups, shared=True):
    """groups: (prompt length, response lengths) each. Not shared: the first prompt token differs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, (length, responses) in enumerate(groups):
        prompt = torch.randint(1, 90, (length,), generator=generator).tolist()
        for index, response in enumerate(responses):
            ids = prompt if shared else [90 + index, *prompt[1:]]
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


def loss(head, micro):
    return LossOutput(-head.logprobs(micro.target_N).logprobs_N)


def logprobs(head, micro):
    return {"logp": head.logprobs(micro.target_N).logprobs_N}


def by_sample(micros, results):
    rows = {}
    for micro, result in zip(micros, results):
        rows |= {(s.group_id, s.index): row for s, row in zip(micro.samples, unpack(micro, result["logp"]))}
    return torch.cat([rows[key] for key in sorted(rows)])


def test_loss_and_gradients_are_those_of_whole_sequences(tmp_path):
    """Against Transformers, sequence by sequence."""
    path = save_model("llama-tied", tmp_path)
    made = samples(GROUPS)
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
    for max_tokens in (1000, 14):
        metrics = make_policy(path).train_step(pack(made, max_tokens), loss)
        assert abs(metrics["train/loss"] - total.item()) < 1e-5 * abs(total.item())
        assert abs(metrics["train/grad_norm"] - norm) < 1e-5 * norm
    together, alone = (policy.score(pack(made, size), logprobs) for size in (1000, 1))
    assert torch.allclose(by_sample(pack(made, 1000), together), by_sample(pack(made, 1), alone), atol=1e-5)
