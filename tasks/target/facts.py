"""What is known of a target without loading its weights: from its configuration, tokenizer and file headers."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.receipt import canonical_json
from tasks.contract.spec import RunSpec
from tasks.target.gguf_once import gguf_parsed_once
from tasks.target.location import (
    INDEX_FILE,
    TargetSource,
    check_files,
    fetch_files,
    header_reader,
    hub_snapshot,
    list_files,
    local_header,
    parse_target,
    small_files,
)
from tasks.target.quiet import quiet

log = logging.getLogger("tasks")

# Storage dtype names of safetensors headers, in torch's words.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F64": "float64"}
# Parts of a checkpoint that a text-only load leaves out: vision towers and multi-token-prediction heads.
_NOT_TEXT = ("visual.", "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.", "mtp.")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "embeddings.weight", "wte.weight")


@dataclass(frozen=True)
class TargetFacts:
    """Shape, vocabulary and tokenizer of a target. Sizes are the text stack's, also of a multimodal checkpoint."""

    name: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # embedding rows, padding rows included
    tokenizer_length: int  # ids the tokenizer knows
    max_positions: int | None
    rope_theta: float | None  # None: the family has no rotary embedding
    layer_types: list[str]  # one a layer: full_attention, sliding_attention, linear_attention, conv, mamba, ...
    tied: bool  # the output head is the embedding
    eos_ids: list[int]  # ascending: generation config, text config and tokenizer together
    pad_id: int | None
    unused_special_ids: list[int]  # special tokens that neither the tokenizer's roles nor the chat template use
    dtype: str  # of the stored weights, as they are loaded (GGUF: after dequantization)
    parameters: int
    weight_bytes: int
    template_digest: str | None  # None: the tokenizer has no chat template

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a recurrent or convolution state (their cache cannot simply be cropped)."""
        return is_recurrent(self.layer_types)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)


def read_target_facts(spec: RunSpec, folder: Path) -> TargetFacts:
    """Facts about `spec.target`, from configuration, tokenizer and headers; weights are not loaded.

    Args:
        spec: `target`, `target_revision` and `trust_remote_code` are read.
        folder: local folder for the small files of a remote target.

    Raises:
        ConfigurationError: field `target`, if it is not a complete causal language model that can be read.
        StorageError: if the store or the hub does not answer.
    """
    source = parse_target(spec)
    if source.kind == "gguf":
        with gguf_parsed_once():
            return _gguf_facts(source)
    if source.kind == "hub":
        snapshot = hub_snapshot(source)
        local = fetch_files(source, small_files(snapshot.files), folder, snapshot.commit)
        check_files(snapshot.files, lambda: (local / INDEX_FILE).read_bytes(), source.location)
        return _facts(source, local, None, None, snapshot.parameters)
    files = list_files(source)
    local = fetch_files(source, small_files(files), folder)
    weights = check_files(files, lambda: (local / INDEX_FILE).read_bytes(), source.location)
    read = header_reader(source)
    return _facts(
        source, local, None, [{"name": key, **value} for n in weights for key, value in read(n).items()], None
    )


def folder_facts(folder: Path, name: str, trust_remote_code: bool = False) -> TargetFacts:
    """Facts about a complete local checkpoint folder."""
    source = TargetSource("folder", name, str(folder), trust_remote_code=trust_remote_code)
    tensors = [
        {"name": key, **value}
        for path in sorted(folder.glob("*.safetensors"))
        for key, value in local_header(path).items()
    ]
    return _facts(source, folder, None, tensors, None)


def _gguf_facts(source: TargetSource) -> TargetFacts:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source.path))
    except (ValueError, OSError) as error:
        raise ConfigurationError(Problem("target", source.location, f"a readable GGUF file ({error})")) from error
    dtype = gguf_dtype(t.tensor_type.name for t in reader.tensors if len(t.shape) > 1)
    stored = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    tensors = [
        # GGUF lists dimensions fastest first; torch's order is the reverse.
        {
            "name": t.name.replace("token_embd", "embed_tokens"),
            "dtype": stored,
            "shape": [int(d) for d in t.shape[::-1]],
        }
        for t in reader.tensors
    ]
    return _facts(source, source.path.parent, source.path.name, tensors, None)


def gguf_dtype(types: Iterable[str]) -> str:
    """Dtype in which a GGUF file's matrices are kept after dequantization: bfloat16, but float32 for unquantized
    float32 and float16 files, which bfloat16 would round."""
    return "float32" if set(types) <= {"F32", "F16"} else "bfloat16"


def read_config(source: TargetSource, folder: Path, gguf_file: str | None) -> Any:
    """The checkpoint's configuration (transformers' PretrainedConfig; the composite one of a multimodal model).

    Raises:
        ConfigurationError: field `target`, if transformers cannot read it.
    """
    from transformers import AutoConfig

    options = {"gguf_file": gguf_file} if gguf_file else {}
    with quiet():
        try:
            return AutoConfig.from_pretrained(str(folder), trust_remote_code=source.trust_remote_code, **options)
        except (ValueError, OSError, KeyError) as error:
            raise ConfigurationError(
                Problem("target", source.location, f"a configuration that transformers can read: {error}")
            ) from error


def read_tokenizer(source: TargetSource, folder: Path, gguf_file: str | None) -> Any:
    """The target's tokenizer.

    Raises:
        ConfigurationError: field `target`, if transformers cannot read it.
    """
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf_file} if gguf_file else {}
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=source.trust_remote_code, **options)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ConfigurationError(
                Problem("target", source.location, f"a tokenizer that transformers can read: {error}")
            ) from error


def _facts(
    source: TargetSource,
    folder: Path,
    gguf_file: str | None,
    tensors: Sequence[Mapping[str, Any]] | None,
    known_parameters: int | None,
) -> TargetFacts:
    whole = read_config(source, folder, gguf_file)
    config = whole.get_text_config(decoder=True)
    _require_decoder(source, whole, config)
    tokenizer = read_tokenizer(source, folder, gguf_file)
    if tensors is not None:
        tensors = [t for t in tensors if not str(t["name"]).removeprefix("model.").startswith(_NOT_TEXT)]
    dtype = _dtype(config, whole, tensors)
    parameters = known_parameters or sum(math.prod(t["shape"]) for t in tensors or ())
    generation = _json(folder / "generation_config.json") if gguf_file is None else {}
    eos = eos_ids(generation.get("eos_token_id"), config, tokenizer)
    layers = int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
    return TargetFacts(
        name=source.name,
        architecture=_architecture(whole, config),
        model_type=str(config.model_type),
        num_layers=layers,
        hidden_size=int(config.hidden_size),
        intermediate_size=_intermediate(config),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=_embedding_rows(tensors) or int(config.vocab_size),
        tokenizer_length=len(tokenizer),
        max_positions=getattr(config, "max_position_embeddings", None),
        rope_theta=_rope_theta(config, None if gguf_file else folder),
        layer_types=layer_types(config),
        tied=bool(getattr(whole, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False)),
        eos_ids=sorted(eos),
        pad_id=pad_id(config, tokenizer),
        unused_special_ids=_unused_special_ids(tokenizer, eos),
        dtype=dtype,
        parameters=parameters,
        weight_bytes=_bytes(tensors) if tensors else parameters * 2,
        template_digest=template_digest(tokenizer),
    )


def _require_decoder(source: TargetSource, whole: Any, config: Any) -> None:
    needed = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
    missing = [name for name in needed if not isinstance(getattr(config, name, None), int)]
    if missing or getattr(whole, "is_encoder_decoder", False):
        what = f"its configuration lacks {missing}" if missing else "it is an encoder-decoder"
        raise ConfigurationError(
            Problem("target", source.location, f"a decoder-only language model; {whole.model_type}: {what}")
        )


def _architecture(whole: Any, config: Any) -> str:
    listed = getattr(whole, "architectures", None) or getattr(config, "architectures", None)
    if listed:
        return str(listed[0])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))


def _intermediate(config: Any) -> int:
    for name in ("intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return value
    return 4 * int(config.hidden_size)


def layer_types(config: Any) -> list[str]:
    """Kind of every decoder layer; families without the attribute have full attention throughout.

    `hybrid` is a layer with attention and a state-space model side by side (Falcon-H1).
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        kinds = ["full_attention"] * int(config.num_hidden_layers)
    kinds = ["full_attention" if kind == "attention" else str(kind) for kind in kinds]
    if not is_recurrent(kinds) and getattr(config, "mamba_d_state", None):
        return ["hybrid"] * len(kinds)
    return kinds


def is_recurrent(kinds: Iterable[str]) -> bool:
    """Whether any layer carries a recurrent or convolution state."""
    stateless = ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe")
    return any(kind not in stateless for kind in kinds)


def _rope_theta(config: Any, folder: Path | None) -> float | None:
    """Rope base: the nested `rope_parameters` win over a flat `rope_theta`, and a conflict is reported."""
    nested = getattr(config, "rope_parameters", None) or {}
    if isinstance(nested.get("full_attention"), Mapping):
        nested = nested["full_attention"]
    theta = nested.get("rope_theta")
    if folder is not None:
        raw = _json(folder / "config.json")
        flat = raw.get("text_config", raw).get("rope_theta")
        if theta is not None and flat is not None and float(flat) != float(theta):
            log.warning(
                "target: config.json gives rope_theta %s at the top and %s in rope_parameters; the nested one is used",
                flat,
                theta,
            )
    if theta is None:
        theta = getattr(config, "rope_theta", None)
    return float(theta) if theta is not None else None


def eos_ids(generation: Any, config: Any, tokenizer: Any) -> set[int]:
    """Every id that ends an answer: of the generation config, the text config and the tokenizer."""
    found: set[int] = set()
    for value in (generation, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            found |= {int(v) for v in (value if isinstance(value, list | tuple) else [value])}
    return found


def pad_id(config: Any, tokenizer: Any) -> int | None:
    """The tokenizer's padding id, else the configuration's."""
    for value in (tokenizer.pad_token_id, getattr(config, "pad_token_id", None)):
        if value is not None:
            return int(value)
    return None


def template_digest(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template, or None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(canonical_json(template)).hexdigest() if template else None


def _unused_special_ids(tokenizer: Any, eos: set[int]) -> list[int]:
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} | eos
    template = json.dumps(getattr(tokenizer, "chat_template", None) or "", ensure_ascii=False)
    tokens = tokenizer.added_tokens_decoder.items()
    return sorted(i for i, t in tokens if t.special and i not in roles and t.content not in template)


def _dtype(config: Any, whole: Any, tensors: Sequence[Mapping[str, Any]] | None) -> str:
    if tensors:
        sizes: dict[str, int] = {}
        for tensor in tensors:
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
        most = max(sizes, key=lambda name: sizes[name])
        return _DTYPES.get(most, most)
    stated = getattr(whole, "dtype", None) or getattr(config, "dtype", None) or "bfloat16"
    return str(stated).removeprefix("torch.")


def _bytes(tensors: Sequence[Mapping[str, Any]]) -> int:
    width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
    return sum(math.prod(t["shape"]) * width.get(t["dtype"], 1) for t in tensors)


def _embedding_rows(tensors: Sequence[Mapping[str, Any]] | None) -> int | None:
    for tensor in tensors or ():
        if str(tensor["name"]).endswith(_EMBEDDINGS) and ".visual." not in tensor["name"]:
            return int(tensor["shape"][0])
    return None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}
