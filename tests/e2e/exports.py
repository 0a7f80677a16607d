"""What Transformers makes of a run's export, beside what its trainer says."""

import json
from pathlib import Path

import torch
from launch import run_python
from transformers import AutoModelForCausalLM, AutoTokenizer


def distance_of_export(run: Path, *overrides: str) -> float:
    """The largest difference between the log-probs of a response under the export and under the resumed trainer.

    overrides: what one process needs to resume the run of several."""
    code = (
        f"import json; from rlpost import Trainer; t = Trainer.resume({str(run)!r}, {overrides!r})\n"
        "print(json.dumps(t.score(['decline : lamp river'], ['lampae riverum'])))"
    )
    scored = run_python(["-c", code])
    assert scored.returncode == 0, scored.stderr
    ours = torch.tensor(json.loads(scored.stdout.splitlines()[-1])[0])
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    model, info = AutoModelForCausalLM.from_pretrained(
        run / "export", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    messages = [{"role": "user", "content": "decline : lamp river"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    response = tokenizer.encode("lampae riverum", add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    return float((ours - theirs).abs().max())
