"""Processes that import SGLang ahead: the next engines take them, dead ones are passed over, none is left. argv:
model."""

import json
import os
import signal
import sys

import torch
from common import EXTRA, alive, greedy, publish, reference

from rlpost.rollout.engines import sglang_process
from rlpost.rollout.engines.sglang import SGLangEngine


def main() -> None:
    sglang_process.prestart(2)
    killed, waiting = (process.pid for process in sglang_process._waiting)
    os.killpg(killed, signal.SIGKILL)
    sglang_process._waiting[0]._process.wait()
    engine = SGLangEngine(sys.argv[1], dtype=torch.float32, memory_fraction=0.1, max_batch=16, extra=EXTRA)
    engine.start()
    assert engine._process.pid == waiting and not sglang_process._waiting
    publish(engine, reference(sys.argv[1], seed=1), 1)
    assert len(engine.generate(greedy([[1, 2, 3]], 4))[0].ids) == 4
    engine.close()
    assert not alive(waiting)
    sglang_process.prestart(1)
    print("MEASURED " + json.dumps({"left": sglang_process._waiting[0].pid}))


if __name__ == "__main__":
    main()
