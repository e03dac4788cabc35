"""Which process a command is, and of how many: as launchers put it into the environment."""

from __future__ import annotations

import pytest

from muonckpt.cli import main
from muonckpt.converters.engine.workers import LaunchError, Worker, joined, worker_of

ENVIRONMENTS = {
    "nothing": ({"HOME": "/"}, Worker(0, 1)),
    "torchrun": ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Worker(2, 4)),
    "srun": ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}, Worker(1, 3)),
    "a batch script, which runs once": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, Worker(0, 1)),
    "mpirun in a batch script": (
        {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"},
        Worker(2, 3),
    ),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "5"}, Worker(4, 5)),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Worker(0, 1)),
    "torchrun under srun": (
        {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        Worker(3, 4),
    ),
    "half": ({"RANK": "1"}, None),
    "the other half": ({"SLURM_STEP_NUM_TASKS": "2"}, None),
    "words": ({"RANK": "first", "WORLD_SIZE": "4"}, None),
    "too many": ({"RANK": "4", "WORLD_SIZE": "4"}, None),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "4"}, None),
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_launchers_say_who_a_process_is(launcher):
    environment, expected = ENVIRONMENTS[launcher]
    if expected is None:
        with pytest.raises(LaunchError, match=r"worker 4 of 4|worker -1 of 4|expected a rank and a number"):
            worker_of(environment)
    else:
        assert worker_of(environment) == expected


def test_a_process_that_cannot_find_the_others_says_what_to_set():
    environment = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "MASTER_ADDR": "node1"}
    with pytest.raises(LaunchError, match=r"worker 1 of 3 .*MASTER_PORT"), joined(environment):
        pass


def test_an_impossible_launch_is_a_mistake_in_the_command_line(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code = main.run(["reshard", str(tiny_checkpoint), str(tmp_path / "out"), "--mesh", "dp=3"])
    assert code == 2 and "there is no worker 4 of 4" in capsys.readouterr().err
