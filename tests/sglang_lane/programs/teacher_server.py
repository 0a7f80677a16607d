"""SGLang's own HTTP server as a teacher, against Transformers. argv: model directory, with a tokenizer."""

import json
import os
import signal
import subprocess
import sys

import torch
from common import alive, logprobs_of, reference
from launch import free_port
from transformers import AutoTokenizer

from rlpost.teacher import TeacherConfig, check_external
from rlpost.teacher.client import ScoringClient

SEQUENCES = [[5, 9, 200, 31, 7], [7] * 40, list(range(100, 120)), [3, 4]]
STARTS = [2, 39, 1, 1]


def main(path: str) -> None:
    model = reference(path, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model.save_pretrained(path)
    port = free_port()
    arguments = ["--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--disable-cuda-graph"]
    arguments += ["--max-total-tokens=4096", "--mem-fraction-static=0.1", "--skip-server-warmup", f"--port={port}"]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", path, *arguments]
    server = subprocess.Popen(command, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}, start_new_session=True)
    try:
        # Refused connections while it starts are repeated.
        config = TeacherConfig(update="static", url=f"http://127.0.0.1:{port}", retries=8, sequences_per_request=3)
        check_external(config, tokenizer, [])
        rows = ScoringClient(config).score(SEQUENCES, STARTS)
        gap = 0.0
        for row, ids, start in zip(rows, SEQUENCES, STARTS, strict=True):
            want = logprobs_of(model, ids)[start - 1 :].gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            gap = max(gap, (want - torch.tensor(row).double()).abs().max().item())
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    print("MEASURED", json.dumps({"scored": gap, "sequences": len(rows), "alive": alive(server.pid)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
