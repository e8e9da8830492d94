"""Every file of a checkpoint, damaged in every way, is detected and named, and the valid one before it is used."""

import os
import pickle
import shutil

import pytest
import torch

from camshaft.checkpoint import Entries, Reader, Store
from camshaft.errors import CheckpointError
from camshaft.testing import TinyData, TinyModule, tiny_run


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def flip_first(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 0x80
    path.write_bytes(bytes(content))


def delete(path):
    path.unlink()


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES = (truncate, empty, flip, flip_first, delete, grow)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the checkpoints of a real run: at steps 2 and 4, with averages."""
    from camshaft.callbacks.ema import EMA

    place = tmp_path_factory.mktemp("runs")
    result = tiny_run(
        TinyModule(configure=adamw), TinyData(), callbacks={"ema": EMA(0.9)}, max_steps=4, runs_dir=place,
        checkpoint={"every": "2 steps", "keep_last": 2},
    )  # fmt: skip
    return result.run_dir / "checkpoints"


def newest(directory):
    return max(path for path in directory.glob("step_*"))


def test_these_are_all_its_files(directory):
    kinds = {path.name for path in newest(directory).iterdir()}
    assert kinds >= {"manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "ema.safetensors"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_any_damage_to_any_file_is_named_and_the_one_before_is_used(directory, tmp_path, damage):
    for number, name in enumerate(sorted(path.name for path in newest(directory).iterdir())):
        copy = tmp_path / f"{number}"
        shutil.copytree(directory, copy)
        damage(newest(copy) / name)
        with Store(copy) as store:
            found = store.latest()
        assert found is not None
        assert found.manifest.step == 2, name
        (passed,) = found.passed_over
        assert name in passed.why or (name == "manifest.json" and passed.why), (name, passed.why)
        with pytest.raises(CheckpointError) as error:
            Reader(newest(copy), check="full")
        assert name in str(error.value)


def test_with_every_checkpoint_damaged_nothing_is_found(directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    for path in copy.glob("step_*"):
        delete(path / "model.safetensors")
    with Store(copy) as store:
        assert store.latest() is None


def test_a_directory_without_a_manifest_is_no_checkpoint(directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    # As a kill between the writes and the rename could leave it, had it been renamed first.
    (newest(copy) / "manifest.json").unlink()
    with Store(copy) as store:
        assert [found.manifest.step for found in store.checkpoints()] == [2]


class Touch:
    """Touch a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def read_everything(path, check):
    with Reader(path, check=check) as reader:
        for key in reader.names():
            reader.tensor(key)
        reader.data("progress")
        reader.rank_data("streams", 0)


def test_a_pickle_in_place_of_any_file_runs_nothing(directory, tmp_path):
    planted = tmp_path / "planted"
    for number, name in enumerate(sorted(path.name for path in newest(directory).iterdir())):
        copy = tmp_path / f"{number}"
        shutil.copytree(directory, copy)
        for path in copy.glob("step_*"):
            (path / name).write_bytes(pickle.dumps(Touch(planted)))
        with Store(copy) as store:
            assert store.latest() is None
        for check in ("quick", "full"):
            with pytest.raises(CheckpointError):
                read_everything(newest(copy), check)
    assert not planted.exists()


def test_a_pickle_that_the_manifest_vouches_for_runs_nothing_either(tmp_path):
    """An attacker who writes the manifest too can make a file pass its hash; it is still never unpickled."""
    import hashlib
    import json

    planted = tmp_path / "planted"
    with Store(tmp_path / "c") as store:
        path = store.save(Entries({"model/w": torch.zeros(4)}, data={"progress": {}}), step=1)
    for name in ("model.safetensors", "state.json"):
        content = pickle.dumps(Touch(planted))
        manifest = json.loads((path / "manifest.json").read_text())
        record = manifest["files"][name]
        record |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / name).write_bytes(content)
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError):
            read_everything(path, "quick")
    assert not planted.exists()
