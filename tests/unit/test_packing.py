import random
from itertools import product

import pytest
import torch

from rlpost.data.packing import assign, micro_batch_count, pack, run_tokens, unpack
from rlpost.types import Prompt, Sample


def sample(number, prompt, response, **tokens):
    ids = list(range(100 * number, 100 * number + prompt + response))
    return Sample(Prompt(number, [], ids[:prompt]), group_id=number, index=0, response_ids=ids[prompt:], tokens=tokens)


def weighted(number, prompt, response):
    return sample(number, prompt, response, weights=torch.full((response,), 1.0 + number))


def spread(lengths, parts):
    sums = [sum(lengths[i] for i in part) for part in parts]
    return max(sums) - min(sums)


def test_assign_covers_everything_once_and_is_deterministic():
    lengths = [random.Random(1).randint(1, 500) for _ in range(101)]
    for ranks in (1, 2, 3, 8):
        parts = assign(lengths, ranks)
        assert sorted(i for part in parts for i in part) == list(range(101))
        assert parts == assign(lengths, ranks)


def test_assign_is_near_the_best_split():
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 100) for _ in range(9)]
        best = min(
            abs(sum(l if side else -l for l, side in zip(lengths, sides))) for sides in product((0, 1), repeat=9)
        )
        assert spread(lengths, assign(lengths, 2)) <= best + 12  # the differencing method's gap on so few items
    many = [rng.randint(1, 1000) for _ in range(256)]
    assert spread(many, assign(many, 8)) <= 0.01 * sum(many) / 8


def test_assign_leaves_no_rank_empty_handed_where_there_is_enough():
    assert all(assign([1000, 1, 1, 1], 4))
    assert all(assign([1000, 1000, 0, 0], 3))
    assert sorted(map(len, assign([5], 3))) == [0, 0, 1]
    assert assign([], 2) == [[], []]


def test_packing_keeps_the_limit_and_a_longer_sample_goes_alone():
    lengths = [random.Random(2).randint(2, 40) for _ in range(40)] + [90]
    samples = [sample(i, 1, length - 1) for i, length in enumerate(lengths)]
    micros = pack(samples, 64)
    assert len(micros) == micro_batch_count(samples, 64)
    for micro in micros:
        assert len(micro.input_ids_T) <= 64 or len(micro.samples) == 1
    assert sorted(s.group_id for m in micros for s in m.samples) == list(range(41))
    assert len(micros) <= -(-sum(lengths) // 64) + 2


def test_a_micro_batch_by_hand():
    a, b = sample(1, 2, 3, x=torch.tensor([1.0, 2.0, 3.0])), sample(2, 3, 1, x=torch.tensor([4.0]))
    (micro,) = pack([b, a], 100)
    assert micro.samples == [a, b]
    assert micro.input_ids_T.tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203]
    assert micro.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert micro.cu_seqlens.tolist() == [0, 5, 9] and micro.cu_seqlens.dtype == torch.int32
    assert micro.max_seqlen == 5
    assert micro.predict_N.tolist() == [1, 2, 3, 7]
    assert micro.target_N.tolist() == [102, 103, 104, 203]
    assert micro.sequence_N.tolist() == [0, 0, 0, 1]
    assert micro.fields["x"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_every_response_token_is_predicted_by_the_one_before_it():
    micros = pack([sample(i, 1 + i % 3, i % 5) for i in range(12)], 10)
    for micro in micros:
        if any(s.response_ids for s in micro.samples):
            assert torch.equal(micro.input_ids_T[micro.predict_N + 1], micro.target_N)


def test_a_one_token_response_trains_from_the_prompts_last_token():
    (micro,) = pack([sample(3, 4, 1)], 100)
    assert micro.predict_N.tolist() == [3] and micro.target_N.tolist() == [304]


@pytest.mark.parametrize("count", [3, 5, 9])
def test_an_equal_count_comes_by_splitting_and_then_by_fillers(count):
    samples = [weighted(i, 2, 3 + i) for i in range(5)]
    micros = pack(samples, 40, count=count)
    assert len(micros) == count
    assert sorted(s.group_id for m in micros for s in m.samples) == list(range(5))
    fillers = [m for m in micros if not m.samples]
    assert len(fillers) == max(0, count - 5)
    for filler in fillers:
        assert filler.fields["weights"].tolist() == [0.0]
        assert len(filler.predict_N) == len(filler.target_N) == len(filler.sequence_N) == 1
        assert filler.predict_N[0] < len(filler.input_ids_T)
        assert unpack(filler, torch.ones(1)) == []


def test_the_largest_is_split_first():
    samples = [weighted(0, 1, 9), weighted(1, 1, 9), weighted(2, 1, 2), weighted(3, 1, 2)]
    sizes = sorted(len(m.input_ids_T) for m in pack(samples, 20, count=3))
    assert sizes == [6, 10, 10]


def test_a_rank_without_samples_gets_fillers_that_look_like_the_others():
    (micro,) = pack([], 10, count=1, defaults={"weights": torch.zeros(1), "hidden": torch.full((1, 4), 7.0)})
    assert micro.samples == [] and micro.fields["weights"].tolist() == [0.0]
    assert micro.fields["hidden"].tolist() == [[7.0] * 4]
    assert pack([], 10)[0].fields["weights"].tolist() == [0.0]


def test_an_empty_response_does_no_harm():
    micros = pack([weighted(0, 3, 0), weighted(1, 2, 2)], 100)
    assert [len(part) for part in unpack(micros[0], micros[0].fields["weights"])] == [0, 2] or [
        len(part) for part in unpack(micros[0], micros[0].fields["weights"])
    ] == [2, 0]
    (alone,) = pack([weighted(0, 3, 0)], 100)
    assert alone.fields["weights"].tolist() == [0.0] and alone.predict_N.tolist() == [2]
    assert [part.shape for part in unpack(alone, torch.ones(1, 5))] == [(0, 5)]


def test_unpack_is_the_inverse():
    rng = torch.Generator().manual_seed(0)
    rows = {i: torch.randn(i % 4, 3, generator=rng) for i in range(9)}
    micros = pack([sample(i, 2, i % 4, x=rows[i]) for i in range(9)], 12, count=6)
    found = {s.group_id: part for m in micros for s, part in zip(m.samples, unpack(m, m.fields["x"]))}
    assert all(torch.equal(found[i], rows[i]) for i in range(9))


def test_the_teacher_reads_its_own_prompt_and_the_same_response():
    taught, untaught = sample(1, 2, 3), sample(2, 2, 3)
    taught.distill_mask, taught.teacher_prompt_ids = 1.0, [7, 8, 9, 10]
    (micro,) = pack([taught, untaught], 100, use="teacher")
    assert micro.input_ids_T.tolist() == [7, 8, 9, 10, *taught.response_ids]
    assert micro.predict_N.tolist() == [3, 4, 5] and micro.samples == [taught]
    assert torch.equal(micro.target_N, pack([taught], 100)[0].target_N)
    assert pack([untaught], 100, use="teacher")[0].samples == []
    taught.teacher_prompt_ids = None
    with pytest.raises(ValueError, match="1/0 has distill_mask > 0 and no teacher prompt"):
        pack([taught], 100, use="teacher")


def test_fields_must_fit():
    with pytest.raises(ValueError, match=r"sample 0/0: tokens\['x'\] has 2 rows for 3 response tokens"):
        pack([sample(0, 1, 3, x=torch.zeros(2))], 10)
    some = [sample(0, 1, 2, x=torch.ones(2, 4)), sample(1, 1, 3)]
    with pytest.raises(ValueError, match=r"sample 1/0 has no tokens\['x'\]"):
        pack(some, 10)
    (micro,) = pack(some, 10, defaults={"x": torch.full((1, 4), -1.0)})
    by_group = dict(zip([s.group_id for s in micro.samples], unpack(micro, micro.fields["x"])))
    assert by_group[0].tolist() == [[1.0] * 4] * 2 and by_group[1].tolist() == [[-1.0] * 4] * 3


def group(number, prompt, responses):
    samples = [sample(number, prompt, response) for response in responses]
    for s in samples[1:]:
        s.prompt = samples[0].prompt
    return samples


def test_samples_of_one_prompt_stay_together_and_count_it_once():
    samples = [s for pair in zip(group(0, 20, [3, 4, 5]), group(1, 20, [3, 4, 5])) for s in pair]
    assert run_tokens(samples) == 2 * (20 + 12)
    micros = pack(samples, 32)
    assert [{s.group_id for s in micro.samples} for micro in micros] == [{0}, {1}]
    assert micro_batch_count(samples, 32) == 2
    smaller = pack(samples, 30)  # the prompt and seven more tokens; the group is cut
    assert sorted(len(micro.samples) for micro in smaller) == [1, 1, 2, 2]
    assert all(run_tokens(micro.samples) <= 30 for micro in smaller)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=0"):
        micro_batch_count([sample(0, 1, 3)], 0)
    with pytest.raises(ValueError, match="need 2 micro-batches, not 1"):
        pack([sample(0, 1, 3), sample(1, 1, 3)], 4, count=1)
    with pytest.raises(ValueError, match="0/0 has an empty prompt"):
        pack([sample(0, 0, 3)], 4)
