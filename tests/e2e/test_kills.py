"""A run under torchrun that is killed again and again, at moments drawn from a seed, goes on each time with the same
command and ends as the unbroken one: the same metrics, rollouts, weights, to the last bit.

`make test-faults` kills 30 times; RLPOST_KILLS sets the number.
"""

import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from killing import Run
from overrides import command

from rlpost.observe.metrics import read_metrics
from rlpost.weights.checkpoint import CheckpointStore

KILLS = int(os.environ.get("RLPOST_KILLS", "4"))
CASES = {"2 ranks": (2, KILLS, "true"), "4 ranks": (4, KILLS // 8, "false")}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_often_ends_as_an_unbroken_one(case, tiny, tmp_path):
    ranks, kills, background = CASES[case]
    if not kills:
        pytest.skip("only with RLPOST_KILLS=8 and more: make test-faults")
    more = [
        f"data.eval.held_out={{path: {tiny / 'data' / 'eval.jsonl'}, limit: 4, samples: 1}}",
        f"trainer.steps={12 * kills}",  # each kill leaves some for the next, also on a fast machine
        "trainer.eval_every=3",
        "trainer.save_every=1",
        f"trainer.async_save={background}",
        "rollout.prompts_per_step=4",
    ]
    whole = Run(command(tiny, tmp_path / "whole", "sdpo", *more), ranks)
    assert whole.end(120 + kills)[0] == 0, whole.text
    draw, seen = random.Random(f"kills {case}"), Counter()
    broken, directory = command(tiny, tmp_path / "broken", "sdpo", *more), tmp_path / "broken" / "run"
    for number in range(kills):
        # The last kill comes while the export is written.
        kind = "export" if number == kills - 1 else draw.choices(["time", "save", "start"], [5, 4, 1])[0]
        kill_once(Run(broken, ranks), kind, draw, directory, seen)
        seen[kind] += 1
    last = Run(broken, ranks)
    assert last.end(120 + kills)[0] == 0, last.text
    print(f"\n{case}: {dict(seen)}")
    assert learned(directory) == learned(tmp_path / "whole" / "run")
    files = ("rollouts/*/*.jsonl", "export/*.safetensors", "checkpoints/*/*.safetensors", "checkpoints/latest")
    for pattern in files:
        found, expected = (
            {p.relative_to(d): p.read_bytes() for p in d.glob(pattern)} for d in (directory, tmp_path / "whole" / "run")
        )
        assert expected and found == expected, pattern
    assert not list(directory.rglob("*.tmp")) and not list(directory.rglob("*.old"))


def kill_once(run: Run, kind: str, draw: random.Random, directory: Path, seen: Counter) -> None:
    """Waits for the moment, kills, and looks at what is left."""
    victim, steps = draw.choice([*range(run.ranks), "launcher", "all"]), draw.randint(0, 3)
    left = being_written(directory)  # by the run that was killed before

    def writing() -> bool:
        return bool(being_written(directory) - left)

    def writing_or_missed() -> bool:  # a fast machine writes a checkpoint between two looks
        return writing() or sum(line.startswith("step ") for line in run.lines) > steps + 3

    if kind == "start":
        waited = run.wait_until(lambda: len(run.pids()) == run.ranks)
        time.sleep(draw.uniform(0, 6))
    elif kind == "time":
        waited = run.wait_for("training from step") and run.wait_for("^step ", times=steps)
        time.sleep(draw.uniform(0, 0.3))
    elif kind == "save":
        waited = run.wait_for("training from step") and run.wait_for("^step ", times=steps)
        waited = waited and run.wait_until(writing_or_missed)
        time.sleep(draw.uniform(0, 0.01))
    else:
        waited = run.wait_until(lambda: (directory / "export.tmp").exists(), timeout=240)
    assert waited and len(run.pids()) == run.ranks, f"{kind}: the run was through before\n{run.text}"
    if victim == "all":
        run.kill_all()
    elif victim == "launcher":
        run.process.kill()
    else:
        run.kill(victim)
    seen["while a checkpoint was written"] += writing()
    code, seconds = run.end(timeout=30)
    assert code != 0, f"{kind} {victim}: the run was through"
    assert seconds < 15, f"{kind} {victim}: {seconds:.1f} s:\n{run.text}"
    assert run.text.count(" failed in phase ") <= 3  # the sentence, and twice in torchrun's summary
    store = CheckpointStore(directory / "checkpoints")
    if store.latest() is not None:
        checkpoint = store.load()  # checksums too
        assert all(tensor.isfinite().all() for kind in checkpoint.kinds for tensor in checkpoint.tensors(kind).values())
    for name in ("metrics.jsonl", "timeline.json"):
        if (directory / name).exists():
            rows = read_metrics(directory / name) if name.endswith("l") else json.loads((directory / name).read_text())
            assert isinstance(rows, list)


def being_written(directory: Path) -> set[tuple[str, int]]:
    """Names and inodes of checkpoints that are not complete."""
    found = set()
    for path in (directory / "checkpoints").glob("step_*.tmp"):
        with suppress(FileNotFoundError):  # complete by now
            found.add((path.name, path.stat().st_ino))
    return found


def learned(directory: Path) -> list[dict]:
    """The metrics that do not depend on the clock."""
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/") and k != "publish/seconds"}
        for row in read_metrics(directory)
    ]
