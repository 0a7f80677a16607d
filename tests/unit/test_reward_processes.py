"""Rewards in processes: what would stop or end the trainer's own process costs one call."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpost.rewards import RewardResult
from rlpost.rewards.judge import Judge, RewardError
from rlpost.types import Prompt, Sample


def naughty(sample):
    match sample.response:
        case "spin":
            re.match(r"(a+)+$", "a" * 60 + "b")  # never gives the interpreter back
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(3)
        case "raise":
            raise type("Local", (Exception,), {})("of a class that only the child knows")
        case "print":
            print("between the results")
    return RewardResult(float(os.getpid() != sample.prompt.metadata["parent"]), feedback=sample.response)


def ranks(samples):
    return [len(samples) + sample.index for sample in samples]


def samples_of(*responses):
    prompt = Prompt(7, [], [1], metadata={"parent": os.getpid()})
    return [Sample(prompt, 0, i, response=response) for i, response in enumerate(responses)]


def test_each_fault_costs_its_own_call_alone(caplog):
    samples = samples_of("fine", "spin", "crash", "exit", "leave", "raise", "print", "fine")
    judge = Judge(naughty, timeout=2, workers=2, isolate=True, on_error=-1.0)
    begun = time.monotonic()
    assert judge.score(samples) == {"reward/errors": 4.0, "reward/timeouts": 1.0}
    assert time.monotonic() - begun < 60
    assert [s.reward for s in samples] == [1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0]
    assert samples[6].feedback == "print"
    assert "on prompt 7, sample 1: TimeoutError: no result within 2 s" in caplog.text
    again = samples_of("fine", "fine")
    assert judge.score(again)["reward/errors"] == 0.0 and [s.reward for s in again] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("crash", "its process ended \\(signal SIGSEGV\\)"),
        ("leave", "its process ended \\(exit code 3\\)"),
        ("exit", "SystemExit: 3"),
        ("raise", "Local: of a class that only the child knows"),
        ("spin", "no result within 0.5 s"),
    ],
)
def test_the_reason_names_reward_and_sample(response, said):
    judge = Judge(naughty, timeout=0.5 if response == "spin" else 20, isolate=True, on_error="raise")
    with pytest.raises(RewardError, match=f"reward 'naughty' on prompt 7, sample 0: .*{said}"):
        judge.score(samples_of(response))


def test_exit_in_a_thread_is_an_error_and_no_silence(caplog):
    """Without processes, too, as far as a thread can."""
    samples = samples_of("exit", "print")
    assert Judge(naughty, timeout=30).score(samples)["reward/errors"] == 1.0
    assert "SystemExit: 3" in caplog.text


def test_group_rewards_travel():
    samples = samples_of("a", "b")
    Judge(ranks, isolate=True).score(samples)
    assert [s.reward for s in samples] == [2.0, 3.0]


def test_a_function_that_cannot_travel_is_refused_at_once():
    with pytest.raises(ValueError, match="reward.isolate=true is not allowed with '<?lambda>?', which other processes"):
        Judge(lambda sample: 0.0, isolate=True)


def test_a_hanging_call_does_not_outlive_a_killed_parent():
    code = (
        "from rlpost.rewards.judge import Judge\n"
        "import os, signal, threading, time\n"
        "from test_reward_processes import naughty, samples_of\n"
        "def kill():\n"
        "    me = os.getpid()\n"
        "    while not (held := open(f'/proc/{me}/task/{me}/children').read()): time.sleep(.01)\n"
        "    os.write(1, held.encode()); os.kill(me, signal.SIGKILL)\n"
        "threading.Thread(target=kill).start()\n"
        "Judge(naughty, timeout=60, isolate=True).score(samples_of('spin'))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)])
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, timeout=60
    )
    assert run.returncode == -signal.SIGKILL
    child = int(run.stdout)
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until, "the child is an orphan"
