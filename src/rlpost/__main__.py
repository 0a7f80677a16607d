"""The command line: `python -m rlpost recipe=NAME group.key=value …`, also under torchrun."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.launcher import STOPPED, follow_launcher, leave, tell_launcher

if TYPE_CHECKING:
    from rlpost.trainer import Trainer

HELP = """\
rlpost: RL post-training of language models.

  torchrun --nproc-per-node N -m rlpost recipe=NAME [group.key=value …]     train (one process without torchrun)
  python -m rlpost [recipe=NAME] --cfg job [group.key=value …]              print the resolved configuration
  python -m rlpost quickstart [--seed S] [--dir DIR]                        the two-minute demonstration
  python -m rlpost prepare KIND SRC OUT [--eval-ratio .1] [--seed 42]       make train.jsonl and eval.jsonl
  python -m rlpost eval RUN [group.key=value …]                             evaluate a run's last checkpoint
  python -m rlpost generate RUN PROMPT [PROMPT …]                           sample from a run's last checkpoint
  python -m rlpost export RUN [--step N] [--tag teacher] [--dtype bf16]     a checkpoint as a Hugging Face directory
  python -m rlpost plan recipe=NAME [--ranks N] [group.key=value …]         bytes and arithmetic, without a model
  python -m rlpost doctor [DIR]                                             what this machine has, and what to fix

recipes:  {recipes}
groups:   {groups}
fields:   every field and its default is in the output of --cfg job; a wrong one is answered with those that exist

examples: python -m rlpost recipe=sdpo_sciknoweval data.domain=physics trainer.steps=20 optim.lr=5e-6
          torchrun --nproc-per-node 2 -m rlpost recipe=grpo_tiny parallel.tensor=2
A run writes <run.dir>/<run.name>/: metrics.jsonl, rollouts/, plots/, checkpoints/, export/, log.txt.
The same command goes on from its last checkpoint (trainer.resume=auto).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    follow_launcher()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    from rlpost.config.compose import ConfigError

    rank = int(os.environ.get("RANK", 0))
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        tell_launcher(str(error), rank == 0)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print(STOPPED, file=sys.stderr)
        if "RANK" in os.environ:
            leave(130)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    command = arguments[0]
    if command in COMMANDS:
        return COMMANDS[command](arguments[1:])
    if "=" not in command and not command.startswith(("-", "+", "~")):
        from rlpost.config.compose import ConfigError

        raise ConfigError([f"There is no command {command!r}. There are: {', '.join(COMMANDS)}; see --help"])
    return _train(arguments)


def _help() -> str:
    from rlpost.config.compose import files_root, recipe_names

    groups = (p for p in sorted((files_root() / "conf").iterdir()) if p.is_dir())
    listed = [f"{g.name}={'|'.join(sorted(f.stem for f in g.glob('*.yaml')))}" for g in groups]
    return HELP.format(recipes=", ".join(recipe_names()), groups="  ".join(listed))


def _train(arguments: list[str]) -> int:
    from rlpost.config.compose import compose_config, split_recipe, to_config

    show = "--cfg" in arguments
    if show:
        at = arguments.index("--cfg")
        del arguments[at : at + 2]
    recipe, overrides = split_recipe(arguments)
    composed = compose_config(recipe, overrides)
    if show:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(composed), end="")
        return 0
    from rlpost.trainer import Trainer

    config = to_config(composed)
    directory = Path(config.run.dir) / config.run.name
    return _run(lambda: Trainer(config), lambda trainer: trainer.fit(), directory)


def _run(build: Callable[[], Trainer], use: Callable[[Trainer], object], directory: Path | None) -> int:
    """directory: the run's, where the traceback of a failure goes."""
    from rlpost.failures import PhaseError, report

    try:
        trainer = build()
        use(trainer)
        trainer.close()
    except PhaseError as error:
        report(error, directory)
        if "RANK" in os.environ:
            leave(1)
        return 1
    return 0


def _quickstart(arguments: list[str]) -> int:
    from rlpost.quickstart import main as quickstart

    return quickstart(arguments)


def _doctor(arguments: list[str]) -> int:
    from rlpost.doctor import main as doctor

    return doctor(arguments)


def _plan(arguments: list[str]) -> int:
    from rlpost.plan import main as plan

    return plan(arguments)


def _prepare(arguments: list[str]) -> int:
    import argparse
    import json
    import logging

    from rlpost.data.prepare import KINDS, prepare

    parser = argparse.ArgumentParser(prog="rlpost prepare", description="Make train.jsonl and eval.jsonl.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("src", help="a file or folder: JSONL, JSON or Parquet")
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--eval-ratio", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="skip: leave out and count")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which rows are left out, and why
    try:
        print(json.dumps(prepare(**vars(given)), indent=2))
    except (ValueError, OSError) as error:
        print(f"rlpost prepare: {error}", file=sys.stderr)
        return 2
    return 0


def _eval(arguments: list[str]) -> int:
    from rlpost.trainer import Trainer

    def show(trainer: Trainer) -> None:
        for name, value in trainer.evaluate().items():
            print(f"{name:40s} {value:.4f}")

    if not arguments:
        return _usage("eval RUN [group.key=value …]")
    return _run(lambda: Trainer.resume(arguments[0], arguments[1:]), show, Path(arguments[0]))


def _generate(arguments: list[str]) -> int:
    from rlpost.trainer import Trainer

    def show(trainer: Trainer) -> None:
        for prompt, (response,) in zip(arguments[1:], trainer.generate(arguments[1:])):
            print(f"> {prompt}\n{response}\n")

    if len(arguments) < 2:
        return _usage("generate RUN PROMPT [PROMPT …]")
    return _run(lambda: Trainer.resume(arguments[0]), show, Path(arguments[0]))


def _export(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        prog="rlpost export", description="Write a checkpoint of a run as a Hugging Face directory."
    )
    parser.add_argument("run", help="the run's directory")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the latest)")
    parser.add_argument("--tag", default="student", help="student, teacher, …: whose weights (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: the one that was trained in")
    parser.add_argument("--out", help="the directory to write (default: RUN/export, with step and tag where given)")
    parser.add_argument("--model", help="where config.json and the tokenizer are, if model.path has moved")
    given = parser.parse_args(arguments)
    from rlpost.persist import export_checkpoint
    from rlpost.weights.checkpoint_reader import CheckpointError
    from rlpost.weights.export import ExportError

    try:
        print(export_checkpoint(**vars(given)))
    except (CheckpointError, ExportError, ValueError, OSError) as error:
        print(f"rlpost export: {error}", file=sys.stderr)
        return 1
    return 0


def _usage(line: str) -> int:
    print(f"usage: python -m rlpost {line}", file=sys.stderr)
    return 2


COMMANDS = {
    "quickstart": _quickstart,
    "prepare": _prepare,
    "eval": _eval,
    "generate": _generate,
    "export": _export,
    "plan": _plan,
    "doctor": _doctor,
}

if __name__ == "__main__":
    code = main()
    gc.freeze()  # else the interpreter looks for garbage in all of Megatron and torch as it ends: two seconds
    sys.exit(code)
