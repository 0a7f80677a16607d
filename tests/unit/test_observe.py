import io
import json
import logging
import math
import subprocess
import sys
import threading

import pytest
import torch

from rlpost.observe.logs import NOTICE, remove_handlers, setup_logging
from rlpost.observe.metrics import MetricsLog, read_metrics
from rlpost.observe.plots import plot_run, smooth
from rlpost.observe.progress import Progress, duration, summary
from rlpost.observe.records import RolloutRecords
from rlpost.observe.timeline import Timeline
from rlpost.observe.trackers import Trackers
from rlpost.types import Prompt, Sample


def sample(index=0, **fields):
    prompt = Prompt(id=7, messages=[{"role": "user", "content": "größer?\n"}], ids=[1, 2, 3], answer="B", source="chem")
    return Sample(prompt, group_id=4, index=index, response_ids=[5, 6], response="<answer>B</answer>",
                  loss_mask=[1, 0], reward=1.0, **fields)  # fmt: skip


def test_metrics_are_one_line_a_step_and_never_nan_in_silence(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.write(1, {"train/loss": torch.tensor(0.5), "train/tokens": 12})
    log.write(2, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/tokens": 3})
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0] == (
        '{"step": 1, "train/loss": 0.5, "train/tokens": 12}'
    )
    assert read_metrics(tmp_path / "run")[1] == {
        "step": 2,
        "train/loss": None,
        "train/grad_norm": None,
        "train/tokens": 3,
        "nonfinite": ["train/loss", "train/grad_norm"],
    }
    with pytest.raises(TypeError, match="metric 'x' is 'high'"):
        log.write(3, {"x": "high"})


def test_a_resumed_run_cuts_the_lines_it_will_write_again(tmp_path):
    log = MetricsLog(tmp_path)
    log.cut_after(-1)  # nothing there yet
    for step in range(4):
        log.write(step, {"x": math.nan if step == 1 else step})
    with open(log.path, "a") as f:
        f.write('{"step": 4, "x"')  # killed while writing
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    log.cut_after(2)
    log.write(3, {"x": 9})
    assert [(row["step"], row["x"]) for row in read_metrics(tmp_path)] == [(0, 0), (1, None), (2, 2), (3, 9)]
    assert read_metrics(tmp_path)[1]["nonfinite"] == ["x"]
    log.path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_rollout_records_hold_what_a_reader_asks_for(tmp_path):
    records = RolloutRecords(tmp_path)
    taught = sample(feedback="wrong unit", teacher_messages=[{"role": "user", "content": "hint"}],
                    teacher_prompt_ids=[1, 2, 3, 4], distill_mask=1.0)  # fmt: skip
    records.write("train", 3, [taught, sample(1)])
    records.write("eval", 3, [sample()], set="heldout")
    row, plain = (json.loads(line) for line in (tmp_path / "rollouts/train/3.jsonl").read_text().splitlines())
    assert row["prompt"] == [{"role": "user", "content": "größer?\n"}]
    assert row["teacher_prompt"] == [{"role": "user", "content": "hint"}] and row["feedback"] == "wrong unit"
    assert (row["prompt_tokens"], row["response_tokens"], row["teacher_prompt_tokens"]) == (3, 2, 4)
    assert (row["loss_mask_fraction"], row["distill_mask"]) == (0.5, 1.0)
    assert (row["answer"], row["reward"], row["finish_reason"], row["source"]) == ("B", 1.0, "stop", "chem")
    assert plain["teacher_prompt"] is None and plain["teacher_prompt_tokens"] is None
    assert json.loads((tmp_path / "rollouts/eval/3.jsonl").read_text())["set"] == "heldout"
    with pytest.raises(ValueError, match="kind='test' is not allowed; allowed are train, eval"):
        records.write("test", 3, [])
    records.write("train", 11, [sample()])
    records.cut_after(3)
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*/*")) == ["3.jsonl", "3.jsonl"]


def test_records_of_many_writers_stay_whole(tmp_path):
    records = RolloutRecords(tmp_path)
    long = sample(teacher_messages=[{"role": "user", "content": "x" * 20_000}])
    writers = [threading.Thread(target=records.write, args=("train", 1, [long] * 8)) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = (tmp_path / "rollouts/train/1.jsonl").read_text().splitlines()
    assert len(lines) == 48 and all(json.loads(line)["group_id"] == 4 for line in lines)


METRICS = {"rollout/reward/mean": 0.25, "train/loss": 1.5, "perf/tokens_per_s": 1234.0, "perf/step_s": 2.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_line_a_step_where_it_is_not_a_terminal():
    stream = io.StringIO()
    progress = Progress(10, stream)
    progress.update(4, METRICS)
    progress.update(5, {})
    progress.close()
    first, second = stream.getvalue().splitlines()
    assert first == "step  4/10  reward 0.25  loss 1.5  1.23k tokens/s  2 s/step  ETA 0:12"
    assert second.startswith("step  5/10  ")


def test_progress_rewrites_its_line_on_a_terminal():
    stream = Terminal()
    progress = Progress(2, stream)
    progress.update(1, METRICS)
    progress.say("saved")
    progress.update(2, METRICS)
    progress.close()
    shown = stream.getvalue()
    clear = "\r\x1b[K"
    assert shown.count("\n") == 2 and "saved\n" in shown and shown.endswith("ETA 0:00\n")
    assert shown.split(clear)[1] == f"saved\n{shown.split(clear)[0]}"
    assert [duration(s) for s in (0, 75, 3723)] == ["0:00", "1:15", "1:02:03"]


def test_a_phase_stands_behind_the_line_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(2, stream)
    progress.phase("rollout")
    progress.update(1, METRICS)
    progress.phase("train")  # the line is full
    progress.close()
    written = stream.getvalue().split("\r\x1b[K")
    assert written[0] == "step 0/2  · rollout" and all(len(line.strip()) < 40 for line in written)
    assert "train" not in written[-1]
    elsewhere = io.StringIO()
    Progress(2, elsewhere).phase("rollout")
    assert not elsewhere.getvalue()


def test_summary_says_what_moved_and_where_everything_is(tmp_path):
    run = tmp_path / "quickstart"
    (run / "export").mkdir(parents=True)
    (run / "log.txt").touch()
    rows = [
        {"step": 0, "eval/heldout/mean@4": 0.1},
        {"step": 1, "rollout/reward/mean": 0.2},
        {"step": 2, "rollout/reward/mean": 0.7, "eval/heldout/mean@4": 0.8, "eval/heldout/mean@4/stderr": 0.1},
    ]
    text = summary(run, rows, seconds=61)
    assert text.splitlines()[0] == "quickstart: 2 steps in 1:01"
    assert "  rollout/reward: 0.2 → 0.7" in text and "  eval/heldout/mean@4: 0.1 → 0.8" in text
    assert f"model  {run / 'export'}" in text and f"log    {run / 'log.txt'}" in text
    assert "checkpoints" not in text
    assert summary(run, []).startswith("quickstart: 0 steps")


def test_summary_says_where_the_time_of_a_step_goes(tmp_path):
    step = {"perf/tokens_per_s": 100.0, "perf/peak_bytes": 1.0}
    rows = [
        {"step": 0, "eval/heldout/mean@4": 0.1},
        {"step": 1, "perf/step_s": 90.0, "perf/rollout_s": 80.0, **step},  # the first compiles
        {"step": 2, "perf/step_s": 3.5, "perf/rollout_s": 1.25, "perf/train_s": 2.0, **step},
        {"step": 3, "perf/step_s": 3.0, "perf/rollout_s": 1.0, "perf/train_s": 2.0, **step},
    ]
    assert "  seconds of a step, median: 3.5 (rollout 1.25, train 2)" in summary(tmp_path, rows)
    assert "seconds of a step" not in summary(tmp_path, rows[:1])


def test_log_goes_to_the_run_and_only_to_the_last_one(tmp_path):
    setup_logging(tmp_path / "a")
    logging.getLogger("rlpost.trainer").info("first")
    setup_logging(tmp_path / "b", rank=3)
    logging.getLogger("rlpost.trainer").info("unseen")
    logging.getLogger("rlpost.trainer").warning("second")
    assert (tmp_path / "a" / "log.txt").read_text().endswith("I rlpost.trainer: first\n")
    (line,) = (tmp_path / "b" / "log.txt").read_text().splitlines()
    assert line.startswith("[rank 3]") and line.endswith("W rlpost.trainer: second")
    remove_handlers(list(logging.getLogger("rlpost").handlers))


@pytest.mark.parametrize(
    ("shown_from", "expected"),
    [
        (NOTICE, ["the engine starts", "warning: bf16 rounds", "error: once more"]),
        (logging.WARNING, ["warning: bf16 rounds", "error: once more"]),
    ],
)
def test_what_a_person_should_read_is_shown_and_kept(tmp_path, shown_from, expected):
    shown = []
    handlers = setup_logging(tmp_path, 0, shown.append, shown_from)
    log = logging.getLogger("rlpost.anywhere")
    log.info("the page cache was not warmed")
    log.log(NOTICE, "the engine starts")
    log.warning("%s rounds", "bf16")
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        log.exception("once more")  # the traceback is for log.txt
    remove_handlers(handlers)
    assert shown == expected
    kept = (tmp_path / "log.txt").read_text()
    assert "N rlpost.anywhere: the engine starts" in kept and "ZeroDivisionError" in kept and "page cache" in kept


def test_a_terminal_that_is_gone_takes_no_warning_and_stops_nothing(tmp_path):
    closed = io.StringIO()
    handlers = setup_logging(tmp_path, 0, Progress(2, closed).say)
    closed.close()
    logging.getLogger("rlpost.anywhere").warning("rows left out")
    remove_handlers(handlers)
    assert "rows left out" in (tmp_path / "log.txt").read_text()


def test_timeline_is_a_whole_trace_after_every_event(tmp_path):
    timeline = Timeline(tmp_path, rank=1)
    timeline.record("rollout", 10.0, 12.5, step=1)
    assert json.loads(timeline.path.read_text()) == [
        {"name": "rollout", "cat": "phase", "ph": "X", "ts": 10_000_000, "dur": 2_500_000, "pid": 1, "tid": 0,
         "args": {"step": 1}}
    ]  # fmt: skip
    with pytest.raises(KeyError), Timeline(tmp_path).span("train", step=1):  # a resumed run goes on; failures show too
        raise KeyError
    assert [event["name"] for event in json.loads(timeline.path.read_text())] == ["rollout", "train"]


def test_tensorboard_gets_finite_values_and_forgets_the_abandoned_future(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in (((1, 2, 3), 1.0), ((2, 3), 2.0)):
        trackers = Trackers(tmp_path)
        for step in steps:
            trackers.log(step, {"train/loss": value, "bad": math.nan})
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_a_missing_tracker_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"tracker\.wandb=true needs .*`pip install wandb`, or set tracker\.wandb=f"):
        Trackers(tmp_path, tensorboard=False, wandb=True)


def write_run(directory, steps, *, teacher=True):
    log = MetricsLog(directory)
    log.write(0, {"eval/heldout/mean@4": 0.1, "eval/heldout/pass@4": 0.2})
    for step in range(1, steps + 1):
        row = {"rollout/reward/mean": step / steps, "train/loss": 1 / step, "rollout/response_tokens/mean": 20.0}
        if teacher:
            row["ema/distance"] = 1e-5 * step
        if step == 2:
            row["train/loss"] = math.nan
        log.write(step, row)


@pytest.mark.parametrize("steps", [3, 40])
def test_plots_are_drawn_from_metrics_alone(tmp_path, steps):
    write_run(tmp_path, steps)
    figure = plot_run(tmp_path)
    names = ["loss", "overview", "response_lengths", "reward", "teacher_distance"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [f"{name}.png" for name in names]
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    reward, loss, *_ = figure.axes
    labels = [text.get_text() for text in reward.get_legend().get_texts()]
    assert labels == ["training rollouts" if steps == 3 else "training rollouts (smoothed)", "eval: heldout/mean@4"]
    assert all(axes.get_xlabel() == "step" and axes.get_ylabel() for axes in figure.axes)
    assert len(loss.lines[0].get_xdata()) == steps - 1  # the step without a finite loss is left out
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_run_without_a_teacher_or_without_numbers(tmp_path):
    write_run(tmp_path / "grpo", 3, teacher=False)
    plot_run(tmp_path / "grpo")
    assert not (tmp_path / "grpo" / "plots" / "teacher_distance.png").exists()
    MetricsLog(tmp_path / "young").write(0, {"perf/step_s": 1.0})
    figure = plot_run(tmp_path / "young", save=False)
    assert "nothing to draw yet" in figure.get_suptitle() and not (tmp_path / "young" / "plots").exists()


def test_smoothing_keeps_constants_and_follows_a_line():
    assert smooth([2.0] * 20) == pytest.approx([2.0] * 20)
    line = [float(i) for i in range(100)]
    assert smooth(line)[10:-10] == pytest.approx(line[10:-10])


def test_heavy_packages_load_only_when_they_are_used():
    code = (
        "import sys, rlpost.observe.plots, rlpost.observe.trackers, rlpost.observe.records, rlpost.observe.progress\n"
        "print([m for m in ('matplotlib', 'tensorboard', 'torch', 'wandb') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
                         env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert run.stdout.strip() == "[]"


def test_the_timeline_goes_on_wherever_a_kill_or_a_full_disk_cut_it(tmp_path):
    timeline = Timeline(tmp_path)
    for i in range(3):
        timeline.record(f"event {i}", i, i + 1, step=i)
    whole = timeline.path.read_bytes()
    for length in range(len(whole) + 1):
        timeline.path.write_bytes(whole[:length])
        timeline.record("next", 9, 10, step=9)
        names = [event["name"] for event in json.loads(timeline.path.read_text())]
        assert names == [f"event {i}" for i in range(len(names) - 1)] + ["next"]


def test_an_evaluation_that_is_done_again_replaces_its_line(tmp_path):
    """Killed between an evaluation and the next checkpoint."""
    log, records = MetricsLog(tmp_path), RolloutRecords(tmp_path)
    for name in ("a", "b", "a"):
        log.drop(lambda row, name=name: any(key.startswith(f"eval/{name}/") for key in row))
        log.write(4, {f"eval/{name}/mean@1": 0.5})
        records.drop_eval(4, name)
        records.write("eval", 4, [sample()], eval=name)
    assert [list(row)[1] for row in read_metrics(tmp_path)] == ["eval/b/mean@1", "eval/a/mean@1"]
    lines = (tmp_path / "rollouts" / "eval" / "4.jsonl").read_text().splitlines()
    assert [json.loads(line)["eval"] for line in lines] == ["b", "a"]
