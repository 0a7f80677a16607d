"""`small_disk.py TINY DIR`, in a mount namespace of its own: runs on a disk of 8 MB that gets full, or is read-only."""

import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import toy_faults
from overrides import command

from rlpost.__main__ import main
from rlpost.observe.metrics import read_metrics
from rlpost.weights.checkpoint import CheckpointStore

TINY, DISK = Path(sys.argv[1]), Path(sys.argv[2])
NO_SPACE = "[Errno 28] No space left on device"
# The reward that fills the disk is called 15 times a step, and by the evaluation after the last step.
# name: (at which call, bytes that stay free, what is said, steps in metrics.jsonl, the checkpoint that is there)
CASES = {
    # The last page of a file has room where the disk has none: whichever file needs a new one is named.
    "metrics": (16, 0, NO_SPACE, (1, 2), 1),
    "checkpoint": (
        16,
        400_000,
        f"in phase 'save' of step 2: checkpoint {DISK}/checkpoint/checkpoints/step_000002: ",
        (2,),
        1,
    ),
    "export": (46, 100_000, f"in phase 'export' of step 3: export to {DISK}/export/export: ", (3,), 3),
}


@contextmanager
def heard():
    """What goes to descriptor 2 meanwhile."""
    box, saved, (read, write) = io.StringIO(), os.dup(2), os.pipe()
    os.set_blocking(read, False)
    os.dup2(write, 2)
    try:
        yield box
    finally:
        os.dup2(saved, 2)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            box.write((pipe.read() or b"").decode())
        sys.stderr.write(box.getvalue())


def run(name, *more):
    arguments = command(TINY, DISK, "grpo", f"run.name={name}", "trainer.steps=3", "trainer.save_every=1", *more)
    arguments += [
        "reward._target_=toy_faults.filling",
        f"data.eval.held_out={{path: {TINY / 'data' / 'eval.jsonl'}, limit: 4, samples: 1}}",
        "trainer.eval_at_start=false",
    ]
    toy_faults.forget_calls()
    with heard() as said:
        code = main(arguments)
    return code, said.getvalue()


def full(name, at, free, said, steps, saved):
    directory = DISK / name
    os.environ |= {"FILL_AT": str(at), "FREE_BYTES": str(free), "RUN_DIR": str(directory)}
    code, words = run(name)
    assert code == 1, words
    last = words.strip().splitlines()
    assert said in words and NO_SPACE in words and str(directory) in last[-2], words
    assert last[-1].endswith("What was saved before is intact."), words
    rows = read_metrics(directory)
    assert max(row["step"] for row in rows) in steps, rows
    store = CheckpointStore(directory / "checkpoints")
    assert store.latest() == saved and store.load().step == saved
    assert not list(directory.rglob("*.tmp")), list(directory.rglob("*.tmp"))
    json.loads((directory / "timeline.json").read_text())
    # With room again the same command goes on.
    (directory / "filler").unlink()
    os.environ["FILL_AT"] = "-1"
    code, words = run(name)
    assert code == 0, words
    assert [row["step"] for row in read_metrics(directory) if "train/loss" in row] == [1, 2, 3]
    subprocess.run(["rm", "-r", directory], check=True)


def read_only():
    os.environ["FILL_AT"] = "-1"
    code, words = run("kept")
    assert code == 0, words
    before = {path: path.stat().st_mtime for path in DISK.rglob("*")}
    subprocess.run(["mount", "-o", "remount,ro", DISK], check=True)
    for name in ("kept", "new"):
        code, words = run(name)
        assert code == 1 and words.strip().splitlines()[-1].startswith("[Errno 30] Read-only file system"), words
    assert {path: path.stat().st_mtime for path in DISK.rglob("*")} == before


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", DISK], check=True)
    for case, facts in CASES.items():
        full(case, *facts)
    read_only()
    print("all disks were full")
