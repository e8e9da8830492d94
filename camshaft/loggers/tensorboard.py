"""Write TensorBoard's event files."""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from torch import Tensor

from camshaft.loggers.base import Logger, Record, Run

_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}


class TensorBoard(Logger):
    """Write scalars, texts, images, the recipe and hyper-parameters into the run directory.

    Each start of the run makes one event file, all in the same directory, so that TensorBoard shows a
    resumed run as one; steps that it repeats are purged. Epoch, samples and tokens are scalars that go
    along. Hyper-parameters stand beside the final metrics of this same run, not in a run of their own.
    The calling thread writes, and flushes record by record.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._records: Any = None
        self._counted = -1

    def open(self, run: Run) -> None:
        """Start an event file, and write the recipe into it."""
        if run.directory is None:
            return
        # Imported here, not above: it takes a tenth of a second, and most runs' help texts need none of it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (run.directory / f"events.out.tfevents.{unique}").open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run.resumed_step:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=run.resumed_step + 1, session_log=start))
        if run.recipe:
            self.log_text("recipe", f"```yaml\n{run.recipe.rstrip()}\n```", run.resumed_step)

    def log_metrics(self, record: Record) -> None:
        """Write a record's values as scalars."""
        if self._file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = dict(record.values)
        if record.step != self._counted:
            self._counted = record.step
            values |= {"epoch": record.epoch, "samples": record.samples}
            values |= {"tokens": record.tokens} if record.tokens else {}
        self._summary([Summary.Value(tag=name, simple_value=value) for name, value in values.items()], record.step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text, which TensorBoard shows as Markdown: its lines stay lines."""
        if self._file is None:
            return
        if "```" not in text:
            text = text.replace("\n", "  \n")
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._summary([Summary.Value(tag=name, metadata=metadata, tensor=tensor)], step)

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Write an image as PNG."""
        if self._file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        channels, height, width = image.shape
        picture = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encode_png(image))
        self._summary([Summary.Value(tag=name, image=picture)], step)

    def log_hparams(self, hparams: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the hyper-parameters, and name the scalars of this run that are its results."""
        if self._file is None or not hparams:
            return
        from torch.utils.tensorboard.summary import hparams as summaries

        plain = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in hparams.items()}
        for summary in summaries(plain, dict(metrics)):
            self._summary(list(summary.value), 0)

    def close(self, status: str) -> None:
        """Finish the file."""
        del status
        if self._file is not None:
            self._file.close()
            self._file = None

    def _summary(self, values: list[Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        assert self._file is not None
        self._records.write(event.SerializeToString())
        self._file.flush()


def encode_png(image: Tensor) -> bytes:
    """Return the PNG file of a (C, H, W) image of floats in [0, 1], with 1 to 4 channels."""
    channels, height, width = image.shape
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).reshape(height, -1).numpy()
    # Each row begins with its filter, which is 0: none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
