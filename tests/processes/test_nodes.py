"""The scripts of examples/nodes for several nodes, as they stand there: network namespaces are the nodes."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_commands import put_into
from forked import launch
from namespaces import Hosts, open_hosts
from ports import free_port
from scripts import ROOT, printed_losses

NODES = ROOT / "examples" / "nodes"
SCRIPT = ["--tiny", "--steps", "3"]
ALL_PROCESSES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""What takes the place of GPUs here."""


@pytest.fixture(scope="module")
def on_one_node() -> list[float]:
    """Losses of as many ranks without a network between them."""
    words = ["examples/finetune_deepspeed.py", "--deepspeed_config", "examples/ds_zero3_cad.json", *SCRIPT]
    done = launch(2, words, ROOT, **ALL_PROCESSES)
    assert done.returncode == 0, done.stderr[-3000:]
    return printed_losses(done.stdout)


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Hosts, list[str], dict[str, str]]]:
    """Two nodes in the checkout that know each other's names, these, and an environment with a cluster's commands."""
    monkeypatch.chdir(ROOT)
    names = getattr(request, "param", ["node-0", "node-1"])
    table = tmp_path / "hosts"
    lines = [f"10.213.7.{host + 1} {name} {name.partition('.')[0]}" for host, name in enumerate(names)]
    table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with open_hosts(2, "1gbit", table) as hosts:
        on = {name: hosts.on(host, name.partition(".")[0]) for host, name in enumerate(names)}
        folder = tmp_path / "bin"
        folder.mkdir()
        yield hosts, names, {**ALL_PROCESSES, **put_into(folder, on), "PYTHONPATH": str(ROOT)}


def finish(processes: list[subprocess.Popen[str]], expected: list[float]) -> str:
    """Wait for launchers; what they said."""
    deadline, said = time.monotonic() + 200.0, ""
    for process in processes:
        out, log = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert process.returncode == 0, (out + log)[-6000:]
        said += out + log
    assert printed_losses(said) == pytest.approx(expected, rel=1e-5)
    assert "CAD is on: 2 ranks" in said and re.search(r"between hosts 0\.\d+ GB/s \(measured\)", said), said
    assert sum(map(float, re.findall(r"([\d.]+) MiB moved", said))) > 0, "CAD had work for another node"
    return said


def on_each(nodes, words: list[str], number: str, **variables: str) -> list[subprocess.Popen[str]]:
    """A command on every node, whose number is in the variable `number`."""
    hosts, names, environment = nodes
    common = {**environment, "MASTER_ADDR": names[0], "MASTER_PORT": str(free_port()), **variables}
    return [
        hosts.launch([*hosts.on(host, name.partition(".")[0]), *words, *SCRIPT], {**common, number: str(host)})
        for host, name in enumerate(names)
    ]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    """Ours, with a GPU on each node."""
    text = (NODES / "hostfile").read_text()
    assert set(re.findall(r"slots=(\d+)", text)) == {"8"}
    path = tmp_path / "hostfile"
    path.write_text(text.replace("slots=8", "slots=1"))
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh"])
def test_a_script_on_each_node(nodes, hostfile: str, on_one_node: list[float], script: str) -> None:
    """DeepSpeed's without ssh."""
    words = ["sh", f"examples/nodes/{script}"]
    finish(on_each(nodes, words, "NODE_RANK", NODES="2", GPUS="1", HOSTFILE=hostfile), on_one_node)


@pytest.mark.long
def test_deepspeed_by_pdsh(nodes, hostfile: str, on_one_node: list[float], tmp_path: Path) -> None:
    """Who logs in has nothing of the environment: what processes need is in DeepSpeed's file for it. Here that is the
    interface too, as a node's own name leads to loopback."""
    hosts, names, environment = nodes
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {' '.join(names)}\n")
    carried = tmp_path / "deepspeed_env"
    needed = {**ALL_PROCESSES, "GLOO_SOCKET_IFNAME": "eth0"}
    carried.write_text("".join(f"{name}={value}\n" for name, value in needed.items()))
    variables = {"HOSTFILE": hostfile, "MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(free_port())}
    words = [*hosts.on(0, names[0]), "sh", "examples/nodes/deepspeed.sh", *SCRIPT]
    finish([hosts.launch(words, {**environment, **variables, "DS_ENV_FILE": str(carried)})], on_one_node)


@pytest.mark.long
def test_slurm(nodes, on_one_node: list[float]) -> None:
    hosts, names, environment = nodes
    job = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }  # fmt: skip
    words = [*hosts.on(0, names[0]), "bash", "examples/nodes/slurm.sbatch", *SCRIPT]
    finish([hosts.launch(words, {**environment, **job})], on_one_node)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [["cad-0.cad", "cad-1.cad"]], indirect=True)
def test_kubernetes(nodes, on_one_node: list[float]) -> None:
    """What the container of each pod runs, with the pod's name, environment and what an Indexed Job adds to it."""
    service, job = yaml.safe_load_all((NODES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed" and service["spec"]["clusterIP"] == "None"
    assert int(variables["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    assert pod["subdomain"] == domain and service["spec"]["selector"] == {"job-name": name}
    _, names, _ = nodes
    assert [f"{name}-{index}.{domain}" for index in range(2)] == names
    assert variables["MASTER_ADDR"] == names[0]
    variables |= {"GPUS": "1", "MASTER_PORT": str(free_port())}
    finish(on_each(nodes, container["command"], "JOB_COMPLETION_INDEX", **variables), on_one_node)
