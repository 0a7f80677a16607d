"""`rlpost plan`: its bytes are those of real policies, its arithmetic is a run's."""

from pathlib import Path

import pytest
from launch import run_ranks
from plan_ranks import LAYOUTS
from tiny_models import save_model

from rlpost.config.compose import ConfigError
from rlpost.plan import main
from rlpost.quickstart import task

WORKER = str(Path(__file__).with_name("plan_ranks.py"))


def test_bytes_are_those_of_real_policies_under_every_cut(tmp_path):
    for kind in {kind for kind, _ in LAYOUTS}:
        save_model(kind, tmp_path)
    run = run_ranks([WORKER, str(tmp_path)], 2, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in (0, 1):
        assert f"rank {rank}: {len(LAYOUTS)} plans hold" in run.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    task.write(folder, 0)
    return folder


def test_the_arithmetic_of_a_step_and_the_phases_are_printed(tiny, capsys):
    arguments = ["recipe=quickstart_sdpo", f"run.dir={tiny}", f"model.path={tiny / 'model'}", "--ranks", "2"]
    assert main([*arguments, "train.updates_per_rollout=2", "--device-gib", "8", "parallel.tensor=2"]) == 0
    printed = capsys.readouterr().out
    assert "ranks: 2 = tensor 2 × pipeline 1 × context 1 × data 1" in printed
    assert "in 2 updates of about" in printed and "steps an epoch" in printed
    phases = [line.split()[0] for line in printed.splitlines() if line[:1].isalpha()]
    for phase in ("rollout", "judge", "prepare", "teach", "train", "teacher_update", "publish"):
        assert phase in phases
    assert "policy.optimizer" in printed and "teacher and a copy of the student" in printed


def test_only_a_teacher_of_another_shape_is_on_the_device(tiny, capsys):
    config = task.model_config()
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    config.save_pretrained(tiny / "larger")
    arguments = ["recipe=quickstart_sdpo", f"run.dir={tiny}", f"model.path={tiny / 'model'}", "teacher=external"]
    for models, kept in ((f"{{early: {tiny / 'larger'}, late: {tiny / 'model'}}}", True), (None, False)):
        chosen = ["teacher.model=null", f"teacher.models={models}"] if kept else [f"teacher.model={tiny / 'larger'}"]
        main([*arguments, *chosen])
        printed = capsys.readouterr().out
        assert "teacher.weights" in printed and ("teacher and a copy of the student" in printed) == kept
    main(arguments[:3])
    assert "teacher.weights" not in capsys.readouterr().out


def test_a_plan_over_the_device_exits_1(tiny, capsys):
    arguments = ["recipe=quickstart_sdpo", f"run.dir={tiny}", f"model.path={tiny / 'model'}"]
    assert main([*arguments, "--device-gib", "0.001"]) == 1
    assert "too little: see train.max_tokens_per_micro_batch" in capsys.readouterr().out


def test_ranks_that_do_not_fit_are_refused(tiny):
    arguments = ["recipe=quickstart_sdpo", f"run.dir={tiny}", f"model.path={tiny / 'model'}", "parallel.tensor=2"]
    with pytest.raises(ConfigError, match="3 ranks cannot be cut into TP 2"):
        main([*arguments, "--ranks=3"])
