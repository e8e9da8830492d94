import json
import os
import subprocess

import pytest

from camshaft.recipe import provenance
from camshaft.redact import HIDDEN, is_secret_argument, is_secret_variable, redact


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    git("init", "-q", "-b", "main")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "first")
    git("remote", "add", "origin", "https://me:hunter2@example.com/x.git")
    return tmp_path


def test_a_clean_repository_is_recorded_by_its_revision(repository):
    record = provenance.git(repository)
    assert len(record["revision"]) == 40
    assert record["branch"] == "main"
    assert record["is_clean"]
    assert record["diff"] == ""
    assert record["remote"] == f"https://{HIDDEN}@example.com/x.git"


def test_changes_are_recorded_without_their_secrets(repository):
    (repository / "a.py").write_text("x = 2\napi_key = 'abcdef123456'\n")
    (repository / "new.py").write_text("")
    record = provenance.git(repository)
    assert not record["is_clean"]
    assert "+x = 2" in record["diff"]
    assert record["untracked"] == ["new.py"]
    assert "abcdef123456" not in record["diff"]


def test_a_repository_cannot_run_programs_of_its_own(repository):
    config = (
        '[core]\n\tfsmonitor = touch pwned\n[diff "x"]\n\ttextconv = touch pwned\n[diff]\n\texternal = touch pwned\n'
        '[filter "y"]\n\tclean = touch pwned && cat\n\trequired\n'
    )
    with (repository / ".git" / "config").open("a") as file:
        file.write(config)
    (repository / ".gitattributes").write_text("*.py diff=x filter=y\n")
    (repository / "a.py").write_text("x = 3\n")
    assert "+x = 3" in provenance.git(repository)["diff"]
    assert not (repository / "pwned").exists()


def test_outside_a_repository_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git(tmp_path) is None


def test_everything_that_repeats_a_run_is_recorded(repository, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_JWT_TOKEN", "should-never-be-seen")
    record = provenance.collect(code=repository, seed=7, parent="runs/a/step_10")
    assert record["seed"] == 7
    assert record["parent_checkpoint"] == "runs/a/step_10"
    assert record["packages"]["torch"]
    assert record["packages"]["omegaconf"]
    assert record["hardware"]["cores"] == os.cpu_count()
    assert record["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert record["command"]
    assert "should-never-be-seen" not in json.dumps(record)


@pytest.mark.parametrize(
    "text",
    [
        "token sk-abcdefghijklmnopqrstuv here", "--api_key=abcdefgh",
        "password: hunter2hunter2", "hf_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst", "AKIAABCDEFGHIJKLMNOP", "https://me:pass@host/x", "MY_SECRET=abcdefgh",
        "logger.token=abcdefgh", "HF_TOKEN: 'abcdefgh'", "--access-token=abcdefgh",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_secrets_are_blanked(text):
    assert HIDDEN in redact(text)
    for part in ("sk-abc", "abcdefgh", "hunter2", "hf_abc", "ghp_abc", "AKIAABC", "pass@", "\nabc\n"):
        assert part not in redact(text)


def test_a_secret_of_the_environment_is_blanked_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redact("run 0123456789abcdef.") == f"run {HIDDEN}."


def test_ordinary_words_are_no_secrets():
    text = (
        "optimizer.lr=1e-3 num_tokens=4096000 module.tokenizer=bert-base pad_token: '<|endoftext|>' "
        "keys=[a, b] monkey=1 https://example.com/a"
    )
    assert redact(text) == text
    assert not any(map(is_secret_argument, ["key", "tokens", "num_tokens", "token", "monkey", "keys_per_head"]))
    assert all(map(is_secret_argument, ["api_key", "apikey", "hf_token", "password", "client_secret"]))
    assert all(map(is_secret_variable, ["WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"]))
    assert not any(map(is_secret_variable, ["HOME", "MONKEY_ISLAND", "TOKENIZERS_PARALLELISM"]))


def test_the_recipe_says_its_files_overrides_and_seed(project):
    from helpers import read

    loaded = read("module: {_target_: net.Net}\nmax_epochs: 1\n", ["seed=9"])
    record = provenance.collect(loaded)
    assert record["seed"] == 9
    assert record["recipes"] == ["r.yaml"]
    assert record["overrides"] == ["seed=9"]
