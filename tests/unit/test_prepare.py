import json
from pathlib import Path

import pytest

from rlpost.__main__ import main
from rlpost.data.prepare import prepare
from rlpost.data.reading import BadRows, DataError, read_rows

SHARED = Path(__file__).parents[3] / "shared" / "data" / "sciknoweval"


def upstream(number, **changes):
    return {
        "question": f"What is {number}?",
        "choices": {"text": ["one", "two"], "label": ["A", "B"]},
        "answerKey": "AB"[number % 2],
        "type": "mcq-2-choices",
        "domain": "Materials",
        "details": {"level": "L3", "task": "t", "subtask": "s"},
        "prompt": {"default": "Choose."},
    } | changes


def write(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read(path):
    return [dict(row.values) for row in read_rows(str(path), BadRows())]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_upstream_rows(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    values = [upstream(i) for i in range(20)]
    source = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write(source, values)
    elif kind == "json":
        source.write_text(json.dumps(values))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), source)
    summary = prepare("sciknoweval", source, tmp_path / "out")
    train, evaluation = read(tmp_path / "out" / "train.jsonl"), read(tmp_path / "out" / "eval.jsonl")
    assert (len(train), len(evaluation)) == (summary["train"], summary["eval"]) == (18, 2)
    assert sorted(row["idx"] for row in train + evaluation) == list(range(20))
    first = next(row for row in train + evaluation if row["idx"] == 0)
    assert first["prompt"] == "What is 0?\n\nA: one\nB: two"
    assert (first["answer"], first["source"], first["kind"]) == ("A", "material", "mcq")
    assert "<answer>" in first["system"] and "A or B" in first["system"] and "2 options" in first["system"]
    assert summary["answers"] == {"A": 10, "B": 10}
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


def test_what_is_left_out_is_counted(tmp_path):
    values = [
        upstream(0),
        upstream(1),
        upstream(2, type="open-ended-qa"),
        upstream(3, details={"level": "L1"}),
        upstream(4, details={"level": "L1"}),
    ]
    summary = prepare("sciknoweval", write(tmp_path / "a.jsonl", values), tmp_path / "out", eval_ratio=0.5)
    assert (summary["read"], summary["train"], summary["eval"]) == (5, 1, 1)
    assert summary["left_out"] == {"type open-ended-qa": 1, "level L1": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answerKey": "C"}, "answerKey 'C' is none of the options A, B"),
        ({"choices": {"text": ["one"], "label": ["A", "B"]}}, "2 labels and 1 texts"),
        ({"question": " "}, "no question"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, changes, reason):
    path = write(tmp_path / "a.jsonl", [upstream(0), upstream(1, **changes)])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}"):
        prepare("sciknoweval", path, tmp_path / "out")
    summary = prepare("sciknoweval", path, tmp_path / "out", on_bad_row="skip")
    assert summary["train"] == 1 and sum(summary["left_out"].values()) == 1


def test_no_rows_wrong_kind_and_wrong_ratio_are_errors(tmp_path):
    path = write(tmp_path / "a.jsonl", [upstream(0, details={"level": "L1"})])
    with pytest.raises(DataError, match="no sciknoweval row among 1 rows"):
        prepare("sciknoweval", path, tmp_path / "out")
    with pytest.raises(ValueError, match="no kind 'sciknow'; there are sciknoweval, jsonl"):
        prepare("sciknow", path, tmp_path / "out")
    with pytest.raises(ValueError, match="eval_ratio=1"):
        prepare("sciknoweval", path, tmp_path / "out", eval_ratio=1)


def test_split_follows_the_seed_and_overlap_is_reported(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": f"q{i // 2}", "answer": "x #### 4"} for i in range(40)])
    first = prepare("jsonl", path, tmp_path / "one", seed=1)
    again = prepare("jsonl", path, tmp_path / "two", seed=1)
    prepare("jsonl", path, tmp_path / "three", seed=2)
    texts = [(tmp_path / name / "eval.jsonl").read_text() for name in ("one", "two", "three")]
    assert texts[0] == texts[1] != texts[2]
    train = {row["prompt"] for row in read(tmp_path / "one" / "train.jsonl")}
    both = [row["idx"] for row in read(tmp_path / "one" / "eval.jsonl") if row["prompt"] in train]
    assert first["overlap"] == again["overlap"] == {"prompts": len(both), "idx": both} and both
    assert read(tmp_path / "one" / "train.jsonl")[0]["answer"] == "4"


@pytest.mark.parametrize(("domain", "rows"), [("biology", 500), ("material", 935)])
def test_rows_already_in_shape_pass_through(tmp_path, domain, rows):
    if not (SHARED / domain).is_dir():
        pytest.skip(f"no {SHARED / domain}")
    summary = prepare("sciknoweval", SHARED / domain, tmp_path)
    assert summary["train"] + summary["eval"] == rows and summary["eval"] == round(rows * 0.1)
    before = {
        json.dumps(row, sort_keys=True) for part in ("train", "test") for row in read(SHARED / domain / f"{part}.jsonl")
    }
    after = {json.dumps(row, sort_keys=True) for part in ("train", "eval") for row in read(tmp_path / f"{part}.jsonl")}
    assert before == after


def test_the_command_leaves_bad_rows_out_where_it_is_told(tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a", "answer": "b"}\n{broken\n{"prompt": "c", "answer": "d"}\n')
    arguments = ["prepare", "jsonl", str(source), str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "rows.jsonl:2: broken JSON" in (said := capsys.readouterr().err) and "--on-bad-row skip" in said
    assert main([*arguments, "--on-bad-row", "skip"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"broken JSON": 1}
