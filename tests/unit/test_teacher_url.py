"""A teacher behind a URL: a real server, scoring with a real model, that may also fail in every way."""

import threading
from types import SimpleNamespace

import pytest
import torch
from launch import free_port
from scoring_server import ScoringServer
from tiny_policy import tiny_model
from tiny_tokenizer import tiny_tokenizer

from rlpost.data.batching import Update
from rlpost.teacher import TeacherConfig, check_external
from rlpost.teacher.client import ScoringClient, TeacherServerError
from rlpost.teacher.payloads import PayloadError
from rlpost.teacher.remote import RemoteTeacher
from rlpost.types import Prompt, Sample

TOKENIZER = tiny_tokenizer()
ALONE = SimpleNamespace(rank=0, size=1)
MESH = SimpleNamespace(dp=ALONE, tp=ALONE, pp=ALONE, cp=ALONE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("served") / "model", vocab_size=len(TOKENIZER))
    TOKENIZER.save_pretrained(path)
    return path


def config(url, **more):
    return TeacherConfig(update="static", url=url, **{"retry_wait_s": 0.0, "retries": 1, "timeout_s": 20.0, **more})


def samples():
    g = torch.Generator().manual_seed(1)
    made = []
    for i, length in enumerate((4, 1, 6, 3, 5)):
        ids = torch.randint(0, len(TOKENIZER), (length,), generator=g).tolist()
        sample = Sample(Prompt(i, [], [1]), i, 0, ids, distill_mask=0.0 if i == 3 else 1.0)
        sample.teacher_prompt_ids = torch.randint(0, len(TOKENIZER), (2 + i,), generator=g).tolist()
        sample.tokens["distill_mask"] = torch.full((length,), sample.distill_mask)
        made.append(sample)
    return made


def score(teacher, given):
    return teacher.score(Update(given, 1, 1, True))


@pytest.mark.parametrize("api", ["sglang", "vllm"])
def test_scores_are_those_of_the_model_for_these_very_tokens(api, model):
    """Random ids, which no text tokenises to: a server that tokenised again would answer for others."""
    server, given = ScoringServer(model), samples()
    with server.serving() as url:
        chosen = config(url, api=api, sequences_per_request=2)
        check_external(chosen, TOKENIZER, [])
        asked = len(server.requests)
        metrics = score(RemoteTeacher(chosen, MESH), given)
    assert metrics == {"teacher/scored_sequences": 4.0, "teacher/bad_payloads": 0.0}
    scoring = [path for path, _ in server.requests[asked:] if path != "/v1/models"]
    assert scoring == ["/generate" if api == "sglang" else "/v1/completions"] * 2
    for sample in given:
        if sample.distill_mask == 0:
            assert "teacher_logprobs" not in sample.tokens
            continue
        rows = server.logprobs(sample.teacher_prompt_ids + sample.response_ids)
        rows = rows[len(sample.teacher_prompt_ids) - 1 : -1]
        want = rows.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(sample.tokens["teacher_logprobs"], want, atol=1e-6, rtol=1e-6)


def test_requests_run_at_once(model):
    """Each waits for the others: one after the other, none would be answered in time."""
    together = threading.Barrier(3)

    def wait(path, answer):
        if path == "/generate":
            together.wait(timeout=10)
        return 200, answer

    server = ScoringServer(model, fault=wait)
    with server.serving() as url:
        client = ScoringClient(config(url, sequences_per_request=1, requests_at_once=3, retries=0))
        rows = client.score([[1, 2, i] for i in range(6)], [2] * 6)
    assert server.at_once == 3
    want = [float(server.logprobs([1, 2])[-1, i]) for i in range(6)]
    assert [row[0] for row in rows] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("trouble", ["busy", "dropped", "no JSON"])
def test_a_request_that_fails_once_is_repeated(trouble, model, caplog):
    failed = []

    def fault(path, answer):
        if path == "/generate" and not failed:
            failed.append(path)
            return {"busy": (503, "loading"), "dropped": None, "no JSON": (200, b"<html>")}[trouble]
        return 200, answer

    server = ScoringServer(model, fault=fault)
    with server.serving() as url:
        (row,) = ScoringClient(config(url)).score([[1, 2, 3]], [1])
    assert row == pytest.approx([float(server.logprobs([1, 2, 3])[t, t + 2]) for t in range(2)], abs=1e-6)
    assert "POST /generate failed" in caplog.text and "once more" in caplog.text


def answers(*, status=200, change=lambda answer: answer):
    return lambda path, answer: (status, change(answer)) if path == "/generate" else (200, answer)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answers(status=500), "had no answer, 2 times .is the server up\?.; the last: HTTP 500"),
        (answers(status=400, change=lambda _: {"error": "too long"}), "was refused: HTTP 400: .*too long"),
        (answers(change=lambda answer: {"choices": []}), "answers in another form than teacher.api=sglang"),
        (answers(change=lambda answer: answer[1:]), "0 answers to 1 sequences"),
        (answers(change=lambda answer: [{"text": "hi"}]), "another form .*meta_info"),
    ],
    ids=["broken", "refused", "another form", "too few", "no scores"],
)
def test_what_a_server_does_wrong_is_said(fault, said, model):
    with ScoringServer(model, fault=fault).serving() as url:
        with pytest.raises(TeacherServerError, match=f"(?s)teacher.url={url}: POST /generate .*{said}") as error:
            score(RemoteTeacher(config(url), MESH), samples()[:1])
        assert "Traceback" not in str(error.value)


def test_a_server_that_is_not_there_or_too_slow(model):
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TeacherServerError, match=r"GET /v1/models had no answer, 2 times .*; the last: .* refused$"):
        check_external(config(nowhere), TOKENIZER, [])
    released = threading.Event()
    server = ScoringServer(model, fault=lambda path, answer: (released.wait(10), (200, answer))[1])
    with server.serving() as url:
        with pytest.raises(TeacherServerError, match=r"had no answer, 1 times .*; the last: timed out"):
            check_external(config(url, timeout_s=0.2, retries=0), TOKENIZER, [])
        released.set()


def cut_first(change):
    """Spoils the first of the answers' scores."""

    def fault(path, answer):
        if path == "/generate":
            change(answer[0]["meta_info"]["input_token_logprobs"])
        return 200, answer

    return fault


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scores: scores.pop(), "3 scores for 4 response tokens"),
        (lambda scores: scores[2].__setitem__(1, -7), "score 1 is of token -7, not of "),
        (lambda scores: scores[1].__setitem__(0, float("nan")), "the log-prob of response token 0 is nan"),
        (lambda scores: scores[1].__setitem__(0, None), "the log-prob of response token 0 is None"),
    ],
    ids=["missing token", "another token", "nan", "none"],
)
def test_a_sequence_without_usable_scores_teaches_nothing(change, said, model):
    with ScoringServer(model, fault=cut_first(change)).serving() as url:
        given = samples()
        metrics = score(RemoteTeacher(config(url, max_bad_payload_fraction=0.3), MESH), given)
        assert metrics["teacher/bad_payloads"] == 1.0
        assert not given[0].tokens["distill_mask"].any() and not given[0].tokens["teacher_logprobs"].any()
        assert given[1].tokens["distill_mask"].all()
        with pytest.raises(PayloadError, match=f"1 of 4 sequences have no usable scores.*the first: {said}"):
            score(RemoteTeacher(config(url), MESH), samples())


def test_what_other_ranks_hear_counts_too(model, monkeypatch):
    """A rank of the same data-parallel part that asks nobody, and the rank of another part."""

    def part(rows, error=None):
        return lambda mine: [(0, *heard), (1, rows, error), None]

    with ScoringServer(model).serving() as url:
        chosen, given = config(url, max_bad_payload_fraction=0.4), samples()
        heard = RemoteTeacher(chosen, MESH)._ask([s for s in given if s.distill_mask > 0])
    idle = RemoteTeacher(chosen, SimpleNamespace(dp=ALONE, tp=SimpleNamespace(rank=1, size=2), pp=ALONE, cp=ALONE))
    monkeypatch.setattr("rlpost.teacher.remote.all_gather_objects", part([[-1.0], "3 scores for 4 response tokens"]))
    assert score(idle, given) == {"teacher/scored_sequences": 6.0, "teacher/bad_payloads": 1.0}
    assert given[0].tokens["teacher_logprobs"].tolist() == pytest.approx(heard[0][0])
    monkeypatch.setattr("rlpost.teacher.remote.all_gather_objects", part([], "no answer"))
    with pytest.raises(TeacherServerError, match="no answer"):
        score(idle, samples())


def test_a_token_that_the_teacher_rules_out_stays_finite(model):
    change = cut_first(lambda scores: scores[1].__setitem__(0, float("-inf")))
    with ScoringServer(model, fault=change).serving() as url:
        given = samples()
        assert score(RemoteTeacher(config(url), MESH), given)["teacher/bad_payloads"] == 0.0
    assert given[0].tokens["teacher_logprobs"][0] == -80.0


def test_another_model_or_tokenizer_is_refused_at_launch(model, monkeypatch):
    server = ScoringServer(model, name="qwen")
    with server.serving() as url:
        with pytest.raises(ValueError, match=rf"teacher.served_model=llama is not what teacher.url={url} serves: qwen"):
            check_external(config(url, served_model="llama"), TOKENIZER, [])
        other = tiny_tokenizer()
        other.add_tokens(["Two trains"])
        with pytest.raises(ValueError, match="serves 'qwen', which has another tokenizer than the student: token 0"):
            check_external(config(url), other, [])
        with pytest.raises(ValueError, match="teacher.api_key_env=NO_SUCH_KEY: there is no such environment variable"):
            check_external(config(url, api_key_env="NO_SUCH_KEY"), TOKENIZER, [])
        monkeypatch.setenv("TEACHER_KEY", "secret")
        check_external(config(url, served_model="qwen", api_key_env="TEACHER_KEY"), TOKENIZER, [])
    assert server.headers[-1]["Authorization"] == "Bearer secret"
