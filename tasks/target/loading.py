"""Opening a target: weights on the device, tokenizer, and the modules that the pipeline touches, found by family.

Text stacks only: a multimodal checkpoint is opened through `AutoModelForCausalLM`, which leaves the vision tower out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.contract.errors import ConfigurationError, IntegrityError, Problem
from tasks.contract.receipt import Receipt
from tasks.stages.context import StageContext
from tasks.target.digests import hash_file, sha256_of
from tasks.target.facts import eos_ids, layer_types, pad_id, read_config, read_tokenizer
from tasks.target.location import TargetSource, fetch_files
from tasks.target.quiet import quiet

log = logging.getLogger("tasks")

_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f", "ln_f")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Target:
    """An open target. H is its hidden size, N its number of layers, V its number of embedding rows."""

    model: Any  # Hugging Face causal language model, eval mode, no gradients
    decoder: Any  # the part below the head: embeddings, layers, final norm
    layers_name: str  # attribute of `decoder` that holds the layers
    tokenizer: Any
    config: Any  # the text configuration
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    head: nn.Module
    eos_ids: frozenset[int]
    pad_id: int | None
    attention: str  # attention implementation in use, e.g. sdpa
    linear_attention: str  # "none", "pytorch" (slow reference), "flash-linear-attention" or "mamba-ssm"

    @property
    def device(self) -> torch.device:
        """Where the embeddings are: inputs go there."""
        return next(self.embedding.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return next(self.embedding.parameters()).dtype


def open_target(ctx: StageContext, receipt: Receipt, *, dtype: torch.dtype | None = None) -> Target:
    """Load the target of a receipt of stage `target` onto `ctx.device`.

    Args:
        ctx: device, spec (`compute_dtype`, `trust_remote_code`) and local cache.
        receipt: of stage `target`.
        dtype: instead of the spec's compute dtype.

    Raises:
        IntegrityError: if the files are no longer those of the receipt.
        ConfigurationError: field `target`, if the folder is not mounted here, or the family cannot be hooked.
    """
    folder = target_folder(ctx, receipt)
    return load_target_folder(
        folder,
        ctx.device,
        dtype or compute_dtype(ctx.spec.compute_dtype, ctx.device),
        name=str(receipt.details["name"]),
        trust_remote_code=ctx.spec.trust_remote_code,
    )


def open_tokenizer(ctx: StageContext, receipt: Receipt) -> Any:
    """The tokenizer of a receipt of stage `target`; weights are neither read nor fetched."""
    folder = target_folder(ctx, receipt, weights=False)
    source = TargetSource(
        "folder", str(receipt.details["name"]), str(folder), trust_remote_code=ctx.spec.trust_remote_code
    )
    return read_tokenizer(source, folder, None)


def compute_dtype(name: str, device: str) -> torch.dtype:
    """`RunSpec.compute_dtype` as torch's: auto is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def load_target_folder(
    folder: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    name: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a local checkpoint folder.

    Args:
        folder: config.json, safetensors, tokenizer.
        device: where the weights go.
        dtype: float32 or bfloat16.
        name: for messages; the folder's name if None.
        trust_remote_code: run Python code that comes with the checkpoint.

    Raises:
        ConfigurationError: field `target`, if transformers cannot load it or its layers cannot be found.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    name = name or Path(folder).name
    source = TargetSource("folder", name, str(folder), trust_remote_code=trust_remote_code)
    text = read_config(source, folder, None).get_text_config(decoder=True)
    started = time.monotonic()
    placement: dict[str, Any] = {}
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu and importlib.util.find_spec("accelerate"):
        placement["device_map"] = {"": device}  # straight to the GPU, without a copy in host memory
    with quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, **placement
            )
        except (ValueError, OSError, KeyError) as error:
            raise ConfigurationError(
                Problem("target", name, f"a causal language model that transformers can load: {error}")
            ) from error
        tokenizer = read_tokenizer(source, folder, None)
    if not placement:
        model = model.to(device)
    # Also for the forward passes: what the libraries say there about missing kernels is said once, below.
    transformers_logging.set_verbosity_error()
    target = describe_model(model, tokenizer, name)
    log.info(
        "target %s: %s, %d layers, hidden size %d, %s on %s, attention %s, loaded in %.1f s",
        name,
        text.model_type,
        target.num_layers,
        target.hidden_size,
        str(dtype).removeprefix("torch."),
        device,
        target.attention,
        time.monotonic() - started,
    )
    if target.linear_attention == "pytorch":
        log.warning(
            "target %s has recurrent layers and they run in PyTorch's reference implementation: install %s on a CUDA "
            "GPU (a 27B Gated DeltaNet hybrid was measured at 0.6 of the speed without it)",
            name,
            "flash-linear-attention" if hasattr(text, "linear_num_value_heads") else "mamba-ssm",
        )
    return target


def describe_model(model: Any, tokenizer: Any, name: str) -> Target:
    """Find a causal language model's parts, freeze it and put it into eval mode.

    Raises:
        ConfigurationError: field `target`, naming the family, if its decoder layers cannot be hooked.
    """
    model.eval()
    model.requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    # Classes that wrap the text stack once more (model.language_model) answer with the wrapper.
    if not _find(decoder, _LAYERS, nn.ModuleList) and hasattr(decoder, "language_model"):
        decoder = decoder.language_model
    layers_name = _find(decoder, _LAYERS, nn.ModuleList)
    norm_name = _find(decoder, _NORMS, nn.Module)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = getattr(decoder, layers_name) if layers_name else nn.ModuleList()
    missing = [
        what
        for what, found in (
            ("decoder layers", layers_name),
            ("final norm", norm_name),
            ("input embedding", embedding is not None),
            ("output head", head is not None),
        )
        if not found
    ]
    if missing or len(layers) != config.num_hidden_layers:
        what = f"no {' and no '.join(missing)}" if missing else f"{len(layers)} of {config.num_hidden_layers} layers"
        raise ConfigurationError(
            Problem(
                "target",
                name,
                f"a family whose decoder layers can be hooked; {type(model).__name__} (model type {config.model_type}) "
                f"cannot: {what} found in {type(decoder).__name__}",
            )
        )
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return Target(
        model=model,
        decoder=decoder,
        layers_name=layers_name,
        tokenizer=tokenizer,
        config=config,
        name=name,
        num_layers=len(layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(embedding.weight.shape[0]),
        layers=layers,
        final_norm=getattr(decoder, norm_name),
        embedding=embedding,
        head=head,
        eos_ids=frozenset(eos_ids(generation, config, tokenizer)),
        pad_id=pad_id(config, tokenizer),
        attention=str(getattr(model.config, "_attn_implementation", None) or "eager"),
        linear_attention=_linear_attention(config),
    )


def _find(module: Any, names: tuple[str, ...], kind: type) -> str:
    return next((name for name in names if isinstance(getattr(module, name, None), kind)), "")


def _linear_attention(config: Any) -> str:
    from transformers.utils.import_utils import is_flash_linear_attention_available, is_mamba_2_ssm_available

    if getattr(config, "linear_num_value_heads", None) and "linear_attention" in layer_types(config):
        return "flash-linear-attention" if is_flash_linear_attention_available() else "pytorch"
    if any(getattr(config, name, None) for name in ("mamba_d_state", "ssm_state_size")):
        return "mamba-ssm" if is_mamba_2_ssm_available() else "pytorch"
    return "none"


# ---- the files ------------------------------------------------------------------------------------------------------


def target_folder(ctx: StageContext, receipt: Receipt, *, weights: bool = True) -> Path:
    """Local folder with the target's files, exactly those of the receipt.

    Args:
        ctx: for its store and local cache.
        receipt: of stage `target`.
        weights: False: configuration and tokenizer only.

    Raises:
        IntegrityError: naming the file that changed.
        ConfigurationError: field `target`, if a local folder is not visible to this process.
    """
    if ctx.cache is None:
        ctx.cache = ctx.scratch()
    location = receipt.details["location"]
    if location["kind"] == "folder":
        folder = Path(location["path"])
        if not folder.is_dir():
            raise ConfigurationError(
                Problem("target", str(folder), "a folder that every task sees: mount it, or use an s3:// prefix")
            )
        _check_files(folder, receipt, ctx.cache, weights)
        return folder
    wanted = [n for n in receipt.details["files"] if weights or not n.endswith(".safetensors")]
    folder = ctx.cache / "targets" / f"{receipt.identity[:32]}-{'all' if weights else 'small'}"
    if folder.is_dir():
        return folder
    building = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    building.mkdir(parents=True)
    try:
        if location["kind"] == "store":
            for name in wanted:
                _link(ctx.fetch(receipt, name), building / name)
        else:
            source = TargetSource(location["kind"], receipt.details["name"], location["path"])
            fetch_files(source, wanted, building, location.get("revision"))
            _check_files(building, receipt, None, weights)
        try:
            os.replace(building, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was faster: its folder holds the same verified files.
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _check_files(folder: Path, receipt: Receipt, cache: Path | None, weights: bool) -> None:
    for name, entry in receipt.details["files"].items():
        if name.endswith(".safetensors") and not weights:
            continue
        path = folder / name
        stat = path.stat() if path.is_file() else None
        if stat is not None and stat.st_size == entry["size"]:
            # Size and time as when it was hashed: the same file. Otherwise (a copy, another mount) read it.
            if stat.st_mtime_ns == entry.get("mtime_ns"):
                continue
            digest = sha256_of(path, cache) if cache else hash_file(path)
            if digest == entry["sha256"]:
                continue
        found = "missing" if stat is None else f"{stat.st_size} bytes"
        raise IntegrityError(
            f"target {receipt.details['name']}: {path} is not the file imported by stage target ({found}; expected "
            f"{entry['size']} bytes, SHA-256 {entry['sha256']}); restore it or start a new run"
        )
