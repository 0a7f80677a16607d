"""A killed scheduler, and engines that cannot start. argv: model directory."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from common import EXTRA, alive, greedy, kill_scheduler, publish, reference

from rlpost.rollout.engines.sglang import SGLangEngine
from rlpost.rollout.engines.sglang_process import EngineDied


def check_killed(path: str) -> float:
    engine = SGLangEngine(path, dtype=torch.float32, memory_fraction=0.1, max_batch=16, extra=EXTRA)
    engine.start()
    publish(engine, reference(path, seed=1), 1)
    group, killed_at = engine._process.pid, []

    def kill() -> None:
        killed_at.append(time.monotonic())
        kill_scheduler(engine)

    threading.Timer(0.3, kill).start()
    try:
        while not killed_at or time.monotonic() < killed_at[0] + 20:  # whatever it does when the kill comes
            engine.generate(greedy([[1, 2, 3]] * 8, 450))
    except EngineDied as error:
        took = time.monotonic() - killed_at[0]
        assert "Log:" in str(error) and "its last lines" in str(error), error
    else:
        raise AssertionError("a dead engine went on answering")
    assert not alive(group), "processes of the engine were left"
    try:
        engine.generate(greedy([[1, 2, 3]], 1))
    except EngineDied:
        pass
    else:
        raise AssertionError("a dead engine answered")
    engine.close()
    return took


def check_start_errors(path: str) -> None:
    unknown = shutil.copytree(path, path + "-unknown")
    config = json.loads((Path(unknown) / "config.json").read_text()) | {"architectures": ["NoSuchForCausalLM"]}
    (Path(unknown) / "config.json").write_text(json.dumps(config))
    for model, extra, kind, told in (
        (path, {"max_total_token": 9}, ValueError, ("engine.extra.max_total_token", "did you mean max_total_tokens")),
        (unknown, EXTRA, EngineDied, ("SGLang lacks this architecture", "its last lines")),
    ):
        engine = SGLangEngine(model, dtype=torch.float32, memory_fraction=0.1, extra=extra)
        try:
            engine.start()
        except kind as error:
            assert all(words in str(error) for words in told), error
        else:
            raise AssertionError(f"{model} started with {extra=}")
        finally:
            engine.close()


def main() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    check_start_errors(sys.argv[1])
    took = check_killed(sys.argv[1])
    assert took < 10, took
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    print("MEASURED " + json.dumps({"noticed_s": took}))


if __name__ == "__main__":
    main()
