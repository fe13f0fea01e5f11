"""Fetches a model from the Hugging Face hub into that library's own cache; every failure becomes one line.

Called by `hub.py` only, which imports it late: huggingface_hub takes a while to import. Only weights, configuration,
tokenizer and templates are fetched; no code of a repository is ever run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from headrace.errors import StartupError

_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]
_IGNORED = ["original/*", "onnx/*", "*.onnx.json"]
_GGUF_PREFERENCE = ("Q4_K_M", "Q4_1", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32")


def download(repo: str, file: str | None, revision: str | None, *, progress: bool = True) -> Path:
    """A folder of safetensors, or a GGUF file.

    `file` is a GGUF file of the repository or a quantisation such as Q8_0; None takes the safetensors, or where there
    are none the first GGUF file of a preferred quantisation.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would log each attempt; our one line says it all
    if not progress:
        disable_progress_bars()
    with _one_line_errors(repo, revision):
        files = _list_files(repo, revision)
        offline = files is None  # then only what an earlier download has left
        if file is None and (files is None or any(name.endswith(".safetensors") for name in files)):
            return Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=_PATTERNS,
                    ignore_patterns=_IGNORED,
                    local_files_only=offline,
                )
            )
        name = file if file is not None and file.endswith(".gguf") else pick_gguf(repo, files or [], file)
        return Path(hf_hub_download(repo, name, revision=revision, local_files_only=offline))


def _list_files(repo: str, revision: str | None) -> list[str] | None:
    """The repository's files; None when the hub cannot be reached, which one quick question tells."""
    try:
        siblings = HfApi().model_info(repo, revision=revision, timeout=30).siblings or []
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception:  # of the HTTP library below, which is another one from version to version
        return None
    return [sibling.rfilename for sibling in siblings]


def pick_gguf(repo: str, files: list[str], quantisation: str | None = None) -> str:
    """The GGUF file to take among a repository's files."""
    candidates = sorted(name for name in files if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    for wanted in (quantisation,) if quantisation else _GGUF_PREFERENCE:
        for name in candidates:
            if wanted.lower() in name.lower():
                return name
    if quantisation is None:
        if candidates:
            return candidates[0]
        raise StartupError(f"Hugging Face repository {repo!r} holds neither safetensors nor GGUF files")
    if not files:
        raise StartupError(f"cannot fetch {repo!r}: the Hugging Face hub cannot be reached")
    raise StartupError(f"{repo!r} has no GGUF file for {quantisation!r}; it has: {', '.join(candidates) or 'none'}")


@contextlib.contextmanager
def _one_line_errors(repo: str, revision: str | None) -> Iterator[None]:
    at = f"{repo!r} (revision {revision!r})" if revision else repr(repo)
    unreachable = f"cannot fetch {at}: the Hugging Face hub cannot be reached"
    try:
        yield
    except StartupError:
        raise
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{at} is gated: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(f"the Hugging Face hub has no public model {at}; a private one needs HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"the Hugging Face repository has no such revision: {at}") from error
    except errors.HFValidationError as error:
        raise StartupError(f"{at} is not a Hugging Face id: {_first_line(error)}") from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(f"{unreachable}, and no copy is cached") from error
    except errors.EntryNotFoundError as error:
        raise StartupError(f"{at} has no such file: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        raise StartupError(f"cannot fetch {at}: {_first_line(error)}") from error
    except Exception as error:  # of the HTTP library below, which is another one from version to version
        raise StartupError(f"{unreachable} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
