"""External teachers under several launches: models of two shapes by source, and a server."""

import json

import torch
from scoring_server import ScoringServer
from test_cuts import compare
from transformers import Qwen3ForCausalLM

from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import task


def larger_model(path):
    """Deeper and narrower than the student, with its tokenizer."""
    config = task.model_config()
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = 4, 48, 6
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(path)
    task.make_tokenizer().save_pretrained(path)
    return path


def test_teachers_of_two_shapes_by_source(tiny, tmp_path):
    models = f"{{early: {tiny / 'model'}, late: {larger_model(tmp_path / 'larger')}}}"
    more = ["teacher=external", "teacher.model=null", f"+teacher.models={models}"]
    compare(tiny, tmp_path, "sdpo_full", ["tensor parallel 2", "pipeline parallel 2"], *more)
    events = json.loads((tmp_path / "one" / "run" / "timeline.json").read_text())
    held = {e["name"]: e["args"]["resident_bytes"] for e in events if "resident_bytes" in e.get("args", {})}
    assert held["teach"] > held["prepare"] > 0  # by the weights of the larger model


def test_a_server_teaches_every_launch_alike(tiny, tmp_path):
    server = ScoringServer(larger_model(tmp_path / "served"))
    with server.serving() as url:
        more = ["teacher=url", f"teacher.url={url}", "algorithm.mode=sampled", "algorithm.alpha=1"]
        compare(tiny, tmp_path, "sdpo", ["tensor parallel 2"], *more)
    rows = [row for row in read_metrics(tmp_path / "one" / "run") if "train/loss" in row]
    assert all(row["teacher/scored_sequences"] > 0 and row["teacher/bad_payloads"] == 0 for row in rows)
    asked = [len(body["input_ids"]) for path, body in server.requests if path == "/generate"]
    probes = 1 + 2  # each rank at its launch; of two tensor-parallel ranks one asks
    assert sum(asked) == 2 * sum(int(row["teacher/scored_sequences"]) for row in rows) + probes
