"""`rlpost export`: a checkpoint as a Hugging Face directory, without its trainer."""

import json
import shutil

import pytest
import torch
from launch import run_python
from overrides import command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlpost.persist import export_checkpoint


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Two steps of SDPO, saved after each, exported by its trainer."""
    out = tmp_path_factory.mktemp("export")
    done = run_python(["-m", "rlpost", *command(tiny, out, "sdpo", "trainer.save_every=1")])
    assert done.returncode == 0, done.stderr
    return out / "run"


def weights(directory):
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_the_command_writes_what_the_trainer_wrote(run, tmp_path):
    code = (
        "import sys; from rlpost.__main__ import main\n"
        f"code = main(['export', {str(run)!r}, '--out', {str(tmp_path / 'x')!r}])\n"
        "assert not any(name.split('.')[0] == 'megatron' for name in sys.modules), 'Megatron was loaded'\n"
        "sys.exit(code)"
    )
    done = run_python(["-c", code])
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'x'}\n"), done.stderr
    ours, trainers = weights(tmp_path / "x"), weights(run / "export")
    assert ours.keys() == trainers.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, trainers[name]), name
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        here, there = tmp_path / "x" / name, run / "export" / name
        assert here.exists() == there.exists() and (not here.exists() or here.read_text() == there.read_text()), name
    card = (tmp_path / "x" / "README.md").read_text()
    for line in (
        "| steps | 2 |",
        "| algorithm | sdpo |",
        "## Training reward",
        "| megatron-core |",
        "train/loss",
        "  top_k: 8\n",
    ):
        assert line in card
    assert "perf/" not in card


def test_transformers_loads_it_and_scores_alike(run):
    loaded, info = AutoModelForCausalLM.from_pretrained(export_checkpoint(run), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    policy = AutoModelForCausalLM.from_pretrained(run / "export")  # which test_run.py compares with the trainer
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits.log_softmax(-1), policy(ids).logits.log_softmax(-1))


def test_step_tag_and_dtype(run):
    teacher = export_checkpoint(run, step=1, tag="teacher", dtype="bf16")
    assert teacher == run / "export-step_000001-teacher"
    saved = weights_of_checkpoint(run, 1, "tag.teacher")
    found = weights(teacher)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name].bfloat16()) for name in saved)
    assert json.loads((teacher / "config.json").read_text())["dtype"] == "bfloat16"
    student = weights(export_checkpoint(run, step=1))
    assert any(not torch.equal(student[name], saved[name]) for name in saved)
    card = (teacher / "README.md").read_text()
    assert "| weights | teacher |" in card and "| steps | 1 |" in card


def weights_of_checkpoint(run, step, kind):
    files = (run / "checkpoints" / f"step_{step:06d}").glob(f"{kind}-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_mistakes_say_what_there_is(run, tmp_path):
    with pytest.raises(ValueError, match="has no tag 'techer'. There are: student, teacher"):
        export_checkpoint(run, tag="techer")
    with pytest.raises(RuntimeError, match=r"step_000007 \(others: step 1, 2\): .*there is none"):
        export_checkpoint(run, step=7)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        export_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no config.json: say where the model that was trained is, with --model"):
        export_checkpoint(run, model=tmp_path)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file = copy / "checkpoints" / "step_000002" / "master-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RuntimeError, match=r"master-00000.safetensors has another checksum"):
        export_checkpoint(copy)
    assert (run / "export" / "README.md").exists()
