"""One prompt's log-probs from engine and trainer: equal after a publish, not with other weights."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_policy, save_model

import rlpost.rollout.canary
from rlpost.rollout.canary import Canary, CanaryError
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.weights.publish import Publisher

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    directory = save_model("qwen3", tmp_path_factory.mktemp("models"))
    policy, engine = make_policy(directory), TorchEngine(str(directory), dtype=torch.float32)
    engine.start()
    return policy, engine, Publisher(policy, engine)


def canary(rooms, mode):
    policy, engine, publisher = rooms
    found = Canary(policy, engine, [5, 9, 2, 31, 7, 7, 40, 3], mode, torch.float32)
    publisher.publish()
    found.published()
    return found


def serve_others(rooms, scale=0.05):
    """The engine gets weights that the canary does not know of."""
    policy, _, publisher = rooms
    for tensor in policy.masters().values():
        tensor.add_(scale * torch.randn(tensor.shape))
    policy.sync_from_masters()
    publisher.publish()


@pytest.mark.parametrize("mode", ["first", "always"])
def test_published_weights_pass_and_others_do_not(rooms, mode):
    found = canary(rooms, mode)
    found.check()
    told = found.metrics()
    assert told.keys() == ({"rollout/canary"} if mode == "always" else set()) and found.metrics() == {}
    assert all(gap < 1e-5 for gap in told.values())
    found = canary(rooms, mode)
    serve_others(rooms)
    with pytest.raises(CanaryError, match=r"mean \|Δ log-prob\| over 7 tokens is"):
        found.check()


def test_how_often(rooms, monkeypatch):
    policy, engine, publisher = rooms
    asked, score = [], engine.score
    monkeypatch.setattr(engine, "score", lambda *given: asked.append(given) or score(*given))
    for mode, due in (("off", [0, 0]), ("first", [1, 0]), ("always", [1, 1])):
        found = Canary(policy, engine, [5, 9, 2], mode, torch.float32)
        compared = []
        for _ in range(2):
            publisher.publish()
            found.published()
            found.check()
            found.check()  # once after a publish
            compared.append(len(asked))
            asked.clear()
        assert compared == due, mode


@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_much_rounding_in_bf16_is_said_once(rooms, dtype, said, monkeypatch, caplog):
    policy, engine, publisher = rooms
    torch.manual_seed(0)
    monkeypatch.setattr(rlpost.rollout.canary, "NOTABLE", 1e-4)
    found = Canary(policy, engine, [5, 9, 2, 31, 7, 7, 40, 3], "always", dtype)
    for _ in range(2):
        publisher.publish()
        found.published()
        serve_others(rooms, scale=0.001)
        found.check()
        assert 1e-4 < found.metrics()["rollout/canary"] < 0.1
    assert caplog.text.count("model.dtype=fp16 rounds eight times finer") == said


@pytest.mark.parametrize(("dtype", "advice"), [(torch.bfloat16, "publish.verify=always"), (torch.float16, "65504")])
def test_what_overflows_in_fp16_is_told_so(rooms, dtype, advice, monkeypatch):
    policy, engine, publisher = rooms
    found = Canary(policy, engine, [5, 9, 2, 31], "first", dtype)
    publisher.publish()
    found.published()
    score = engine.score

    def overflown(*given):
        return [replace(one, logprobs=one.logprobs * torch.nan) for one in score(*given)]

    monkeypatch.setattr(engine, "score", overflown)
    with pytest.raises(CanaryError, match=f"is nan, more than .*{advice}"):
        found.check()
