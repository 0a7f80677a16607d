"""The demonstration ends where a person stops it: no further run begins, and nobody reads a traceback."""

import signal

from killing import Run


def test_ctrl_c_ends_the_quickstart(tmp_path):
    run = Run(["quickstart", "--dir", str(tmp_path)])
    assert run.wait_for("^step ", times=3)
    run.process.send_signal(signal.SIGINT)
    code, seconds = run.end(timeout=30)
    assert code == 130 and seconds < 20, run.text
    assert "run the same command to go on" in run.text and "Traceback" not in run.text
    assert (tmp_path / "quickstart_seed0" / "sft" / "checkpoints" / "latest").exists()
    assert not (tmp_path / "quickstart_seed0" / "sdpo").exists()
