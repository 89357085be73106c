"""Bringing a target into the pipeline: one flat folder of files, each with its SHA-256, and one identity over them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tasks.contract.receipt import canonical_json
from tasks.target.digests import sha256_of
from tasks.target.facts import gguf_dtype, read_tokenizer
from tasks.target.gguf_once import gguf_parsed_once
from tasks.target.location import (
    CONFIG_FILES,
    INDEX_FILE,
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    TargetSource,
    check_files,
    fetch_files,
    hub_snapshot,
    list_files,
)
from tasks.target.quiet import quiet

# Keys of config.json that name the library or the folder of origin and say nothing of the model.
_INCIDENTAL = ("transformers_version", "_name_or_path", "_model_name_or_path")


def local_checkpoint(source: TargetSource, scratch: Path) -> tuple[Path, list[str], dict[str, str]]:
    """A local folder with the checkpoint's files.

    Args:
        source: the target.
        scratch: where files of a GGUF, s3 or hub target are put.

    Returns:
        The folder; the names of the files that belong to the checkpoint; where later stages find them (`location`
        of the receipt: kind `store` for what was converted, else the target's own place).
    """
    if source.kind == "gguf":
        with gguf_parsed_once():
            dequantize(source, scratch)
        return scratch, _relevant([p.name for p in scratch.iterdir()], scratch, source), {"kind": "store"}
    if source.kind == "folder":
        names = _relevant(list(list_files(source)), source.path, source)
        return source.path, names, {"kind": "folder", "path": str(source.path)}
    commit = None
    if source.kind == "hub":
        snapshot = hub_snapshot(source)
        names, commit = list(snapshot.files), snapshot.commit
    else:
        names = list(list_files(source))
    fetch_files(source, [n for n in names if n == INDEX_FILE], scratch, commit)
    names = _relevant(names, scratch, source)
    fetch_files(source, names, scratch, commit)
    location = {"kind": source.kind, "path": source.location}
    return scratch, names, {**location, "revision": commit} if commit else location


def _relevant(names: list[str], folder: Path, source: TargetSource) -> list[str]:
    weights = check_files(names, lambda: (folder / INDEX_FILE).read_bytes(), source.location)
    known = {*CONFIG_FILES, *TOKENIZER_FILES, INDEX_FILE}
    code = {n for n in names if n.endswith(".py")} if source.trust_remote_code else set()
    return sorted(set(weights) | (known & set(names)) | code)


def dequantize(source: TargetSource, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as a Transformers checkpoint (safetensors).

    Without `GgufConfig(dequantize=True)` transformers keeps the weights packed and cannot save them.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GgufConfig

    types = [t.tensor_type.name for t in GGUFReader(str(source.path)).tensors if len(t.shape) > 1]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[gguf_dtype(types)]
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            str(source.path.parent),
            gguf_file=source.path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(str(folder))
    read_tokenizer(source, source.path.parent, source.path.name).save_pretrained(str(folder))


def digest_files(folder: Path, names: list[str], cache: Path | None) -> dict[str, dict[str, Any]]:
    """Size, SHA-256 and time of change of each file, by name."""
    found = {}
    for name in names:
        stat = (folder / name).stat()
        found[name] = {
            "size": stat.st_size,
            "sha256": sha256_of(folder / name, cache),
            "mtime_ns": stat.st_mtime_ns,
        }
    return found


def identities(folder: Path, files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Digests of the checkpoint by what they stand for.

    `weights` covers the tensor files in name order and the model's configuration. `identity` covers these, the
    tokenizer with its template, and the end tokens: whatever changes tokens, states or decoded text changes it.
    The library version that wrote the files is left out.
    """
    weights = _digest(
        {
            "tensors": [[n, f["sha256"]] for n, f in sorted(files.items()) if n.endswith(".safetensors")],
            "config": _stable(folder / "config.json"),
        }
    )
    tokenizer = _digest(
        [[n, files[n]["sha256"]] for n in sorted(files) if n in TOKENIZER_FILES and n not in TEMPLATE_FILES]
    )
    template = _digest([[n, files[n]["sha256"]] for n in sorted(files) if n in TEMPLATE_FILES])
    code = [[n, f["sha256"]] for n, f in sorted(files.items()) if n.endswith(".py")]
    generation = folder / "generation_config.json"
    ends = _stable(generation).get("eos_token_id") if generation.is_file() else None
    whole = {"weights": weights, "tokenizer": tokenizer, "template": template, "eos": ends, "code": code}
    return {"weights": weights, "tokenizer": tokenizer, "identity": _digest(whole)}


def _stable(path: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(path.read_bytes()).items() if name not in _INCIDENTAL}


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
