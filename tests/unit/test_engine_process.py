"""What the engine's process and the trainer share and leave behind, without SGLang."""

import subprocess
import sys

import torch

from rlpost.proc import group_is_alive
from rlpost.rollout.engines.host_memory import HostMemory

READ = """
import sys, torch
path, size = sys.argv[1], int(sys.argv[2])
print(torch.from_file(path, shared=True, size=size, dtype=torch.uint8).sum().item())
"""


def read_elsewhere(path: str, shared: bool, size: int) -> int:
    assert shared
    program = [sys.executable, "-c", READ, path, str(size)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_another_process_reads_the_last_put_whatever_its_size():
    memory = HostMemory()
    for size in (1000, 10, 5_000_000):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        assert read_elsewhere(*memory.put(data)) == data.sum().item()
    memory.close()
    memory.close()
    where, _, size = memory.put(torch.ones(7, dtype=torch.uint8))
    assert read_elsewhere(where, True, size) == 7
    memory.close()


def test_a_process_group_is_alive_until_its_last_process_is_gone():
    spawn = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']); print(p.pid, flush=True)"
    first = subprocess.Popen(
        [sys.executable, "-c", spawn + "; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    first.stdout.readline()
    first.kill()
    first.wait()
    assert group_is_alive(first.pid)  # its child reads from the same pipe
    first.stdin.close()
    for _ in range(2000):
        if not group_is_alive(first.pid):
            break
        subprocess.run(["true"], check=True)
    assert not group_is_alive(first.pid)
