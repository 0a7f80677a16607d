import pytest

from rlpost.quickstart import task


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with the quickstart's untrained model and its rows: model/, data/{sft,train,eval}.jsonl."""
    folder = tmp_path_factory.mktemp("tiny")
    task.write(folder, seed=0)
    return folder
