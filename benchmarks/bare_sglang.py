"""A plain SGLang engine for `rollout.py --bare separate`: one JSON call a line on stdin, `RESULT` lines on stdout.

The first line holds the engine's arguments, each other {"input_ids", "sampling_params"}; the answer is
{"seconds", "tokens"}. What is timed is `Engine.generate` alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlpost.rollout.engines.sglang_host import _build
from rlpost.rollout.engines.sglang_process import engine_environment

MARK = "RESULT "


class BareEngine:
    """The other end: starts this file as a process and calls it."""

    def __init__(self, wanted: dict[str, Any], extra: dict[str, Any], environment: dict[str, str]):
        self.log = Path(tempfile.mkdtemp(prefix="bare-sglang-")) / "log.txt"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                env=engine_environment(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._call({"wanted": wanted, "extra": extra})

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict]) -> dict[str, float]:
        return self._call({"input_ids": input_ids, "sampling_params": sampling_params})

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _call(self, message: dict[str, Any]) -> Any:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the bare engine died; its last lines ({self.log}):\n{self.log.read_text()[-2000:]}")


def reply(value: object) -> None:
    print(MARK + json.dumps(value), flush=True)


def main() -> None:
    engine = _build(json.loads(sys.stdin.readline()))
    reply("ready")
    for line in sys.stdin:
        call = json.loads(line)
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.generate(**call, return_logprob=True)
        seconds = time.perf_counter() - start
        reply({"seconds": seconds, "tokens": sum(len(output["output_ids"]) for output in outputs)})
    engine.shutdown()


if __name__ == "__main__":
    main()
