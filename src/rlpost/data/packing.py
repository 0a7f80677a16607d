"""Which rank trains what, and whole sequences packed into micro-batches.

All functions are pure and deterministic: every rank calls them with the same lengths and gets the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from rlpost.types import MicroBatch, Sample

Use = Literal["student", "teacher"]


def assign(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank, so that sums of lengths are close (largest differencing, Karmarkar & Karp 1982).

    Every rank gets something where there are at least as many items as ranks.
    """
    if ranks < 1:
        raise ValueError(f"cannot assign to {ranks} ranks")
    # A partition is (−spread, tie-break, [(sum, indices), …] with the largest sum first).
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths):
        parts = [(length, [index])] + [(0, [])] * (ranks - 1)
        heapq.heappush(heap, (-length if ranks > 1 else 0, index, parts))
    if not heap:
        return [[] for _ in range(ranks)]
    while len(heap) > 1:
        _, tie, large = heapq.heappop(heap)
        _, _, small = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(large, reversed(small))]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return _without_empty([sorted(indices) for _, indices in heap[0][2]])


def _without_empty(parts: list[list[int]]) -> list[list[int]]:
    for part in parts:
        if not part:
            fullest = max(parts, key=len)
            if len(fullest) > 1:
                part.append(fullest.pop())
    return parts


def micro_batch_count(samples: Sequence[Sample], max_tokens: int, use: Use = "student") -> int:
    """How many micro-batches `pack` makes of these samples; at least one."""
    return max(1, len(_bins(_used(samples, use), max_tokens, use)))


def run_tokens(samples: Sequence[Sample], use: Use = "student") -> int:
    """How many tokens the model runs for these samples in one micro-batch: what a group's prompts have in common counts
    once."""
    samples = _used(samples, use)
    return sum(
        shared + sum(_tokens(samples[i], use) - shared for i in members) for shared, members in _by_group(samples, use)
    )


def worth_sharing(saved: int, tokens: int) -> bool:
    """Whether sequences of so many tokens should run their common beginning once: cut in pieces they cost attention
    more, and their keys are gathered."""
    return 16 * saved >= tokens > 0 < saved


def _by_group(samples: Sequence[Sample], use: Use) -> list[tuple[int, list[int]]]:
    """Samples of one student's prompt (indices), and how many tokens their sequences share from the start."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(tuple(sample.prompt.ids), []).append(index)
    return [(_shared([samples[i] for i in members], use), members) for members in by_prompt.values()]


def _shared(samples: Sequence[Sample], use: Use) -> int:
    """What all prompts begin with, where sharing is worth it for any two of them; else 0."""
    if use == "student":
        common = len(samples[0].prompt.ids)
    else:
        prompts = [_prompt_ids(sample, use) for sample in samples]
        first, last = min(prompts), max(prompts)  # what these two begin with, all others do
        common = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
    longest = max(_tokens(sample, use) for sample in samples)
    return common if len(samples) > 1 and worth_sharing(common, 2 * longest) else 0


def _tokens(sample: Sample, use: Use) -> int:
    return len(_prompt_ids(sample, use)) + len(sample.response_ids)


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    count: int | None = None,
    use: Use = "student",
    defaults: Mapping[str, Tensor] | None = None,
) -> list[MicroBatch]:
    """First-fit-decreasing into micro-batches that run at most max_tokens; a longer sequence goes alone.

    Samples with the same prompt stay together as far as they fit, since the model runs their prompt once.
    count: exactly that many (all ranks need the same number), by splitting the largest; where there are fewer
    samples than micro-batches the rest are fillers, one token of weight 0. use="teacher" packs the teacher's prompt
    with the student's response, of the samples with distill_mask > 0 only. defaults: name → a tensor [1, …] that a
    filler, and a sample without that name in `tokens`, repeats. Raises ValueError for a name that some samples lack
    and defaults do not hold.
    """
    samples = _used(samples, use)
    bins = _bins(samples, max_tokens, use) or [[]]
    if count is not None:
        lengths = [_tokens(sample, use) for sample in samples]
        bins = _split_to(bins, lengths, count)
    fields = _field_examples(samples, defaults or {})
    return [_micro_batch([samples[i] for i in members], use, fields, defaults or {}) for members in bins]


def unpack(micro: MicroBatch, tensor_N: Tensor) -> list[Tensor]:
    """A tensor [N, …] of a micro-batch cut back into one [R, …] for each of `micro.samples`."""
    lengths = [len(sample.response_ids) for sample in micro.samples]
    # A micro-batch without a response token carries one of weight 0, which is nobody's.
    return [part.clone() for part in tensor_N[: sum(lengths)].split(lengths)] if lengths else []


def _prompt_ids(sample: Sample, use: Use) -> list[int]:
    if use == "student":
        return sample.prompt.ids
    if sample.teacher_prompt_ids is None:
        raise ValueError(f"sample {sample.group_id}/{sample.index} has distill_mask > 0 and no teacher prompt")
    return sample.teacher_prompt_ids


def _used(samples: Sequence[Sample], use: Use) -> Sequence[Sample]:
    return samples if use == "student" else [sample for sample in samples if sample.distill_mask > 0]


def _bins(samples: Sequence[Sample], max_tokens: int, use: Use) -> list[list[int]]:
    """Indices for each micro-batch."""
    bundles: list[list[int]] = []  # samples of one group that fit together
    costs: list[int] = []
    for shared, members in _by_group(samples, use):
        cost = max_tokens + 1
        for index in members:
            rest = _tokens(samples[index], use) - shared
            if cost + rest > max_tokens:
                bundles.append([])
                costs.append(0)
                cost = shared
            bundles[-1].append(index)
            cost += rest
            costs[-1] = cost
    return [[i for bundle in members for i in bundles[bundle]] for members in _first_fit(costs, max_tokens)]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    if max_tokens < 1:
        raise ValueError(f"train.max_tokens_per_micro_batch={max_tokens} is not allowed; it is at least 1")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, left in enumerate(room):
            if lengths[index] <= left:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins


def _split_to(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    if len(bins) > count:
        raise ValueError(f"{sum(lengths)} tokens need {len(bins)} micro-batches, not {count}")
    bins = [members for members in bins if members]
    while len(bins) < count:
        splittable = [i for i, members in enumerate(bins) if len(members) > 1]
        if not splittable:
            return bins + [[] for _ in range(count - len(bins))]
        largest = max(splittable, key=lambda i: sum(lengths[j] for j in bins[i]))
        members = bins[largest]
        halves = [[members[i] for i in part] for part in assign([lengths[j] for j in members], 2)]
        bins[largest : largest + 1] = halves
    return bins


def _field_examples(samples: Sequence[Sample], defaults: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name → a tensor [0, …] of the right dtype and trailing shape, over all samples and defaults."""
    examples = {name: value[:0] for name, value in defaults.items()}
    for sample in samples:
        for name, value in sample.tokens.items():
            examples.setdefault(name, value[:0])
            if value.shape[0] != len(sample.response_ids):
                raise ValueError(
                    f"sample {sample.group_id}/{sample.index}: tokens[{name!r}] has {value.shape[0]} rows for "
                    f"{len(sample.response_ids)} response tokens"
                )
    return examples


def _micro_batch(
    samples: list[Sample], use: Use, examples: Mapping[str, Tensor], defaults: Mapping[str, Tensor]
) -> MicroBatch:
    input_ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    sequences: list[int] = []
    boundaries = [0]
    for number, sample in enumerate(samples):
        prompt, response = _prompt_ids(sample, use), sample.response_ids
        if not prompt:
            raise ValueError(
                f"sample {sample.group_id}/{sample.index} has an empty prompt: nothing predicts its first token"
            )
        first = len(input_ids) + len(prompt) - 1  # the prompt's last token predicts the first of the response
        input_ids += prompt + response
        positions += range(len(prompt) + len(response))
        predict += range(first, first + len(response))
        targets += response
        sequences += [number] * len(response)
        boundaries.append(len(input_ids))
    fields = {name: _field(name, samples, example, defaults) for name, example in examples.items()}
    if not targets:
        # Nothing to learn here, but the forward and backward must run: one token of weight 0.
        if not samples:
            input_ids, positions, boundaries = [0], [0], [0, 1]
        predict, targets, sequences = [boundaries[1] - 1], [0], [0]
        fields = {name: _repeated(name, example, defaults, 1) for name, example in examples.items()}
        fields["weights"] = torch.zeros(1)
    return MicroBatch(
        input_ids_T=torch.tensor(input_ids),
        position_ids_T=torch.tensor(positions),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in pairwise(boundaries)),
        predict_N=torch.tensor(predict),
        target_N=torch.tensor(targets),
        sequence_N=torch.tensor(sequences),
        samples=samples,
        fields=fields,
    )


def _field(name: str, samples: Sequence[Sample], example: Tensor, defaults: Mapping[str, Tensor]) -> Tensor:
    parts = [example]
    for sample in samples:
        if name in sample.tokens:
            parts.append(sample.tokens[name])
        elif name in defaults:
            parts.append(_repeated(name, example, defaults, len(sample.response_ids)))
        elif sample.response_ids:
            raise ValueError(
                f"sample {sample.group_id}/{sample.index} has no tokens[{name!r}], others in its batch have"
            )
    return torch.cat(parts)


def _repeated(name: str, example: Tensor, defaults: Mapping[str, Tensor], rows: int) -> Tensor:
    if name in defaults:
        return defaults[name].expand(rows, *example.shape[1:]).clone()
    return example.new_zeros(rows, *example.shape[1:])
