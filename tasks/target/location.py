"""Where a target's files are, and how to bring the ones needed onto the local disk.

Four forms of `RunSpec.target`: `package:MODULE/FILE.gguf` (a data file inside an installed package, whose code is not
imported), a local folder or GGUF file, an `s3://` prefix, and a Hugging Face hub id. A checkpoint is one flat folder:
`config.json`, safetensors weights, tokenizer files.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.contract.errors import ConfigurationError, Problem, StorageError
from tasks.contract.spec import RunSpec

Kind = Literal["gguf", "folder", "s3", "hub"]

CONFIG_FILES = ("config.json", "generation_config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    *TEMPLATE_FILES,
)
INDEX_FILE = "model.safetensors.index.json"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_FORMS = (
    "an existing local folder, an s3:// prefix, a hub id such as Qwen/Qwen3-8B, or package:MODULE/FILE.gguf "
    "of an installed package"
)


@dataclass(frozen=True)
class TargetSource:
    """A target string, understood."""

    kind: Kind
    name: str  # short name for people, e.g. Qwen3.6-27B
    location: str  # path of the folder or GGUF file, s3:// prefix, or hub id
    revision: str | None = None  # hub only
    trust_remote_code: bool = False

    @property
    def path(self) -> Path:
        """Local path of a `gguf` or `folder` target."""
        if self.kind not in ("gguf", "folder"):
            raise ValueError(f"target {self.location} is not on the local disk")
        return Path(self.location)


def parse_target(spec: RunSpec) -> TargetSource:
    """Understand `spec.target` without touching weights or network.

    Raises:
        ConfigurationError: field `target` (or `target_revision`), if it is none of the four forms, or not there.
    """
    text = spec.target.strip()
    if text.startswith("package:"):
        source = _package_file(text, spec)
    elif text.startswith("s3://"):
        if not re.match(r"^s3://[^/]+/.+", text):
            raise _refusal(text, "s3://bucket/prefix of a checkpoint folder")
        name = text.rstrip("/").rsplit("/", 1)[-1]
        source = TargetSource("s3", name, text.rstrip("/"), trust_remote_code=spec.trust_remote_code)
    else:
        source = _local(text, spec) or _hub(text, spec)
    if spec.target_revision and source.kind != "hub":
        raise ConfigurationError(
            Problem("target_revision", spec.target_revision, f"empty: {text} is not a hub id and has no revisions")
        )
    return source


def _refusal(found: object, expected: str) -> ConfigurationError:
    return ConfigurationError(Problem("target", found, expected))


def _package_file(text: str, spec: RunSpec) -> TargetSource:
    module, _, file = text.removeprefix("package:").partition("/")
    top, *rest = module.split(".")
    if not file.endswith(".gguf") or ".." in file or not all(part.isidentifier() for part in (top, *rest)):
        raise _refusal(text, "package:MODULE/FILE.gguf")
    # Only the top-level name is looked up: find_spec of a dotted name would import the parents.
    found = importlib.util.find_spec(top)
    roots = list(found.submodule_search_locations or []) if found else []
    if not roots:
        raise _refusal(text, f"an installed package {top!r} (pip install its distribution into the tasks environment)")
    for root in roots:
        path = Path(root, *rest, file)
        if path.is_file():
            return TargetSource("gguf", path.stem, str(path), trust_remote_code=spec.trust_remote_code)
    present = sorted(p.name for root in roots for p in Path(root, *rest).glob("*.gguf"))
    raise _refusal(text, f"a GGUF file of package {module}; it has {present}")


def _local(text: str, spec: RunSpec) -> TargetSource | None:
    path = Path(text).expanduser()
    if path.is_dir():
        return TargetSource(
            "folder", path.resolve().name, str(path.resolve()), trust_remote_code=spec.trust_remote_code
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise _refusal(text, f"a checkpoint folder or a .gguf file; {path.name} is neither")
        return TargetSource("gguf", path.stem, str(path.resolve()), trust_remote_code=spec.trust_remote_code)
    return None


def _hub(text: str, spec: RunSpec) -> TargetSource:
    if not _HUB_ID.match(text):
        raise _refusal(text, _FORMS)
    return TargetSource("hub", text.rsplit("/", 1)[-1], text, spec.target_revision, spec.trust_remote_code)


# ---- listing and fetching -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetFile:
    """One file of a checkpoint, wherever it is. `tag` changes with the content; `local` is its path, if any."""

    name: str
    size: int
    tag: str
    local: Path | None = None


def list_files(source: TargetSource) -> dict[str, TargetFile]:
    """Top-level files of the checkpoint, by name. For hub ids see `hub_snapshot`.

    Raises:
        ConfigurationError: field `target`, if there is no such folder or prefix.
        StorageError: if the store does not answer.
    """
    if source.kind == "gguf":
        paths = [source.path]
    elif source.kind == "folder":
        paths = sorted(p for p in source.path.iterdir() if p.is_file())
    elif source.kind == "s3":
        from tasks.storage import open_store

        infos = [i for i in open_store(source.location).list("") if "/" not in i.path]
        if not infos:
            raise _refusal(source.location, "a prefix with a checkpoint's files directly below it; nothing is there")
        return {i.path: TargetFile(i.path, i.size, i.tag) for i in infos}
    else:
        raise ValueError("list_files: a hub target is listed by hub_snapshot")
    stats = [(p, p.stat()) for p in paths]
    return {p.name: TargetFile(p.name, s.st_size, f"{s.st_size}-{s.st_mtime_ns}", p) for p, s in stats}


def check_files(names: Iterable[str], read_index: Callable[[], bytes], location: str) -> list[str]:
    """Names of the weight files, after checking that the checkpoint is complete and holds nothing pickled.

    Raises:
        ConfigurationError: field `target`, naming the files that are missing.
    """
    present = set(names)
    if "config.json" not in present:
        raise _refusal(location, f"a Transformers checkpoint with config.json; found {sorted(present)[:20]}")
    weights = sorted(n for n in present if n.endswith(".safetensors"))
    if INDEX_FILE in present:
        listed = sorted(set(json.loads(read_index())["weight_map"].values()))
        missing = [n for n in listed if n not in present]
        if missing:
            raise _refusal(location, f"all weight files that {INDEX_FILE} names; missing: {missing}")
        weights = listed
    if not weights:
        raise _refusal(location, "safetensors weights (pickled .bin files are never loaded: convert the checkpoint)")
    if not present & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise _refusal(location, f"a tokenizer beside the weights (tokenizer.json); found {sorted(present)[:20]}")
    return weights


def small_files(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that say what the weights are and how text becomes tokens."""
    return [n for n in (*CONFIG_FILES, *TOKENIZER_FILES, INDEX_FILE) if n in set(names)]


@dataclass(frozen=True)
class HubSnapshot:
    """What the hub says of one revision."""

    commit: str
    files: tuple[str, ...]
    parameters: int | None


def hub_snapshot(source: TargetSource) -> HubSnapshot:
    """Ask the hub for the commit behind a revision.

    Raises:
        ConfigurationError: field `target`, if repository or revision do not exist, or access is refused.
        StorageError: if the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(source.location, revision=source.revision)
    except GatedRepoError as error:
        raise _refusal(source.location, "a model this token may read: accept its terms, set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at revision {source.revision}" if source.revision else ""
        raise _refusal(
            source.location, f"{_FORMS}; the hub has no such model{at}, and no such folder exists"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise StorageError(f"target {source.location}: the Hugging Face hub does not answer ({error})") from error
    except Exception as error:  # the hub client's transport raises its own classes, which change between its versions
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests", "urllib3"):
            raise
        raise StorageError(f"target {source.location}: the Hugging Face hub does not answer ({error})") from error
    tensors = getattr(info, "safetensors", None)
    return HubSnapshot(
        commit=str(info.sha),
        files=tuple(sibling.rfilename for sibling in info.siblings or () if "/" not in sibling.rfilename),
        parameters=int(tensors.total) if tensors is not None else None,
    )


def fetch_files(source: TargetSource, names: Iterable[str], folder: Path, commit: str | None = None) -> Path:
    """Bring files of an s3 or hub target into a local folder; a local target's own folder is returned as it is.

    Args:
        source: the target.
        names: files wanted.
        folder: where they go; what is there with the right size is kept.
        commit: hub revision to take (the resolved commit, so that all files are of one version).
    """
    if source.kind in ("gguf", "folder"):
        return source.path.parent if source.kind == "gguf" else source.path
    folder.mkdir(parents=True, exist_ok=True)
    if source.kind == "hub":
        from huggingface_hub import snapshot_download

        patterns = list(names)
        snapshot_download(
            source.location, revision=commit or source.revision, allow_patterns=patterns, local_dir=str(folder)
        )
        return folder
    from tasks.storage import open_store

    store = open_store(source.location)
    for name in names:
        path = folder / name
        if not (path.is_file() and path.stat().st_size == store.stat(name).size):
            store.download(name, path)
    return folder


# ---- safetensors headers: shapes without weights --------------------------------------------------------------------


def safetensors_header(read: Callable[[int, int], bytes], name: str) -> dict[str, Mapping[str, Any]]:
    """Tensor entries of a safetensors file, read from its first bytes only.

    Args:
        read: `read(start, length)` gives bytes of the file.
        name: for the message.

    Raises:
        ConfigurationError: field `target`, if this is not a safetensors file.
    """
    first = read(0, 8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= length <= 100_000_000:
        raise _refusal(name, f"a safetensors file; its header length reads {length}")
    try:
        header = json.loads(read(8, length))
    except ValueError as error:
        raise _refusal(name, f"a safetensors file with a JSON header ({error})") from error
    return {key: value for key, value in header.items() if key != "__metadata__"}


def header_reader(source: TargetSource) -> Callable[[str], dict[str, Mapping[str, Any]]]:
    """Function that reads the safetensors header of a file of a `folder` or `s3` target."""
    if source.kind == "folder":
        return lambda name: local_header(source.path / name)
    from tasks.storage import open_store

    store = open_store(source.location)
    return lambda name: safetensors_header(lambda start, length: store.read(name, start, length), name)


def local_header(path: Path) -> dict[str, Mapping[str, Any]]:
    """Tensor entries of a local safetensors file."""

    def read(start: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    return safetensors_header(read, path.name)
