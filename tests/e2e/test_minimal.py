"""The flat loop of recipes/minimal.py is the Trainer's: the same losses, step by step."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost import Trainer

MINIMAL = Path(__file__).parents[2] / "recipes" / "minimal.py"
STEPS, LR, EPS = 4, 1e-2, 1e-3  # a large eps keeps Adam smooth in the gradient, whose rounding differs


@pytest.fixture
def model(tiny, tmp_path):
    """The tiny model, where the padding token, which an untrained model samples, is a token like all others:
    Transformers sets its embedding to 0 and never trains it, Megatron does."""
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.pad_token_id = None
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.02 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


def test_the_flat_loop_gives_the_trainers_losses(tiny, model, tmp_path):
    flat = runpy.run_path(str(MINIMAL))
    assert len(MINIMAL.read_text().splitlines()) <= 250
    losses = flat["main"](model, tiny / "data" / "train.jsonl", STEPS, LR, EPS)
    trainer = Trainer.from_recipe(
        "quickstart_sdpo",
        [
            f"run.dir={tmp_path}",
            f"run.seed={flat['SEED']}",
            f"model.path={model}",
            f"data.train={tiny / 'data' / 'train.jsonl'}",
            f"data.eval.held_out={tiny / 'data' / 'eval.jsonl'}",
            f"rollout.prompts_per_step={flat['PROMPTS']}",
            f"rollout.samples_per_prompt={flat['SAMPLES']}",
            f"rollout.max_response_tokens={flat['MAX_TOKENS']}",
            f"teacher.alpha={flat['EMA']}",
            f"optim.lr={LR}",
            f"optim.eps={EPS}",
            "tracker.progress=false",
        ],
    )
    expected = [trainer.step()["train/loss"] for _ in range(STEPS)]
    trainer.close()
    assert min(losses) > 1e-4  # the untrained model and its teacher do differ
    assert losses == pytest.approx(expected, rel=2e-3)
