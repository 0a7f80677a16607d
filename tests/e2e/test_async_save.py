"""trainer.async_save from the command line: what a failing write does to the run, and what a finished run leaves."""

import json

from launch import run_python
from overrides import command

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # as a full disk: smaller files can still be written
from rlpost.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_failing_write_ends_the_run_at_the_next_phase(tiny, tmp_path):
    saving = ["trainer.async_save=true", "trainer.save_every=1", "trainer.steps=50"]
    run = run_python(["-c", LIMITED, *command(tiny, tmp_path, "sdpo", *saving)])
    assert run.returncode == 1
    assert "rank 0 failed in phase 'save' of step" in run.stderr and "File too large" in run.stderr
    assert run.stderr.count("File too large") == 1 and "Traceback" not in run.stderr
    assert "step 50/50" not in run.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_leaves_the_last_checkpoints_and_nothing_half_written(tiny, tmp_path):
    saving = ["trainer.async_save=true", "trainer.save_every=1", "trainer.steps=4", "trainer.keep=3"]
    run = run_python(["-m", "rlpost", *command(tiny, tmp_path, "grpo", *saving)])
    assert run.returncode == 0, run.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    steps = [f"step_{step:06d}" for step in (2, 3, 4)]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", *steps]
    for step in steps:
        assert f"step_{json.loads((checkpoints / step / 'state.json').read_text())['step']:06d}" == step
