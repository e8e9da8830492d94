"""Processes start in every way that is promised, and what stands in the way is said before anything starts."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Done, begin, environment, finish, fit, project, run

pytestmark = pytest.mark.distributed

BIN = Path(sys.executable).parent
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: Linear
  fsdp_version: 2
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
same_network: true
use_cpu: false
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def trained(done: Done, steps: int = 12) -> None:
    """Check that two ranks were one run, which says what it has to say once."""
    assert done.code == 0, done.out + done.err
    assert done.out.count(f"Finished after {steps} steps") == 1
    assert "world size 2" in done.out
    assert "Traceback" not in done.err


def test_torchrun_starts_a_recipe_unchanged_and_one_rank_says_an_error_of_all(recipe, tmp_path):
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "-m", "camshaft.fit", str(recipe)]
    trained(run([*command, f"runs_dir={tmp_path}"], environment(recipe), recipe.parent))
    done = run([*command, f"runs_dir={tmp_path}", "batch_size=7"], environment(recipe), recipe.parent)
    assert done.code != 0
    said = [line for line in done.err.splitlines() if line.startswith("RecipeError: batch_size is 7")]
    assert len(said) == 1, done.err


def test_accelerate_launch_starts_a_recipe_unchanged(recipe, tmp_path):
    command = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    env = environment(recipe, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path))
    trained(run([*command, "-m", "camshaft.fit", str(recipe), f"runs_dir={tmp_path}"], env, recipe.parent))


def test_validation_and_test_start_processes_as_training_does(recipe, tmp_path):
    words = [f"runs_dir={tmp_path}", "launch.num_processes=2", "data.test=true"]
    trained(fit(recipe, *words))
    command = [sys.executable, "-m", "camshaft.test", str(recipe), *words]
    done = run(command, environment(recipe), recipe.parent)
    assert done.code == 0, done.err
    assert done.out.count("test/loss") == 1


def test_an_accelerate_config_is_adopted_key_by_key(recipe, tmp_path):
    plain = tmp_path / "plain.yaml"
    plain.write_text(recipe.read_text().replace("strategy: ddp\n", ""))
    shutil.copy(recipe.parent / "faulty.py", tmp_path)
    home = tmp_path / "home" / "accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text(ACCELERATE)
    words = ["--accelerate-config", "default", f"runs_dir={tmp_path}"]
    done = fit(plain, *words, HF_HOME=str(home.parent))
    trained(done)
    assert "fsdp on cpu: world size 2" in done.out
    assert "3 gathered units" in done.out
    assert "precision bf16" in done.out
    assert done.err.count("fsdp_cpu_ram_efficient_loading: True has no effect") == 1
    done = fit(recipe, *words, HF_HOME=str(home.parent), timeout=30)
    assert done.code == 2
    assert "asks for strategy.name: fsdp, and the recipe ddp" in done.err


@pytest.mark.parametrize("launcher", ["torchrun", "camshaft"])
def test_a_killed_worker_is_restarted_and_the_run_resumes(recipe, tmp_path, launcher):
    words = ["-m", "camshaft.fit", str(recipe), f"runs_dir={tmp_path}", "resume=never"]
    if launcher == "torchrun":
        command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "--max_restarts", "2", *words]
    else:
        command = [sys.executable, *words, "launch.num_processes=2", "launch.max_restarts=2"]
    env = environment(recipe, FAULT="kill:1:6", DONE=str(tmp_path / "done"))
    done = run(command, env, recipe.parent)
    assert done.code == 0, done.out + done.err
    assert (tmp_path / "done").exists()
    assert done.out.count("at step 4.") == 1
    assert done.out.count("Finished after 12 steps") == 1
    assert len(list(tmp_path.glob("run/*/recipe.yaml"))) == 1


@pytest.mark.parametrize("launcher", ["accelerate", "camshaft"])
def test_two_machines_make_one_run(recipe, tmp_path, launcher):
    port, env = str(free_port()), environment(recipe, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path))
    processes = []
    for rank in ("0", "1"):
        words = ["-m", "camshaft.fit", str(recipe), f"runs_dir={tmp_path}"]
        if launcher == "accelerate":
            command = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "2"]
            command += ["--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
            command += ["--mixed_precision", "no", "--dynamo_backend", "no", *words]
        else:
            command = [sys.executable, *words, *machine(rank, "127.0.0.1", port)]
        processes.append(begin(command, env, recipe.parent))
    first, second = [finish(process, 90) for process in processes]
    trained(first)
    assert second.code == 0, second.err
    # Each machine prepares its data.
    assert "hello from 0 of 2" in first.out
    assert "hello from 1 of 2" in second.out
    assert "Finished" not in second.out


@pytest.mark.long
def test_two_machines_restart_together_when_a_process_of_one_is_killed(recipe, tmp_path):
    env = environment(recipe, FAULT="kill:1:6", DONE=str(tmp_path / "done"))
    words = [sys.executable, "-m", "camshaft.fit", str(recipe), f"runs_dir={tmp_path}", "launch.max_restarts=3"]
    port = str(free_port())
    processes = [begin([*words, *machine(rank, "127.0.0.1", port)], env, recipe.parent) for rank in ("0", "1")]
    both = [finish(process, 120) for process in processes]
    assert [done.code for done in both] == [0, 0], both[0].err + both[1].err
    out = both[0].out + both[1].out
    assert out.count("at step 4.") == 1
    assert out.count("Finished after 12 steps") == 1


def test_the_script_for_slurm_starts_a_launcher_on_each_machine(recipe, tmp_path):
    # One machine of two slots: srun runs the command here, and scontrol knows this host.
    tools = {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}
    for name, line in tools.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/bash\n{line}\n")
        tool.chmod(0o755)
    job = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "here"}
    env = environment(recipe, PATH=f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}", SLURM_GPUS_ON_NODE="2", **job)
    script = Path(__file__).parents[2] / "recipes" / "launch" / "slurm.sh"
    trained(run(["bash", str(script), str(recipe), f"runs_dir={tmp_path}"], env, recipe.parent))


def machine(rank: str, host: str, port: str) -> list[str]:
    return [
        "launch.num_machines=2", "launch.num_processes=1", f"launch.machine_rank={rank}",
        f"launch.main_process_ip={host}", f"launch.main_process_port={port}",
    ]  # fmt: skip


SCRIPT = """
import sys

import torch

import camshaft
from camshaft.testing import TinyData, TinyModule


class Mine(TinyModule):
    def training_step(self, batch, batch_idx):
        if "raise" in sys.argv:
            raise camshaft.DataError("no data today.")
        return super().training_step(batch, batch_idx)


def train(strategy, **more):
    torch.manual_seed(0)
    module = Mine()
    loggers = {"console": None, "tensorboard": None}
    result = camshaft.run(
        module, TinyData(48), strategy=strategy, max_steps=6, device="cpu", resume="never", batch_size=8,
        callbacks={"progress": None, "summary": None}, loggers=loggers, runs_dir=sys.argv[1], **more
    )
    assert result.module is module
    return module.state_dict()
"""
MAIN = """
if __name__ == "__main__":
    found = train("fsdp", num_processes=2)
    expected = train("single")
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-5), name
    print("alike")
"""


def python(code: str, *words: str, cwd: Path, stdin: bool = False) -> Done:
    """Run a script, or the same lines as a notebook would, which has no file to import."""
    path = cwd / "script.py"
    path.write_text(code)
    command = [sys.executable, "-" if stdin else str(path), str(cwd / "runs"), *words]
    env = environment(path)
    if not stdin:
        return run(command, env, cwd)
    done = subprocess.run(command, input=code, env=env, cwd=cwd, capture_output=True, text=True, timeout=90)
    return Done(done.returncode, done.stdout, done.stderr, 0.0)


def test_a_script_trains_in_processes_of_its_own_and_gets_whole_weights_back(tmp_path):
    done = python(SCRIPT + MAIN, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "alike" in done.out
    done = python(SCRIPT + MAIN, "raise", cwd=tmp_path)
    assert done.err.count("DataError: no data today.") == 1


def test_a_script_without_a_main_is_told_so(tmp_path):
    done = python(SCRIPT + "train('ddp', num_processes=2)\n", cwd=tmp_path)
    assert done.err.count("the script starts processes while it is imported") == 1


def test_a_notebook_forks_and_says_when_it_cannot(tmp_path):
    # A class that is defined in a cell, with a lambda, cannot be imported by other processes.
    cell = SCRIPT + "Mine.odd = lambda self: None\ntrain('ddp', num_processes=2)\nprint('trained')\n"
    done = python(cell, cwd=tmp_path, stdin=True)
    assert done.code == 0, done.err
    assert "trained" in done.out
    busy = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\ntorch.set_num_threads(2)\n"
    busy += "torch.ones(900, 900) @ torch.ones(900, 900)\n"
    done = python(busy + cell, cwd=tmp_path, stdin=True)
    assert "this notebook has computed with several threads already" in done.err


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a cable between them, or skip with the reason why not."""
    if shutil.which("ip") is None:
        pytest.skip("there is no 'ip' command")
    hosts = [f"camshaft{os.getpid()}{end}" for end in "ab"]
    try:
        for host in hosts:
            made = subprocess.run(["ip", "netns", "add", host], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        steps = [f"link add va netns {hosts[0]} type veth peer name vb netns {hosts[1]}"]
        for host, device, address in zip(hosts, ("va", "vb"), ("10.77.0.1", "10.77.0.2"), strict=True):
            steps += [
                f"-n {host} addr add {address}/24 dev {device}", f"-n {host} link set {device} up",
                f"-n {host} link set lo up",
            ]  # fmt: skip
        for step in steps:
            done = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"a cable between network namespaces cannot be made here: {done.stderr.strip()}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def test_two_hosts_with_a_network_of_their_own_make_one_run(recipe, tmp_path):
    with two_hosts() as hosts:
        processes = []
        for rank, (host, device) in enumerate(zip(hosts, ("va", "vb"), strict=True)):
            words = [str(recipe), f"runs_dir={tmp_path}", *machine(str(rank), "10.77.0.1", "29555")]
            command = ["ip", "netns", "exec", host, sys.executable, "-m", "camshaft.fit", *words]
            processes.append(begin(command, environment(recipe, GLOO_SOCKET_IFNAME=device), recipe.parent))
        first, second = [finish(process, 90) for process in processes]
        trained(first)
        assert second.code == 0, second.err


def test_a_port_in_use_is_said_before_anything_starts(recipe, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = fit(recipe, f"runs_dir={tmp_path}", "launch.num_processes=2", f"launch.main_process_port={port}")
    assert done.code == 2
    assert done.err.startswith(f"StrategyError: port {port} of this machine is in use")
    assert "hello" not in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=fsdp"], "strategy fsdp needs several processes, and none were asked for"),
        (["strategy=single", "launch.num_processes=2"], "2 processes were asked for, and strategy single is for one"),
        (["strategy=fsdp", "launch.num_processes=1"], "strategy fsdp was started with 1 process"),
        (["strategy=megatron"], "strategy megatron is recognised but not supported"),
        (["strategy={name: fsdp, wrap: [Blokc]}", "launch.num_processes=2"], "The classes with parameters are Linear"),
        (["device=cuda", "launch.num_processes=2"], "sees no CUDA device"),
        (["strategy=tensor_parallel", "launch.num_processes=2"], "Faulty has no tensor_parallel_plan()"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_start_is_said_once_on_the_launching_terminal(recipe, tmp_path, words, said):
    if "device=cuda" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    done = fit(recipe, f"runs_dir={tmp_path}", *words)
    assert done.code == 2, done.err
    assert done.err.count(said) == 1, done.err
    assert "Traceback" not in done.err
