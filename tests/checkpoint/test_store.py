"""A checkpoint is whole or not there, durable before others are deleted, and belongs to one run at a time."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import torch

from camshaft.checkpoint import Entries, Reader, Shard, Store
from camshaft.errors import CheckpointError


def entries(value=1.0, size=8):
    return Entries({"model/w": torch.full((size,), value)}, data={"note": value})


def names(store):
    return sorted(path.name for path in store.directory.glob("step_*"))


def test_what_is_saved_comes_back_with_every_dtype_and_value(tmp_path):
    tensors = {
        f"model/{str(dtype).removeprefix('torch.')}": torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
    }
    tensors |= {"model/scalar": torch.tensor(3.5), "model/empty": torch.empty(0, 4), "model/view": torch.eye(4)[::2].T}
    data = {"nan": float("nan"), "inf": -float("inf"), "tuple": (1, "a"), "none": None, "big": 2**80}
    with Store(tmp_path) as store:
        path = store.save(Entries(tensors, data=data, rank_tensors={"r": torch.ones(2)}, rank_data={"k": [1]}), step=3)
    with Reader(path, check="full") as reader:
        for name, tensor in tensors.items():
            assert reader.tensor(name).dtype == tensor.dtype
            assert torch.equal(reader.tensor(name), tensor)
        assert reader.data("tuple") == (1, "a")
        assert reader.data("nan") != reader.data("nan")
        assert reader.data("inf") == -float("inf")
        assert reader.data("big") == 2**80
        assert torch.equal(reader.rank_tensors(0)["r"], torch.ones(2))
        assert reader.rank_data("k", 0) == [1]
        assert reader.rank_data("k", 7) is None


def test_pointers_name_the_newest_and_what_they_are_told(tmp_path):
    with Store(tmp_path) as store:
        first = store.save(entries(), step=1)
        second = store.save(entries(), step=2)
        store.point("best", first, {"value": 0.5})
        assert store.resolve("last").path == second
        assert store.resolve("best").path == first
        assert "0.5" in (tmp_path / "best").read_text()
        with pytest.raises(CheckpointError, match="worst"):
            store.resolve("worst")


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 1}, [1, 6]),
        ({"keep_last": 2}, [1, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [1, 2, 4, 6]),
        ({"keep_last": 0}, [1, 6]),
        ({"keep_last": 1, "keep": ["step_00000003"]}, [1, 3, 6]),
    ],
    ids=str,
)
def test_retention_keeps_what_is_asked_and_what_a_pointer_names(tmp_path, keep, left):
    with Store(tmp_path) as store:
        paths = [store.save(entries(), step=step) for step in range(1, 7)]
        store.point("best", paths[0])
        store.prune(**keep)
        assert [int(name[5:13]) for name in names(store)] == left


def test_an_inexact_one_is_kept_and_never_chosen(tmp_path):
    with Store(tmp_path) as store:
        exact = store.save(entries(), step=1)
        store.save(entries(), step=2, meta={"exact": False})
        found = store.latest()
        assert found.path == exact
        assert "not exact" in found.passed_over[0].why
        assert store.resolve("last").path == exact


def test_a_second_run_is_refused_and_names_the_first(tmp_path):
    with Store(tmp_path), pytest.raises(CheckpointError, match=r"in use by another run \(this process\)"):
        Store(tmp_path)
    holds = "import sys, time; from camshaft.checkpoint import Store; s = Store(sys.argv[1])\n"
    holds += "print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError, match=str(other.pid)):
                Store(tmp_path)
        finally:
            other.kill()
    Store(tmp_path).close()


def test_a_dead_run_holds_no_lock_and_leaves_nothing_half_written(tmp_path):
    script = (
        "import sys, torch, os\n"
        "from camshaft.checkpoint import Store, Entries\n"
        f"store = Store({str(tmp_path)!r})\n"
        "store.save(Entries({'model/w': torch.ones(4)}), step=1)\n"
        "import camshaft.checkpoint.store as s\n"
        "s.Store._commit = lambda *a: os.kill(os.getpid(), 9)\n"
        "store.save(Entries({'model/w': torch.ones(4)}), step=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert done.returncode == -9, done.stderr
    before = {path.name for path in tmp_path.iterdir()}
    with Store(tmp_path) as store:
        assert store.latest().manifest.step == 1
        after = {path.name for path in tmp_path.iterdir()}
    # What was being written at the kill is there before, and swept when the next run opens the directory.
    assert before - after
    assert names(store) == [name for name in after if name.startswith("step_")]


def test_a_background_write_is_of_the_moment_it_was_asked_for(tmp_path):
    weight = torch.zeros(1 << 20)
    with Store(tmp_path) as store:
        store.save_async(Entries({"model/w": weight}), step=1)
        weight.fill_(7.0)
        path = store.wait()
    with Reader(path) as reader:
        assert not reader.tensor("model/w").any()


def test_one_background_write_at_a_time_and_its_error_comes_up_at_the_next(tmp_path):
    folder = tmp_path / "checkpoints"
    with Store(folder) as store:
        store.save_async(entries(size=1 << 20), step=1)
        store.save_async(entries(size=1 << 20), step=2)
        assert store.wait().name.startswith("step_00000002")
        # Its directory goes away while it writes.
        store.save_async(entries(size=1 << 22), step=3)
        for _ in range(200):
            if any(path.name.startswith(".") and path.is_dir() for path in folder.iterdir()):
                break
            time.sleep(0.001)
        folder.rename(tmp_path / "gone")
        folder.mkdir()
        # Unless it was quicker than the deletion.
        with contextlib.suppress(CheckpointError):
            store.wait()
        store.save(entries(), step=4)
        assert store.latest().manifest.step == 4


FULL = """
import resource, signal, sys, torch
from camshaft.checkpoint import Store, Entries
from camshaft.errors import CheckpointError
store = Store(sys.argv[1])
store.save(Entries({"model/w": torch.ones(64)}), step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    (store.save_async if sys.argv[2] == "background" else store.save)(
        Entries({"model/w": torch.ones(1 << 20)}), step=2)
    store.wait()
except CheckpointError as error:
    print(error)
print(store.latest().manifest.step, sorted(p.name for p in store.directory.iterdir() if p.is_dir()))
"""


@pytest.mark.parametrize("how", ["now", "background"])
def test_a_full_disk_is_told_and_the_last_good_one_stays(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), how], timeout=60, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert "step_00000002" in lines[0], done.stderr
    assert "File too large" in done.stdout
    assert lines[-1] == "1 ['step_00000001']"


def test_a_file_in_place_of_the_directory_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Opening"):
        Store(tmp_path / "file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_group": torch.zeros(1)},
        {"rank/w": torch.zeros(1)},
        {"model/w": torch.zeros(1).to_sparse()},
        {"model/w": torch.empty(1, device="meta")},
        {"model/w": "text"},
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, wrong):
    with Store(tmp_path) as store:
        with pytest.raises(CheckpointError):
            store.save(Entries(wrong), step=1)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_shard_must_lie_inside_its_tensor():
    with pytest.raises(CheckpointError, match="does not lie inside a tensor of shape"):
        Shard(torch.zeros(3), (4,), offsets=(2,))


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_any_part_of_a_sharded_tensor_can_be_read(tmp_path, rows):
    """Boxes and flat ranges, as FSDP and ZeRO hold them, read back in parts that cross their borders."""
    whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    with Store(tmp_path) as store:
        path = store.save(
            Entries(
                {
                    "model/box": Shard(whole, (7, 6), offsets=(0, 0)),
                    "model/flat": Shard(whole.flatten(), (7, 6), flat_start=0),
                }
            ),
            step=1,
        )
    with Reader(path) as reader:
        for start in range(7 - rows + 1):
            assert torch.equal(reader.read("model/box", (start, 1), (rows, 4)), whole[start : start + rows, 1:5])
        assert torch.equal(reader.read_flat("model/flat", 6, 20), whole.flatten()[6:26])


def test_a_checkpoint_elsewhere_is_the_same_with_the_manifest_last(tmp_path):
    pytest.importorskip("fsspec")
    place = f"memory://camshaft-{os.getpid()}/run/checkpoints"
    with Store(place) as store:
        store.save(entries(1.0), step=1)
        second = store.save(entries(2.0), step=2)
        assert store.latest().path == second
        with Reader(second, check="full") as reader:
            assert reader.tensor("model/w")[0] == 2.0
        import fsspec

        memory = fsspec.filesystem("memory")
        folder = str(second).removeprefix("memory:/")
        times = {name.rpartition("/")[2]: memory.created(name) for name in memory.ls(folder, detail=False)}
        assert max(times, key=times.__getitem__) == "manifest.json"
        memory.rm(f"{folder}/manifest.json")
        assert store.latest().manifest.step == 1
        store.prune(keep_last=1)
