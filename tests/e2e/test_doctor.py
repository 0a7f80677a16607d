"""`rlpost doctor`: a sound machine passes, and each thing that is broken is said with what to do."""

import re
import shutil
import socket
import tomllib
from pathlib import Path

import pytest
from launch import run_python

from rlpost import doctor

ROOT = Path(__file__).parents[2]


def states(findings):
    return {finding.what: finding.state for finding in findings}


def test_this_machine_is_ready_and_a_step_is_trained(tmp_path):
    run = run_python(["-m", "rlpost", "doctor", str(tmp_path / "runs")])
    assert run.returncode == 0, run.stdout + run.stderr
    lines = dict(re.findall(r"(?m)^(?:ok|note) +(\S+(?: \S+)*?) {2,}(.*)$", run.stdout))
    assert "a step of training" in lines["self-test"] and "GiB available" in lines["memory"]
    assert lines["gloo"] == "available" and run.stdout.endswith("ready\n")
    assert not (tmp_path / "runs").exists()


def test_a_broken_machine_exits_1_with_what_to_do(tmp_path, monkeypatch, capsys):
    for name in ("check_step", "check_optional", "check_communication"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    (tmp_path / "file").write_text("")
    assert doctor.main([str(tmp_path / "file" / "runs")]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"broken +run directory +.*file/runs cannot be written: Not a directory", printed)
    assert "to fix:\n  run directory (broken): give run.dir" in printed and printed.endswith("\n1 broken\n")


def test_versions_that_are_missing_or_old(monkeypatch):
    found = {"torch": "2.9.1+cpu", "megatron-core": "0.16.1rc2", "transformers": "5.12.0"}
    monkeypatch.setattr(doctor, "versions", lambda packages: found)
    findings = {finding.what: finding for finding in doctor.check_versions()}
    assert findings["torch"].state == "broken" and findings["torch"].fix == "pip install 'torch>=2.11'"
    assert findings["omegaconf"].text == "not installed"
    assert findings["megatron-core"].state == findings["transformers"].state == "ok"


def test_the_versions_are_those_of_pyproject():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = dict(match.groups() for line in listed if (match := re.match(r"([\w-]+)>=([\d.]+)", line)))
    assert {package: wanted[package] for package in doctor.NEEDED} == doctor.NEEDED


def test_packages_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "sglang.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [sglang, *_] = doctor.check_optional()
    assert sglang.state == "broken" and sglang.text.endswith("ImportError: libcudart.so.12: no such file")


@pytest.mark.parametrize(
    ("attribute", "check", "what"),
    [
        ("MEMORY_LEAST", doctor.check_memory, "memory"),
        ("DISK_LEAST", lambda: doctor.check_disk(Path.cwd()), "run directory"),
        ("SHARED_LEAST", lambda: doctor.check_disk(Path.cwd()), "/dev/shm"),
    ],
)
def test_too_little_room(attribute, check, what, monkeypatch):
    assert states(check())[what] == "ok"
    monkeypatch.setattr(doctor, attribute, shutil.disk_usage("/").total * 10**6)
    assert states(check())[what] == "broken"


def test_torchruns_port_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "MASTER_PORT", taken.getsockname()[1])
        [finding] = doctor.check_ports()
    assert finding.state == "note" and re.search(r"--master-port \d+", finding.fix)


def test_a_step_that_fails_is_said(monkeypatch):
    def fails(folder):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(doctor, "_tiny_run", fails)
    [finding] = doctor.check_step()
    assert (finding.state, finding.text) == ("broken", "RuntimeError: no kernel image is available")
