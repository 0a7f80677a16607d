import json
from pathlib import Path

import pytest
from tiny_tokenizer import tiny_tokenizer

from rlpost.config.schema import DataConfig
from rlpost.data.dataset import PromptDataset
from rlpost.data.reading import BadRows, DataError, read_rows

TOKENIZER = tiny_tokenizer()
SCIKNOWEVAL = Path(__file__).parents[3] / "shared" / "data" / "sciknoweval"


def rows(n):
    return [{"prompt": f"question {i}", "answer": str(i), "level": i % 3} for i in range(n)]


def write_jsonl(path, values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return str(path)


def dataset(values, seed=0, responses=False, without_response=False, **config):
    kinds = {"responses": responses, "without_response": without_response}
    return PromptDataset(DataConfig(train="unused", **config), TOKENIZER, values, seed, **kinds)


def ids(prompts):
    return [prompt.id for prompt in prompts]


@pytest.mark.parametrize("kind", ["jsonl", "json", "json lines", "parquet", "folder", "saved", "objects"])
def test_every_kind_of_source_gives_the_same_rows(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    values = rows(5)
    source = tmp_path / f"rows.{kind.split()[0]}"
    if kind in ("jsonl", "json lines"):
        write_jsonl(source, values)
    elif kind == "json":
        source.write_text(json.dumps(values, indent=1))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), source)
    elif kind == "saved":
        Dataset.from_list(values).save_to_disk(str(source))
    elif kind == "folder":
        source.mkdir()
        write_jsonl(source / "a.jsonl", values[:2])
        write_jsonl(source / "b.jsonl", values[2:])
    else:
        source = values
    assert [dict(row.values) for row in read_rows(source, BadRows())] == values


def test_unicode_line_separators_do_not_end_a_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_rows(str(path), BadRows())[0].values["prompt"] == "one\u2028two"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "broken JSON"),
        ('["x"]', "wrong type: a row is a JSON object, not list"),
        ('{"answer": "x"}', "no prompt"),
        ('{"prompt": ""}', "no prompt"),
        ('{"prompt": 3}', "wrong type: column 'prompt' holds int"),
        ('{"prompt": [{"role": "user"}]}', "wrong type: a message"),
        ('{"prompt": "x", "system": 1}', "wrong type: column 'system' holds int"),
        ('{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "assistant turn"),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line_or_is_counted(tmp_path, line, reason):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + '\n{"prompt": "good too"}\n')
    with pytest.raises(DataError, match=rf"train\.jsonl:2: .*{reason}"):
        dataset(str(path))
    kept = dataset(str(path), on_bad_row="skip")
    assert [p.messages[-1]["content"] for p in kept.prompts] == ["good", "good too"]
    assert sum(kept.counts.values()) - kept.counts["rows"] - kept.counts["prompts"] == 1


def test_missing_columns_files_and_rows_are_named(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", rows(2))
    with pytest.raises(
        DataError, match=r"data.prompt_key=promt.*Did you mean 'prompt'.*Columns: prompt, answer, level"
    ):
        dataset(path, prompt_key="promt")
    with pytest.raises(DataError, match=r"data.answer_key=gold: there is no such column"):
        dataset(path, answer_key="gold")
    with pytest.raises(DataError, match=r"no such file.*Did you mean 'train.jsonl'"):
        dataset(str(tmp_path / "tran.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows in"):
        dataset(str(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match="no rows in an empty list"):
        dataset([])
    with pytest.raises(DataError, match="unknown kind of file"):
        (tmp_path / "a.txt").write_text("x")
        dataset(str(tmp_path / "a.txt"))


def test_broken_json_file_names_its_line(tmp_path):
    (tmp_path / "a.json").write_text('[\n{"prompt": "x"},\n{"prompt": }\n]')
    with pytest.raises(DataError, match=r"a\.json:3: broken JSON"):
        read_rows(str(tmp_path / "a.json"), BadRows())


def test_a_row_becomes_a_prompt():
    row = {"prompt": "2+2?", "system": "Be short.", "answer": "4", "source": "sums", "hard": True}
    (prompt,) = dataset([row]).prompts
    assert prompt.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    assert (prompt.answer, prompt.source, prompt.metadata) == ("4", "sums", {"hard": True})
    assert TOKENIZER.decode(prompt.ids).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")


def shout(prompt, row):
    return f"{prompt.upper()} ({row['level']})"


def test_transform_and_columns_by_name():
    (prompt,) = dataset(
        [{"question": "why?", "level": 2}], prompt_key="question", transform=f"{__name__}.shout"
    ).prompts
    assert prompt.messages == [{"role": "user", "content": "WHY? (2)"}]
    with pytest.raises(ImportError, match="no 'shuot'.*Did you mean 'shout'"):
        dataset(rows(1), transform=f"{__name__}.shuot")


def test_a_mapping_names_the_source_of_its_rows(tmp_path):
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", values) for name, values in (("a", rows(2)), ("b", rows(1)))}
    own = [{"prompt": "?", "source": "mine"}]
    made = dataset({"math": [paths["a"], paths["b"]], "law": own, "code": paths["b"]})
    assert [prompt.source for prompt in made.prompts] == ["math"] * 3 + ["mine", "code"]


def test_the_answer_block_makes_a_conversation_of_a_question():
    (prompt,) = dataset(rows(1), responses=True, transform="rlpost.data.templates.with_answer_block").prompts
    assert prompt.messages[-1] == {"role": "assistant", "content": "<answer>\n0\n</answer>"}


def test_length_is_counted_in_tokens_of_the_whole_template():
    values = [{"prompt": "x" * n} for n in (10, 11)]
    limit = len(dataset(values[:1]).prompts[0].ids)
    kept = dataset(values, max_prompt_tokens=limit)
    assert ids(kept.prompts) == [0] and kept.counts["too long"] == 1
    with pytest.raises(DataError, match=r"row 1: \d+ tokens, data.max_prompt_tokens"):
        dataset(values, max_prompt_tokens=limit, on_long_prompt="error")
    with pytest.raises(DataError, match="no prompts left of 2 rows"):
        dataset(values, max_prompt_tokens=3)


def test_each_epoch_is_another_permutation_of_everything():
    data = dataset(rows(7), seed=3)
    first, second = (ids(data.next_batch(7)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert ids(dataset(rows(7), seed=3).next_batch(7)) == first
    assert ids(dataset(rows(7), seed=4).next_batch(7)) != first
    assert ids(dataset(rows(7), shuffle=False).next_batch(7)) == list(range(7))


@pytest.mark.parametrize(
    ("option", "sizes"), [("wrap", [4, 4, 4, 4, 4]), ("drop", [4, 4, 4, 4, 4]), ("keep", [4, 4, 2, 4, 4])]
)
def test_last_batch(option, sizes):
    data = dataset(rows(10), last_batch=option)
    batches = [ids(data.next_batch(4)) for _ in range(5)]
    assert [len(batch) for batch in batches] == sizes
    seen = [i for batch in batches for i in batch]
    if option == "wrap":
        assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    elif option == "drop":
        assert len(set(seen[:8])) == len(set(seen[8:16])) == 8 and seen[8:12] == data.order(1)[:4]
    else:
        assert sorted(seen[:10]) == list(range(10))


def test_a_batch_may_be_larger_than_the_data():
    assert len(dataset(rows(3)).next_batch(8)) == 8
    assert len(dataset(rows(3), last_batch="keep").next_batch(8)) == 3
    with pytest.raises(DataError, match="never fills a batch of 8"):
        dataset(rows(3), last_batch="drop").next_batch(8)


@pytest.mark.parametrize("option", ["wrap", "drop", "keep"])
def test_resume_in_a_later_epoch_twice_equals_the_unbroken_run(option):
    unbroken = dataset(rows(10), seed=5, last_batch=option)
    expected = [ids(unbroken.next_batch(3)) for _ in range(14)]
    data, found = dataset(rows(10), seed=5, last_batch=option), []
    for stop in (5, 9, 14):
        while len(found) < stop:
            found.append(ids(data.next_batch(3)))
        state = json.loads(json.dumps(data.state()))
        data = dataset(rows(10), seed=5, last_batch=option)
        data.load_state(state)
    assert found == expected


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = dataset(rows(4)).state()
    for other in (dataset(rows(5)), dataset(rows(4), seed=1), dataset([{**r, "prompt": "new"} for r in rows(4)])):
        with pytest.raises(ValueError, match="not the same data"):
            other.load_state(state)


def test_rows_to_learn_from():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    values = [{"prompt": chat}, {"prompt": "a", "response": "b"}, {"prompt": "a", "answer": "b"}]
    data = dataset(values, responses=True)
    assert [p.messages for p in data.prompts] == [chat] * 3
    assert all(TOKENIZER.decode(p.ids).endswith("assistant\n") for p in data.prompts)
    with pytest.raises(DataError, match="row 0: no response"):
        dataset([{"prompt": "a"}], responses=True)


def test_rows_to_learn_from_are_evaluated_without_what_is_to_be_said():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    values = [
        {"prompt": [*chat, {"role": "assistant", "content": "d"}]},
        {"prompt": chat},
        {"prompt": "a", "response": "b"},
    ]
    data = dataset(values, without_response=True)
    assert [p.messages for p in data.prompts] == [chat, chat, chat[:1]]
    assert [p.ids for p in data.prompts] == [
        p.ids for p in dataset([{"prompt": chat}, {"prompt": chat}, values[2]]).prompts
    ]
    with pytest.raises(DataError, match="nothing to generate"):
        dataset([{"prompt": [chat[1]]}], without_response=True)


@pytest.mark.parametrize("field", ["last_batch", "on_bad_row", "on_long_prompt"])
def test_wrong_options_name_what_is_allowed(field):
    with pytest.raises(ValueError, match=f"data.{field}=maybe is not allowed; allowed are"):
        dataset(rows(1), **{field: "maybe"})


@pytest.mark.parametrize(("domain", "count"), [("biology", 50), ("chemistry", 210), ("material", 94), ("physics", 80)])
def test_real_rows(domain, count):
    path = SCIKNOWEVAL / domain / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    data = dataset(str(path), max_prompt_tokens=100_000)
    assert len(data) == count
    assert all([m["role"] for m in p.messages] == ["system", "user"] and p.answer in "ABCD" for p in data.prompts)
