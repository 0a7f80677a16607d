"""Scores, publishes and payloads of a teacher on an engine, with a tiny policy, against Hugging Face."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_policy import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM

from rlpost.algorithms import build_algorithm
from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.data.batching import Batcher
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.policy.megatron import MegatronPolicy
from rlpost.rollout.engine import Request, SamplingParams
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.teacher import TeacherConfig
from rlpost.teacher.engine import EngineTeacher, OwnEngineTeacher
from rlpost.teacher.payloads import PayloadError
from rlpost.teacher.weights import SnapshotWeights
from rlpost.types import Prompt, Sample
from rlpost.weights.publish import Publisher
from rlpost.weights.snapshots import SnapshotStore

T, K = 0.7, 5
REQUEST = Request([5, 9, 2], SamplingParams(4), seed=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("engine_teachers")
    model = AutoModelForCausalLM.from_pretrained(tiny_model(root / "first"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(root / "second")
    return root


@pytest.fixture(scope="module")
def policy(models):
    return MegatronPolicy(
        ModelConfig(path=str(models / "first")), OptimConfig(lr=1e-2), ParallelConfig(), temperature=T
    )


class Room:
    """A student that was published once, its teacher, and five samples, of which the fourth is not taught."""

    def __init__(self, policy, models, slot, mode="topk", **config):
        policy.load_optimizer_tensors("master", SafetensorsReader(models / "first").get)
        self.policy, self.models = policy, models
        snapshots = SnapshotStore(policy.masters, policy.sync_from_masters)
        fields = (
            {"mode": "topk", "top_k": K, "top_k_ids": "teacher"} if mode == "topk" else {"mode": mode, "alpha": 1.0}
        )
        self.algorithm = build_algorithm({"name": "sdpo", **fields})
        limits = {"max_tokens": 40, "max_response_tokens": 8}
        self.batcher = Batcher(self.algorithm, updates_per_rollout=1, **limits, dp_rank=0, dp_size=1)
        self.engine = TorchEngine(str(models / "first"), dtype=torch.float32)
        self.engine.start()
        self.publisher = Publisher(policy, self.engine)
        self.publisher.publish()
        weights = SnapshotWeights(policy.gather_masters, snapshots)
        config = TeacherConfig(**{"backend": "engine", "engine": slot, "update": "periodic", "interval": 1, **config})

        def read(path):
            return policy.scatter_masters(SafetensorsReader(path).get)

        kind, engine, publisher = EngineTeacher, self.engine, self.publisher
        if slot == "own":
            kind, engine = OwnEngineTeacher, TorchEngine(str(models / "first"), dtype=torch.float32)
            publisher = Publisher(weights, engine)
        top_k = self.algorithm.teacher_top_k
        self.teacher = kind(config, policy, snapshots, read, weights, publisher, engine, top_k=top_k)

    def move(self, name="second"):
        """The student becomes another model, and the teacher follows."""
        self.policy.load_optimizer_tensors("master", SafetensorsReader(self.models / name).get)
        self.teacher.after_batch()

    def update(self):
        g = torch.Generator().manual_seed(3)
        samples = []
        for i, length in enumerate((4, 1, 6, 3, 5)):
            prompt = Prompt(i, [], torch.randint(0, VOCABULARY, (3,), generator=g).tolist())
            sample = Sample(prompt, i, 0, torch.randint(0, VOCABULARY, (length,), generator=g).tolist(), reward=0.0)
            sample.rollout_logprobs, sample.loss_mask = [-1.0] * length, [1] * length
            sample.teacher_prompt_ids = torch.randint(0, VOCABULARY, (5 + i,), generator=g).tolist()
            sample.distill_mask = 0.0 if i == 3 else 1.0
            flags = dict.fromkeys(("success", "demonstration", "feedback", "cut"), False)
            sample.teacher_info = {"route": "student", "tokens": 5 + i, **flags}
            samples.append(sample)
        self.algorithm.prepare(samples)
        (update,) = self.batcher.updates(samples)
        return update

    def train(self, update):
        micros = self.batcher.pack(update, defaults=self.teacher.blank)
        return self.policy.train_step(micros, self.algorithm.loss)


@pytest.mark.parametrize("mode", ["topk", "sampled"])
@pytest.mark.parametrize("slot", ["own", "shared"])
def test_scores_are_those_of_the_teacher_and_not_of_the_student(slot, mode, policy, models):
    room = Room(policy, models, slot, mode, update="static", model=str(models / "second"))
    assert room.teacher.own_tag is None and room.teacher.serve()["teacher/version"] == (1 if slot == "own" else 2)
    update = room.update()
    assert room.teacher.score(update) == {"teacher/scored_sequences": 4.0, "teacher/bad_payloads": 0.0}
    model = AutoModelForCausalLM.from_pretrained(models / "second")
    for sample in update.samples:
        if sample.distill_mask == 0:
            assert "teacher_logprobs" not in sample.tokens
            continue
        ids = torch.tensor([sample.teacher_prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.teacher_prompt_ids) - 1 : -1]
        want = (logits / T).log_softmax(-1)
        sampled = want.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(sample.tokens["teacher_logprobs"], sampled, atol=1e-5, rtol=1e-5)
        assert ("teacher_topk_ids" in sample.tokens) is (mode == "topk")
        if mode == "topk":
            top, top_ids = want.topk(K)
            torch.testing.assert_close(sample.tokens["teacher_topk_logprobs"], top, atol=1e-5, rtol=1e-5)
            assert torch.equal(sample.tokens["teacher_topk_ids"], top_ids)
    metrics = room.train(update)
    assert metrics["train/grad_norm"] > 0 and metrics["sdpo/teacher_student_kl"] != 0


def test_an_own_engine_is_published_to_only_when_the_teacher_moved(policy, models):
    room = Room(policy, models, "own")
    teacher, publisher = room.teacher, room.teacher.publisher
    assert teacher.serve()["teacher/version"] == teacher.engine.version == 1
    assert teacher.serve() == {} and publisher.version == 1
    teacher.after_optimizer_step()  # a periodic teacher moves after batches
    assert teacher.serve() == {}
    first = teacher.engine.digest()
    room.move()
    assert teacher.serve()["teacher/version"] == 2 and teacher.engine.digest() != first
    assert room.engine.digest() == first and room.publisher.served is policy  # the student's engine is left alone

    teacher.engine.sleep(["weights"])
    teacher.engine.wake(["weights"])
    assert teacher.serve()["teacher/version"] == 3  # what slept is gone
    teacher.close()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        teacher.engine.score([[1, 2]], [1])


def test_own_versions_go_on_after_a_resume_and_never_go_back(policy, models):
    room = Room(policy, models, "own")
    for _ in range(3):
        room.move()
        room.teacher.serve()
    state = room.teacher.state_dict()
    assert state == {"batches": 3, "version": 3}
    resumed = Room(policy, models, "own").teacher
    resumed.load_state_dict(state)
    assert resumed.serve()["teacher/version"] == 3 and resumed.state_dict() == state
    room.move()
    room.teacher.serve()
    room.teacher.load_state_dict(state)  # a run that falls back to a checkpoint goes on with its engines
    assert room.teacher.serve()["teacher/version"] == 5
    resumed.load_state_dict({"batches": 2})  # of a run with teacher.backend=swap
    fresh = Room(policy, models, "own").teacher
    fresh.load_state_dict({"batches": 2})
    assert fresh.serve()["teacher/version"] == 1


def test_in_a_shared_engine_no_version_means_both(policy, models):
    room = Room(policy, models, "shared")
    teacher, publisher, engine = room.teacher, room.publisher, room.engine
    teacher.start()
    assert publisher.served is policy and engine.version == 1
    students = engine.digest()
    room.move()
    assert teacher.serve()["teacher/version"] == engine.version == 2
    assert publisher.served is teacher.weights and publisher.named == 1 and engine.digest() != students
    assert teacher.serve() == {}
    assert publisher.publish()["publish/version"] == engine.generate([REQUEST])[0].version == 3
    assert publisher.served is policy and publisher.named == 3
    assert teacher.serve()["teacher/version"] == 4  # the same teacher as before, published anew
    assert teacher.state_dict() == {"batches": 1}
    engine.load_bucket = lambda bucket: 1 / 0
    room.move("first")
    with pytest.raises(RuntimeError, match="could not send the weights of version 5"):
        teacher.serve()
    assert publisher.served is None and publisher.version == 4


def spoiled(**change):
    return lambda score: replace(score, **{name: make(getattr(score, name)) for name, make in change.items()})


def at_first(value):
    def make(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return make


FAULTS = {
    "too few": (spoiled(logprobs=lambda t: t[1:]), "3 scores for 4 response tokens"),
    "nan": (spoiled(logprobs=at_first(float("nan"))), "teacher_logprobs is nan"),
    "infinite": (spoiled(topk_logprobs=at_first(float("inf"))), "teacher_topk_logprobs is inf"),
    "short lists": (
        spoiled(topk_ids=lambda t: t[:, 1:], topk_logprobs=lambda t: t[:, 1:]),
        r"lists of \[4, 4\] ids for 4 response tokens and 5 ids each",
    ),
    "no such id": (spoiled(topk_ids=at_first(VOCABULARY)), r"ids \d+ … 90, in a vocabulary of 90"),
    "another version": (spoiled(version=lambda v: v - 1), "version 0 scored, not the teacher's 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_score_that_cannot_be_used_teaches_nothing_and_is_counted(name, policy, models):
    change, said = FAULTS[name]
    room = Room(policy, models, "own", max_bad_payload_fraction=0.3)
    teacher = room.teacher
    teacher.serve()
    score = teacher.engine.score
    teacher.engine.score = lambda ids, starts, **asked: [
        change(s) if len(sequence) == 9 else s for sequence, s in zip(ids, score(ids, starts, **asked))
    ]
    update = room.update()
    assert teacher.score(update) == {"teacher/scored_sequences": 4.0, "teacher/bad_payloads": 1.0}
    spoilt, *others = update.samples
    assert not spoilt.tokens["distill_mask"].any() and others[0].tokens["distill_mask"].all()
    metrics = room.train(update)
    assert metrics["train/skipped"] == 0 and metrics["train/grad_norm"] > 0
    teacher.config.max_bad_payload_fraction = 0.2
    with pytest.raises(PayloadError, match=f"teacher.engine=own.*: 1 of 4 sequences.*the first: {said}"):
        teacher.score(room.update())


def test_a_token_that_the_teacher_rules_out_stays_finite(policy, models):
    room = Room(policy, models, "own")
    room.teacher.serve()
    score = room.teacher.engine.score
    change = spoiled(logprobs=at_first(-torch.inf), topk_logprobs=at_first(-torch.inf))
    room.teacher.engine.score = lambda *given, **asked: [change(s) for s in score(*given, **asked)]
    update = room.update()
    assert room.teacher.score(update)["teacher/bad_payloads"] == 0
    tokens = update.samples[0].tokens
    assert tokens["teacher_logprobs"][0] == tokens["teacher_topk_logprobs"][0, 0] == -80


def test_ranks_of_one_engine_ask_together_and_each_gets_its_own(policy, models, monkeypatch):
    room = Room(policy, models, "own")
    teacher, update = room.teacher, room.update()
    teacher.serve()
    alone = teacher._ask(update.samples)
    teacher._engine_group = SimpleNamespace(rank=lambda: 1)
    others = ([[1, 2, 3], [4, 5]], [1, 1])
    monkeypatch.setattr("rlpost.teacher.engine.all_gather_objects", lambda mine, group: [others, mine, ([], [])])
    for one, together in zip(alone, teacher._ask(update.samples), strict=True):
        torch.testing.assert_close(one.logprobs, together.logprobs)
    assert teacher._ask([]) == []


def test_a_step_without_taught_samples_asks_for_nothing(policy, models):
    room = Room(policy, models, "own")
    room.teacher.serve()
    room.teacher.engine.score = None
    update = room.update()
    for sample in update.samples:
        sample.distill_mask = 0.0
    assert room.teacher.score(update) == {"teacher/scored_sequences": 0.0, "teacher/bad_payloads": 0.0}
