"""One SDPO step on the CPU: rlpost against TRL's experimental SDPO trainer.

    python benchmarks/peer_trl.py [--steps 9] [--tokenizer DIR] [--data train.jsonl]

Long-lived workers, each in its own virtual environment, take turns step by step: while one works the others wait on
their pipes, so all meet the same weather of the machine. They get the same model directory (random weights),
the same rows in the same order, the same numbers of samples and tokens, the same divergence on the same top-k, and
the same outcome of every sample (its reward and feedback do not depend on the text). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peer_trl_workers import Spec

REPOSITORY = Path(__file__).resolve().parents[1]
WORKERS = Path(__file__).with_name("peer_trl_workers.py")
PEER_ENVIRONMENT = REPOSITORY / ".venv-trl"
PEER_REQUIREMENTS = ["trl==1.16.0", "transformers==5.24.0", "datasets==5.2.0", "accelerate==1.15.0"]
DEFAULT_DATA = REPOSITORY.parent / "shared" / "data" / "sciknoweval" / "chemistry" / "train.jsonl"
VOCABULARY = 49152

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, tokenizer_directory: Path | None, texts: list[str]) -> None:
    """A 15.7 M Qwen3 with V = 49152 and tied embeddings, random weights, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory) if tokenizer_directory else made_tokenizer(texts)
    if len(tokenizer) > VOCABULARY:
        raise SystemExit(f"{tokenizer_directory} has {len(tokenizer)} tokens; the model has room for {VOCABULARY}")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def made_tokenizer(texts: list[str], size: int = VOCABULARY):
    """A byte-level BPE trained on the rows, filled up to `size` with made words so that any id decodes to text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    stream = random.Random(0)
    words = ["".join(stream.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(20_000)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*texts, *words], trainer)
    if bpe.get_vocab_size() != size:
        raise RuntimeError(f"the made tokenizer has {bpe.get_vocab_size()} tokens, not {size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def write_rows(source: Path, target: Path, count: int) -> None:
    """The first `count` rows of the data set, in its own order."""
    if not source.is_file():
        raise SystemExit(f"no rows at {source}: name a SciKnowEval train.jsonl with --data")
    lines = source.read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        raise SystemExit(f"{source} has {len(lines)} rows, but {count} are needed: ask for fewer --steps")
    with target.open("w", encoding="utf-8") as out:
        for number, line in enumerate(lines[:count]):
            row = {key: json.loads(line)[key] for key in ("prompt", "system", "answer")}
            out.write(json.dumps({"row": number, **row}) + "\n")


@dataclass(frozen=True)
class Contestant:
    """One worker of the comparison: which of the two it runs, and under what name its results stand."""

    name: str
    role: str  # rlpost | trl
    python: Path
    spec: Spec


class Worker:
    """The driver's side of one worker: start it, ask for steps, and say what its log says when it dies."""

    def __init__(self, contestant: Contestant, folder: Path):
        self.name = contestant.name
        self.log = folder / f"{self.name}.log"
        spec_path = folder / f"{self.name}.json"
        spec_path.write_text(json.dumps(asdict(contestant.spec)))
        threads = str(contestant.spec.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if contestant.role == "rlpost":
            path = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(contestant.python), str(WORKERS), contestant.role, str(spec_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.versions = self._read()["ready"]

    def step(self) -> dict[str, Any]:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = "\n".join(self.log.read_text().splitlines()[-30:])
            raise SystemExit(f"the worker {self.name} ended (exit {self.process.returncode}):\n{tail}")
        return json.loads(line)


@contextmanager
def started(contestants: list[Contestant], folder: Path) -> Iterator[list[Worker]]:
    """All workers, ready for their first step; ended whatever happens."""
    workers: list[Worker] = []
    try:
        for contestant in contestants:
            workers.append(Worker(contestant, folder))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def peer_python(environment: Path) -> Path:
    """The peer's interpreter; makes its virtual environment where there is none (RLPOST_TORCH names the torch)."""
    python = environment / "bin" / "python"
    complete = environment / "complete"  # written last: a broken installation is made again
    if not complete.is_file():
        print(f"making the peer's environment in {environment} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # torch first and alone: the plain requirement of the others could bring another build of it.
        subprocess.run([*install, *os.environ.get("RLPOST_TORCH", "torch==2.13.0").split()], check=True)
        subprocess.run([*install, *PEER_REQUIREMENTS], check=True)
        complete.touch()
    return python


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(spec: Spec, versions: dict[str, str], turns: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: what was compared, medians and ratios to rlpost, and where each one's seconds go."""

    def median(name: str, key: str) -> float:
        return statistics.median(turn[key] for turn in turns[name])

    ours = turns["rlpost"]
    rows, phases = [], []
    for name, done in turns.items():
        seconds = [turn["seconds"] for turn in done]
        peak = max(turn["peak_bytes"] for turn in done)
        row = [name, f"{median(name, 'seconds'):.2f}", f"{min(seconds):.2f}–{max(seconds):.2f}"]
        row += [f"{statistics.median(s / own['seconds'] for s, own in zip(seconds, ours)):.2f}"]
        row += [f"{median(name, 'cpu_seconds'):.2f}", f"{peak / 2**30:.2f}"]
        row += [f"{peak / max(own['peak_bytes'] for own in ours):.2f}"]
        row += [f"{statistics.mean(t[key] for t in done):.0f}" for key in ("response_tokens", "teacher_prompt_tokens")]
        rows.append(row)
        parts = [
            (part, statistics.median(turn["phases"].get(part, 0.0) for turn in done)) for part in done[0]["phases"]
        ]
        phases.append(f"- {name}: " + ", ".join(f"{part} {value:.2f}" for part, value in parts))
    header = ["", "median s", "range s", "× rlpost", "CPU s", "peak RSS GiB", "× rlpost"]
    return "\n".join(
        [
            f"{platform.machine()}, {os.cpu_count()} CPUs, {spec.threads} threads each, {len(ours)} alternations. "
            f"{spec.prompts} prompts × {spec.samples} samples × {spec.response_tokens} tokens, 15.7 M Qwen3, fp32, "
            f"Jensen-Shannon α={spec.alpha} on the top {spec.top_k} and the tail. "
            f"{'; '.join(sorted(set(versions.values())))}.\n",
            table([*header, "response tokens", "teacher prompt tokens"], rows),
            "\nSeconds by phase (medians):\n",
            *phases,
        ]
    )


def contestants(arguments: argparse.Namespace, spec: Spec) -> list[Contestant]:
    python = Path(arguments.peer_python) if arguments.peer_python else peer_python(PEER_ENVIRONMENT)
    peers = [
        Contestant(
            name=f"TRL, {count} a forward{', checkpointing' if arguments.peer_checkpointing else ''}",
            role="trl",
            python=python,
            spec=replace(spec, peer_micro_batch=count, peer_checkpointing=arguments.peer_checkpointing),
        )
        for count in arguments.peer_micro_batch
    ]
    return [*peers, Contestant("rlpost", "rlpost", Path(sys.executable), spec)]


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="peer_trl-") as name:
        folder, source = Path(name), Path(arguments.data)
        spec = Spec(
            model=str(folder / "model"),
            rows=str(folder / "rows.jsonl"),
            steps=arguments.warmup + arguments.steps,
            top_k=arguments.top_k,
            threads=arguments.threads,
            micro_batch_tokens=arguments.micro_batch_tokens,
        )
        write_rows(source, Path(spec.rows), spec.prompts * spec.steps)
        texts = [json.loads(line)["prompt"] for line in source.read_text(encoding="utf-8").splitlines()]
        write_model(Path(spec.model), Path(arguments.tokenizer) if arguments.tokenizer else None, texts)
        turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
        with started(contestants(arguments, spec), folder) as workers:
            for number in range(spec.steps):
                for worker in workers:
                    turns[worker.name].append(worker.step())
                seconds = "   ".join(f"{worker.name}: {turns[worker.name][-1]['seconds']:.2f} s" for worker in workers)
                print(f"{'warm-up' if number < arguments.warmup else 'step'} {number + 1}   {seconds}", flush=True)
            versions = {worker.name: worker.versions for worker in workers}
        measured = {worker: done[arguments.warmup :] for worker, done in turns.items()}
        print("\n" + report(spec, versions, measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=9, help="measured alternations")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=4096, help="train.max_tokens_per_micro_batch of rlpost"
    )
    parser.add_argument("--data", default=str(DEFAULT_DATA), help="SciKnowEval rows (JSON lines)")
    parser.add_argument(
        "--tokenizer", default=os.environ.get("MODEL_DIR"), help="a directory (default: MODEL_DIR, else made)"
    )
    parser.add_argument("--peer-python", help="an interpreter with TRL (default: .venv-trl, made if missing)")
    parser.add_argument(
        "--peer-micro-batch", type=int, nargs="+", default=[16, 4], help="sequences in one forward of the peer"
    )
    parser.add_argument("--peer-checkpointing", action="store_true", help="gradient checkpointing, TRL's default")
    arguments = parser.parse_args()
    if any(16 % count for count in arguments.peer_micro_batch):
        parser.error(f"--peer-micro-batch {arguments.peer_micro_batch}: each must divide the step's 16 samples")
    compare(arguments)


if __name__ == "__main__":
    main()
