"""Combinations that are refused at launch, each with a sentence: one table."""

import importlib.util
from pathlib import Path

import pytest
from overrides import command
from tiny_policy import tiny_model

from rlpost import Trainer
from rlpost.config.checks import check_config
from rlpost.config.compose import ConfigError, load_config

OPD = ["algorithm=opd", "feedback=opd", "algorithm.top_k=8"]
ENGINE, LISTS = ["teacher=ema_engine"], ["algorithm.mode=topk", "algorithm.top_k=8", "algorithm.top_k_ids=teacher"]
BLEND = ["algorithm=blend", "algorithm.sdpo.top_k=8"]

# name: (algorithm of overrides.py, overrides, what is said)
REFUSED = {
    "a teacher that the layout cannot cut": (
        "sdpo",
        ["teacher=external", "teacher.model={tmp}/teacher", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        "does not divide the teacher {tmp}/teacher's 3 layers",
    ),
    "a teacher with another vocabulary": (
        "sdpo",
        ["teacher=external", "teacher.model={tmp}/teacher"],
        "teacher.model={tmp}/teacher has a vocabulary of 90 ids, model.path one of",
    ),
    "a group estimator with one sample": (
        "grpo",
        ["rollout.samples_per_prompt=1"],
        "rollout.samples_per_prompt=1 is not allowed with algorithm.name=grpo",
    ),
    "RLOO with one sample": ("grpo", ["algorithm=rloo", "rollout.samples_per_prompt=1"], "algorithm.name=rloo"),
    "REINFORCE++ with a group baseline and one sample": (
        "grpo",
        ["algorithm=reinforce_pp", "algorithm.advantage=reinforce_pp_baseline", "rollout.samples_per_prompt=1"],
        "with algorithm.name=reinforce_pp",
    ),
    "a blend with one sample": ("sdpo", [*BLEND, "rollout.samples_per_prompt=1"], "with algorithm.name=blend"),
    "both KLs": (
        "grpo",
        ["algorithm.kl_coef=0.1"],
        "algorithm.kl_coef=0.1 and algorithm.kl_loss_coef=0.1 are not allowed together",
    ),
    "an unbiased KL that is not in the loss": (
        "grpo",
        ["algorithm=grpo", "algorithm.kl_coef=0.1", "algorithm.kl_unbiased=true"],
        "algorithm.kl_unbiased=true corrects the gradient of the KL in the loss",
    ),
    "a reference that moves and is not kept": (
        "grpo",
        ["algorithm=grpo", "algorithm.reference_every=5"],
        "algorithm.reference_every=5 moves a reference that is not kept",
    ),
    "OPD as loss and advantage": (
        "sdpo",
        [*OPD, "algorithm.advantage_coef=1"],
        "algorithm.loss_coef=1.0 and algorithm.advantage_coef=1 are not allowed together",
    ),
    "OPD as neither": ("sdpo", [*OPD, "algorithm.loss_coef=0"], "exactly one is above 0"),
    "an EMA with another model": (
        "sdpo",
        ["teacher.model=elsewhere"],
        "teacher.update=ema is not allowed with teacher.model",
    ),
    "an EMA with several models": (
        "sdpo",
        ["teacher.models={math: a, code: b}"],
        "teacher.update=ema is not allowed with teacher.models",
    ),
    "one model and several": (
        "sdpo",
        ["teacher=external", "teacher.model=a", "teacher.models={math: a}"],
        "teacher.model and teacher.models are not allowed together",
    ),
    "an EMA with a server": (
        "sdpo",
        ["teacher.url=http://here", "algorithm.mode=sampled", "algorithm.alpha=1"],
        "teacher.update=ema is not allowed with teacher.url",
    ),
    "a server and a model": (
        "sdpo",
        ["teacher=external", "teacher.model=a", "teacher.url=http://here"],
        "teacher.model and teacher.url are not allowed together",
    ),
    "a server and whole distributions": (
        "sdpo",
        [*OPD, "teacher=url", "teacher.url=http://here"],
        "teacher.url=http://here is not allowed with this algorithm: a server tells the log-probs of the sampled",
    ),
    "a server and another temperature": (
        "sdpo",
        [*OPD, "algorithm.mode=sampled", "teacher=url", "teacher.url=http://here", "rollout.temperature=0.7"],
        "teacher.url=http://here needs rollout.temperature=1, not 0.7",
    ),
    "a server that is no URL": ("sdpo", ["teacher=url", "teacher.url=here:30000"], "it begins with http://"),
    "an engine and the student's ids": (
        "sdpo",
        [*ENGINE],
        "algorithm.top_k_ids=student is not allowed with teacher.backend=engine: an engine tells the log-probs of",
    ),
    "an engine and the whole vocabulary": ("sdpo_full", [*ENGINE], "algorithm.mode=full is not allowed with teacher"),
    "an engine and an entropy gate": (
        "sdpo",
        [*ENGINE, *LISTS, "algorithm.entropy_gate=1.5"],
        "algorithm.entropy_gate=1.5 is not allowed with teacher.backend=engine",
    ),
    "an engine in a blend": (
        "sdpo",
        [*ENGINE, *BLEND, "algorithm.sdpo.top_k_ids=union"],
        "algorithm.sdpo.top_k_ids=union is not allowed with teacher.backend=engine",
    ),
    "an engine and the live student": (
        "sdpo",
        [*ENGINE, *LISTS, "teacher.update=trust_region"],
        "teacher.update=trust_region is not allowed with teacher.backend=engine",
    ),
    "an engine and several teachers": (
        "sdpo",
        [*ENGINE, *LISTS, "teacher.update=static", "+teacher.models={a: b}"],
        "teacher.models={'a': 'b'} is not allowed with teacher.backend=engine",
    ),
    "an engine and a server": (
        "sdpo",
        [*ENGINE, *LISTS, "teacher.update=static", "+teacher.url=http://here"],
        "teacher.url=http://here is not allowed with teacher.backend=engine",
    ),
    "an engine and a model of another shape": (
        "sdpo",
        [*ENGINE, *LISTS, "teacher.update=static", "+teacher.model={tmp}/teacher"],
        "teacher.model={tmp}/teacher is not allowed with teacher.backend=engine, as its shape is another than the",
    ),
    "SGLang's scores at another temperature": (
        "sdpo",
        [*ENGINE, *LISTS, "engine.name=sglang", "rollout.temperature=0.7"],
        "rollout.temperature=0.7 is not allowed with teacher.backend=engine and engine.name=sglang",
    ),
    "an unknown engine of the teacher": (
        "sdpo",
        [*ENGINE, *LISTS, "teacher.engine=both"],
        "teacher.engine=both is not allowed; allowed are own, shared",
    ),
    "a shared engine without a use": (
        "sdpo",
        ["+teacher.engine=shared"],
        "teacher.engine=shared has no use with teacher.backend=swap",
    ),
    "a Jensen-Shannon divergence of the sampled token": (
        "sdpo",
        ["algorithm.mode=sampled", "algorithm.alpha=0.5"],
        "algorithm.alpha=0.5 is not allowed with algorithm.mode=sampled",
    ),
    "a teacher that is not there": (
        "sdpo",
        ["teacher=external", "teacher.model=/no/such/model"],
        "teacher.model=/no/such/model has no config.json",
    ),
    "top-k beyond the vocabulary": (
        "sdpo",
        ["algorithm.top_k=5000"],
        "algorithm.top_k=5000 is larger than the model's",
    ),
    "top-k beyond the vocabulary in a blend": (
        "sdpo",
        ["algorithm=blend", "algorithm.sdpo.top_k=5000"],
        "algorithm.top_k=5000 is larger than the model's",
    ),
    "an entropy gate without distributions": (
        "sdpo",
        ["algorithm.mode=sampled", "algorithm.alpha=1", "algorithm.entropy_gate=1"],
        "algorithm.entropy_gate=1 is not allowed with algorithm.mode=sampled",
    ),
    "a part of a blend with a denominator of its own": (
        "sdpo",
        [*BLEND, "algorithm.grpo.reduction=constant"],
        "algorithm.grpo.reduction is not allowed; both parts share algorithm.reduction",
    ),
    "bounds of no correction": ("grpo", ["algorithm.correction_high=2"], "bound algorithm.correction, which is null"),
    "a teacher for GRPO": ("grpo", ["teacher=ema"], "teacher is set, but algorithm.name=grpo has no use for one"),
    "distillation without a teacher": ("sdpo", ["teacher=none"], "needs a teacher"),
    "distillation without feedback": ("sdpo", ["feedback=none"], "needs feedback"),
    "a policy gradient without a reward": ("grpo", ["reward=none"], "algorithm.name=grpo needs a reward"),
    "a filter without a reward": (
        "sdpo",
        [*OPD, "reward=none", "rollout.filter=nonzero_std"],
        "rollout.filter=nonzero_std needs a reward",
    ),
    "an unknown filter": ("grpo", ["rollout.filter=std"], "rollout.filter=std is not allowed; allowed are nonzero_std"),
    "greedy sampling in training": ("grpo", ["rollout.temperature=0"], "rollout.temperature=0"),
    "an advantage that cannot be imported": (
        "grpo",
        ["algorithm.advantage=no.such.fn"],
        "algorithm.advantage=no.such.fn",
    ),
    "phases without the teacher's": ("sdpo", ["phases=grpo"], "phases lacks teach, teacher_update"),
    "no such resident": (
        "grpo",
        ["trainer.keep_on_device=[policy.optimiser]"],
        "trainer.keep_on_device has no resident 'policy.optimiser'",
    ),
    "compiled layers that are cut": (
        "grpo",
        ["model.impl=compiled", "parallel.tensor=2"],
        "model.impl=compiled is not allowed with parallel.tensor=2",
    ),
    "a canary that nobody knows": ("grpo", ["rollout.canary=never"], "rollout.canary=never is not allowed"),
    "PPO without its phases": ("ppo", ["phases=grpo"], "phases lacks values, critic"),
    "a critic's phases without one": ("grpo", ["phases=ppo"], "phase 'values' needs a critic"),
    "a critic's settings without one": (
        "grpo",
        ["critic.lr=1e-4"],
        "critic is set, but algorithm.name=grpo has no use for one",
    ),
    "PPO with a group's advantage": (
        "ppo",
        ["algorithm.advantage=rloo"],
        "algorithm.advantage=rloo is not allowed; allowed are gae",
    ),
    "PPO with both KLs": ("ppo", ["algorithm.kl_loss_coef=0.1"], "are not allowed together"),
    "PPO in a blend": (
        "sdpo",
        [*BLEND, "algorithm.grpo.name=ppo"],
        "algorithm.grpo.name=ppo is not allowed in a blend",
    ),
    "a critic that leaves the policy no step": (
        "ppo",
        ["critic.alone_steps=2"],
        "critic.alone_steps=2 leaves no step for the policy",
    ),
    "a critic that is not there": (
        "ppo",
        ["critic.path=/no/such/model"],
        "critic.path=/no/such/model has no config.json",
    ),
    "an unknown schedule of the critic": (
        "ppo",
        ["critic.schedule=step"],
        "critic.schedule=step is not allowed; allowed are constant, linear, cosine",
    ),
    "a bound on values of nothing": ("ppo", ["algorithm.value_clip=0"], "algorithm.value_clip=0 is not allowed"),
    "a fallback without evaluations": (
        "grpo",
        ["guards.action=fallback", "trainer.save_every=2"],
        "guards.action=fallback goes back to the checkpoint with the best evaluation, so it needs data.eval",
    ),
    "a fallback to checkpoints that are not evaluated": (
        "grpo",
        ["guards.action=fallback", "data.eval={a: b.jsonl}", "trainer.save_every=3", "trainer.eval_every=2"],
        "trainer.eval_every=2 above 0 and trainer.save_every=3 a multiple of it",
    ),
    "an unknown guard": (
        "grpo",
        ["guards.action=shout"],
        "guards.action=shout is not allowed; allowed are off, warn, stop, fallback",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    algorithm, overrides, said = REFUSED[name]
    if "{tmp}" in said:
        tiny_model(tmp_path / "teacher", layers=3)
    overrides, said = [o.replace("{tmp}", str(tmp_path)) for o in overrides], said.replace("{tmp}", str(tmp_path))
    given = [o for o in command(tiny, tmp_path, algorithm) if not _withdrawn(o, overrides)]
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, [*given, *overrides]))
    assert said in str(error.value)


def test_ppo_trains_after_its_values_are_known(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = load_config(None, command(tiny, tmp_path, "ppo"))
    check_config(config)
    train = next(phase for phase in config.phases if phase.name == "train")
    config.phases.remove(train)
    config.phases.insert(3, train)
    with pytest.raises(ConfigError, match="phase 'train' stands before 'values', which its advantages need"):
        check_config(config)


def _withdrawn(given: str, overrides: list[str]) -> bool:
    """Fields of another choice of the group, which this case replaces."""
    for group in ("algorithm", "teacher", "reward", "feedback"):
        if any(o.startswith(f"{group}=") for o in overrides) and given.startswith((f"{group}=", f"{group}.")):
            return True
    return given.startswith("phases=") and any(o.startswith("phases=") for o in overrides)


def test_phases_need_what_they_work_on(tiny, tmp_path):
    config = load_config(None, command(tiny, tmp_path, "sdpo"))
    teach = next(phase for phase in config.phases if phase.name == "teach")
    teach.residents = ["policy.weights"]
    with pytest.raises(ConfigError, match="phase 'teach' lacks policy.optimizer among its residents: it works on them"):
        check_config(config)
    config.teacher["backend"] = "engine"
    config.algorithm["top_k_ids"] = "teacher"
    check_config(config)  # no swap


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_an_engine_that_is_not_installed(tiny, tmp_path):
    with pytest.raises(ConfigError, match="SGLang is not installed: pip install"):
        Trainer(load_config(None, command(tiny, tmp_path, "grpo", "engine.name=sglang")))
    assert not (tmp_path / "run").exists()
