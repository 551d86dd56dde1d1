"""The table of engines: what each says to a process that it starts, as environments in and places out."""

from __future__ import annotations

import pytest

from rpcdist import Placement
from rpcdist._launch.placement import find_placement, first_host, how_to_set_address, torch_variables
from rpcdist.errors import ConfigError

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-006]",
}
MPI = {  # of Open MPI 4, on two hosts
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "791019520.0;tcp://10.0.0.1,10.1.0.1:41645;tcp6://[fd00::2]:51591",
    "OMPI_MCA_orte_local_daemon_uri": "791019520.1;tcp://10.0.0.2,10.1.0.2:41646",
    "PMIX_NAMESPACE": "791019521",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI21": "791019520.0;tcp4://127.0.0.1:57457",
}
PET = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}
JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}
POD = "train-2.train.default.svc.cluster.local"
TORCH = {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
IN_SLURM = Placement(5, 8, 1, 2, "gpu003", 21873)
IN_MPI = Placement(3, 4, 1, None, "10.0.0.1", 26437)
IN_JOB = Placement(2, 4, 0, 2, "train-0.train.default.svc.cluster.local", 29500)


def placement(environment: dict[str, str], own_name: str = "localhost") -> Placement | None:
    return find_placement(environment, lambda: own_name)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        # torch's own
        ({"RANK": "1", "WORLD_SIZE": "2"}, Placement(1, 2)),
        (TORCH, Placement(1, 2, 0, 1, "h", 9)),
        (TORCH | {"RPCDIST_ROLE": "trainer:0"}, Placement(1, 2, 0, 1, "h", 9, "trainer", 0)),
        # Slurm: a step of several tasks, and nothing else
        (SLURM, IN_SLURM),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, Placement(5, 6, 1, 2, "gpu003", 21873)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, Placement(5, 8, 1, 2, "127.0.0.1", 21873)),
        (SLURM | {"MASTER_ADDR": "10.0.0.9"}, Placement(5, 8, 1, 2, "10.0.0.9", 21873)),
        (SLURM | {"MASTER_PORT": "4000"}, Placement(5, 8, 1, 2, "gpu003", 4000)),
        ({name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}, None),  # a batch script
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}, None),  # the shell of salloc
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        # Open MPI, on several hosts, on one, alone, and started by Slurm, whose variables are those of its daemon
        (MPI, IN_MPI),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Placement(3, 4, 1, None, "127.0.0.1", 26437)),
        (MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (MPI | SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, IN_MPI),
        # PMIx has no size of its own
        ({"PMIX_RANK": "1"}, None),
        (
            {
                "PMIX_RANK": "1",
                "WORLD_SIZE": "2",
                "PMIX_NAMESPACE": "791019521",
                "PMIX_SERVER_URI4": "1.0;tcp4://10.0.0.1:7",
            },
            Placement(1, 2, None, None, "10.0.0.1", 26437),
        ),
        (SLURM | {"PMIX_RANK": "5", "WORLD_SIZE": "8"}, IN_SLURM),
        # Kubeflow's Trainer
        (PET, Placement(2, 3, 0, 2, "train-node-0-0.train", 29400)),
        (PET | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        (PET | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"}, None),
        # one process of each engine's task starts several: a world of its own, that fits into the engine's
        (SLURM | {"RANK": "11", "WORLD_SIZE": "16"}, Placement(11, 16)),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8"}, Placement(5, 8)),
        (SLURM | {"WORLD_SIZE": "8"}, IN_SLURM),
        # torchrun started this process, whatever started torchrun
        (SLURM | TORCH | {"TORCHELASTIC_RUN_ID": "none"}, Placement(1, 2, 0, 1, "h", 9)),
        (PET | TORCH | {"TORCHELASTIC_RUN_ID": "none", "PET_NPROC_PER_NODE": "4"}, Placement(1, 2, 0, 1, "h", 9)),
    ],
)
def test_places(environment: dict[str, str], expected: Placement | None) -> None:
    assert placement(environment) == expected


def test_an_indexed_job_finds_rank_0_by_its_own_name() -> None:
    assert placement(JOB, POD) == IN_JOB
    assert placement(JOB | {"MASTER_ADDR": "10.0.0.9"}) == Placement(2, 4, 0, 2, "10.0.0.9", 29500)
    assert placement({"JOB_COMPLETION_INDEX": "2"}, POD) is None  # pods that know nothing of each other
    # A process that the pod has started is not a rank of the Job.
    assert placement(JOB | {"RANK": "0"}, POD) == Placement(0, 4)
    with pytest.raises(ConfigError, match=r"JOB_COMPLETION_INDEX=2 WORLD_SIZE=2.*not from 0 to 1"):
        placement(JOB | {"WORLD_SIZE": "2"}, POD)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK='1' and WORLD_SIZE=None in the environment"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' and WORLD_SIZE='2' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is not from 0 to 1"),
        (TORCH | {"RPCDIST_ROLE": "trainer"}, "RPCDIST_ROLE='trainer' in the environment is not a role and a number"),
        (TORCH | {"RPCDIST_ROLE": "a:b"}, "RPCDIST_ROLE='a:b' in the environment is not a role and a number"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "RANK=None"),
        # two that disagree are named both
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 WORLD_SIZE=1, and Slurm .SLURM_PROCID=5 SLURM_NTASKS=8"),
        (SLURM | {"RANK": "4", "WORLD_SIZE": "8"}, "RANK=4 WORLD_SIZE=8, and Slurm"),
        (SLURM | {"RANK": "3", "WORLD_SIZE": "16"}, "RANK=3 WORLD_SIZE=16, and Slurm"),
        (SLURM | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, and Slurm"),
        (SLURM | {"RANK": "4"}, "RANK=4, and Slurm"),
        (SLURM | {"PMIX_RANK": "4", "WORLD_SIZE": "8"}, "Slurm .*, and PMIx .PMIX_RANK=4 WORLD_SIZE=8"),
        (PET | {"RANK": "0", "WORLD_SIZE": "3"}, "RANK=0 WORLD_SIZE=3, and Kubeflow's Trainer"),
        # what is no place
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 SLURM_NTASKS=8 SLURM_LOCALID=1.: the rank is not from 0 to 7"),
        (SLURM | {"SLURM_PROCID": "x"}, "Slurm .SLURM_PROCID=x .*: these variables must be whole numbers"),
        (PET | {"PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4. Start the program with torchrun"),
        (PET | {"PET_NNODES": "1:4"}, "PET_NNODES=1:4 .*torchrun"),
    ],
)
def test_contradictions(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placement(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        (TORCH, {name: text for name, text in TORCH.items() if name != "GROUP_RANK"}),
        ({"RANK": "1"}, {"RANK": "1"}),  # of a world that changes
        (
            SLURM,
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu003", "MASTER_PORT": "21873"},
        ),
        (
            SLURM | {"MASTER_ADDR": "m", "WORLD_SIZE": "8"},
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "21873"},
        ),
        # another world inside of the engine's: its address is none of the engine's
        (SLURM | {"RANK": "11", "WORLD_SIZE": "16"}, {"RANK": "11", "WORLD_SIZE": "16"}),
        # a world of one can be joined
        (
            SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"},
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "21873"},
        ),
        ({"PMIX_RANK": "1"}, {"RANK": "1"}),
    ],
)
def test_the_variables_of_torch(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert torch_variables(environment, lambda: "localhost") == expected


def test_an_address_that_only_the_user_knows() -> None:
    """Rank 0 of `mpirun` is not where `mpirun` is; a pod has no name for the others."""
    rank_0 = MPI | {"OMPI_COMM_WORLD_RANK": "0"}
    assert "MASTER_ADDR" not in torch_variables(rank_0, lambda: "")
    assert "set MASTER_ADDR to its host, the same for all processes (mpirun -x" in how_to_set_address(
        rank_0, lambda: ""
    )
    assert "`subdomain`" in how_to_set_address(JOB, lambda: "train-2")
    assert how_to_set_address({}, lambda: "") == ""


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2,7],m3", "n1"),
        ("n[3,5-7]", "n3"),
        ("gpu[003-010]-ib", "gpu003-ib"),
        ("r[0-1]n[02-03]", "r0n02"),
        ("login,n[1-2]", "login"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


@pytest.mark.parametrize(("master", "host"), [("127.0.0.5", "127.0.0.5"), (None, "127.0.0.1")])
def test_a_file_binds_where_the_environment_would(
    master: str | None, host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file names no host. RPC said nothing, and bound to loopback, where other machines do not reach it."""
    from rpcdist.rpc import RpcOptions
    from rpcdist.rpc._start import _bind_host

    for name in ("RPCDIST_HOST", "TP_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    with caplog.at_level("INFO", logger="rpcdist.rpc"):
        assert _bind_host(RpcOptions(init_method="file:///tmp/job")) == host
    said = "file:// names no host, so RPC listens on loopback: for several machines set MASTER_ADDR"
    assert [record.getMessage() for record in caplog.records] == ([] if master else [said])


def test_groups_over_a_file_bind_where_the_environment_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from rpcdist.collectives import HashStore
    from rpcdist.collectives._group.local_process import bind_host

    for name in ("RPCDIST_HOST", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert bind_host(HashStore()) == "127.0.0.5"
