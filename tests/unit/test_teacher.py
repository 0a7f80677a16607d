"""The teacher's weights and scores, on a tiny Megatron policy, against Hugging Face."""

import json

import pytest
import torch
from tiny_policy import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM

from rlpost.algorithms import build_algorithm
from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.data.batching import Batcher
from rlpost.policy.frozen import FrozenModel
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.policy.logits import HiddenTargets
from rlpost.policy.megatron import MegatronPolicy
from rlpost.teacher import (
    TeacherConfig,
    build_teacher_config,
    check_external,
    directory_mistakes,
    shape_differences,
)
from rlpost.teacher.local import LocalTeacher
from rlpost.types import Prompt, Sample
from rlpost.weights.snapshots import SnapshotStore

T = 0.7


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models of one shape, one that is deeper and wider, one with another vocabulary."""
    root = tmp_path_factory.mktemp("teachers")
    student = tiny_model(root / "student")
    for number, name in enumerate(("math", "code"), start=1):
        model = AutoModelForCausalLM.from_pretrained(student)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * number * torch.randn_like(parameter))
        model.save_pretrained(root / name)
    tiny_model(root / "large", layers=3, tied=False, hidden_size=48, num_attention_heads=6)
    tiny_model(root / "foreign", vocab_size=VOCABULARY + 1)
    return root


@pytest.fixture(scope="module")
def policy(models):
    return MegatronPolicy(
        ModelConfig(path=str(models / "student")), OptimConfig(lr=1e-2), ParallelConfig(), temperature=T
    )


def samples():
    g = torch.Generator().manual_seed(3)
    made = []
    for i, (length, source) in enumerate(((4, "math"), (1, "code"), (6, "code"), (3, "math"), (5, "math"))):
        prompt = Prompt(i, [], torch.randint(0, VOCABULARY, (3,), generator=g).tolist(), source=source)
        made.append(Sample(prompt, i, 0, torch.randint(0, VOCABULARY, (length,), generator=g).tolist()))
        made[-1].rollout_logprobs, made[-1].loss_mask = [-1.0] * length, [1] * length
        made[-1].teacher_prompt_ids = torch.randint(0, VOCABULARY, (5 + i,), generator=g).tolist()
        made[-1].distill_mask = 0.0 if i == 3 else 1.0
        flags = dict.fromkeys(("success", "demonstration", "feedback", "cut"), False)
        made[-1].teacher_info = {"route": "student", "tokens": 5 + i, **flags}
    return made


def set_up(policy, root, **config):
    policy.load_optimizer_tensors("master", SafetensorsReader(root / "student").get)
    snapshots = SnapshotStore(policy.masters, policy.sync_from_masters)
    algorithm = build_algorithm({"name": "opd", "mode": "full"})
    batcher = Batcher(algorithm, updates_per_rollout=1, max_tokens=20, max_response_tokens=8, dp_rank=0, dp_size=1)

    def read(path):
        return policy.scatter_masters(SafetensorsReader(path).get)

    config = TeacherConfig(**config)
    models = {
        source: FrozenModel(ModelConfig(path=path), ParallelConfig(), temperature=T)
        for source, path in config.external().items()
        if shape_differences(path, str(root / "student"))
    }
    teacher = LocalTeacher(config, policy, snapshots, batcher, read, models)
    given = samples()
    algorithm.prepare(given)
    (update,) = batcher.updates(given)
    return teacher, update


def hf_logits(model, sample):
    ids = torch.tensor([sample.teacher_prompt_ids + sample.response_ids])
    with torch.no_grad():
        return model(ids).logits[0, len(sample.teacher_prompt_ids) - 1 : -1].float()


def check(teacher, update, logits):
    """Each sample's targets are softmax(logits(sample) / T): the sampled tokens', and the whole vocabulary's."""
    for sample in update.samples:
        if sample.distill_mask == 0:
            assert "teacher_hidden" not in sample.tokens
            continue
        want = (logits(sample) / T).log_softmax(-1)
        ids = torch.tensor(sample.response_ids)[:, None]
        torch.testing.assert_close(sample.tokens["teacher_logprobs"], want.gather(1, ids)[:, 0], atol=2e-5, rtol=1e-4)
        t = sample.tokens
        targets = HiddenTargets(t["teacher_hidden"], t["teacher_lse"], teacher.head, VOCABULARY, temperature=T)
        everything = torch.arange(VOCABULARY).expand(len(ids), -1)
        torch.testing.assert_close(targets.logprobs_at(everything), want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(t["teacher_entropy"], -(want.exp() * want).sum(1), atol=2e-5, rtol=1e-4)
    for name, row in teacher.blank.items():
        taught = next(s for s in update.samples if s.distill_mask > 0)
        assert row.shape == (1, *taught.tokens[name].shape[1:]) and not row.any()


def test_another_model_teaches(policy, models):
    teacher, update = set_up(policy, models, update="static", model=str(models / "math"))
    teacher.score(update)
    oracle = AutoModelForCausalLM.from_pretrained(models / "math")
    check(teacher, update, lambda sample: hf_logits(oracle, sample))
    before = teacher.snapshots.hash("teacher")
    move(policy, models)
    teacher.after_optimizer_step()
    teacher.after_batch()
    assert teacher.snapshots.hash("teacher") == before and teacher.own_tag is None


def test_a_larger_model_teaches(policy, models):
    """It has a model of its own; the student's weights are not touched meanwhile."""
    teacher, update = set_up(policy, models, update="static", model=str(models / "large"))
    assert list(teacher.models) == [None] and teacher.snapshots.tags() == []
    before = teacher.snapshots.hash("student")
    teacher.score(update)
    oracle = AutoModelForCausalLM.from_pretrained(models / "large")
    check(teacher, update, lambda sample: hf_logits(oracle, sample))
    assert teacher.snapshots.hash("student") == before and teacher.own_tag is None
    parameters = sum(p.numel() for p in oracle.parameters())
    padding = 2 * (teacher.head.shape[0] - VOCABULARY) * 48  # of the embedding and the head
    assert sum(resident.bytes() for resident in teacher.residents()) == 4 * (parameters + padding)


@pytest.mark.parametrize("code", ["code", "large"], ids=["one shape", "two shapes"])
def test_each_source_has_its_teacher(code, policy, models):
    directories = {"math": str(models / "math"), "code": str(models / code)}
    teacher, update = set_up(policy, models, update="static", models=directories)
    teacher.score(update)
    oracles = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in directories.items()}
    check(teacher, update, lambda sample: hf_logits(oracles[sample.prompt.source], sample))
    # The same head serves the loss on micro-batches of both sources.
    micros = teacher.batcher.pack(update, defaults=teacher.blank)
    for micro in micros:
        micro.teacher_head = teacher.head
    metrics = policy.train_step(micros, teacher.batcher.algorithm.loss)
    assert metrics["sdpo/teacher_student_kl"] > 0 and metrics["train/grad_norm"] > 0


def move(policy, models):
    """The student becomes another model."""
    policy.load_optimizer_tensors("master", SafetensorsReader(models / "code").get)


def test_trust_region_mixes_logits(policy, models):
    teacher, update = set_up(policy, models, update="trust_region", student_share=0.3)
    move(policy, models)
    teacher.score(update)
    reference, student = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("student", "code"))
    check(teacher, update, lambda sample: 0.7 * hf_logits(reference, sample) + 0.3 * hf_logits(student, sample))


def test_periodic_copies_the_student_every_interval(policy, models):
    teacher, _ = set_up(policy, models, update="periodic", interval=3)
    first = teacher.snapshots.hash("teacher")
    move(policy, models)
    for _ in range(2):
        teacher.after_optimizer_step()
        teacher.after_batch()
        assert teacher.snapshots.hash("teacher") == first
    resumed, _ = set_up(policy, models, update="periodic", interval=3)
    resumed.load_state_dict(teacher.state_dict())
    move(policy, models)
    resumed.after_batch()
    assert resumed.snapshots.hash("teacher") == resumed.snapshots.hash("student") != first


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({"update": "ema", "model": "x"}, ["teacher.update=ema is not allowed with teacher.model"]),
        ({"update": "periodic", "models": {"a": "x"}}, ["teacher.update=periodic is not allowed with teacher.models"]),
        ({"update": "static", "model": "x", "models": {"a": "y"}}, ["teacher.model and teacher.models"]),
        ({"update": "static", "models": {}}, ["teacher.models is empty"]),
        (
            {"update": "slow", "alpha": 0, "every": "day", "interval": 0, "student_share": 1, "backend": "url"},
            ["update=slow", "alpha=0", "every=day", "interval=0", "student_share=1", "backend=url"],
        ),
    ],
    ids=str,
)
def test_wrong_teachers_are_refused(config, lines):
    with pytest.raises(ValueError) as error:
        build_teacher_config(config)
    for line in lines:
        assert line in str(error.value)


def test_a_teacher_with_another_vocabulary_is_refused(models):
    student = str(models / "student")
    config = TeacherConfig(update="static", models={"a": str(models / "foreign")})
    (line,) = directory_mistakes(config, student)
    assert "teacher.models.a=" in line and "a vocabulary of 91 ids, model.path one of 90" in line
    for name in ("math", "large"):
        assert not list(directory_mistakes(TeacherConfig(update="static", model=str(models / name)), student))
    (line,) = directory_mistakes(TeacherConfig(update="static", models={"a": "/no"}), student)
    assert "teacher.models.a=/no has no config.json" in line
    differences = shape_differences(str(models / "large"), student)
    assert "num_hidden_layers 3 (model.path: 2)" in differences and "hidden_size 48 (model.path: 32)" in differences


def test_a_source_without_a_teacher_and_another_tokenizer_are_refused(tmp_path):
    from rlpost.quickstart.task import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = TeacherConfig(update="static", models={"math": str(tmp_path / "a")})
    check_external(config, tokenizer, [Prompt(0, [], [1], source="math")])
    with pytest.raises(ValueError, match=r"prompt 7 has source 'law', for which teacher.models has no teacher.*math"):
        check_external(config, tokenizer, [Prompt(7, [], [1], source="law")])
    tokenizer.add_tokens(["new"])
    with pytest.raises(ValueError, match="another tokenizer"):
        check_external(config, tokenizer, [])
