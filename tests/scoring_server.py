"""A real HTTP server on localhost that scores with a Transformers model, in SGLang's and in vLLM's words."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# What goes wrong: fn(path, answer) -> (HTTP status, answer), or None where the connection is to be dropped.
Fault = Callable[[str, Any], tuple[int, Any] | None]


class ScoringServer:
    """url, requests (path, body) in their order, and `at_once`: the most that were being answered together."""

    def __init__(self, model: Path, name: str = "teacher", fault: Fault = lambda path, answer: (200, answer)):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.name, self.fault = name, fault
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self._running = 0
        self._lock = threading.Lock()

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": self.name, "object": "model"}]}
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])}
        if path == "/generate":
            assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0
            return [self._sglang(ids, at) for ids, at in zip(body["input_ids"], body["logprob_start_len"], strict=True)]
        if path == "/v1/completions":
            assert body["model"] == self.name
            choices = [{"index": i, "prompt_logprobs": self._vllm(ids)} for i, ids in enumerate(body["prompt"])]
            return {"object": "text_completion", "choices": choices[::-1]}
        raise AssertionError(f"nobody asked for {path} here")

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[T, V]: row t predicts token t + 1."""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def _sglang(self, ids: list[int], start: int) -> dict[str, Any]:
        rows = self.logprobs(ids)
        entries = [[float(rows[t - 1, ids[t]]), ids[t], None] for t in range(start + 1, len(ids))]
        return {"text": "", "meta_info": {"input_token_logprobs": [[None, ids[start], None], *entries]}}

    def _vllm(self, ids: list[int]) -> list[dict[str, Any] | None]:
        rows, entries = self.logprobs(ids), [None]
        for t in range(1, len(ids)):
            told = {ids[t], int(rows[t - 1].argmax())}
            entries.append({str(i): {"logprob": float(rows[t - 1, i]), "decoded_token": "?"} for i in told})
        return entries

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Runs in threads of this process; gives the URL."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(None)

            def do_POST(self) -> None:
                self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _respond(self, body: Any) -> None:
                with outer._lock:
                    outer._running += 1
                    outer.at_once = max(outer.at_once, outer._running)
                    outer.requests.append((self.path, body))
                    outer.headers.append(dict(self.headers))
                result = outer.fault(self.path, outer.answer(self.path, body))
                with outer._lock:
                    outer._running -= 1
                if result is None:
                    self.close_connection = True
                    return
                payload = result[1] if isinstance(result[1], bytes) else json.dumps(result[1]).encode()
                self.send_response(result[0])
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                """Not to the terminal."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
