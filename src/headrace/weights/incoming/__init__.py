"""Weights that come over the wire: pure readers from what a trainer sends to `CheckpointTensor`s, one file per form.

Called by whoever applies a weight update. Every reader trusts nothing: counts, names, shapes and ranges are checked
before use, memory grows with the payload and not with what it claims, and whatever is wrong is one `InvalidRequest`
that names the tensor, the value and what is allowed. Results are views of what came in, unless it says otherwise.
"""

from headrace.weights.incoming.checksum import tensor_checksum, total_checksum
from headrace.weights.incoming.raw import Manifest, parse_dtype, parse_manifest, read_raw
from headrace.weights.incoming.safetensors_bytes import read_safetensors_bytes
from headrace.weights.incoming.shared_memory import read_shared_memory
from headrace.weights.incoming.sparse import apply_sparse, read_indices
from headrace.weights.incoming.torch_pickle import read_pickled_tensors, read_serialized_tensors

__all__ = [
    "Manifest",
    "apply_sparse",
    "parse_dtype",
    "parse_manifest",
    "read_indices",
    "read_pickled_tensors",
    "read_raw",
    "read_safetensors_bytes",
    "read_serialized_tensors",
    "read_shared_memory",
    "tensor_checksum",
    "total_checksum",
]
