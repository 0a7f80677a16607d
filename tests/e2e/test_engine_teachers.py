"""A teacher on an engine, its own or the student's in turns, teaches as the swapped weights do."""

import json
from pathlib import Path

import pytest
from launch import run_python, run_ranks
from overrides import command

from rlpost import Trainer
from rlpost.config.compose import load_config
from rlpost.observe.metrics import read_metrics

PROGRAM = Path(__file__).with_name("many_runs.py")
TOPK = ["algorithm.top_k_ids=teacher", "rollout.temperature=0.8", "trainer.steps=3"]
SAMPLED = ["algorithm.mode=sampled", "algorithm.alpha=1", "trainer.steps=3", "train.updates_per_rollout=2"]
QUIET = {"route": "none", "tokens": 0, **dict.fromkeys(("success", "demonstration", "feedback", "cut"), False)}
OWN, SHARED = ["teacher=ema_engine"], ["teacher=ema_engine", "teacher.engine=shared"]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """The rows of every run's steps, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    one = {
        "topk swap": TOPK,
        "topk own": [*OWN, *TOPK],
        "topk shared": [*SHARED, *TOPK],
        "sampled swap": SAMPLED,
        "sampled own": [*OWN, *SAMPLED],
        "sampled shared": [*SHARED, *SAMPLED],
        "halves own": [*OWN, *TOPK, "trainer.steps=2"],
        "halves own/3": [*OWN, *TOPK],
        "halves shared": [*SHARED, *SAMPLED, "trainer.steps=2"],
        "halves shared/3": [*SHARED, *SAMPLED],
        "static own": [*OWN, *TOPK, "teacher.update=static"],
    }
    two = {
        "topk own DP 2": [*OWN, *TOPK],
        "sampled shared DP 2": [*SHARED, *SAMPLED],
        "topk shared TP 2": [*SHARED, *TOPK, "parallel.tensor=2"],
        "sampled own TP 2": [*OWN, *SAMPLED, "parallel.tensor=2"],
        "topk own PP 2": [*OWN, *TOPK, "parallel.pipeline=2"],
    }
    for ranks, chosen in ((1, one), (2, two)):
        commands = {
            name: [*command(tiny, folder, "sdpo", *more), "teacher.alpha=0.1", "tracker.progress=false"]
            for name, more in chosen.items()
        }
        plan = folder / f"{ranks}.json"
        plan.write_text(json.dumps(commands))
        arguments = [str(PROGRAM), str(folder), str(plan)]
        run = run_python(arguments) if ranks == 1 else run_ranks(arguments, ranks, timeout=300)
        assert run.returncode == 0, run.stderr
    names = {name.split("/")[0] for name in (*one, *two)}
    return {name: [r for r in read_metrics(folder / name / "run") if "train/loss" in r] for name in names}


def different(name):
    """Metrics that the clock, the teacher's place or its versions decide, or that engines do not know."""
    return name.startswith(("perf/", "publish/", "teacher/")) or name == "sdpo/teacher_entropy"


@pytest.mark.parametrize("mode", ["topk", "sampled"])
def test_every_teacher_and_every_launch_gives_the_same_run(mode, runs):
    want = runs[f"{mode} swap"]
    assert len(want) == 3 and all(row["train/grad_norm"] > 0 and row["ema/distance"] > 0 for row in want)
    others = [name for name in runs if name.startswith(mode) and not name.endswith("swap")]
    assert len(others) in (4, 5)
    for name in others:
        assert len(runs[name]) == 3
        for row, there in zip(want, runs[name]):
            for key in row:
                if not different(key):
                    # After two steps of Adam the rounding of a cut is in the weights: 1e-5 was just missed once.
                    assert there[key] == pytest.approx(row[key], rel=3e-5, abs=2e-6), (name, key)
            assert there["teacher/bad_payloads"] == 0 < there["teacher/scored_sequences"] <= 15


def test_versions_advance_and_never_mean_two_sets_of_weights(runs):
    own, shared = runs["topk own"], runs["topk shared"]
    assert [row["publish/version"] for row in own] == [2, 3, 4]
    assert [row["teacher/version"] for row in own] == [1, 2, 3]  # in the phase `teach`
    assert [row["teacher/version"] for row in shared] == [2, 4, 6]
    assert [row["publish/version"] for row in shared] == [3, 5, 7]
    for row in (*own, *shared):
        assert row["rollout/staleness/max"] == 0 and row["teacher/publish_seconds"] > 0
    assert [row.get("teacher/version") for row in runs["static own"]] == [1, None, None]


@pytest.mark.parametrize(("halves", "whole"), [("halves own", "topk own"), ("halves shared", "sampled shared")])
def test_a_resumed_run_goes_on_with_the_same_numbers(halves, whole, runs):
    clock = ("perf/", "publish/seconds", "teacher/publish_seconds", "rollout/canary")  # compares once in each process
    kept = [[{k: v for k, v in r.items() if not k.startswith(clock)} for r in runs[name]] for name in (halves, whole)]
    assert kept[0] == kept[1]


def test_nothing_samples_from_the_teacher_in_a_shared_engine(tiny, tmp_path, monkeypatch):
    """Also after a stop between its scoring and the update, and after a step that taught nothing."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    trainer = Trainer(
        load_config(None, [*command(tiny, tmp_path, "sdpo", *SHARED, *SAMPLED), "tracker.progress=false"])
    )
    rooms = trainer.rooms
    publisher, engine, score, served = rooms.publisher, rooms.engine, rooms.teacher.score, []
    generate = engine.generate

    def sampled(requests):
        served.append((publisher.served is rooms.policy, engine.version))
        return generate(requests)

    def stopped_meanwhile(update):
        rooms.agreement.stop_requested = True
        return score(update)

    engine.generate, rooms.teacher.score = sampled, stopped_meanwhile
    assert trainer.step() == {} and publisher.served is rooms.teacher.weights and publisher.named == 1
    rooms.agreement.stop_requested, rooms.teacher.score = False, score
    trainer.generate(["?"])
    assert publisher.named == 3
    rooms.feedback.teacher_prompts = lambda samples: [setattr(sample, "teacher_info", QUIET) for sample in samples]
    assert trainer.step()["train/no_signal"] > 0 and publisher.served is rooms.policy and publisher.named == 5
    trainer.generate(["?"])
    assert served == [(True, 1), (True, 3), (True, 3), (True, 5)]
    trainer.close()
